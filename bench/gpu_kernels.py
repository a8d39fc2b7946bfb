"""gpu_kernels.py -- times a GPU's kernels one by one, relative to the device's peak.

    gpu_kernels.py ceilings OUT.json      products and copies, by cuBLASLt as our linear calls it
    gpu_kernels.py table CASE OUT.json    every kernel of a speed case, and their sum over a step;
                                          ceilings.json beside OUT.json is taken if it is there
    gpu_kernels.py once CASE WORD...      kernels whose names contain a word, once with operands of
                                          a speed case, for a profiler
    gpu_kernels.py small [WORD]           every kernel once on exact allocations, for a sanitizer;
                                          WORD: only kernels whose names contain it

Shapes, numbers of calls and launches come from the plans, so the kernels are timed as they train;
sizes of operands come from the facts of kernels. A kernel's floor is the larger of two times: its
bytes (each operand read once, each result written once) at the rate of a device copy, and its
operations at the rate of an 8192^3 product. Its share is floor / time. Calls are captured in a
graph that is launched several times. Operands change from call to call, so that the cache keeps
none of them.

Invariants
 1. Operands are random numbers: a product of zeros is faster.
 2. Nothing is timed that was not run before.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gpu_cases
from gpu_cases import REHEARSAL, ROOT
from gpu_report import write

sys.path[:0] = [str(ROOT), str(ROOT / "gen")]
import numpy as np

from tests.lib import zk
from tests.lib.device import ON_DEVICE, TO_DEVICE, Device
from zg.facts import kernels as kernels_of
from zg.plan import plan
from zg.plan.operand import Layers
from zg.plan.text import parse

TARGET = zk.TARGET
# Bytes of operands between two uses of the same one.
CACHE = 256 << 20 if not REHEARSAL else 0
# Least bytes that operands are allocated from.
POOL = 12 << 30 if not REHEARSAL else 64 << 20
BLOCK = (1 << 24) + 4096  # random numbers that fill the pool again and again
SIDE = 8192 if not REHEARSAL else 64  # side of a ceiling's products
AGAIN, LEAST_MS = (5, 4.0) if not REHEARSAL else (2, 0.0)

# Bytes that a call moves, where they are not each operand's once.
MOVED = {
    # rows of tokens that occur are read and written
    "zk_embed_bwd": "real*M*C+4*M+(8*min(M,V) if add else real*V)*C",
    # a sum's first gradient is only written
    "zk_push": "(4+real)*n",
}
# Backward attention computes forward's scores again: 5 products instead of 4.
RECOMPUTED = {f"zk_attention_{kind}bwd": 5 / 4 for kind in ("", "local_", "capped_")}
# Kernels that no training step calls.
NO_STEP = {"zk_rope_table", "zk_pick", "zk_init", "zk_hash"}
# Bytes of an element of a type, and elements of the plan's own operands.
WIDTHS = kernels_of.WIDTHS | {"ctl": ctypes.sizeof(zk.Ctl)}
OWN = {"ctl": "1", "i64": str(zk.SUMS)}
ON_HOST = ("spans", "r")


def value(expression: str, numbers: dict[str, int]) -> int:
    return int(eval(expression, {"__builtins__": {}, "min": min}, numbers))


# ---- calls of a step


@dataclass(frozen=True)
class Kernel:
    """A (kernel, shape) of a plan: its words, and the number of calls in a step."""

    launch: plan.Launch
    args: tuple[str, ...]
    count: int


def spelt(word: str) -> tuple[str, ...]:
    """Return a plan's word as operands of zk.h: spans come with their number."""
    return (word, "nspans") if word.startswith("spans.") else (word,)


def kernels(p: plan.Plan) -> list[Kernel]:
    """Return the kernels of a training step, by launch."""
    fns, calls, words = {f.name: f for f in p.fns}, Counter(), {}
    for s in p.step:
        for call in (
            c for step in s.steps if step.op in fns for c in fns[step.op].calls
        ):
            calls[call.launch] += s.repeat * call.rounds
            words.setdefault(
                call.launch,
                tuple(w for arg in call.args for w in spelt(str(arg))),
            )
    return [
        Kernel(row, words[row.name], calls[row.name])
        for row in p.launches
        if row.name in calls
    ]


def dims(p: plan.Plan, k: Kernel) -> dict[str, int]:
    """Return the integers of a call by name, with the others that its operands' sizes depend on.
    real: bytes of a real; V and P: rows of the tables of tokens and positions; moments: f32."""
    h = p.head
    positions = [t.shape[0] for t in p.tensors if t.name.startswith("wpe")]
    found = {
        "real": 4 if h.real == "f32" else 2,
        "V": h.vocab,
        "P": [*positions, 0][0],
        "full": 0,
        "moments": 1,
    }
    names = zk.operand_names(k.launch.kernel)
    found |= {
        name: int(word)
        for name, word in zip(names, k.args, strict=False)
        if word.lstrip("-").isdigit()
    }
    if kernels_of.kernel(k.launch.kernel).own and k.launch.shape:
        found["n"] = k.launch.shape[0]
    return kernels_of.letters(found)


def sizes(k: Kernel, d: dict[str, int], moved: bool = False) -> dict[str, int]:
    """Return the bytes of a call's operands in memory of the device. moved: of a table the rows
    that it picks, and of all columns those of its slice."""
    if moved and {"n", "N"} <= d.keys():
        d = d | {"N": d["n"]}
    rows, widths = {"w": d["V"], "p": d["P"]}, WIDTHS | {"real": d["real"]}
    if moved and "M" in d:
        rows = {name: min(n, d["M"]) for name, n in rows.items()}
    words = dict(zip(zk.operand_names(k.launch.kernel), k.args, strict=False))
    found = {}
    for f in kernels_of.kernel(k.launch.kernel).formals:
        if f.number or f.name in ON_HOST or words[f.name] == "null":
            continue
        elems = f.elems or OWN.get(f.type, "n")
        elems = f"{rows[f.name]}{elems}" if elems.startswith("*") else elems
        width = widths.get(f.type) or (4 if d[f.type] else d["real"])
        found[f.name] = width * value(elems, d)
    return found


def table_of(p: plan.Plan, k: Kernel, target: str) -> zk.Launch:
    run = next(r for r in p.runs if r.launch == k.launch.name and target in r.targets)
    grids = [zk.Grid(g.x, g.y, g.z, g.block, g.shared) for g in run.grids]
    return zk.Launch((ctypes.c_int32 * 3)(*run.tile), (zk.Grid * 4)(*grids), run.margin)


# ---- operands on the device


class Operands:
    """Space for operands that is full of random numbers, on a device with the methods of
    tests/lib/device.py."""

    def __init__(self, device: Device, target: str, real: str, room: int) -> None:
        self.device, self.target, self.real = device, target, real
        self.random = np.random.default_rng(1).standard_normal(
            min(BLOCK, room), np.float32
        )
        self.normal = self.random if real == "f32" else zk.to_bf16(self.random)
        self.room, self.size, self.used = device.take(room), room, 0
        self.fill(self.room, room)

    def fill(self, at: int, size: int, moments: bool = False) -> None:
        """Fill with normal numbers of the program's type. moments: with their squares, in f32."""
        block = np.square(self.random) if moments else self.normal
        first = min(size, block.nbytes)
        self.device.copy(at, block.ctypes.data, first, TO_DEVICE)
        for start in range(first, size, first):
            self.device.copy(at + start, at, min(first, size - start), ON_DEVICE)

    def upload(self, at: int, array: np.ndarray) -> None:
        self.device.copy(at, array.ctypes.data, array.nbytes, TO_DEVICE)

    def take(self, size: int) -> int:
        """Return the next place of the space, from its start again when it is used up."""
        size = -(-size // 256) * 256
        assert size <= self.size, f"{size} bytes of {self.size}"
        if self.used + size > self.size:
            self.used = 0
        self.used += size
        return self.room + self.used - size


class Bench(Operands):
    """The kernels' library on one stream."""

    def __init__(self, real: str, room: int) -> None:
        self.library, why = zk.library(zk.EMULATED), ctypes.c_char_p()
        super().__init__(Device(self.library), TARGET, real, room)
        self.stream = self.device.stream()
        self.marks = [self.device.event(), self.device.event()]
        self.space, self.pinned_scratch = (
            self.device.take(zk.SPACE),
            np.zeros(zk.PINNED_SCRATCH, np.uint8),
        )
        self.context = ctypes.c_void_p(
            self.library.zk_open(
                self.stream,
                ctypes.c_void_p(self.space),
                ctypes.c_void_p(self.pinned_scratch.ctypes.data),
                zk.F32 if real == "f32" else zk.BF16,
                0,
                1,
                ctypes.byref(why),
            )
        )
        assert self.context.value, why.value

    def close(self) -> None:
        self.device.wait()
        self.library.zk_close(self.context)
        for at in (self.room, self.space):
            self.device.free(at)
        for mark in self.marks:
            self.device.call("cudaEventDestroy", mark)
        self.device.call("cudaStreamDestroy", self.stream)

    # ---- time

    def seconds(self, calls: list[Callable[[], None]]) -> float:
        """Return the seconds of one of the calls, which alternate: the median over several launches
        of a graph of them."""

        def once(run: Callable[[], None]) -> float:
            self.device.record(self.marks[0], self.stream)
            run()
            self.device.record(self.marks[1], self.stream)
            return self.device.between(*self.marks)

        self.device.wait()  # copies that fill operands may still be running
        for call in calls:
            call()
        self.device.wait()
        ms = max(once(lambda: [call() for call in calls]) / len(calls), 1e-3)
        turns = max(1, round(LEAST_MS / ms / len(calls)))
        with self.device.graph(self.stream) as graph:
            for call in calls * turns:
                call()

        def play():
            return self.device.play(graph, self.stream)

        once(play)
        found = [once(play) / (turns * len(calls)) for _ in range(AGAIN)]
        self.device.call("cudaGraphExecDestroy", graph)
        return 1e-3 * statistics.median(found)


# ---- one kernel


def recipe() -> zk.Recipe:
    return zk.Recipe(
        rate=zk.phases([zk.held(1e-4)]),
        momentum=zk.phases([zk.held(0.9)]),
        beta2=0.95,
        eps=1e-8,
        clip=1.0,
        rows=1024,
    )


@dataclass
class Call:
    """A kernel with one set of operands. keep: those in host memory."""

    bench: Operands
    kernel: str
    launch: zk.Launch
    words: list[object]
    keep: list[object]

    def __call__(self) -> None:
        result, types, launch = zk.prototypes()[self.kernel]
        run = getattr(self.bench.library, self.kernel)
        run.restype, run.argtypes = (
            result,
            [ctypes.c_void_p] * (1 + launch) + types,
        )
        run(self.bench.context, ctypes.addressof(self.launch), *self.words)


def special(b: Operands, name: str, at: int, d: dict[str, int]) -> None:
    """Fill operands that cannot be arbitrary numbers."""
    if name in ("token", "target", "all"):
        rows = d["A"] if name == "all" else d.get("M") or d["B"] * d["T"]
        b.upload(
            at,
            np.random.default_rng(2).integers(0, d["V"], rows).astype(np.int32),
        )
    elif name == "position":  # of about three documents per sample
        rows = d.get("M") or d["B"] * d["T"]
        length = max(1, d.get("T", rows) // 3)
        b.upload(at, (np.arange(rows) % length).astype(np.int32))
    elif name == "v":
        b.fill(at, 4 * d["n"], moments=True)
    elif name == "ctl":
        ctl = zk.Ctl(
            step=3,
            applied=2,
            valid=1024,
            lr=1e-4,
            factor=1.0,
            bias1=0.5,
            bias2=0.5,
        )
        b.device.copy(at, ctypes.addressof(ctl), ctypes.sizeof(ctl), TO_DEVICE)
    elif name == "sums":
        sums = np.zeros(zk.SUMS, np.int64)
        sums[zk.VALID] = 1024
        b.upload(at, sums)


def words_of(b: Operands, p: plan.Plan, k: Kernel, take: Callable[[int], int]) -> Call:
    """Return the call with its own operands. As in training, a loss's gradient overwrites the
    logits, a bias exists if the plan has one, and moments are squares."""
    d, n = dims(p, k), zk.operand_names(k.launch.kernel)
    size, keep, words = sizes(k, d), [], []
    span = zk.Span(elems=d.get("n", 0), count=1, std=1.0, rate=1.0, decay=0.1)
    for name, word in zip(n, k.args, strict=False):
        if name in ON_HOST:
            keep.append(span if name == "spans" else recipe())
            words.append(ctypes.addressof(keep[-1]))
        elif name == "src":
            keep.append((ctypes.c_void_p * 1)(take(size[name])))
            words.append(ctypes.addressof(keep[-1]))
        elif name in size and name != "dlogits":
            words.append(take(size[name]))
            special(b, name, words[-1], d)
        else:
            words.append(None if name in size else number(name, word, d))
    if "dlogits" in size:
        words[n.index("dlogits")] = words[n.index("logits")]
    return Call(b, k.launch.kernel, table_of(p, k, b.target), words, keep)


def number(name: str, word: str, d: dict[str, int]) -> object:
    """Return a number of a call on one whole flat on one rank."""
    if word == "null":
        return None
    if name == "carry":  # of a loop: all its chunks but the first add to dw
        return int(word != "0")
    fixed = {
        "first": 0,
        "at": 0,
        "nspans": 1,
        "count": 1,
        "total": 1,
        "mask": 0,
        "place": 0,
        "head": 0,
        "block": 1,
        "stride": d.get("n", 0),
    }
    if name in fixed:
        return fixed[name]
    if name in d:
        return d[name]
    if word.startswith("l:"):  # a number that differs between layers: the first's
        return Layers.read(word).values[0]
    return float(word)


def need(k: Kernel, d: dict[str, int]) -> int:
    return sum(-(-size // 256) * 256 for size in sizes(k, d).values()) + 4096


def work(k: Kernel, d: dict[str, int]) -> tuple[int, int]:
    """Return the least bytes that a call moves, each operand once or, if it is added to, twice; and
    its operations."""
    name, row = k.launch.kernel, kernels_of.kernel(k.launch.kernel)
    flops = int(RECOMPUTED.get(name, 1) * value(row.flops, d))
    if name in MOVED:
        return value(MOVED[name], d), flops
    twice = {"+": 2, "$": 0}
    moved = sizes(k, d, moved=True)
    bytes_ = sum(
        twice.get(f.mode, 1) * moved[f.name] for f in row.formals if f.name in moved
    )
    return bytes_, flops


def seconds_of(b: Bench, p: plan.Plan, k: Kernel) -> float:
    """Return the seconds of a kernel whose operands come from memory."""
    d = dims(p, k)
    sets = max(1, min(8, -(-CACHE // need(k, d)), b.size // need(k, d)))
    b.used = 0
    # The last kernel left its results there.
    b.fill(b.room, min(b.size, sets * need(k, d)))
    return b.seconds([words_of(b, p, k, b.take) for _ in range(sets)])


def timed(
    b: Bench, p: plan.Plan, k: Kernel, peaks: dict[str, float]
) -> dict[str, object]:
    d, seconds = dims(p, k), seconds_of(b, p, k)
    bytes_, flops = work(k, d)
    floor = max(bytes_ / peaks["copy"], flops / peaks[p.head.real])
    return {
        "kernel": k.launch.kernel,
        "shape": k.launch.shape,
        "us": 1e6 * seconds,
        "bytes": bytes_,
        "flops": flops,
        "share": floor / seconds,
        "calls": k.count,
        "step_us": 1e6 * seconds * k.count,
    }


# ---- ceilings


def product(real: str) -> float:
    """Return the FLOP/s of our linear, which is cuBLASLt's product."""
    n, R = SIDE, 4 if real == "f32" else 2
    text = plan.Launch("linear_fwd.0", "zk_linear_fwd", (n, n, n, 1))
    b = Bench(real, 4 * n * n * R + 4096)
    launch = zk.launched(
        "zk_linear_fwd",
        zk.F32 if real == "f32" else zk.BF16,
        (0, 0, 0, 0, n, n, n, 1),
    )
    x, w, y = (b.take(R * n * n) for _ in range(3))
    call = Call(b, text.kernel, launch, [y, x, w, None, n, n, n, zk.OUT_IN], [])
    rate = 2 * n**3 / b.seconds([call])
    b.close()
    return rate


def copying() -> float:
    """Return the bytes a second of a copy, read and written."""
    size = POOL // 6
    b = Bench("bf16", 2 * size)

    def call():
        return b.device.call(
            "cudaMemcpyAsync",
            ctypes.c_void_p(b.room + size),
            ctypes.c_void_p(b.room),
            ctypes.c_size_t(size),
            ON_DEVICE,
            b.stream,
        )

    rate = 2 * size / b.seconds([call])
    b.close()
    return rate


def ceilings() -> dict[str, float]:
    return {"bf16": product("bf16"), "f32": product("f32"), "copy": copying()}


# ---- commands


def prepared(
    case: gpu_cases.Case, room: int = 0
) -> tuple[Bench, plan.Plan, list[Kernel]]:
    """Return a bench with room for any kernel of a case, its plan and its kernels."""
    p = parse(case.source.read(".plan"))
    listed = kernels(p)
    room = max(room, *(need(k, dims(p, k)) for k in listed))
    return Bench(p.head.real, room), p, listed


def table(case: gpu_cases.Case, path: Path) -> None:
    """Time the kernels of a case; the file has those timed so far at any time."""
    known = path.with_name("ceilings.json")
    peaks = json.loads(known.read_text()) if known.exists() else ceilings()
    b, p, listed = prepared(case, POOL)
    rows: list[dict] = []
    for k in listed:
        rows.append(timed(b, p, k, peaks))
        print(
            f"{case.name:14} {rows[-1]['kernel'][3:]:15} {str(k.launch.shape):34} "
            f"{rows[-1]['us']:10.1f} us {100 * rows[-1]['share']:5.1f} % x {k.count}",
            flush=True,
        )
        step = 1e-6 * sum(r["step_us"] for r in rows)
        write(path, {"ceilings": peaks, "rows": rows, "step": step})
    b.close()


def once(case: gpu_cases.Case, words: list[str]) -> None:
    """Run the kernels with one of these words in their names."""
    b, p, listed = prepared(case)
    for k in listed:
        if any(word in k.launch.kernel for word in words):
            words_of(b, p, k, b.take)()
            print(k.launch.kernel, k.launch.shape)
    b.close()


def small(word: str) -> None:
    """Run the kernels whose names contain the word, each operand in its own allocation of exact
    size. Each type has one context, and equal calls run once."""
    benches: dict[str, Bench] = {}
    seen: set[object] = set()
    for source in gpu_cases.SMALL:
        p = parse(source.read(".plan"))
        real = p.head.real
        b = benches[real] = benches.get(real) or Bench(real, 1 << 20)
        taken: list[int] = []

        def take(size: int, b: Bench = b, taken: list[int] = taken) -> int:
            taken.append(b.device.take(size))
            b.fill(taken[-1], size)
            return taken[-1]

        for k in kernels(p):
            # names of operands do not matter
            args = tuple("" if w[0].isalpha() and w != "null" else w for w in k.args)
            call = (real, k.launch.kernel, k.launch.shape, args)
            if word not in k.launch.kernel or call in seen:
                continue
            run = words_of(b, p, k, take)
            # Wait for copies that fill operands: the call's stream does not.
            b.device.wait()
            run()
            b.device.wait()
            seen.add(call)
        for at in taken:
            b.device.free(at)
    for b in benches.values():
        b.close()
    ran = {name for _, name, *_ in seen}
    rows = kernels_of.KERNELS.items()
    wanted = {name for name, row in rows if word in name and not row.exchange} - NO_STEP
    assert ran == wanted, wanted ^ ran
    print(f"{len(ran)} kernels ran")


def main(argv: list[str]) -> int:
    cases = {case.name: case for case in gpu_cases.CASES}
    command, *words = argv or [""]
    if command == "ceilings" and len(words) == 1:
        write(words[0], ceilings())
    elif command == "table" and len(words) == 2 and words[0] in cases:
        table(cases[words[0]], Path(words[1]))
    elif command == "once" and len(words) > 1 and words[0] in cases:
        once(cases[words[0]], words[1:])
    elif command == "small" and len(words) <= 1:
        small(*words or [""])
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
