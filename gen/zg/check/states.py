"""states.py -- proves that each place of each state holds its elements between two steps."""

from __future__ import annotations

from ..plan.mesh import Along
from .arrays import State, Stored, stores
from .memory import Extent
from .order import Memory, Place, told


class States:
    """Fills the places of states at a run's start, and requires their content later."""

    def __init__(self, m: Memory) -> None:
        self.m = m
        self.stores = stores(m.p)

    def fill(self, s: Stored) -> None:
        """Set every instance of a store to its first values."""
        for l in range(s.flat.count):
            slot = self.m.bytes(s.cls, l)
            slot.write(s.at, self.size(s), self.filling(s, l, 0))

    def size(self, s: Stored) -> int:
        """Return the bytes of a store in a slot."""
        return (s.flat.shard * s.parts if s.parts > 1 else s.n) * s.width

    def filling(self, s: Stored, l: int, step: int) -> Extent:
        """Return the run that a store must hold after `step`."""
        first = 0 if s.parts > 1 else s.lo
        group = self.m.groups.get(s.over)
        by_rank = group.times(s.flat.shard * s.parts) if group else ()
        return Extent(State(s.what, s.flat.name, l, step), first, s.width, by_rank)

    def own_part(self, s: Stored, l: int, step: int) -> None:
        """Require that a rank's own part of a store holds the state."""
        flat = s.flat
        owned = self.m.owners(flat.name).times(flat.shard)
        state = State(s.what, flat.name, l, step)
        want = Extent(state, s.lo, s.width, owned)
        place = self.own_place(s, l, owned)
        _same(self.m, s, l, place.look(s.n * s.width), want)

    def own_place(self, s: Stored, l: int, owned: Along) -> Place:
        """Return the place of a rank's own shard, in a store with only that shard or with more."""
        m = self.m
        slot = m.bytes(s.cls, l)
        if s.over and s.parts == 1:
            return Place(slot, s.at, 0, m.every)
        rest = m.groups[s.over].without(owned) if s.over else owned
        among = m.among(rest, s.flat.shard) or m.every
        return Place(slot, s.at, s.flat.shard * s.width, among)

    def set_step_zero(self, cls: str, l: int) -> None:
        """Turn initial values into the values of step 0, as if a run had loaded them here. Initial
        values in other places stay as they are."""

        def given(run: Extent) -> Extent:
            if not isinstance(run.array, State) or run.array.step != -1:
                return run
            return run._replace(array=run.array._replace(step=0))

        self.m.bytes(cls, l).each(given)

    def settled(self) -> None:
        """Require that every place of every state holds its elements as of the last step."""
        m = self.m
        for s in self.stores:
            for l in range(s.flat.count):
                step = m.made if (s.flat.name, l) in m.moving else 0
                run = m.bytes(s.cls, l).read(s.at, self.size(s))
                _same(m, s, l, run, self.filling(s, l, step))


def _same(m: Memory, s: Stored, l: int, run: Extent | None, want: Extent) -> None:
    """Refuse the content of a store if it is not the wanted one."""
    if run != want:
        m.ends(f"{s.cls}[{l}] holds {told(run)}, not {told(want)}")
