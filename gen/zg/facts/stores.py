"""stores.py -- the offset of a state in its class."""

from __future__ import annotations

from ..plan.plan import Plan, Store
from .ops import BYTES


def begin(p: Plan, s: Store) -> int:
    """Return the byte offset of a state's elements in a slot. The class of parameters holds a whole
    shard, of which masters may be a part; any other class holds only its state's elements."""
    (params,) = p.stored("params", s.flat)
    return s.first * BYTES[s.dtype] if s.cls == params.cls else 0
