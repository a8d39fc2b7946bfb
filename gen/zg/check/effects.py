"""effects.py -- plays the kernels of the plan's own functions: sums, norms, updates, initial
values. Each method takes its call's operands: places, numbers (n, by_rank) and words."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..facts import ops
from ..facts.kernels import HOST, KERNELS, NULL, TWINS, Formal
from ..facts.kernels import kernel as row_of
from ..plan import operand as plan
from ..plan.mesh import Along, Members, plus
from ..plan.operand import ALL, Arg, Index, base
from ..plan.plan import STEP, Call, Fn, Plan, Ref, Step
from .arrays import (
    EVERY,
    Control,
    Key,
    Leaf,
    MicroBatch,
    Pending,
    State,
    Sum,
    Table,
    Totals,
    over_ranks,
)
from .copies import Moves, Place, Reduction, told
from .kernels import CTL, LEAVES
from .memory import Run
from .order import Action

BLOCK = 1024  # elements of a block of the optimizer's kernels
SUMS = ops.SUMS  # integers of a step's exact sums
CONTROL = ops.CTL  # bytes of a step's constants


class Number(NamedTuple):
    """Number of a call, by_rank more for each place in a group."""

    n: int
    by_rank: int = 0
    group: str = ALL


class Part(NamedTuple):
    """Range of elements of a flat's instance."""

    flat: str
    l: int
    first: int
    by_rank: Along
    n: int


class Sources(NamedTuple):
    """Slot with the pieces that a reduction delivered."""

    inbox: Place


Operand = Place | Number | Sources | str
# Types whose operands are words: spans.F, recipe, freq.N, out.
WORDS = ("span", "recipe", "f64", "u64")
Kernel = Callable[..., None]
# A kernel's method, its arguments, and operand index -> the largest number it was launched for.
Called = tuple[Kernel, list[Arg | Number], dict[int, int]]


class Formals(NamedTuple):
    """Operands that a step passes to a function, by name."""

    refs: dict[str, Ref]
    numbers: dict[str, int]


class Effects(Moves):
    """Plays kernels; each method has the name of its kernel in zk.h."""

    def __init__(self, p: Plan) -> None:
        super().__init__(p)
        self.launches = {l.name: l for l in p.launches}
        self.moving = {
            (f.name, l) for f in p.flats if p.moves(f) for l in range(f.count)
        }
        self.called: dict[str, list[Called]] = {}
        self.moments = ops.BYTES[p.recipe.moments]
        self.hashed: Part | None = None

    # ---- calls

    def calling(
        self,
        fn: Fn,
        s: Step,
        numbers: dict[str, int],
    ) -> Action:
        """Prepare one of the plan's own functions: its calls in order, with their operands."""
        if fn.name not in self.called:
            self.called[fn.name] = self.calls_of(fn)
        if any(
            c.kernel.startswith(HOST) != (s.queue == "host") for c in fn.calls
        ):
            self.fail("the queue runs other kernels")
        names, refs = (*fn.ins, *fn.outs), s.refs
        formals = Formals(dict(zip(names, refs, strict=True)), numbers)
        work = []
        for kernel, args, most in self.called[fn.name]:
            operands = [self.operand_of(a, formals) for a in args]
            numbers_of = [
                a.n if isinstance(a, Number) else 0 for a in operands
            ]
            short = any(numbers_of[at] > n for at, n in most.items())
            # On a host, a kernel's size is its argument, not its launch.
            if short and s.queue != "host":
                self.fail(f"{kernel.__name__} is launched for fewer elements")
            work.append((kernel, operands))
        return Effects.own, work

    def own(self, *calls: tuple[Kernel, list[Operand]]) -> None:
        for kernel, operands in calls:
            kernel(self, *operands)

    def calls_of(self, fn: Fn) -> list[Called]:
        """Return a function's calls with their arguments. Every operand of the function must be
        used."""
        used, out = set(), []
        for c in fn.calls:
            launch = self.launches.get(c.launch)
            if c.rounds != 1 or not launch or launch.kernel != c.kernel:
                self.fail(f"{c.kernel} is launched as another kernel")
            row = TWINS.get(c.kernel) or KERNELS.get(c.kernel)
            kernel = getattr(Effects, row.name, None) if row else None
            if not row or not kernel:
                self.fail(f"no function has {c.kernel}")
            used |= {base(a) for a in c.args}
            self.fits(fn, c)
            args = [Number(a) if isinstance(a, int) else a for a in c.args]
            if len(launch.shape) != len(row.shape):
                self.fail(f"{c.kernel} is launched for another shape")
            most = {
                row.at[name]: n
                for name, n in zip(row.shape, launch.shape, strict=True)
            }
            out.append((kernel, args, most))
        if not {*fn.ins, *fn.outs} <= used:
            self.fail("has operands that no call uses")
        return out

    def fits(self, fn: Fn, call: Call) -> None:
        """Require numbers, places and words where the kernel's row has them."""
        formals = row_of(call.kernel).formals
        if len(formals) != len(call.args):
            self.fail(f"{call.kernel} has {len(call.args)} operands")
        for f, arg in zip(formals, call.args, strict=True):
            want = (
                "number"
                if f.number
                else "word"
                if f.type in WORDS
                else "place"
            )
            null = f.optional and arg == NULL
            # Only calls in rounds may have by_round.
            rounds = getattr(arg, "by_round", 0)
            if not null and sort_of(arg, fn, f) != want or rounds:
                self.fail(
                    f"{call.kernel}: {f.name} is {arg}, which is no {want}"
                )

    def operand_of(self, arg: Arg | Number, formals: Formals) -> Operand:
        """Return the operand that an argument of a call stands for in this step."""
        if isinstance(arg, Number):
            return arg
        if isinstance(arg, plan.Operand):
            ref = formals.refs.get(arg.base) or Ref(arg.base, 0)
            group = self.groups[arg.group]
            return Place(self.slot(ref), ref.at + arg.at, arg.by_rank, group)
        if isinstance(arg, Index):
            more = formals.numbers[arg.more] if arg.more else 0
            layer = arg.by_layer * formals.numbers["l"]
            return Number(layer + arg.at + more, arg.by_rank, arg.group)
        word = str(arg)
        if word.startswith("&"):
            return self.place(formals.refs[word[1:]])
        if word == "sources":
            return Sources(self.place(formals.refs[word]))
        number = formals.numbers.get(word)
        return word if number is None else Number(number)

    def part(self, spans: str, first: Number, n: Number) -> Part:
        """Return the elements that a kernel works on: n elements of a flat from `first` on."""
        kind, _, name = spans.partition(".")
        if kind != "spans":
            self.fail(f"works on {spans}")
        flat = self.flats[name]
        whole = flat.shard * self.W
        l, at = divmod(first.n, whole)
        elems = n.n
        even = elems > 0 and elems % BLOCK == 0
        there = l < flat.count
        if not even or not there or n.by_rank:
            self.fail(f"works on {elems} elements of {name}[{l}]")
        group = self.groups[first.group]
        return Part(name, l, at, group.times(first.by_rank), elems)

    # ---- content of places

    def control(self, where: Place) -> Control:
        """Return the constants at a place. Arenas start as zeros."""
        run = where.buffer.read(where.at, CONTROL)
        if not where.buffer.held and not where.at:
            return Control(0, 0, False)
        if not run or run.first or not isinstance(run.array, Control):
            self.fail(f"{where} holds {told(run)}, not a step's constants")
        return run.array

    def set_control(self, where: Place, now: Control) -> None:
        where.buffer.write(where.at, CONTROL, Run(now))

    def constants(self, where: Place, write: bool = False) -> Control:
        """Access all constants of a step and return them."""
        self.access(where, CONTROL if write else where.buffer.stride, write)
        return self.control(where)

    def leaves(self, where: Place, write: bool) -> Control:
        """Access only the count of leaves among the constants."""
        lo, hi = CTL[LEAVES]
        self.touch(where.buffer, where.at + lo, where.at + hi, write)
        return self.control(where)

    def totals(self, where: Place, write: bool) -> Totals:
        """Access the sums of the current step and return them."""
        slot = self.access(where, 8 * SUMS, write)
        run = slot.read(where.at, 8 * SUMS)
        sums = run.array if run and not run.first else None
        if not isinstance(sums, Totals):
            self.fail(f"{where} holds {told(run)}, not the step's sums")
        if sums.step != self.now:
            self.fail(
                f"{where} holds the sums of step {sums.step}, not {self.now}"
            )
        return sums

    def set_totals(self, where: Place, now: Totals) -> None:
        where.buffer.write(where.at, 8 * SUMS, Run(now))

    def goes_on(self, where: Place, width: int, part: Part, what: str) -> None:
        """Advance a state's elements from the last step to this one."""
        flat, l, first, by_rank, n = part
        want = Run(State(what, flat, l, self.now - 1), first, width, by_rank)
        self.access(where, n * width, True)  # which includes reading them
        run = self.look(where, n * width)
        if run != want:
            self.fail(f"{where} holds {told(run)}, not {told(want)}")
        self.put(
            where,
            n * width,
            Run(State(what, flat, l, self.now), first, width, by_rank),
        )

    def holds_sum(self, where: Place, part: Part) -> None:
        """Require the sum of this step's gradients over all micro-batches of all ranks."""
        run = self.reads(where, part.n * 4)
        micro_batches = self.p.head.micro_batches * self.W
        if run and micro_batches == 1 and isinstance(run.array, Leaf):
            if self.complete(run.array):  # the only micro-batch
                run = run._replace(array=self.one_sum(run))
        # With one rank, its sum is the sum over all ranks.
        if run and self.W == 1 and isinstance(run.array, Sum):
            run = run._replace(
                array=over_ranks(run.array, self.every), by_rank=part.by_rank
            )
        micro_batch = MicroBatch(self.now, 0, ())
        leaves = run.array.leaves if run and isinstance(run.array, Sum) else 0
        want = Run(
            Sum(part.flat, part.l, micro_batch, micro_batches, leaves, True),
            part.first,
            4,
            part.by_rank,
        )
        if run != want:
            self.fail(f"{where} holds {told(run)}, not {told(want)}")

    # ---- once a step

    def zk_begin(self, ctl: Place, sums: Place, recipe: str) -> None:
        """Start a step: reset its constants and sums."""
        last = self.constants(ctl, True)
        self.access(sums, 8 * SUMS, True)
        step = last.step + 1
        if step != self.now or recipe != "recipe":
            self.fail(f"{ctl} has begun step {step}, not {self.now}")
        self.set_control(ctl, Control(step, 0, False))
        nothing = Totals(step, frozenset(), frozenset(), False)
        self.set_totals(sums, nothing)

    def zk_count(self, ctl: Place, leaves: Number) -> None:
        now = self.leaves(ctl, True)
        self.set_control(ctl, now._replace(leaves=now.leaves + leaves.n))

    def zk_square_sum(
        self, sums: Place, g: Place, spans: str, first: Number, n: Number
    ) -> None:
        """Add a part's squared norm to the step's sums."""
        part = self.part(spans, first, n)
        now = self.totals(sums, True)
        self.holds_sum(g, part)
        (store,) = self.p.stored("sum", part.flat)
        over, group = self.groups.get(store.over), g.group
        each = self.flats[part.flat].shard * self.p.parts(store)
        begin = over.times(each) if over else ()
        own = plus(begin, group.times(g.by_rank // 4))
        if g.buffer.cls != store.cls or self.W > 1 and own != part.by_rank:
            self.fail(
                f"the sum of {part.flat} lies in {store.cls}, over {store.over}"
            )
        norms = now.norms
        if part in norms or now.everywhere:
            self.fail(f"{part.flat}[{part.l}] is measured twice, or too late")
        self.set_totals(sums, now._replace(norms=norms | {part}))

    def do_allreduce(self, source: Place, to: Place, count: int) -> None:
        """Sum the step's sums over all ranks."""
        if count != SUMS or source.buffer is to.buffer:
            self.fail("reduces something else than the step's sums")
        if self.group != self.every:
            self.fail(f"reduces over {self.group.name}, not all ranks")
        self.common(source.buffer)
        now = self.totals(source, False)
        self.access(to, 8 * SUMS, True)
        self.set_totals(to, now._replace(everywhere=True))

    def zk_factor(self, ctl: Place, total: Place, recipe: str) -> None:
        """Compute the clipping factor, which needs all norms and losses of all ranks."""
        sums, now = self.totals(total, False), self.constants(ctl, True)
        lacks = self.unmeasured(sums)
        if not sums.everywhere or lacks:
            self.fail(
                f"norms are not complete: {lacks or 'a rank has its own'}"
            )
        if sums.losses != EVERY:
            self.fail(
                f"the losses are of {len(sums.losses)} micro-batches of each rank"
            )
        if now.step != self.now or now.known or recipe != "recipe":
            self.fail(f"the factor of step {now.step}, or twice")
        self.set_control(ctl, now._replace(known=True))

    def unmeasured(self, sums: Totals) -> list[Key]:
        """Return the trainable instances whose norm is missing or not measured exactly once by all
        ranks together."""
        parts: dict[Key, list[tuple[int, int]]] = {
            key: [] for key in self.moving
        }
        for flat, l, first, by_rank, n in sums.norms:
            shard = self.flats[flat].shard
            own = by_rank == self.owners(flat).times(shard)
            parts[flat, l].append((first if own else -1, n))
        return sorted(
            key
            for key, measured in parts.items()
            if not covers(measured, self.flats[key[0]].shard)
        )

    def first_micro_batches(self, n: int) -> frozenset[MicroBatch]:
        """Return the first n micro-batches of each rank, numbered in the order of sums."""
        by: Along = ()
        each, more = 0, 1
        for level in self.p.head.order.levels:
            if level == STEP:
                each, more = more, more * self.p.head.micro_batches
            else:
                group = self.groups[level]
                by = plus(by, group.times(more))
                more *= group.ranks
        return frozenset(MicroBatch(self.now, g * each, by) for g in range(n))

    # ---- sums of leaves

    def zk_push(
        self,
        node: Place,
        stride: Number,
        source: Operand,
        count: Number,
        full: Number,
        n: Number,
        ctl: Operand,
        total: Number,
        mask: Number,
        block: Number,
    ) -> None:
        """Push the next leaves, or sums of leaves, onto the tree whose pending nodes are at
        `node`."""
        size, distance = n.n, stride.n
        width = 4 if full.n else self.real
        came, leaf, group = self.pushed(source, size, width)
        one, ranks = self.one_sum(came), group.ranks if group else 1
        new = over_ranks(one, group) if group and ranks > 1 else one
        said = count.n, full.n
        if not new or said != (ranks, int(not leaf)):
            self.fail(f"pushes {count.n} of {told(came)}")
        counted = False
        before = 0
        if isinstance(ctl, Place):
            counted = True
            before = self.leaves(ctl, False).leaves
        self.tree(counted, total.n, mask.n, block.n, one, ranks)
        self.nodes(node, distance, size, mask.n, counted)
        nodes = mask.n.bit_count()
        if counted and nodes > 1:
            self.others(node, 4 * distance, nodes, one, before > 0)
        if before:
            new = self.carried(node, size, came, new, before * one.leaves)
        done = new._replace(whole=before + ranks == total.n)
        run = Run(done, came.first, 4, came.by_rank)
        self.makes(node, 4 * size, run)

    def pushed(
        self, source: Operand, n: int, width: int
    ) -> tuple[Run, bool, Members | None]:
        """Return the pushed run, whether it holds gradients (not f32 sums), and the group it came
        from."""
        if isinstance(source, Sources):
            r: Reduction = self.brought(source.inbox)
            if (r.size, r.came.width) != (n * width, width):
                self.fail(f"sums {n} elements of {r.size} bytes that came")
            group = self.groups[r.group] if r.sources > 1 else None
            return r.came, r.leaf, group
        if not isinstance(source, Place):
            self.fail(f"pushes {source}")
        run = self.reads(source, n * width)
        if not run or run.width != width:
            self.fail(
                f"{source} holds {told(run)}, not {n} elements of {width} bytes"
            )
        return run, isinstance(run.array, Leaf), None

    def nodes(
        self, node: Place, stride: int, n: int, mask: int, counted: bool
    ) -> None:
        """Require that pending nodes are disjoint and inside their slot."""
        ranks = node.group.ranks
        end = (node.at + node.by_rank * (ranks - 1)) // 4 + n
        room = node.buffer.stride // 4
        most = room // max(1, mask.bit_count())
        if counted and (stride % BLOCK or not end <= stride <= most):
            self.fail(
                f"{node}: nodes at a distance of {stride} elements, of {end} in {room}"
            )
        if not counted and stride:
            self.fail(f"{node}: a distance of nodes, of which there is one")

    def others(
        self, node: Place, step: int, nodes: int, one: Sum, begun: bool
    ) -> None:
        """Access a tree's nodes after the first, `step` bytes apart. Nothing else may write them
        while the tree is incomplete."""
        place, size = node._replace(at=step, by_rank=0), step * (nodes - 1)
        mine = Run(Pending(one.flat, one.l))
        self.access(place, size, True)
        if node.by_rank:  # the content behind a rank's part is not tracked
            return
        there = self.look(place, size)
        if begun and there != mine:
            self.fail(f"{place} holds {told(there)}, not {told(mine)}")
        if not begun:
            self.put(place, size, mine)

    def tree(
        self,
        counted: bool,
        total: int,
        mask: int,
        block: int,
        one: Sum,
        count: int,
    ) -> None:
        """Require that the step's leaves form trees of the plan's size, one after the other.
        Without a counter all leaves must come at once."""
        head = self.p.head
        times = head.micro_batches if counted else 1
        if total != times * count:
            self.fail(f"a tree of {total}, of {count} at a time")
        if total > 1 and block * one.leaves != head.block:
            self.fail(f"trees of {block} times {one.leaves} leaves")
        want = planned = 0
        if counted:
            want = pending(total, count, block)
            planned = self.flats[one.flat].mask
        if mask != want or planned != want:
            self.fail(f"pending sums at {mask:#b}, not {want:#b}")

    def carried(
        self, node: Place, n: int, came: Run, new: Sum, before: int
    ) -> Sum:
        """Return the pending sum extended by the leaves that follow it."""
        old = self.reads(node, 4 * n)
        was = old.array if old else None
        step, at, by_rank = new.micro_batch
        if (
            not old
            or not isinstance(was, Sum)
            or was.whole
            or (was.flat, was.l) != (new.flat, new.l)
            or was.leaves != before
            or was.micro_batch
            != MicroBatch(step, at - was.micro_batches, by_rank)
            or old[1:4] != (came.first, 4, came.by_rank)
        ):
            self.fail(
                f"{node} holds {told(old)}, which {told(came)} does not follow"
            )
        return was._replace(
            micro_batches=was.micro_batches + new.micro_batches,
            leaves=was.leaves + new.leaves,
        )

    # ---- parameters and states

    def zk_init(
        self,
        p: Place,
        spans: str,
        first: Number,
        n: Number,
        seed: Number,
        full: Number,
    ) -> None:
        """Write a part's initial values."""
        part = self.part(spans, first, n)
        if seed.n != self.p.head.seed:
            self.fail("draws from another seed")
        width = 4 if self.is_full(full) else self.real
        initial = State("p", part.flat, part.l, -1)
        self.makes(
            p, part.n * width, Run(initial, part.first, width, part.by_rank)
        )

    def is_full(self, full: Number) -> bool:
        if full.n not in (0, 1) or not full.n and self.real == 4:
            self.fail(f"full is {full.n}")
        return full.n == 1

    def zk_round(self, w: Place, p: Place, n: Number) -> None:
        """Round f32 parameters to the stored type."""
        run = self.reads(p, 4 * n.n)
        if (
            n.n % BLOCK
            or not run
            or not isinstance(run.array, State)
            or run.array.what != "p"
            or run.width != 4
        ):
            self.fail(f"{p} holds {told(run)}, not parameters")
        self.makes(w, self.real * n.n, run._replace(width=self.real))

    def zk_update(
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
        part, now = self.part(spans, first, n), self.constants(ctl)
        if not now.known or now.step != self.now or recipe != "recipe":
            self.fail(
                f"before the factor of step {self.now} is known: {ctl} holds {now}"
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
                    else self.real
                )
                self.goes_on(where, width, part, what)
        # A skipped step leaves w unchanged.
        if isinstance(p, Place) and isinstance(w, Place):
            self.goes_on(w, self.real, part, "p")

    @property
    def rule(self) -> list[str]:
        return list(ops.OPTIMIZERS[self.p.recipe.optimizer])

    def zk_rope_table(
        self, table: Place, freq: str, T: Number, D: Number
    ) -> None:
        rows = {}
        for n, t in enumerate(self.p.tables):
            rows[f"freq.{n}"] = t
        row = rows.get(freq)
        said = T.n, D.n
        if not row or said != (self.p.head.sequence, row.head):
            self.fail(f"turns by {freq} of {T.n} positions, heads of {D.n}")
        made = Run(Table(row.name))
        self.writes(table, 4 * T.n * D.n, made)

    def zk_hash(
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
        part, width = (
            self.part(spans, first, n),
            4 if self.is_full(full) else self.real,
        )
        step = self.now if (part.flat, part.l) in self.moving else 0
        want = Run(
            State("p", part.flat, part.l, step),
            part.first,
            width,
            part.by_rank,
        )
        run = self.look(p, part.n * width)
        if run != want or out != "out":
            self.fail(f"{p} holds {told(run)}, not {told(want)}")
        self.hashed = part


def sort_of(arg: Arg, fn: Fn, f: Formal) -> str:
    """Return the kind of a call's argument: "number", "place", "word" or "none"."""
    if isinstance(arg, plan.Operand):
        return "place"
    if isinstance(arg, (int, Index)):
        return "number"
    if not isinstance(arg, str):
        return "none"
    if arg == "sources":
        return "place" if f.name == "src" else "none"
    if arg.startswith("&"):
        return "place"
    return "number" if arg in fn.ints and f.type not in WORDS else "word"


def pending(total: int, count: int, block: int) -> int:
    """Return the mask of all levels at which sums are ever pending, if `total` leaves come `count`
    at a time. All whole blocks together count as one level."""
    last, mask = total // count - 1, 0
    # Bit b of n * count repeats after 2^(b+1) values of n.
    for b in range((block - 1).bit_length()):
        first = -(-(2**b) // count)
        tried = range(first, min(last + 1, 2 ** (b + 1)))
        mask |= any(n * count >> b & 1 for n in tried) << b
    return mask | block * (last * count >= block)


def covers(parts: list[tuple[int, int]], want: int) -> bool:
    """Return whether the (first, elements) ranges are consecutive from 0 on and add up to
    `want`."""
    end = 0
    for at, n in sorted(parts):
        if at != end:
            return False
        end += n
    return end == want
