"""mlps.py -- MLPs that tokens go through in chunks (train.mlp_chunk).

A linear, an activation and a linear are called in rounds, each for the rows of a chunk. Values
between the linears exist for one chunk only, so backward recomputes them, in rounds, too. Sums of
weights' gradients go on from chunk to chunk in f32 and are rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan.operand import Names
from ..read.spec import Spec
from .graph import OpNode, Value

BETWEEN = ("gelu", "relu2", "swiglu", "geglu")


@dataclass(frozen=True)
class Cut:
    """An MLP that is called in rounds. inner: the values between its linears."""

    rounds: int
    inner: Names


def cut(
    spec: Spec, nodes: Sequence[OpNode], values: dict[str, Value], moving: set[str]
) -> dict[int, Cut]:
    """Cut the MLPs of a block: give their nodes the rows of a chunk, and shorten the values
    between. Return the cut of each node by its number. moving: trainable tensors.

    Raises SpecError if a block has none, or if one has gradients that cannot be summed in chunks.
    """
    chunk, rows = spec.train.mlp_chunk, spec.rows
    if not chunk or chunk >= rows:
        return {}
    if spec.train.lora:
        raise spec.wrong(
            "train.mlp_chunk",
            "gradients of adapters cannot be summed in chunks",
            "auto, or no train.lora",
        )
    inputs: set[str] = set()
    out: dict[int, Cut] = {}
    for n in range(len(nodes) - 2):
        first, between, last = trio = nodes[n : n + 3]
        x, y = first.bind.get("y", ""), between.bind.get("y", "")
        if [first.op.name, last.op.name] != ["linear"] * 2 or not (
            between.op.name in BETWEEN
            and between.bind["x"] == x
            and last.bind["x"] == y
        ):
            continue
        for bias in sorted({first.bind.get("b", ""), last.bind.get("b", "")} & moving):
            raise spec.wrong(
                "train.mlp_chunk",
                f"{bias}: the gradient of a bias cannot be summed in chunks",
                "auto, or an MLP without biases",
            )
        if first.bind["x"] in inputs:
            raise spec.wrong(
                "train.mlp_chunk",
                "two MLPs of a block have one input, whose gradients are added for all tokens",
                "auto",
            )
        inputs.add(first.bind["x"])
        made = Cut(rows // chunk, (x, y))
        for node in trio:
            node.dims |= {"M": chunk, "n": node.dims["n"] // made.rounds}
        for name in made.inner:
            few = values[name].elems // made.rounds
            values[name] = replace(values[name], elems=few)
        out |= dict.fromkeys(range(n, n + 3), made)
    if not out:
        raise spec.wrong(
            "train.mlp_chunk",
            "a block has no linear, activation and linear in a row",
            "auto",
        )
    return out


def notes(spec: Spec) -> Names:
    """Return a note about the bits of chunks."""
    rows = spec.rows
    if (spec.train.mlp_chunk or rows) >= rows or {*spec.targets} == {"cpu"}:
        return ()
    return (
        "train.mlp_chunk: on a GPU a chunk is a product of its own shape, which may sum in another "
        "order than all tokens at once: it is a part of the recipe",
    )


def total(weight: str) -> str:
    """Return the value that is the f32 sum of a weight's gradient."""
    return f"sum.{weight}"


def parts(cuts: Mapping[int, Cut]) -> set[str]:
    """Return the values that hold the rows of one round."""
    return {name for made in cuts.values() for name in made.inner}
