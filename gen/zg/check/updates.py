"""updates.py -- plays the kernels that write or read states: initial values, updates, hashes."""

from __future__ import annotations

from collections.abc import Callable

from ..facts import ops
from .arrays import State, Table
from .constants import constants
from .memory import Run
from .operands import BLOCK, Number, Operand, Part, part_of
from .order import Memory, Place, told


class Updates:
    """Plays kernels that work on states, and on the rotary tables that a run computes once.
    holds_sum: requires the whole sum of a part's gradients."""

    def __init__(
        self, m: Memory, holds_sum: Callable[[Place, Part], None]
    ) -> None:
        self.m, self.fail, self.holds_sum = m, m.fail, holds_sum
        self.moments = ops.BYTES[m.p.recipe.moments]
        self.rule = list(ops.OPTIMIZERS[m.p.recipe.optimizer])
        self.hashed: Part | None = None

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
        if seed.n != m.p.head.seed:
            self.fail("draws from another seed")
        width = 4 if self.is_full(full) else m.real
        initial = State("p", part.flat, part.l, -1)
        m.makes(
            p, part.n * width, Run(initial, part.first, width, part.by_rank)
        )

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
            self.fail(f"{p} holds {told(run)}, not parameters")
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
    ) -> None:
        """Update a part's states from the sum of its gradients, with the known factor."""
        part, now = part_of(self.m, spans, first, n), constants(self.m, ctl)
        if not now.known or now.step != self.m.now or recipe != "recipe":
            self.fail(
                f"before the factor of step {self.m.now} is known: {ctl} holds {now}"
            )
        self.holds_sum(g, part)
        states = dict(
            zip(("p", "m", "v"), (p if p != "null" else w, m, v), strict=True)
        )
        given = [
            what for what, where in states.items() if isinstance(where, Place)
        ]
        if given != ["p", *self.rule]:
            self.fail(f"the rule has {self.rule}, not {given}")
        for what, where in states.items():
            if isinstance(where, Place):
                width = (
                    self.moments
                    if what != "p"
                    else 4
                    if p != "null"
                    else self.m.real
                )
                self.goes_on(where, width, part, what)
        # A skipped step leaves w unchanged.
        if isinstance(p, Place) and isinstance(w, Place):
            self.goes_on(w, self.m.real, part, "p")

    def goes_on(self, where: Place, width: int, part: Part, what: str) -> None:
        """Advance a state's elements from the last step to this one."""
        m = self.m
        flat, l, first, by_rank, n = part
        want = Run(State(what, flat, l, m.now - 1), first, width, by_rank)
        m.access(where, n * width, True)  # which includes reading them
        run = m.look(where, n * width)
        if run != want:
            self.fail(f"{where} holds {told(run)}, not {told(want)}")
        m.put(
            where,
            n * width,
            Run(State(what, flat, l, m.now), first, width, by_rank),
        )

    def rope_table(
        self, table: Place, freq: str, T: Number, D: Number
    ) -> None:
        rows = {}
        for n, t in enumerate(self.m.p.tables):
            rows[f"freq.{n}"] = t
        row = rows.get(freq)
        said = T.n, D.n
        if not row or said != (self.m.p.head.sequence, row.head):
            self.fail(f"turns by {freq} of {T.n} positions, heads of {D.n}")
        made = Run(Table(row.name))
        self.m.writes(table, 4 * T.n * D.n, made)

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
        part, width = (
            part_of(m, spans, first, n),
            4 if self.is_full(full) else m.real,
        )
        step = m.now if (part.flat, part.l) in m.moving else 0
        want = Run(
            State("p", part.flat, part.l, step),
            part.first,
            width,
            part.by_rank,
        )
        run = m.look(p, part.n * width)
        if run != want or out != "out":
            self.fail(f"{p} holds {told(run)}, not {told(want)}")
        self.hashed = part

    def is_full(self, full: Number) -> bool:
        if full.n not in (0, 1) or not full.n and self.m.real == 4:
            self.fail(f"full is {full.n}")
        return full.n == 1
