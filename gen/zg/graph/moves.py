"""moves.py -- trainable tensors: parameter groups, and the values of a unit that have a gradient.

A value that depends on a trainable tensor needs a gradient. A backward line is not run if none of
its gradients is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from ..facts import ops
from ..plan.operand import Ints
from ..read.spec import Spec
from .graph import OpNode


def group(
    spec: Spec,
    name: str,
    parts: Iterable[tuple[str, int]],
    shape: Ints,
    layer: int,
) -> tuple[float, float, int]:
    """Return a tensor's factor of lr, its weight decay, and whether it is frozen (0 or 1) in a
    layer, by the first group that matches it.

    Raises SpecError if groups match some of its parts only.
    """
    o = spec.train.optimizer
    own = o.weight_decay if len(shape) > 1 or o.decay == "all" else 0.0
    names = (ops.layer(n, layer) for n, _ in parts)
    hits = {
        next(
            (i for i, g in enumerate(o.groups) for p in g.match if fnmatchcase(n, p)),
            None,
        )
        for n in names
    }
    if len(hits) > 1:
        raise spec.wrong(
            "train.optimizer.groups",
            f"matches only a part of {name}",
            "groups that match all tensors of a linear, or none",
        )
    hit = hits.pop()
    if hit is None:
        return 1.0, own, 0
    g = o.groups[hit]
    return (
        g.lr_factor,
        own if g.weight_decay is None else g.weight_decay,
        int(g.frozen),
    )


def live(nodes: Iterable[OpNode], moving: set[str]) -> set[str]:
    """Return the names that have a gradient: those in `moving`, and values that depend on them."""
    out = set(moving)
    for node in nodes:
        if any(node.bind.get(word) in out for word in (*node.op.ins, *node.op.params)):
            out |= {node.bind[o.name] for o in node.op.outs}
    return out


def wanted(node: OpNode, words: Iterable[str], alive: set[str]) -> bool:
    """Return whether a backward line computes a gradient that is needed."""
    return any(
        word[0] == "d"
        and word[1:] in (*node.op.ins, *node.op.params)
        and node.bind.get(word[1:]) in alive
        for word in words
    )
