"""leaves.py -- proves that every trainable tensor gets one gradient: the first function in backward
that reads the tensor writes it, the other readers add to it. Frozen tensors get none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..facts.kernels import ROUND
from ..plan.operand import Operand, base, whole
from ..plan.plan import Plan
from .body import Frame
from .order import CheckError


def leaves(
    p: Plan,
    bodies: Mapping[str, Sequence[Frame]],
    counts: dict[str, int],
) -> dict[tuple[str, str], int]:
    """Prove that each trainable tensor's gradient is written once and added to by its other
    readers. Return Facts.steps."""
    kinds = list(reversed(counts))  # in backward order
    tensors = {t.name: t for t in p.tensors}
    readers: dict[str, set[str]] = {n: set() for n in tensors}
    givers: dict[str, list[tuple[str, bool]]] = {n: [] for n in tensors}
    acc: list[tuple[str, bool]] = []
    for kind in kinds:
        for b in bodies[kind]:
            for n in b.reads:
                readers[n].add(kind)
            for n, added in b.grads:
                if n == "acc":
                    acc.append((kind, added))
                else:
                    givers[n] += acc if n in _rounded(b) else [(kind, added)]
    if acc and not any(_rounded(b) for kind in kinds for b in bodies[kind]):
        raise CheckError("an f32 sum is no tensor's")
    sizes = {n for kind in kinds for b in bodies[kind] for n in b.acc}
    if len(sizes) > 1:
        raise CheckError(f"an f32 sum has {sorted(sizes)} elements")
    steps: dict[tuple[str, str], int] = {}
    for name, t in tensors.items():
        got = givers[name]
        read = [k for k in kinds if k in readers[name]]
        if not read or got != ([] if t.frozen else [(k, k != read[0]) for k in read]):
            raise CheckError(
                f"tensor {name}: read by {read}, its gradient comes from {got}"
            )
        if t.count != counts[read[-1]]:
            raise CheckError(
                f"tensor {name}: {t.count} instances for {counts[read[-1]]} units"
            )
        for kind in readers[name]:
            if steps.setdefault((kind, t.flat), t.offset_step) != t.offset_step:
                raise CheckError(
                    f"tensor {name}: another distance than its unit's others"
                )
    return steps


def _rounded(b: Frame) -> set[str]:
    """Return the tensors whose gradient is rounded from the f32 sum."""
    out = set()
    for c in b.calls_of():
        if c.kernel != ROUND:
            continue
        to, of, n = c.args
        if base(of).startswith("acc"):
            if of != Operand("acc"):
                b.fail(c, "rounds something else than the sum")
            elems = whole(n)
            out.add(b.tensor(c, to, elems, 0, True).name)
            b.acc.add(elems)
    return out
