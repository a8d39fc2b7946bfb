"""step.py -- plays a plan's sections, with all parts of the play."""

from __future__ import annotations

from collections.abc import Mapping

from ..plan.plan import Fn, Plan, Ref, Step
from .arrays import Computed, MicroBatch, Totals
from .between import Between
from .constants import SUMS, set_totals
from .copies import Copies
from .fns import Facts
from .kernels import BODIES
from .memory import Extent
from .once import Once
from .order import CheckError, Memory, told
from .own import Own
from .play import Act, Action, Player
from .reductions import Reductions
from .repeats import counted, leap
from .states import States
from .sums import WholeSums
from .trees import Trees
from .units import Units
from .updates import Updates
from .uses import Uses


class Program:
    """Plays a whole run of a plan."""

    def __init__(self, p: Plan, facts: Facts) -> None:
        m = self.m = Memory(p)
        uses = Uses(m, facts)
        between = self.between = Between(m, facts)
        self.units = Units(m, uses, between)
        sums = WholeSums(m, uses)
        copies = self.copies = Copies(m)
        reductions = self.reductions = Reductions(m, sums)
        once = Once(m, sums)
        updates = self.updates = Updates(m, sums)
        self.own = Own(
            m,
            {
                "zk_begin": once.begin,
                "zk_count": once.count,
                "zk_factor": once.factor,
                "zk_hash": updates.hash,
                "zk_init": updates.init,
                "zk_push": Trees(m, sums, reductions).push,
                "zk_rope_table": updates.rope_table,
                "zk_round": updates.round,
                "zk_square_sum": once.square_sum,
                "zk_update": updates.update,
            },
        )
        commands: Mapping[str, Act] = {
            "copy": copies.copy,
            "batch": copies.batch,
            "mark": copies.mark,
            "gather": copies.gather,
            "exchange": between.exchange,
            "alltoall": reductions.alltoall,
            "reducescatter": reductions.reducescatter,
            "allreduce": once.allreduce,
            "done": reductions.done,
        }
        self.player = Player(m, commands, self.calling, copies.dies)
        self.states = States(m)
        self.evaluated = 0

    def calling(self, fn: Fn, s: Step, numbers: dict[str, int]) -> Action:
        """Return the method for a call of a function: a unit's, or the plan's own."""
        if s.kind in BODIES:
            return self.units.calling(s, numbers)
        return self.own.calling(fn, s, numbers)

    def run(self, name: str) -> None:
        self.m.section = name
        for number, s in enumerate(self.m.p.section(name).steps):
            self.m.number = number
            self.player.play(s)

    def start(self) -> None:
        """Play the start: initial values, the values that a run may load instead, and the
        parameters computed from them."""
        for s in self.states.stores:
            if s.what != "p":  # arenas start as zeros
                self.states.fill(s)
        self.run("init")
        self.end()
        for s in (s for s in self.states.stores if s.given):
            for l in range(s.flat.count):
                self.states.own_part(s, l, -1)
                self.states.set_step_zero(s.cls, l)
        self.run("publish")
        self.end()
        self.states.settled()

    def train(self, most: int = 1) -> None:
        """Play one training step with at most `most` repeats of the micro-batch section."""
        m = self.m
        turns = m.p.section("micro_batch").repeat
        m.now += 1
        self.run("begin")
        for m.local in range(min(turns, most)):
            self.run("micro_batch")
            self.end()
        m.local = 0
        leap(m, min(turns, most), turns)
        counted(m)
        self.run("update")
        m.made = m.now
        self.end()
        self.states.settled()
        self.hashes()

    def evaluate(self) -> None:
        """Play an evaluation. A run puts a micro-batch into the first slots and clears the sums."""
        m = self.m
        self.evaluated += 1
        group, first = self.between.group, self.evaluated * m.head.blocks
        by = group.times(m.head.own_blocks) if group else ()
        losses = frozenset(
            MicroBatch(0, first + n, by) for n in range(m.head.own_blocks)
        )
        for index, micro_batch in enumerate(sorted(losses)):
            for name in m.batch:
                slot = m.bytes(name, index)
                slot.write(0, slot.stride, Extent(Computed(name, "", micro_batch)))
        sums = m.first_slot("sums")
        set_totals(sums, Totals(0))
        self.run("eval")
        self.player.over()
        self.end()
        run = sums.look(8 * SUMS)
        if not run or run.array != Totals(0, losses=losses):
            m.ends(f"sums[0] holds {told(run)}, not the loss")
        self.states.settled()

    def end(self) -> None:
        """Require that reductions, bodies and the content of passing classes end with the
        section."""
        m = self.m
        if self.reductions.open:
            m.ends("a reduction is not done")
        if self.units.left:
            m.ends(f"{self.units.left[0][0]} did not run")
        for slot in m.slots.values():
            if slot.held and slot.cls in m.passing:
                m.ends(f"{slot} still holds {slot.told()}")

    def hashes(self) -> None:
        """Prove that a run's hashes cover every master weight exactly once over all ranks."""
        m = self.m
        for s in self.states.stores:
            if not s.given:
                continue
            fn = m.fns[s.given]
            arena = m.classes[s.cls].arena
            queue = "main" if arena == "device" else "host"
            for l in {0, s.flat.count - 1}:
                masters = Ref(s.cls, l, s.at)
                m.step = Step(queue, fn.name, "", ins=(masters,))
                numbers = {"l": l, "at": s.lo, "n": s.n}
                act, operands = self.own.calling(fn, m.step, numbers)
                act(*operands)
                by_rank = m.owners(s.flat.name).times(s.flat.shard)
                if self.updates.hashed != (s.flat.name, l, s.lo, by_rank, s.n):
                    m.fail(f"hashes {self.updates.hashed}")

    def finished(self) -> None:
        """Require that each of the plan's own functions has run."""
        own = {f.name for f in self.m.p.fns if f.body not in BODIES}
        idle = own - self.own.called.keys()
        if idle:
            raise CheckError(f"nothing calls {sorted(idle)}")
