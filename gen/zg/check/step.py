"""step.py -- plays a plan's sections, and proves the content of all states after every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ..plan.mesh import Along
from ..plan.plan import Plan, Ref, Step
from .arrays import (
    EVERY,
    Control,
    MicroBatch,
    State,
    Store,
    Sum,
    Totals,
    Value,
    stores,
)
from .copies import MAIN, Place, told
from .effects import SUMS
from .fns import Facts
from .kernels import BODIES
from .memory import Run, Slot, joined
from .order import CheckError
from .units import Units


class Program(Units):
    """Plays a whole run of a plan."""

    def __init__(self, p: Plan, facts: Facts) -> None:
        super().__init__(p, facts)
        self.stores = stores(p)
        self.evaluated = 0
        exact = p.head.reduction == "exact"
        self.sizes = {g.ranks for g in self.groups.values()} if exact else ()

    # ---- sections

    def run(self, name: str) -> None:
        self.section = name
        for number, s in enumerate(self.p.section(name).steps):
            self.number = number
            self.play(s)

    def start(self) -> None:
        """Play the start: initial values, the values that a run may load instead, and the
        parameters computed from them."""
        for s in self.stores:
            if s.what != "p":  # arenas start as zeros
                self.fill(s, 0)
        self.run("init")
        self.end()
        for s in (s for s in self.stores if s.given):
            for l in range(s.flat.count):
                self.own_part(s, l, -1)
                self.rename(s.cls, l)
        self.run("publish")
        self.end()
        self.settled()

    def fill(self, s: Store, step: int) -> None:
        """Set every instance of a store to the state of `step`."""
        for l in range(s.flat.count):
            self.bytes(s.cls, l).write(
                s.at, self.size(s), self.filling(s, l, step)
            )

    def size(self, s: Store) -> int:
        """Return the bytes of a store in a slot."""
        return (s.flat.shard * s.parts if s.parts > 1 else s.n) * s.width

    def filling(self, s: Store, l: int, step: int) -> Run:
        """Return the run that a store must hold after `step`."""
        first = 0 if s.parts > 1 else s.lo
        group = self.groups.get(s.over)
        by_rank = group.times(s.flat.shard * s.parts) if group else ()
        return Run(
            State(s.what, s.flat.name, l, step), first, s.width, by_rank
        )

    def own_part(self, s: Store, l: int, step: int) -> None:
        """Require that a rank's own part of a store holds the state."""
        flat = s.flat
        owned = self.owners(flat.name).times(flat.shard)
        state = State(s.what, flat.name, l, step)
        want = Run(state, s.lo, s.width, owned)
        place = self.own_place(s, l, owned)
        run = self.look(place, s.n * s.width)
        if run != want:
            self.ends(f"{s.cls}[{l}] holds {told(run)}, not {told(want)}")

    def own_place(self, s: Store, l: int, owned: Along) -> Place:
        """Return the place of a rank's own shard, in a store with only that shard or with more."""
        slot = self.bytes(s.cls, l)
        if s.over and s.parts == 1:
            return Place(slot, s.at, 0, self.every)
        rest = self.groups[s.over].without(owned) if s.over else owned
        among = self.among(rest, s.flat.shard) or self.every
        return Place(slot, s.at, s.flat.shard * s.width, among)

    def rename(self, cls: str, l: int) -> None:
        """Turn initial values into the values of step 0, as if a run had loaded them here. Initial
        values in other places stay as they are."""

        def given(run: Run) -> Run:
            if not isinstance(run.array, State) or run.array.step != -1:
                return run
            return run._replace(array=run.array._replace(step=0))

        self.each(self.bytes(cls, l), given)

    def each(self, slot: Slot, change: Callable[[Run], Run]) -> None:
        """Apply `change` to every run of a slot."""
        slot.held = joined([(a, b, change(run)) for a, b, run in slot.held])
        slot.others = joined(
            [(a, b, change(run)) for a, b, run in slot.others]
        )

    def settled(self) -> None:
        """Require that every place of every state holds its elements as of the last step."""
        for s in self.stores:
            for l in range(s.flat.count):
                step = self.made if (s.flat.name, l) in self.moving else 0
                want = self.filling(s, l, step)
                run = self.bytes(s.cls, l).read(s.at, self.size(s))
                if run != want:
                    self.ends(
                        f"{s.cls}[{l}] holds {told(run)}, not {told(want)}"
                    )

    def train(self, most: int = 1) -> None:
        """Play one training step with at most `most` repeats of the micro-batch section."""
        turns = self.p.section("micro_batch").repeat
        self.now += 1
        self.run("begin")
        for self.local in range(min(turns, most)):
            self.run("micro_batch")
            self.end()
        self.local = 0
        self.leap(min(turns, most), turns)
        self.counted()
        self.run("update")
        self.made = self.now
        self.end()
        self.settled()
        self.hashes()

    def leap(self, played: int, turns: int) -> None:
        """Extrapolate sums from the repeats that were played to all repeats; each adds the same."""
        losses = self.first_micro_batches(played * self.p.together)
        for slot in self.memory.values():
            self.each(
                slot,
                lambda run: run._replace(
                    array=self.grown(run.array, played, turns, losses)
                ),
            )

    def grown(
        self, a: object, played: int, turns: int, losses: frozenset[MicroBatch]
    ) -> object:
        """Return a pending sum, count or loss after all repeats, if it covers exactly the
        micro-batches that were played."""
        if isinstance(a, Totals):
            return a._replace(losses=EVERY) if a.losses == losses else a
        if played == turns:
            return a
        if (
            isinstance(a, Sum)
            and not a.whole
            and a.micro_batch.step == self.now
        ):
            micro_batches, leaves = (
                n * turns // played for n in (a.micro_batches, a.leaves)
            )
            return a._replace(
                micro_batches=micro_batches, leaves=leaves, whole=True
            )
        if isinstance(a, Control) and a.leaves in self.counts(played):
            return a._replace(leaves=a.leaves * turns // played)
        return a

    def counts(self, micro_batches: int) -> set[int]:
        """Return the possible counts of leaves after `micro_batches`: a rank's own leaves or NCCL's
        sums, or one from each rank of a group."""
        return {micro_batches * n for n in (1, *self.sizes)}

    def counted(self) -> None:
        """Require that all leaves of a step are counted. The count may be 0, too, as it is if all
        micro-batches go through a unit before the next one."""
        A, turns = (
            self.p.head.micro_batches,
            self.p.section("micro_batch").repeat,
        )
        good = (0, *self.counts(A)) if turns == A else (0,)
        for (cls, index), slot in self.memory.items():
            for _, _, run in slot.held:
                if (
                    isinstance(run.array, Control)
                    and run.array.leaves not in good
                ):
                    self.ends(
                        f"{cls}[{index}] holds {told(run)}, of {A} micro-batches"
                    )

    def evaluate(self) -> None:
        """Play an evaluation. A run puts a micro-batch into the first slots and clears the sums."""
        self.evaluated += 1
        micro_batch = MicroBatch(0, self.evaluated, ())
        for name in self.batch:
            self.bytes(name, 0).write(
                0, self.classes[name].stride, Run(Value(name, "", micro_batch))
            )
        self.set_totals(
            self.first_slot("sums"),
            Totals(0, frozenset(), frozenset(), False),
        )
        self.run("eval")
        self.over()
        self.end()
        run = self.bytes("sums", 0).read(0, 8 * SUMS)
        if not run or run.array != Totals(
            0, frozenset(), frozenset({micro_batch}), False
        ):
            self.ends(f"sums[0] holds {told(run)}, not the loss")
        self.settled()

    def ends(self, what: str) -> NoReturn:
        raise CheckError(f"at the end of section {self.section}: {what}")

    def over(self) -> None:
        """Release everything that an evaluation leaves, after all queues have finished."""
        self.step = Step("main", "over", "")
        self.queue, self.clock = MAIN, self.clocks[MAIN]
        for buffer in self.memory.values():
            if buffer.held and buffer.cls in self.passing:
                self.dies(buffer)

    def end(self) -> None:
        """Require that reductions, bodies and the content of passing classes end with the
        section."""
        if self.reductions:
            self.ends("a reduction is not done")
        if self.left:
            self.ends(f"{self.left[0][0]} did not run")
        for (cls, index), slot in self.memory.items():
            if slot.held and cls in self.passing:
                self.ends(
                    f"{cls}[{index}] still holds {told(slot.held[0][2])}"
                )

    def hashes(self) -> None:
        """Prove that a run's hashes cover every master weight exactly once over all ranks."""
        for s in self.stores:
            if not s.given:
                continue
            fn = self.fns[s.given]
            arena = self.classes[s.cls].arena
            queue = "main" if arena == "device" else "host"
            for l in {0, s.flat.count - 1}:
                masters = Ref(s.cls, l, s.at)
                self.step = Step(queue, fn.name, "", ins=(masters,))
                numbers = {"l": l, "at": s.lo, "n": s.n}
                act, operands = self.calling(fn, self.step, numbers)
                act(self, *operands)
                by_rank = self.owners(s.flat.name).times(s.flat.shard)
                if self.hashed != (s.flat.name, l, s.lo, by_rank, s.n):
                    self.fail(f"hashes {self.hashed}")

    def finished(self) -> None:
        """Require that each of the plan's own functions has run."""
        own = {f.name for f in self.p.fns if f.body not in BODIES}
        idle = own - self.called.keys()
        if idle:
            raise CheckError(f"nothing calls {sorted(idle)}")
