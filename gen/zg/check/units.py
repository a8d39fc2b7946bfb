"""units.py -- plays the functions of units: their required inputs, and their results."""

from __future__ import annotations

from ..facts.between import BETWEEN
from ..facts.kernels import LOSS_SUMS
from ..facts.ops import OF_SAMPLES
from ..plan.operand import Operand
from ..plan.plan import Fn, Ref, Step, unit_of
from .arrays import Computed, Key, Leaf, MicroBatch, RopeTable, State, Totals
from .between import Between
from .constants import SUMS, control, set_totals
from .kernels import BODIES, SCALED
from .memory import Extent
from .order import Memory, told
from .play import Action
from .uses import UnitUse, Uses


class Units:
    """Plays the functions of units, each as a whole. uses: their parameters."""

    def __init__(self, m: Memory, uses: Uses, between: Between) -> None:
        self.m, self.fail, self.uses, self.between = m, m.fail, uses, between
        self.direct = {f.name: self._direct(f) for f in m.p.fns if f.body in BODIES}
        # functions of the current body that are still to run
        self.left: list[tuple[str, int, int]] = []
        # the current body
        self.body: tuple[str, str, MicroBatch] | None = None
        self.outs: set[str] = set()  # outputs that its functions have written

    def calling(self, s: Step, numbers: dict[str, int]) -> Action:
        """Prepare a function of a unit."""
        l = unit_of(s.unit)[1]
        if numbers.get("l", l) != l:
            self.fail(f"is called as unit {numbers['l']}")
        return self.unit, (s, numbers.get("at", 0))

    def _direct(self, f: Fn) -> list[Operand]:
        """Return the operands of a function that name a class directly."""
        named = {a for c in f.calls for a in c.args if isinstance(a, Operand)}
        own = self.m.classes.keys() - {*f.ins, *f.outs}
        return sorted((a for a in named if a.base in own), key=str)

    def unit(self, s: Step, row: int) -> None:
        """Play one function of a unit. row: first row of its slice."""
        fn = self.m.fns[s.op]
        if unit_of(s.unit)[0] != s.op.split(".")[1] or s.unit not in self.uses.order:
            self.fail("function of another unit")
        ins = list(zip(fn.ins, s.ins, strict=True))
        outs = list(zip(fn.outs, s.outs, strict=True))
        params = self.uses.facts.flats[s.op]
        cut = self.between.cut(fn)
        others = {*params, *(BETWEEN if cut else ())}
        micro_batch = self.values(
            s, [(name, ref) for name, ref in ins if name not in others]
        )
        if cut:
            self.outs = set()
            if micro_batch and self.between.of_samples(fn):
                micro_batch = self.between.sample(micro_batch)
            micro_batch = self.between.read(fn, s.unit, ins, micro_batch)
            self.fixed(s, micro_batch)
            # Values in temporary space end with a body's last function.
            alone = self.m.p.together == 1
            use = (
                self.turn(s, row, self.between.first(micro_batch))
                if alone
                else self.uses.use(s.unit, s.op, 0)
            )
            self.between.write(fn, s.unit, outs, micro_batch)
        else:
            micro_batch = self.fixed(s, micro_batch)
            use = self.turn(s, row, micro_batch)
        for name, ref in ins:
            if name in params:
                self.parameters(ref, use, use.key(name))
        for name, ref in outs:
            if fn.flat(name):
                self.gradient(ref, use, use.key(name), micro_batch)
            elif cut and name in BETWEEN:
                continue
            elif name == "acc":
                self.sum_of_rows(ref, use.body, micro_batch)
            else:
                self.value(
                    name,
                    ref,
                    Computed("x" if name == "y" else name, s.unit, micro_batch),
                )
        if any(c.kernel in LOSS_SUMS.values() for c in fn.calls):
            self.loss(micro_batch)

    def turn(self, s: Step, row: int, micro_batch: MicroBatch) -> UnitUse:
        """Require that a body's functions follow each other with no other function between them."""
        name, kind = s.op.split(".")[:2]
        body = s.unit, name, micro_batch
        if not self.left:
            self.body = body
            self.outs = set()
            self.left = [
                (op, n, at)
                for op, rows in self.uses.facts.parts[name, kind]
                for n, at in enumerate(rows)
            ]
        op, n, at = self.left.pop(0)
        if (s.op, row, body) != (op, at, self.body):
            self.fail("is out of turn")
        return self.uses.use(s.unit, op, n)

    # ---- inputs

    def values(self, s: Step, ins: list[tuple[str, Ref]]) -> MicroBatch | None:
        """Check the inputs that depend on a micro-batch, and return that micro-batch."""
        before, after = self.uses.beside(s.unit)
        means = {
            "x": ("x", before),
            "y": ("x", s.unit),
            "s": ("s", s.unit),
            "dy": ("dx", after),
            "tokens": ("tokens", ""),
            "targets": ("targets", ""),
            "positions": ("positions", ""),
            "keys": ("keys", ""),
            **{c: (c, "") for c in OF_SAMPLES.values()},
        }
        micro_batch = None
        for name, ref in ins:
            self.m.all_of(ref, False)
            micro_batch = self.expect(ref, *means[name], micro_batch)
        return micro_batch

    def expect(
        self, ref: Ref, what: str, unit: str, micro_batch: MicroBatch | None
    ) -> MicroBatch:
        """Require that a slot holds this value of a unit, and return its micro-batch."""
        run = self.m.slot(ref).all()
        array = run.array if run else None
        if (
            run
            and isinstance(array, Computed)
            and not run.first
            and not ref.at
            and (array.what, array.unit) == (what, unit)
            and micro_batch in (None, array.micro_batch)
        ):
            return array.micro_batch
        of = f" of {unit}" if unit else ""
        self.fail(f"{ref} holds {told(run)}, not {what}{of} of {micro_batch}")

    def fixed(self, s: Step, micro_batch: MicroBatch | None) -> MicroBatch:
        """Check the classes that a function names directly, such as temporary space."""
        m = self.m
        for arg in self.direct[s.op]:
            name = arg.base
            table = name.startswith("table")
            read = table or name in (*m.batch, "ctl")
            if m.classes[name].slots > 1 and name != "sums":
                self.fail(f"names no slot of {name}")
            m.operand(arg, not read)
            if name in OF_SAMPLES.values() and self.between.of_samples(m.fns[s.op]):
                block = self.expect(Ref(name, 0), name, "", None)
                if self.between.sample(block) != micro_batch:
                    self.fail(f"{name} are of {block}")
            elif name in m.batch:
                micro_batch = self.expect(Ref(name, 0), name, "", micro_batch)
            elif table:
                self.turned(name)
            elif arg == SCALED:
                self.scaled()
        # One of a body's later functions works on the results of the earlier ones.
        if not micro_batch and self.left and self.body:
            micro_batch = self.body[2]
        return micro_batch or self.fail("is of no micro-batch")

    def turned(self, table: str) -> None:
        head = next(t.head for t in self.m.p.tables if t.name == table)
        run = self.m.bytes(table, 0).read(0, 4 * self.m.head.sequence * head)
        if run != Extent(RopeTable(table)):
            self.fail(f"{table} holds {told(run)}")

    def scaled(self) -> None:
        now = control(self.m, self.m.first_slot("ctl"))
        if now.step != self.m.now:
            self.fail(f"the scale is of another step: {now}")

    def parameters(self, ref: Ref, use: UnitUse, key: Key) -> None:
        """Require that operand w or p holds all parameters of a flat's instance, up to date."""
        m = self.m
        name, l = key
        shard = m.flats[name].shard
        slot = m.all_of(ref, False)
        run = slot.read(0, shard * m.W * m.real)
        step = m.made if key in m.moving else 0
        state = State("p", name, l, step)
        want = Extent(state, 0, m.real)
        at = use.at[name]
        if run != want or ref.at != at:
            self.fail(f"{ref} holds {told(run)}, not {told(want)}, at {at}")

    # ---- outputs

    def value(self, name: str, ref: Ref, array: Computed) -> None:
        """Write a value, or one function's share of it."""
        slot = self.m.all_of(ref, True)
        run = slot.all()
        begun = name in self.outs
        if begun and (not run or run.array != array):
            self.fail(
                f"{ref} holds {told(run)}, not what the unit's other functions made"
            )
        if not begun and slot.held or ref.at:
            self.fail(f"{ref} is overwritten while it holds {slot.told()}")
        slot.write(0, slot.stride, Extent(array))
        self.outs.add(name)

    def sum_of_rows(self, ref: Ref, body: str, micro_batch: MicroBatch) -> None:
        """Write the f32 sum of a tied weight's gradient: the head starts it, the embedding adds to
        it."""
        if body == "bwd":
            self.m.all_of(ref, True)
            self.expect(ref, "acc", "", micro_batch)
        else:
            self.value("acc", ref, Computed("acc", "", micro_batch))

    def gradient(
        self, ref: Ref, use: UnitUse, key: Key, micro_batch: MicroBatch
    ) -> None:
        """Add a function's share to a gradient. If the gradient is stored as the sum, that of the
        last step is still there and is overwritten."""
        m = self.m
        size = m.flats[key[0]].shard * m.W * m.real
        at = use.at[key[0]]
        if ref.at != at or m.classes[ref.cls].stride < size:
            self.fail(
                f"{ref} is not the unit's part of a leaf of {key[0]}, which is at {at}"
            )
        slot = m.all_of(ref, True)
        run = slot.read(0, size)
        was = run.array if run else None
        mine = frozenset({use.writer})
        leaf = Leaf(*key, micro_batch, mine)
        over = (
            slot.cls not in m.passing
            and isinstance(was, Leaf)
            and was.micro_batch.step < micro_batch.step
        )
        if slot.held and not over:
            writers = was.writers if isinstance(was, Leaf) else mine
            others = leaf._replace(writers=writers)
            if mine <= writers or run != Extent(others, 0, m.real):
                self.fail(
                    f"{ref} holds {told(run)}, not the leaf of {key[0]}[{key[1]}] of {micro_batch}"
                    f" without {use.writer}'s part"
                )
            leaf = leaf._replace(writers=writers | mine)
        slot.write(0, size, Extent(leaf, 0, m.real))

    def loss(self, micro_batch: MicroBatch) -> None:
        """Add a micro-batch to the losses of the step's sums."""
        sums = self.m.first_slot("sums")
        run = sums.look(8 * SUMS)
        now = run.array if run else None
        if (
            not isinstance(now, Totals)
            or now.step != micro_batch.step
            or now.everywhere
            or micro_batch in now.losses
        ):
            self.fail(f"sums[0] holds {told(run)}: not cleared, or it has this loss")
        set_totals(sums, now._replace(losses=now.losses | {micro_batch}))
