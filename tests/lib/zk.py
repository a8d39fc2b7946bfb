"""zk.py -- the kernels' library for the tests: every object, any compiler, any number of threads.

    k = zk.Kernels("avx2", zk.BF16, threads=3)
    k.zk_linear_fwd(y, x, w, b, M, N, K, zk.IN_OUT)

The object zk.EMULATED is the GPU's kernels on a CPU; their launches are those of a plan.
ZR_TEST_DEVICE=sm_90 (the type of the device) replaces it by the kernels on a GPU, as "cuda";
ZR_TEST_PTX=sm_90 by the object zk.PTX, nvcc's PTX of them on a CPU.

Invariants
 1. Types of operands come from kernels/zk.h; context and launch are added here.
 2. An operand is a C-contiguous numpy array (bf16: uint16, f16: float16), a ctypes object, None or
    a number.
 3. A call is over when it returns. On a GPU operands lie in its memory for the duration of the call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from zg.facts import grids, ops
from zg.facts.kernels import KERNELS
from zg.plan import plan

from tests.lib.device import Device, Mirror, joined
from tests.lib.trainer import READY, ROOT, alone, sh

Array = np.ndarray

F32, BF16, F16 = 0, 1, 2
REALS = {"f32": F32, "bf16": BF16, "f16": F16}
WIDTH = {F32: 4, BF16: 2, F16: 2}  # bytes of a real
IN_OUT, OUT_IN = 0, 1
PAIRS, TILED = 0, 1  # orders of products in bf16
ORDERS = (PAIRS, TILED)
GELU_TANH, GELU_ERF = 0, 1
HALVES, ADJACENT = 0, 1
VALID, NONFINITE, LOST, MEANS, SUMS = 64, 65, 66, 67, 72
FAULTY, RESCALED, LOWEST = 1, 2, 3  # why a step was skipped

ISAS = ("avx2", "avx512")
# Objects of products: by pairs; by AMX and by AMX of tests/emulation/amx.h, also of attention.
BEST, TILES = "avx512bf16", ("amx", "tiles")
OBJECTS = (*ISAS, BEST, *TILES)
# classes of processors: each has the features of the one before it
CLASSES = (
    *ISAS,
    BEST,
    "amx",
)
ON_DEVICE = "ZR_TEST_DEVICE" in os.environ
TARGET = os.environ.get("ZR_TEST_DEVICE", os.environ.get("ZR_TEST_PTX", "sm_90"))
PTX = f"ptx-{TARGET}"
EMULATED = "cuda" if ON_DEVICE else PTX if "ZR_TEST_PTX" in os.environ else "emulated"
GPUS = ("emulated", EMULATED, PTX)
if not ON_DEVICE:  # the emulated device is the one whose launches are taken
    os.environ.setdefault("ZR_EMULATE_CC", TARGET.removeprefix("sm_"))
SPACE, PINNED_SCRATCH = 33 << 20, 1 << 20
NEEDED = {
    "avx2": {"avx2", "fma", "bmi2", "f16c"},
    **dict.fromkeys(GPUS, {"avx2", "fma", "f16c"}),
    "avx512": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
NEEDED[BEST] = NEEDED["tiles"] = NEEDED["avx512"] | {"avx512_bf16"}
NEEDED["amx"] = NEEDED[BEST] | {"amx_tile", "amx_bf16"}
LIBRARY = {
    "gcc": "out/train-kernels.so",
    "clang": "out/train-clang-kernels.so",
    "tiles": "out/train-tiles-kernels.so",
    **{isa: f"out/train-{isa}-kernels.so" for isa in GPUS},
}
C_TYPES = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}


# ---- structures of zk.h


class Grid(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int32) for name in ("x", "y", "z", "block", "shared")]


class Launch(ctypes.Structure):
    _fields_ = [
        ("tile", ctypes.c_int32 * 3),
        ("part", Grid * 4),
        ("margin", ctypes.c_int32),
    ]


class Span(ctypes.Structure):
    _fields_ = (
        [
            (name, ctypes.c_int64)
            for name in ("at", "elems", "count", "stride", "key", "key_stride")
        ]
        + [(name, ctypes.c_float) for name in ("mean", "std")]
        + [(name, ctypes.c_double) for name in ("rate", "decay")]
    )


class Phase(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("until", "origin", "span")] + [
        ("begin", ctypes.c_double),
        ("end", ctypes.c_double),
        ("curve", ctypes.c_int32),
        ("stairs", ctypes.c_int32),
    ]


class Scaler(ctypes.Structure):
    _fields_ = [("first", ctypes.c_double), ("least", ctypes.c_double)] + [
        (name, ctypes.c_int64) for name in ("window", "hysteresis", "consecutive")
    ]


class Recipe(ctypes.Structure):
    _fields_ = (
        [("rate", Phase * 4), ("momentum", Phase * 4)]
        + [(name, ctypes.c_double) for name in ("beta2", "eps", "clip")]
        + [
            ("rule", ctypes.c_int32),
            ("moments", ctypes.c_int32),
            ("rows", ctypes.c_int64),
            ("seed", ctypes.c_uint64),
            ("scaler", Scaler),
        ]
    )


class Ctl(ctypes.Structure):
    _fields_ = (
        [
            ("step", ctypes.c_int64),
            ("applied", ctypes.c_int64),
            ("beta1", ctypes.c_double),
            ("loss", ctypes.c_double),
            ("norm", ctypes.c_double),
            ("valid", ctypes.c_int64),
            ("skipped", ctypes.c_int64),
        ]
        + [(name, ctypes.c_float) for name in ("lr", "factor", "bias1", "bias2")]
        + [
            ("leaves", ctypes.c_int64),
            ("scale", ctypes.c_double),
            ("clean", ctypes.c_int64),
            ("hysteresis", ctypes.c_int64),
        ]
    )


def phases(listed: Sequence[plan.Phase]) -> ctypes.Array:
    return (Phase * 4)(
        *[
            Phase(
                x.until,
                x.origin,
                x.span,
                x.begin,
                x.end,
                ops.CURVES[x.curve],
                x.stairs,
            )
            for x in listed
        ]
    )


def held(x: float) -> plan.Phase:
    """Return the only phase of a constant schedule."""
    return plan.Phase(0, 0, 1, "line", 0, x, x)


def spans(rows: list[dict[str, float]]) -> ctypes.Array:
    return (Span * len(rows))(*[Span(**{"rate": 1.0, **row}) for row in rows])


# ---- numbers as the kernels store them


def to_bf16(x: Array) -> Array:
    """Round float32 to the nearest bf16, ties to even; NaN stays NaN."""
    x = np.ascontiguousarray(x, np.float32)
    u = x.view(np.uint32)
    even = u + (0x7FFF + (u >> 16 & 1))
    return np.where(np.isnan(x), u >> 16 | 0x40, even >> 16).astype(np.uint16)


def from_bf16(x: Array) -> Array:
    return (x.astype(np.uint32) << 16).view(np.float32)


def rounded(x: Array, precision: str) -> Array:
    """Round float32 numbers to a type of REALS."""
    if precision == "f16":
        return x.astype(np.float16).astype(np.float32)
    return from_bf16(to_bf16(x)) if precision == "bf16" else x


def store(x: Array, dtype: int) -> Array:
    x = np.ascontiguousarray(x, np.float32)
    if dtype == F16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16)
    return to_bf16(x) if dtype == BF16 else x


# Largest error of storing an f32: relative, plus half a step for subnormal numbers.
_ROUNDING = {F32: (0.0, 0.0), BF16: (2.0**-8, 0.0), F16: (2.0**-11, 2.0**-25)}


def rounding(size: Array, dtype: int) -> Array:
    """Return the rounding error of numbers up to `size`, stored as reals."""
    part, step = _ROUNDING[dtype]
    return part * size + step


def kind(x: Array) -> int:
    """Return the type in which an array's numbers are stored."""
    return {np.dtype(np.uint16): BF16, np.dtype(np.float16): F16}.get(x.dtype, F32)


def load(x: Array) -> Array:
    """Return the numbers as float64."""
    return (from_bf16(x) if x.dtype == np.uint16 else x).astype(np.float64)


def empty(dtype: int, *shape: int) -> Array:
    """Return an array of NaN."""
    return store(np.full(shape, np.nan), dtype)


# ---- the library


@functools.cache
def features() -> set[str]:
    """Return the processor's features, named as in Linux."""
    flags = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
    return set(flags[1].split()) if flags else set()


def processor() -> set[str]:
    """Return the features that tests use: the processor's, or those of the class of processors in
    ZR_TEST_ISA. AMX is emulated."""
    named = os.environ.get("ZR_TEST_ISA")
    if named not in CLASSES:
        return features()
    of_class = set().union(
        *(NEEDED[isa] for isa in CLASSES[: CLASSES.index(named) + 1])
    )
    return of_class & (features() | NEEDED["amx"] - NEEDED["tiles"])


if not NEEDED["amx"] - NEEDED["tiles"] <= features() and "amx_tile" in processor():
    LIBRARY |= dict.fromkeys(("gcc", "clang"), LIBRARY["tiles"])


def runs(isa: str) -> bool:
    return NEEDED[isa] <= processor()


def isas(of: Sequence[str] = ISAS) -> list[str]:
    """Return the objects that this processor runs."""
    return [isa for isa in of if runs(isa)]


def orders(dtype: int, isa: str = "") -> tuple[int, ...]:
    """Return the orders of products; they differ only in bf16 on a CPU."""
    return ORDERS if dtype == BF16 and isa not in GPUS else ORDERS[:1]


def compilers() -> list[str]:
    return [cc for cc in LIBRARY if shutil.which(cc)]


def variants(of: Sequence[str] = ISAS) -> list[tuple[str, str, int]]:
    """Return triples (object, compiler, threads)."""
    return [
        (isa, cc, threads)
        for isa in isas(of)
        for cc in compilers()
        for threads in (1, 2, 3)
    ]


def need(isa: str) -> None:
    if not runs(isa):
        pytest.skip(f"this processor cannot run the {isa} object")


@functools.cache
def products(isa: str) -> set[str]:
    """Return the kernels that an object of products has; the others come from avx512."""
    text = (ROOT / "kernels/cpu/kernels.def").read_text()
    lists = ("ZK_PRODUCTS", "ZK_TILED")[: 2 if isa in TILES else 1]
    listed = [re.search(rf"#define {x}\(X\).*?\n\n", text, re.S)[0] for x in lists]
    return set(re.findall(r"X\((zk_\w+)\)", "".join(listed)))


@functools.cache
def library(compiler: str) -> ctypes.CDLL:
    path = READY / Path(LIBRARY[compiler]).name
    if not path.exists():
        path = ROOT / LIBRARY[compiler]
        with alone("ninja"):
            sh("ninja", LIBRARY[compiler])
    lib = ctypes.CDLL(str(path))
    lib.zk_open.restype = ctypes.c_void_p
    lib.zk_object.restype = ctypes.c_char_p
    lib.zk_overhead.restype = ctypes.c_int64
    return lib


def c_type(declared: str) -> type | None:
    return ctypes.c_void_p if "*" in declared else C_TYPES[declared.split()[0]]


@functools.cache
def prototypes() -> dict[str, tuple[type | None, list[type | None], bool]]:
    """Return name -> (result, operands without context and launch, whether there is a launch)."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "kernels/zk.h").read_text(), flags=re.S)
    found = {}
    for result, name, operands in re.findall(
        r"^(\w+) (zk_\w+)\(zk \*k,([^)]*)\);", text, re.M
    ):
        words = [" ".join(word.split()) for word in operands.split(",")]
        launch = "zk_launch" in words[0]
        found[name] = (
            C_TYPES[result],
            [c_type(word) for word in words[launch:]],
            launch,
        )
    return found


@functools.cache
def operand_names(name: str) -> list[str]:
    """Return operand names as in zk.h, without context and launch."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "kernels/zk.h").read_text(), flags=re.S)
    listed = re.search(rf"^\w+ {name}\(zk \*k,([^)]*)\);", text, re.M)[1].split(",")
    return [re.findall(r"\w+", word)[-1] for word in listed][prototypes()[name][2] :]


def operand(x: object) -> object:
    if isinstance(x, np.ndarray):
        assert x.flags.c_contiguous
        return x.ctypes.data
    return ctypes.addressof(x) if isinstance(x, (ctypes.Structure, ctypes.Array)) else x


def shape(name: str, operands: tuple[object, ...]) -> tuple[int, ...]:
    """Return the shape of a call: the numbers by which its launch is found."""
    numbers = KERNELS[name].shape
    return tuple(
        int(x)
        for word, x in zip(operand_names(name), operands, strict=True)
        if word in numbers
    )


def launched(name: str, dtype: int, operands: tuple[object, ...]) -> Launch:
    """Return the launch of a call on the emulated GPU, by the generator's own table."""
    how = grids.how(name, TARGET, WIDTH[dtype], shape(name, operands))
    assert how.workspace <= SPACE
    parts = [Grid(g.x, g.y, g.z, g.block, g.shared) for g in how.grids]
    return Launch((ctypes.c_int32 * 3)(*how.tile), (Grid * 4)(*parts))


# Pointers to host memory on every target; all others are the device's.
HOST = {"spans", "r", "freq", "out", "src"}
HOST_OF = {"zk_mean": {"loss", "valid"}, "zk_hash": {"sum"}}


def extent(x: object) -> tuple[int, int]:
    """Return the start and end of an operand in memory."""
    size = x.nbytes if isinstance(x, np.ndarray) else ctypes.sizeof(x)
    return operand(x), operand(x) + size


def sources(operands: tuple[object, ...], dtype: int) -> tuple[int, int]:
    """Return the memory range of zk_push's sources, from the first to the end of the last."""
    _, _, src, count, full, n, *_ = operands
    first, *rest = [src[i] for i in range(count)]
    return min([first, *rest]), max([first, *rest]) + n * (4 if full else WIDTH[dtype])


def in_kernels(
    name: str, dtype: int, operands: tuple[object, ...]
) -> tuple[list[bool], list[tuple[int, int]]]:
    """Return which operands are memory that a GPU's kernels touch, and its start and end."""
    kept = HOST | HOST_OF.get(name, set())
    moves = [
        word not in kept and isinstance(x, (np.ndarray, ctypes.Structure, ctypes.Array))
        for word, x in zip(operand_names(name), operands, strict=True)
    ]
    spans = [extent(x) for x, moved in zip(operands, moves, strict=True) if moved]
    if name == "zk_push":
        spans.append(sources(operands, dtype))
    return moves, spans


def allow(library: ctypes.CDLL, spans: list[tuple[int, int]]) -> None:
    """Tell the emulation which memory of the host kernels may touch: it finds races there."""
    numbers = [x for start, end in joined(spans) for x in (start, end - start)]
    library.hazard_spans(len(numbers) // 2, (ctypes.c_uint64 * len(numbers))(*numbers))


def on_device(
    device: Device,
    name: str,
    dtype: int,
    call: Callable[..., object],
    head: tuple[object, ...],
    operands: tuple[object, ...],
) -> object:
    """Run the call with copies of its operands in the memory of a GPU."""
    moves, spans = in_kernels(name, dtype, operands)
    with Mirror(device, spans) as mirror:
        given = [
            mirror.at(operand(x))
            if moved and extent(x)[0] < extent(x)[1]
            else operand(x)
            for x, moved in zip(operands, moves, strict=True)
        ]
        if name == "zk_push":
            there = (ctypes.c_void_p * operands[3])(
                *map(mirror.at, operands[2][: operands[3]])
            )
            given[2] = ctypes.addressof(there)
        done = call(*head, *given)
        device.wait()
    return done


def scratch(size: int) -> Array:
    """Return memory at a multiple of 256, like the plan's classes."""
    room = np.empty(size + 256, np.uint8)
    return room[-room.ctypes.data % 256 :][:size]


class Kernels:
    """The kernels of one object on one context; `tile` goes to every launch. order: of products, by
    default the one that the object has an instruction for."""

    def __init__(
        self,
        isa: str | None = None,
        dtype: int = F32,
        threads: int = 1,
        compiler: str = "gcc",
        tile: tuple[int, int, int] = (0, 0, 0),
        order: int | None = None,
    ) -> None:
        self.isa, self.dtype = isa or isas((*ISAS, BEST))[-1], dtype
        self.launch = Launch(tile=(ctypes.c_int32 * 3)(*tile))
        need(self.isa)
        emulated, why = self.isa in GPUS, ctypes.c_char_p()
        own = self.isa in (*GPUS, "tiles")
        self.library = library(self.isa if own else compiler)
        if self.isa in TILES:  # Linux enables AMX when a process asks for it
            assert self.library.zk_tiles_amx()
        self.scratch = (
            [scratch(size) for size in (SPACE, PINNED_SCRATCH)] if emulated else []
        )
        rooms = [room.ctypes.data for room in self.scratch] or [None, None]
        self.device = (
            Device(self.library) if ON_DEVICE and self.isa == EMULATED else None
        )
        if self.device:
            rooms[0] = self.space = self.device.take(SPACE)
        opened = self.library.zk_open(
            None,
            *map(ctypes.c_void_p, rooms),
            dtype,
            0,
            threads,
            ctypes.byref(why),
        )
        assert opened, why.value
        self.context = ctypes.c_void_p(opened)
        if order is None:
            order = TILED if self.isa in TILES else PAIRS
        self.library.zk_products(self.context, order)

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name not in prototypes():
            raise AttributeError(name)
        result, types, launch = prototypes()[name]
        emulated = self.isa in GPUS
        isa = self.isa
        if isa not in ISAS and name not in products(isa):
            isa = "avx512"
        isa = "amx" if isa == "tiles" else isa
        call = getattr(self.library, name if emulated else f"{name}_{isa}")
        call.restype, call.argtypes = (
            result,
            [ctypes.c_void_p] * (1 + launch) + types,
        )

        def run(*operands: object) -> object:
            """Keep self alive: the context outlives the call."""
            if launch and emulated:
                self.launch = launched(name, self.dtype, operands)
            head = (
                (self.context, ctypes.addressof(self.launch))
                if launch
                else (self.context,)
            )
            if self.device:
                return on_device(self.device, name, self.dtype, call, head, operands)
            if emulated:
                spans = in_kernels(name, self.dtype, operands)[1]
                allow(self.library, spans + [extent(room) for room in self.scratch])
            done = call(*head, *map(operand, operands))
            assert not emulated or self.library.cudaDeviceSynchronize() == 0
            return done

        return run

    def __del__(self) -> None:
        if "context" in self.__dict__:
            self.library.zk_close(self.context)
        if self.__dict__.get("device"):
            self.device.free(self.space)
