"""moves.py -- what moves: the group that has a tensor, the values of a unit that have a gradient.

A gradient is needed of what comes from a tensor that moves. A line of backward that makes none that
is needed is not run.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from ..facts import ops
from ..plan.operand import Ints
from ..read.spec import Spec
from .graph import Node


def group(
    spec: Spec,
    name: str,
    parts: Iterable[tuple[str, int]],
    shape: Ints,
    layer: int,
) -> tuple[float, float, int]:
    """A tensor's factor of lr, its weight decay, and whether it is frozen, in a layer: by the first
    group that names it."""
    o = spec.train.optimizer
    own = o.weight_decay if len(shape) > 1 or o.decay == "all" else 0.0
    names = (ops.layer(n, layer) for n, _ in parts)
    hits = {
        next(
            (
                i
                for i, g in enumerate(o.groups)
                for p in g.match
                if fnmatchcase(n, p)
            ),
            None,
        )
        for n in names
    }
    if len(hits) > 1:
        raise spec.wrong(
            "train.optimizer.groups",
            f"match {name} in part",
            "groups that name all tensors that share a linear, or none",
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


def live(nodes: Iterable[Node], moving: set[str]) -> set[str]:
    """What has a gradient: the tensors and values of `moving`, and values that come from these."""
    out = set(moving)
    for node in nodes:
        if any(
            node.bind.get(word) in out
            for word in (*node.op.ins, *node.op.params)
        ):
            out |= {node.bind[o.name] for o in node.op.outs}
    return out


def wanted(node: Node, words: Iterable[str], alive: set[str]) -> bool:
    """Whether a line of backward makes a gradient that is needed."""
    return any(
        word[0] == "d"
        and word[1:] in (*node.op.ins, *node.op.params)
        and node.bind.get(word[1:]) in alive
        for word in words
    )
