"""stores.py -- where in its class a state's elements begin."""

from __future__ import annotations

from ..plan.plan import Plan, Store
from .ops import BYTES


def begin(p: Plan, s: Store) -> int:
    """Bytes of a slot before them: the class of parameters has all of a shard, of which masters may
    be a part; any other has those of its state alone."""
    (params,) = p.stored("params", s.flat)
    return s.first * BYTES[s.dtype] if s.cls == params.cls else 0
