"""check_slices.py -- proves that calls on a weight's slices are together the one on all of it.

Slices come one after the other from row 0 on, with the very operands of the first, each as wide as
its tensor's slices are; what they write together is nobody's to read or to write meanwhile. With
the last one the whole call counts as made, in this call's place. In halves a sum of dx is a value
that only its rounding reads.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .check_kernels import KERNELS, SLICES
from .plan import Call, Fn

if TYPE_CHECKING:
    from .check_fns import _Body


@dataclass
class Slices:
    """Of a body: by the whole call, the row that comes next and the operands of the slices before;
    sums of dx that are whole, and are not rounded."""
    open: dict[Call, tuple[int, list]] = field(default_factory=dict)
    sums: set[tuple] = field(default_factory=set)


def rounds(b: _Body, fn: Fn) -> list[int]:
    """From which rows on a function is called, in turn."""
    if not fn.ints:
        return [0]
    wide = {tuple(map(int, (c.args[-4], c.args[-1]))) for c in fn.calls if c.kernel in SLICES}
    if fn.ints != ("at",) or len(wide) != 1 or any("at" not in c.args for c in fn.calls):
        b.fail(None, f"takes {fn.ints}")
    (N, n), = wide
    return list(range(0, N, n))


def call(b: _Body, c: Call) -> None:
    words = KERNELS[c.kernel].split()
    dims = b.dims(c, words)
    M, N, K, at, n = (int(str(dims[d])) for d in ("M", "N", "K", "at", "n"))
    kernel, *more = SLICES[c.kernel]
    whole = Call(kernel, "", (*c.args[:-2], *more))
    begun, of = b.slices.open.pop(whole, (0, []))
    if at != begun or n <= 0 or N % n:
        b.fail(c, f"{n} of {N} rows from {at} on, after {begun}")
    is_: list[object] = []
    for word, arg in zip(words, c.args):
        head, _, expression = word.partition(":")
        size = {"M*N": M * N, "M*K": M * K, "n*K": N * K, "N": N}.get(expression, 0)
        size_of = size * (4 if head[-1] == "f" else b.real)
        if head[0] == "<":
            is_.append(b.read(c, arg, size_of, "r"))
        elif expression == "n*K":
            t = b.tensor(c, arg, N * K, 0, ("w", "dw"))
            if t.flat_step * n != N:
                b.fail(c, f"{t.name} is in {t.flat_step} slices")
        elif head[0] == ">" and at == 0:
            b.write(c, arg, size_of, "part", (whole,))
        if head[0] == ">":
            _partial(b, c, arg, size_of, whole, at + n == N)
    if at and is_ != of:
        b.fail(c, "reads what the slices before did not read")
    if at + n < N:
        b.slices.open[whole] = at + n, is_
    elif c.kernel == "zk_slice_bwd_x" and b.real != 4:
        _sum(b, c, whole, is_[0], M * K)
    else:
        b.call(whole)


def _partial(b: _Body, c: Call, arg: str, size: int, whole: Call, last: bool) -> None:
    """What is written slice by slice is still there; after the last it makes room for the whole."""
    base, at = b.place(c, arg, size)
    mine = [v for v in b.held.get(base, []) if v.made == (whole,)]
    if [(v.lo, v.hi) for v in mine] != [(at, at + size)]:
        b.fail(c, f"{arg} does not carry on what the slices before made")
    if last:
        b.held[base].remove(mine[0])


def _sum(b: _Body, c: Call, whole: Call, dy: object, elems: int) -> None:
    """dx as f32: it is made when it is rounded."""
    weight = b.tensor(c, whole.args[2], 0, int(whole.args[5]), ("w",)).name
    b.reads.add(weight)
    is_: list[object] = [None, dy, weight, *whole.args[3:]]
    number = b.known.setdefault((whole.kernel, *is_), len(b.known))
    is_[0] = number, 0
    b.write(c, whole.args[0], 4 * elems, "f", (number, 0))
    b.slices.sums.add((number, 0))
    b.ran.append((whole, number, is_))


def rounded(b: _Body, c: Call) -> None:
    """A sum of dx becomes dx."""
    n = int(c.args[2])
    made = b.read(c, c.args[1], 4 * n, "f")
    (base, at), (other, to) = b.place(c, c.args[1], 4 * n), b.place(c, c.args[0], b.real * n)
    if made not in b.slices.sums or b.real == 4 or \
            base == other and at < to + b.real * n and to < at + 4 * n:
        b.fail(c, f"rounds {c.args[1]}")
    b.slices.sums.discard(made)
    b.write(c, c.args[0], b.real * n, "r", made)


def end(b: _Body) -> None:
    for whole in b.slices.open:
        b.fail(whole, "is not made of all slices")
