"""flats.py -- facts about flat buffers that later passes share: names, units of size, and the
tensors that every rank keeps whole (DeepSpeed's persistent parameters)."""

from __future__ import annotations

from fnmatch import fnmatchcase

from ..facts import ops
from ..graph.graph import Graph, Tensor, UnitKind
from ..read.spec import Spec

BLOCK = 1024  # elements: tensors start at multiples, norm and hash work on such blocks
PAGE = 4096  # bytes: a shard of parameters is a multiple
FROZEN = (
    ".frozen"  # suffix of the flat of a flat's frozen tensors, if others are trainable
)


def stem(flat: str) -> str:
    """Return the name of a flat without the suffix of its frozen part."""
    return flat.removesuffix(FROZEN)


def persists(flat: str) -> bool:
    """Return whether every rank keeps a flat whole at stage 3."""
    return stem(flat) == "persistent"


def shard_unit(spec: Spec) -> int:
    """Return the elements that every shard's size is a multiple of."""
    return max(PAGE // ops.BYTES[spec.train.precision], BLOCK)


def padded(spec: Spec, elems: int) -> int:
    """Return `elems` padded to whole shards of all ranks, in elements."""
    return ops.up(elems, spec.cluster.ranks * shard_unit(spec))


def persistent(spec: Spec, graph: Graph) -> frozenset[str]:
    """Return the names of the tensors that every rank keeps whole at stage 3. Raises SpecError if
    zero.replicate matches only some layers of a tensor."""
    if spec.zero.stage < 3:
        return frozenset()
    every = ((k, t) for k in graph.kinds for t in k.tensors)
    return frozenset(t.name for k, t in every if _persists(spec, k, t))


def _persists(spec: Spec, kind: UnitKind, t: Tensor) -> bool:
    """Return whether a tensor is persistent: small enough, or matched by zero.replicate."""
    names = (ops.layer(n, l) for n, _ in t.parts for l in range(kind.count))
    hits = {any(fnmatchcase(n, p) for p in spec.zero.replicate) for n in names}
    if len(hits) > 1:
        raise spec.wrong(
            "zero.replicate",
            f"matches only a part of {t.name}",
            "patterns that match a tensor in all layers, with all tensors of the same "
            "linear, or none of these",
        )
    return t.params <= spec.zero.stage3_param_persistence_threshold or all(hits)
