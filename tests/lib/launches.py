"""launches.py -- finds the launches of a plan's calls on a GPU, from the kernels' own host code.

Every call of a plan is made on the emulated library as on each of its targets, with the plan's
numbers and nulls, and zeros for everything else that the host reads. No kernel runs: the library
reports each launch, and its address gives the kernel's name. So this file needs no table of
launches.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from zg.plan.plan import Call, Grid, Plan, Run

from tests import cuda_budget
from tests.lib import trainer, zk

ROOM = 1 << 20  # bytes of zeros; operands lie at its start
SEEN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t)
INT = (ctypes.c_int64, ctypes.c_int32, ctypes.c_int, ctypes.c_uint64)

# An operand: None, a number, a word (the recipe), or an offset from a multiple of 256 bytes.
Operand = int | str | tuple[int] | None


@dataclass(frozen=True)
class Launch:
    kernel: str  # named as in cuda_budget.py
    block: int  # threads
    shared: int  # bytes of dynamic shared memory of a block


@functools.cache
def kernels(library: ctypes.CDLL) -> dict[int, str]:
    """Return address -> name of all functions."""
    listed = trainer.sh("nm", trainer.ROOT / zk.LIBRARY[zk.EMULATED])
    found = {
        name: int(at, 16)
        for at, name in re.findall(r"^(\w+) [TtWw] (\S+)$", listed, re.M)
    }
    base = ctypes.cast(library.zk_push, ctypes.c_void_p).value - found["zk_push"]
    known = cuda_budget.names(set(found))
    return {base + at: known[name] for name, at in found.items()}


@functools.cache
def opened(real: str) -> zk.Kernels:
    return zk.Kernels(zk.EMULATED, zk.REALS[real])


@functools.cache
def zeros() -> zk.Array:
    room = zk.scratch(ROOM)
    room[:] = 0
    return room


@functools.cache
def launched(
    real: str,
    moments: str,
    kernel: str,
    operands: tuple[Operand, ...],
    tile: tuple[int, ...],
    grids: tuple[Grid, ...],
) -> tuple[Launch, ...]:
    context, recipe = opened(real), zk.Recipe(moments=zk.REALS[moments])
    library, types = context.library, zk.prototypes()[kernel][1]
    hook = ctypes.c_void_p.in_dll(library, "shim_told")
    how = zk.Launch(
        (ctypes.c_int32 * 3)(*tile),
        (zk.Grid * 4)(*[zk.Grid(g.x, g.y, g.z, g.block, g.shared) for g in grids]),
    )
    given = [
        ctypes.addressof(recipe)
        if x == "recipe"
        else zeros().ctypes.data + x[0]
        if isinstance(x, tuple)
        else x
        for x in operands
    ]
    seen: list[tuple[int, int, int]] = []
    told = SEEN(lambda *launch: seen.append(launch))
    call = getattr(library, kernel)
    call.restype, call.argtypes = None, [ctypes.c_void_p] * 2 + types
    hook.value = ctypes.cast(told, ctypes.c_void_p).value
    call(context.context, ctypes.addressof(how), *given)
    hook.value = None
    return tuple(
        Launch(kernels(library)[at], block, shared) for at, block, shared in seen
    )


def operand(text: str, kind: type, n: int) -> Operand:
    """Return a text of the plan as a C type takes it. n: the largest value of a function's own
    number."""
    if kind is ctypes.c_void_p:
        start = re.match(r"\w[\w.]*\+(\d+)", text)
        return (
            None
            if text == "null"
            else text
            if text == "recipe"
            else (int(start[1]) % 256 if start else 0,)
        )
    if kind not in INT:
        return 1
    return n if text == "n" else int(text) if re.fullmatch(r"-?\d+", text) else 0


def operands(call: Call, n: int) -> tuple[Operand, ...]:
    """Return the operands of a call. A flat's spans become their address and their number, which
    changes no launch."""
    texts = [
        text
        for arg in map(str, call.args)
        for text in ((arg, "1") if re.match(r"(spans|moved)\.", arg) else (arg,))
    ]
    found = [
        operand(text, kind, n)
        for text, kind in zip(texts, zk.prototypes()[call.kernel][1], strict=True)
    ]
    if call.kernel == "zk_init":
        found[4] = 1  # elements, which it clears
    return tuple(found)


def of_plan(p: Plan) -> Iterator[tuple[str, Run, tuple[Launch, ...]]]:
    """Yield target, run and launches of every call that has grids."""
    shapes = {row.name: row.shape for row in p.launches}
    runs: dict[str, list[Run]] = {}
    for run in p.runs:
        if run.grids:
            runs.setdefault(run.launch, []).append(run)
    for call in (call for fn in p.fns for call in fn.calls):
        for run in runs.get(call.launch, []):
            made = launched(
                p.head.real,
                p.recipe.moments,
                call.kernel,
                operands(call, max(shapes[call.launch], default=0)),
                run.tile,
                run.grids,
            )
            yield from ((target, run, made) for target in run.targets)
