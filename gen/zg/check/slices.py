"""slices.py -- proves that the calls on a weight's slices together equal one call on the weight.

Slices come in order from row 0 on, with the operands of the first, each as wide as a slice of its
tensor. Until the last slice is done nothing else may touch their common output. With the last one
the whole call counts as run, in its place. In half precision a sum of dx is a value that only its
rounding reads.
"""

from __future__ import annotations

from typing import Any

from ..facts.kernels import KERNELS
from ..plan.operand import Arg
from ..plan.operand import whole as number
from ..plan.plan import Call, Fn
from .body import Frame
from .kernels import whole as whole_of


def rounds(b: Frame, fn: Fn) -> list[int]:
    """Return the first rows of the slices that a function is called for, in order."""
    if fn.ints in ((), ("l",)):
        return [0]
    wide = {
        (number(c.args[-4]), number(c.args[-1]))
        for c in fn.calls
        if KERNELS[c.kernel].whole
    }
    if (
        fn.ints != ("at",)
        or len(wide) != 1
        or any("at" not in c.args for c in fn.calls)
    ):
        b.fail(None, f"takes {fn.ints}")
    ((N, n),) = wide
    return list(range(0, N, n))


def call(b: Frame, c: Call) -> None:
    """Run one call on a slice."""
    row = KERNELS[c.kernel]
    dims = b.dims(c, row)
    M, N, K, at, n = (int(dims[d]) for d in ("M", "N", "K", "at", "n"))
    whole = whole_of(c, row)
    begun, of = b.slices.open.pop(whole, (0, []))
    if at != begun or n <= 0 or N % n:
        b.fail(c, f"{n} of {N} rows from {at} on, after {begun}")
    b.goes_on(c, at)
    is_: list[Any] = []
    end = at + n
    last = end == N
    # Sizes of the whole operands.
    sizes = {"M*N": M * N, "M*K": M * K, "n*K": N * K, "N": N}
    for f, arg in zip(row.formals, c.args, strict=True):
        if f.number:
            continue
        size_of = sizes.get(f.elems, 0) * b.bytes_of(f.type)
        written = f.mode == ">"
        if f.mode == "<":
            is_.append(b.read(c, arg, size_of, "real"))
        elif f.elems == "n*K":
            t = b.tensor(c, arg, N * K, 0, f.name == "dw")
            if t.flat_step * n != N:
                b.fail(c, f"{t.name} is in {t.flat_step} slices")
        elif written and at == 0:
            b.write(c, arg, size_of, "part", (whole,))
        if written:
            _partial(b, c, arg, size_of, whole, last)
    if at and is_ != of:
        b.fail(c, "reads what the slices before did not read")
    if not last:
        b.slices.open[whole] = end, is_
    elif c.kernel == "zk_slice_bwd_x" and b.real != 4:
        _sum(b, c, whole, is_[0], M * K)
    else:
        b.call(whole)


def _partial(b: Frame, c: Call, arg: Arg, size: int, whole: Call, last: bool) -> None:
    """Require that the slices' common output is still there. The last slice removes it, so that the
    whole call can write it."""
    base, at = b.place(c, arg, size)
    held = b.held.get(base, [])
    mine = [v for v in held if v.made == (whole,)]
    there = [(v.lo, v.hi) for v in mine]
    if there != [(at, at + size)]:
        b.fail(c, f"{arg} does not carry on what the slices before made")
    if last:
        b.held[base].remove(mine[0])


def _sum(b: Frame, c: Call, whole: Call, dy: object, elems: int) -> None:
    """Record dx as an f32 sum; it becomes dx when it is rounded."""
    dx, _, w, *_ = whole.args
    width = number(whole.args[5])
    weight = b.tensor(c, w, 0, width, False).name
    b.reads[weight] = None
    is_: list[Any] = [None, dy, weight, *whole.args[3:]]
    said = (whole.kernel, *is_)
    new = len(b.known)
    call = b.known.setdefault(said, new)
    made = call, 0
    is_[0] = made
    b.write(c, dx, 4 * elems, "f32", made)
    b.slices.sums.add(made)
    b.ran.append((whole, call, is_))


def rounded(b: Frame, c: Call) -> None:
    """Round an f32 sum of dx to dx, or the f32 sum of a gradient over rounds to the gradient."""
    n = number(c.args[2])
    summed = 4 * n
    size = b.real * n
    made = b.read(c, c.args[1], summed, "f32")
    if made[0] == "total":
        b.gradient(c, c.args[0], "", {}, n)
        b.ran.append((c, b.number((c.kernel, made)), [None, made, n]))
        return
    base, at = b.place(c, c.args[1], summed)
    other, to = b.place(c, c.args[0], size)
    if (
        made not in b.slices.sums
        or b.real == 4
        or base == other
        and at < to + size
        and to < at + summed
    ):
        b.fail(c, f"rounds {c.args[1]}")
    b.slices.sums.discard(made)
    b.write(c, c.args[0], size, "real", made)


def end(b: Frame) -> None:
    """Require that no slice is missing."""
    for whole in b.slices.open:
        b.fail(whole, "is not made of all slices")
