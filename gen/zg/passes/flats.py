"""flats.py -- facts of flat buffers that are known before there are any: their names, units and
padded sizes, and the tensors that every rank keeps whole (DeepSpeed: persistent parameters).
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from ..facts import ops
from ..graph.graph import Graph, Kind, Tensor
from ..read.spec import Spec

BLOCK = 1024  # elements: tensors start at multiples; norms and hashes use it
PAGE = 4096  # bytes: a shard is a multiple, in the narrowest stored type
FROZEN = (
    ".frozen"  # what the name of a flat ends with, of which the rest trains
)


def stem(flat: str) -> str:
    """What a flat was before its frozen part was taken out."""
    return flat.removesuffix(FROZEN)


def persists(flat: str) -> bool:
    """Every rank keeps it whole at stage 3, too."""
    return stem(flat) == "persistent"


def unit(spec: Spec) -> int:
    """Elements of which a shard is a multiple."""
    return max(PAGE // ops.BYTES[spec.train.precision], BLOCK)


def whole(spec: Spec, elems: int) -> int:
    """Elements of a flat that holds so many, with what fills its shards."""
    return ops.up(elems, spec.cluster.ranks * unit(spec))


def persistent(spec: Spec, graph: Graph) -> frozenset[str]:
    """The tensors that every rank keeps whole at stage 3."""
    if spec.zero.stage < 3:
        return frozenset()
    every = ((k, t) for k in graph.kinds for t in k.tensors)
    return frozenset(t.name for k, t in every if _persists(spec, k, t))


def _persists(spec: Spec, kind: Kind, t: Tensor) -> bool:
    names = (ops.layer(n, l) for n, _ in t.parts for l in range(kind.count))
    hits = {any(fnmatchcase(n, p) for p in spec.zero.replicate) for n in names}
    if len(hits) > 1:
        raise spec.wrong(
            "zero.replicate",
            f"matches {t.name} in part",
            "patterns that name all layers of a tensor, and all that share its "
            "linear, or none",
        )
    return t.params <= spec.zero.stage3_param_persistence_threshold or all(
        hits
    )
