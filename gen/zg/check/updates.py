"""updates.py -- plays the kernels that write or read states: initial values, updates, hashes."""

from __future__ import annotations

from dataclasses import dataclass

from ..facts import ops
from .arrays import RopeTable, State
from .constants import constants
from .memory import Extent
from .operands import BLOCK, Number, Operand, Range, part_of, width_of
from .order import Memory, Place, told
from .sums import WholeSums


@dataclass
class Updates:
    """Plays kernels that work on states, and on the rotary tables that a run computes once. hashed:
    the part of the last hash."""

    m: Memory
    sums: WholeSums
    hashed: Range | None = None

    def init(
        self,
        p: Place,
        spans: str,
        first: Number,
        n: Number,
        seed: Number,
        full: Number,
    ) -> None:
        """Write a part's initial values."""
        m = self.m
        part = part_of(m, spans, first, n)
        if seed.n != m.head.seed:
            m.fail("draws from another seed")
        width = width_of(m, full)
        m.makes(p, part.n * width, part.run("p", -1, width))

    def round(self, w: Place, p: Place, n: Number) -> None:
        """Round f32 parameters to the stored type."""
        m = self.m
        run = m.reads(p, 4 * n.n)
        if (
            n.n % BLOCK
            or not run
            or not isinstance(run.array, State)
            or run.array.what != "p"
            or run.width != 4
        ):
            m.fail(f"{p} holds {told(run)}, not parameters")
        m.makes(w, m.real * n.n, run._replace(width=m.real))

    def update(
        self,
        ctl: Place,
        recipe: str,
        w: Operand,
        p: Operand,
        m: Operand,
        v: Operand,
        g: Place,
        spans: str,
        first: Number,
        n: Number,
        full_sum: Number,
    ) -> None:
        """Update a part's states from the sum of its gradients, with the known factor."""
        part = part_of(self.m, spans, first, n)
        now = constants(self.m, ctl)
        if not now.known or now.step != self.m.now or recipe != "recipe":
            self.m.fail(
                f"before the factor of step {self.m.now} is known: {ctl} holds {now}"
            )
        self.sums.holds(g, part, width_of(self.m, full_sum))
        full = p != "null"
        states = {"p": p if full else w, "m": m, "v": v}
        places = {
            what: where for what, where in states.items() if isinstance(where, Place)
        }
        recipe_of = self.m.p.recipe
        rule = list(ops.OPTIMIZERS[recipe_of.optimizer])
        if [*places] != ["p", *rule]:
            self.m.fail(f"the rule has {rule}, not {[*places]}")
        widths = dict.fromkeys(rule, ops.BYTES[recipe_of.moments])
        widths["p"] = 4 if full else self.m.real
        for what, where in places.items():
            self.goes_on(where, widths[what], part, what)
        # A skipped step leaves w unchanged.
        if isinstance(p, Place) and isinstance(w, Place):
            self.goes_on(w, self.m.real, part, "p")

    def goes_on(self, where: Place, width: int, part: Range, what: str) -> None:
        """Advance a state's elements from the last step to this one."""
        m = self.m
        size = part.n * width
        m.access(where, size, True)  # which includes reading them
        m.holds(where, where.look(size), part.run(what, m.now - 1, width))
        where.put(size, part.run(what, m.now, width))

    def rope_table(self, table: Place, freq: str, T: Number, D: Number) -> None:
        m = self.m
        rows = {f"freq.{n}": t for n, t in enumerate(m.p.tables)}
        row = rows.get(freq)
        shape = T.n, D.n
        if not row or shape != (m.head.sequence, row.head):
            m.fail(f"turns by {freq} of {T.n} positions, heads of {D.n}")
        size = 4 * T.n * D.n
        made = RopeTable(row.name)
        m.writes(table, size, Extent(made))

    def hash(
        self,
        out: str,
        p: Place,
        spans: str,
        first: Number,
        n: Number,
        full: Number,
    ) -> None:
        """Check the operands of a hash. A run calls it between two steps, so no access is
        recorded."""
        m = self.m
        part = part_of(m, spans, first, n)
        width = width_of(m, full)
        step = m.now if (part.flat, part.l) in m.moving else 0
        want = part.run("p", step, width)
        run = p.look(part.n * width)
        if run != want or out != "out":
            m.fail(f"{p} holds {told(run)}, not {told(want)}")
        self.hashed = part
