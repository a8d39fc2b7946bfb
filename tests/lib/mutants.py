"""mutants.py -- makes broken plans, and decides whether two plans are the same program after all.

A mutant is a plan with one thing changed: a step deleted, two neighbours swapped, a wait or a
record dropped, one number of a step changed; the mark of a last use dropped, or moved to the use
before.

The canonical form. A program is determined by its work (operation, operands, numbers), and by the
order of any two conflicting pieces of work: one writes bytes that the other reads or writes. Two
plans with the same work and the same order of all such pairs compute the same, whatever the queues
do in between: swapping two steps that touch different slots changes nothing, and neither does
dropping a wait that another wait implies. `forced` returns the pairs of a plan without races, each
between adjacent accesses only (the others follow, because order is transitive). `same` decides
whether another plan does the same work in that order. A step's unit is for readers only: train.c
does not have it.

The slots that a step touches are stated here again, independently of the checker: whole slots,
except pieces of collectives, which touch a range within every rank's part if there is one group.
Several groups cut slots into different parts. A slot that dies with a step counts as written by it.
A collective's peers read this rank's memory while it runs (all-to-all: until its `done`), so its
own order stands for theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zg.check import check
from zg.facts import grids, ops
from zg.facts.kernels import kernel
from zg.plan import plan
from zg.plan.operand import Index, Layers, Operand, base
from zg.plan.plan import Event, Int, Plan, Ref, Section, Step

ALL = 1 << 62
# named by functions and only read
READ = (
    "tokens",
    "targets",
    "ctl",
    "hctl",
    "table",
)
REDUCES = ("alltoall", "reducescatter")
# Bytes of ctl that these kernels touch; other steps touch all of it.
LEAVES, SCALE = ((at, at + 8) for at in (ops.LEAVES, ops.SCALE))
CTL = {
    "count": LEAVES,
    "recount": LEAVES,
    "sum": LEAVES,
    "node": LEAVES,
    "own": LEAVES,
    "train": SCALE,
}
PLAY = ("init", "publish", "step", "step", "eval", "step")


# ---- verdicts of the checker


def refused(p: Plan) -> bool:
    return rule(lambda: check.check(p)) != ""


def refusal(p: Plan) -> Callable[[Plan], str]:
    """Return a function that names the rule by which a plan is refused. The plan may differ from
    the good one `p` in its steps alone; the rest is proven only once."""
    check.check(p)
    units = check.units(p)
    facts = check.functions(p, units)

    def differs(other: Plan) -> None:
        assert replace(other, sections=p.sections) == p
        check.sections(other)
        now = check.units(other)
        check.play(other, facts if now == units else check.functions(other, now))

    return lambda other: rule(lambda: differs(other))


def rule(act: Callable[[], None]) -> str:
    """Return the place and message of a refusal by the checker, '' if there is none."""
    try:
        act()
    except check.CheckError as e:
        *_, place = (
            (frame.f_code.co_name, line)
            for frame, line in traceback.walk_tb(e.__traceback__)
            if frame.f_code.co_name != "fail"
        )
        return f"{place}: {plain(str(e))}"
    return ""


def plain(said: str) -> str:
    """Return a message without its place, names, numbers and the content of slots."""
    for pattern, by in (
        (
            r"^(at the end of )?section \w+(, step \d+)?: (\w+ [\w.]+ ?\S*: )?",
            "",
        ),
        (r"\bholds? .*", "holds"),
        (r"[\w.]+\[\d+\](\+(\w+\*)?-?\d+)*", "X"),
        (r"\b(queue|launch|function|tensor|of) [\w.\[\]{}]+", r"\1 X"),
        (r"\w+\.[\w.]+", "X"),
        (r"-?\d+", "N"),
    ):
        said = re.sub(pattern, by, said)
    return said


# ---- one thing changed


@dataclass(frozen=True)
class Mutant:
    what: str
    plan: Plan


def changed(p: Plan, section: Section, steps: list[Step]) -> Plan:
    new = replace(section, steps=tuple(steps))
    return replace(p, sections=tuple(new if s is section else s for s in p.sections))


def without(items: tuple, n: int) -> tuple:
    return items[:n] + items[n + 1 :]


def put(items: tuple, n: int, new: object) -> tuple:
    return items[:n] + (new,) + items[n + 1 :]


def numbers(s: Step, groups: Sequence[str]) -> Iterator[tuple[str, Step]]:
    """Yield the step with one of its numbers changed by one slot, one micro-batch or one page, or
    with another group."""
    for part in ("ins", "outs"):
        refs = getattr(s, part)
        for n, r in enumerate(refs):
            for by in (-1, 1):
                for new in (
                    replace(r, index=r.index + by),
                    replace(r, at=r.at + by * 4096),
                    *elsewhere(r, by, groups),
                ):
                    if new.index >= 0 and new.at >= 0:
                        yield (
                            f"{part} {r} -> {new}",
                            replace(s, **{part: put(refs, n, new)}),
                        )
    for n, i in enumerate(s.ints):
        for more, per in ((1, 0), (-1, 0), (0, 1)):
            new = Int(i.name, i.value + more, i.per + per)
            yield f"{i} -> {new}", replace(s, ints=put(s.ints, n, new))
    for part in ("waits", "recs"):
        events = getattr(s, part)
        for n, e in enumerate(events):
            for index in {e.index + 1, max(e.index - 1, 0)} - {e.index}:
                new = Event(e.name, index)
                yield (
                    f"{part} {e} -> {new}",
                    replace(s, **{part: put(events, n, new)}),
                )
    for word in ("", "node", *groups):
        if word != s.group:
            yield f"group {s.group!r} -> {word!r}", replace(s, group=word)
    if "[" in s.unit:
        name, _, index = s.unit.partition("[")
        yield (
            "the next unit",
            replace(s, unit=f"{name}[{int(index[:-1]) + 1}]"),
        )


def elsewhere(r: Ref, by: int, groups: Sequence[str]) -> Iterator[Ref]:
    """Yield a place that differs between ranks with another distance or group."""
    if r.by_rank:
        yield replace(r, by_rank=r.by_rank + by * 4096)
    if r.by_rank and by > 0:
        yield replace(r, by_rank=0, group=plan.ALL)
        yield from (replace(r, group=word) for word in groups if word != r.group)


def with_mark(s: Step, slot: tuple[str, int], last: bool) -> Step:
    """Return the step with or without the mark of a slot's last use."""

    def mark(refs):
        return tuple(
            replace(r, last=last) if (r.cls, r.index) == slot else r for r in refs
        )

    return replace(s, ins=mark(s.ins), outs=mark(s.outs))


def ends(s: Step) -> list[tuple[str, int]]:
    """Return the slots that die with a step."""
    return [(r.cls, r.index) for r in (*s.ins, *s.outs) if r.last]


def uses(s: Step, slot: tuple[str, int]) -> bool:
    return any((r.cls, r.index) == slot for r in (*s.ins, *s.outs))


def early(
    steps: list[Step],
    n: int,
    slot: tuple[str, int],
    such: Callable[[Step], bool] = lambda s: True,
) -> list[Step] | None:
    """Return the steps with the death of a slot moved from step n to the last use before it that
    `such` accepts. None if there is no such use."""
    before = [m for m in range(n) if uses(steps[m], slot) and such(steps[m])]
    if not before:
        return None
    out = [*steps[:n], with_mark(steps[n], slot, False), *steps[n + 1 :]]
    out[before[-1]] = with_mark(out[before[-1]], slot, True)
    return out


def broken(s: Step, groups: Sequence[str]) -> Iterator[tuple[str, Step]]:
    """Yield the step with one wait, record, mark or number changed."""
    for slot in ends(s):
        yield f"{slot[0]}[{slot[1]}] does not die", with_mark(s, slot, False)
    for n, e in enumerate(s.waits):
        yield f"no wait for {e}", replace(s, waits=without(s.waits, n))
    for n, e in enumerate(s.recs):
        yield f"no record of {e}", replace(s, recs=without(s.recs, n))
    yield from numbers(s, groups)


def of_batches(p: Plan) -> Iterator[Mutant]:
    """Yield plans with a batch outside the beginning of a micro-batch, or with slots of two
    numbers."""
    micro_batch, begin = p.section("micro_batch"), p.section("begin")
    for n, s in enumerate(micro_batch.steps):
        if s.op != "batch":
            continue
        rest = [*without(micro_batch.steps, n)]
        sections = {"micro_batch": rest, "begin": [*begin.steps, s]}
        moved = tuple(
            replace(x, steps=tuple(sections.get(x.name, x.steps))) for x in p.sections
        )
        yield Mutant(f"batch {n} in begin", replace(p, sections=moved))
        for m in range(sum(x.op == "batch" for x in rest) + 1, len(rest) + 1):
            yield Mutant(
                f"batch {n} at {m}",
                changed(p, micro_batch, [*rest[:m], s, *rest[m:]]),
            )
        yield Mutant(
            f"batch {n} twice",
            changed(p, micro_batch, [*micro_batch.steps, s]),
        )
        for event in ("waits", "recs"):
            if some := next((getattr(x, event) for x in rest if getattr(x, event)), ()):
                other = [
                    *micro_batch.steps[:n],
                    replace(s, **{event: some}),
                    *micro_batch.steps[n + 1 :],
                ]
                yield Mutant(f"batch {n} with {event}", changed(p, micro_batch, other))
    yield from swapped_targets(p)


def swapped_targets(p: Plan) -> Iterator[Mutant]:
    """Yield the plan with slots 0 and 1 of the targets swapped in every step."""

    def turned(refs):
        return tuple(
            replace(r, index=1 - r.index) if r.cls == "targets" and r.index < 2 else r
            for r in refs
        )

    sections = tuple(
        replace(
            x,
            steps=tuple(
                replace(s, ins=turned(s.ins), outs=turned(s.outs)) for s in x.steps
            ),
        )
        for x in p.sections
    )
    if p.together > 1:
        yield Mutant("targets[0] is targets[1]", replace(p, sections=sections))


def of_twins(p: Plan) -> Iterator[Mutant]:
    """Yield plans that call a kernel's twin: the host's for the device's, whether or not it exists,
    and the reverse. Its launch is right."""
    for f, fn in enumerate(p.fns):
        for n, c in enumerate(fn.calls):
            there = c.kernel.startswith("zk_host_")
            name = (
                c.kernel.replace("zk_host_", "zk_")
                if there
                else c.kernel.replace("zk_", "zk_host_")
            )
            calls = put(fn.calls, n, replace(c, kernel=name, launch=f"other.{n}"))
            shape = next(l.shape for l in p.launches if l.name == c.launch)
            yield Mutant(
                f"{fn.name} {n}: {name}",
                launched(
                    replace(p, fns=put(p.fns, f, replace(fn, calls=calls))),
                    plan.Launch(f"other.{n}", name, shape),
                ),
            )


def launched(p: Plan, l: plan.Launch) -> Plan:
    """Return the plan with its own launch for a call, and without launches that no call has."""
    called = {c.launch for fn in p.fns for c in fn.calls}
    real = 4 if p.head.real == "f32" else 2
    runs = []
    for t in p.head.targets:
        host = t == "cpu" or l.kernel.startswith("zk_host_")
        how = (
            grids.How((), (16, 0, 0)) if host else grids.how(l.kernel, t, real, l.shape)
        )
        runs.append(plan.Run(l.name, (t,), how.tile, how.workspace, how.grids))
    return replace(
        p,
        launches=tuple(x for x in (*p.launches, l) if x.name in called),
        runs=tuple(x for x in (*p.runs, *runs) if x.launch in called),
    )


def mutants(p: Plan) -> Iterator[Mutant]:
    """Yield every mutant of a plan."""
    groups = [g.name for g in p.groups]
    for section in p.sections:
        steps = list(section.steps)
        for n, s in enumerate(steps):
            name = f"{section.name} {n} {s.queue} {s.op} {s.unit}"
            yield Mutant(
                f"{name}: deleted",
                changed(p, section, steps[:n] + steps[n + 1 :]),
            )
            if n + 1 < len(steps):
                swapped = steps[:n] + [steps[n + 1], s] + steps[n + 2 :]
                yield Mutant(
                    f"{name}: swapped with the next",
                    changed(p, section, swapped),
                )
            for what, new in broken(s, groups):
                after = steps[:n] + [new] + steps[n + 1 :]
                yield Mutant(f"{name}: {what}", changed(p, section, after))
            for slot in ends(s):
                if sooner := early(steps, n, slot):
                    yield Mutant(
                        f"{name}: {slot[0]}[{slot[1]}] dies before",
                        changed(p, section, sooner),
                    )


def form(what: str) -> tuple[str, str]:
    """Return the form of a step's mutant: section, queue and operation, and the change, without
    numbers and names of operands."""
    where, _, change = what.partition(": ")
    section, _, queue, op = where.split(" ")[:4]
    names = r"[\w.]+\[\d+\]|\d+|(?<=\w)\.\w+"
    return f"{section} {queue} {op.partition('.')[0]}", re.sub(names, "#", change)


def sample(made: Iterable[Mutant]) -> list[Mutant]:
    """Return the first mutant of two forms and the last of the next two, alternating, and of some
    forms both or one in the middle. Over the plans of test_mutants.py these trigger all the rules
    and messages by which the checker refuses any mutant."""
    forms: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for m in made:
        forms[form(m.what)].append(m)
    out = []
    for n, some in enumerate(forms.values()):
        last = len(some) - 1
        more = {2: {0, last}, 4: {len(some) // 2}, 6: {0, last}}.get(n % 8, set())
        out += [some[at] for at in sorted({last * (n // 2 % 2)} | more)]
    return out


# ---- the canonical form


@dataclass(frozen=True)
class Touch:
    slot: tuple[str, int]
    lo: int
    hi: int
    write: bool


@dataclass
class Work:
    """A step as it ran: its key, its place on its queue, and the steps of every queue before it."""

    key: tuple
    queue: str
    at: int
    clock: dict[str, int]
    touches: list[Touch]


def program(p: Plan) -> Iterator[tuple[Step, int]]:
    """Yield steps in order of issue over a few training steps, with the micro-batch."""
    batch = Step("main", "batch", "", outs=(Ref("tokens", 0), Ref("targets", 0)))
    for name in PLAY:
        for part in ("begin", "micro_batch", "update") if name == "step" else (name,):
            section = p.section(part)
            for g in range(section.repeat):
                if part == "eval":
                    yield batch, g
                yield from ((s, g) for s in section.steps)


class _Footprints:
    def __init__(self, p: Plan) -> None:
        self.p = p
        classes = {c.name for c in p.classes}
        words = {f.name: {base(a) for c in f.calls for a in c.args} for f in p.fns}
        self.named = {
            f.name: words[f.name] & classes - {*f.ins, *f.outs} for f in p.fns
        }
        # slot of the inbox -> the source of its piece
        self.brought: dict[Ref, Touch] = {}
        self.whole = {
            r.cls
            for section in p.sections
            for s in section.steps
            for r in (s.refs if s.group and p.axes else ())
        } - {s.cls for s in p.stores}

    def of(self, s: Step, g: int) -> list[Touch]:
        lo, hi = CTL.get(s.op.split(".")[0], (0, ALL))
        used = [
            replace(t, lo=lo, hi=hi)
            if t.slot == ("ctl", 0)
            else replace(t, lo=0, hi=ALL)
            if t.slot[0] in self.whole
            else t
            for t in self.slots(s, g)
        ]
        return used + [Touch(slot, 0, ALL, True) for slot in ends(s)]

    def slots(self, s: Step, g: int) -> list[Touch]:
        ints = {i.name: i.value + g * i.per for i in s.ints}

        def whole(r, write):
            return Touch((r.cls, r.index), 0, ALL, write)

        def piece(r, size, write):
            return Touch((r.cls, r.index), r.at, r.at + size, write)

        body = s.op.split(".")[0]
        if s.op == "gather":
            return [
                piece(s.ins[0], ints["bytes"], False),
                piece(s.outs[0], ints["bytes"], True),
            ]
        if s.op == "copy":
            return [
                piece(s.ins[0], ints["bytes"], False),
                piece(s.outs[0], ints["bytes"], True),
            ]
        if s.queue == "host" and "n" in ints:
            constants = (
                [Touch(("hctl", 0), 0, ALL, False)]
                if "hctl" in self.named[s.op]
                else []
            )
            return [
                *constants,
                *(piece(r, 4 * ints["n"], False) for r in s.ins),
                *(piece(r, 4 * ints["n"], True) for r in s.outs),
            ]
        # near_ functions read and write the first elements.
        if body.startswith("near_"):
            near = self.p.near(self.p.flat(s.op.partition(".")[2]))
            widths = {"param": 4 if self.p.head.real == "f32" else 2}
            return [
                piece(r, widths.get(r.cls.split(".")[0], 4) * near, write)
                for refs, write in ((s.ins, False), (s.outs, True))
                for r in refs
            ] + [Touch((name, 0), 0, ALL, False) for name in sorted(self.named[s.op])]
        if body == "init" and s.outs[0].at:
            return [piece(s.outs[0], ALL, True)]
        if s.op in REDUCES:
            read = self.brought[s.outs[0]] = piece(s.ins[0], ints["bytes"], False)
            return [read, whole(s.outs[0], True)]
        if s.op == "done":
            read = self.brought.get(s.ins[0])
            return [whole(s.ins[0], True), *([read] if read else [])]
        if body in ("sum", "node", "join"):
            ctl = (
                [Touch(("ctl", 0), 0, ALL, False)] if "ctl" in self.named[s.op] else []
            )
            return [
                *(whole(r, False) for r in s.ins),
                *ctl,
                piece(s.outs[0], 4 * ints["n"], True),
            ]
        out = [whole(r, False) for r in s.ins] + [whole(r, True) for r in s.outs]
        for name in sorted(self.named.get(s.op, ())):
            out.append(Touch((name, 0), 0, ALL, name.split(".")[0] not in READ))
        return out


def played(p: Plan) -> list[Work]:
    """Return all work in order of issue."""
    clocks: dict[str, dict[str, int]] = defaultdict(dict)
    count: Counter[str] = Counter()
    events: dict[Event, dict[str, int]] = {}
    seen: Counter[tuple] = Counter()
    feet = _Footprints(p)
    out = []
    for s, g in program(p):
        clock = clocks[s.queue]
        for e in s.waits:
            for queue, n in events.get(e, {}).items():
                clock[queue] = max(clock.get(queue, 0), n)
        count[s.queue] += 1
        clock[s.queue] = count[s.queue]
        if s.op != "mark":
            key = (
                s.queue,
                s.op,
                s.group,
                s.ins,
                s.outs,
                tuple(i.value + g * i.per for i in s.ints),
            )
            seen[key] += 1
            out.append(
                Work(
                    (*key, seen[key]),
                    s.queue,
                    count[s.queue],
                    dict(clock),
                    feet.of(s, g),
                )
            )
        for e in s.recs:
            events[e] = dict(clock)
    return out


def before(a: Work, b: Work) -> bool:
    return a.at <= b.clock.get(a.queue, 0)


def forced(works: list[Work]) -> list[tuple[tuple, tuple]]:
    """Return the pairs whose order matters, of a plan without a race."""
    slots: dict[tuple, list[tuple[Work, Touch]]] = defaultdict(list)
    pairs = []
    for w in works:
        for t in w.touches:
            for other, o in reversed(slots[t.slot]):
                if (o.write or t.write) and o.lo < t.hi and t.lo < o.hi:
                    assert before(other, w), f"{other.key} and {w.key} are not ordered"
                    pairs.append((other.key, w.key))
                    if o.write and o.lo <= t.lo and t.hi <= o.hi:
                        break
        for t in w.touches:
            slots[t.slot].append((w, t))
    return pairs


def same(p: Plan, original: list[Work], pairs: list[tuple[tuple, tuple]]) -> bool:
    """Return whether p does the work of `original`, with these pairs in order."""
    works = {w.key: w for w in played(p)}
    if works.keys() != {w.key for w in original}:
        return False
    return all(before(works[a], works[b]) for a, b in pairs)


# ---- one thing changed in a function or a table


def shifted(arg: plan.Arg) -> Iterator[plan.Arg]:
    """Yield an operand with its place or number changed by one unit, or null."""
    if isinstance(arg, Operand) and arg.by_rank:
        yield replace(arg, by_rank=arg.by_rank + 4096)
        if arg.group != plan.ALL:
            yield replace(arg, group=plan.ALL)
    elif isinstance(arg, Operand):
        yield "null"
        for new in (arg.at + 64, arg.at - 64):
            if new >= 0:
                yield replace(arg, at=new)
        if arg.by_round:
            yield replace(arg, by_round=0)
            yield from (
                replace(arg, by_round=arg.by_round + more) for more in (-64, 64)
            )
    elif isinstance(arg, Index):
        yield from (
            replace(arg, at=arg.at + 1024),
            replace(arg, by_rank=arg.by_rank + 1024),
        )
        if arg.group != plan.ALL:
            yield replace(arg, group=plan.ALL)
    elif isinstance(arg, Layers):
        yield from other(arg)
    elif arg in ("c", "at"):
        yield from (0, 1)
    elif arg == "n":
        yield 1024
    elif isinstance(arg, (int, float)):
        yield from other(arg)


def other(value: object) -> Iterator[object]:
    """Yield another number, or a record with one of its numbers changed."""
    if isinstance(value, int):
        yield from (value + 1, value - 1)
    elif isinstance(value, float):
        yield from (value * (1 + 2.0**-40) or 2.0**-40, 2 * value + 1)
    elif isinstance(value, tuple):
        for n, one in enumerate(value):
            yield without(value, n)
            yield from (put(value, n, new) for new in other(one))
    elif dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from (
                replace(value, **{f.name: new}) for new in other(getattr(value, f.name))
            )


def of_calls(p: Plan) -> Iterator[Mutant]:
    """Yield plans with a call deleted, or with one of its operands or integers changed."""
    for f, fn in enumerate(p.fns):

        def having(calls: tuple[plan.Call, ...], f: int = f, fn: plan.Fn = fn) -> Plan:
            return replace(p, fns=put(p.fns, f, replace(fn, calls=calls)))

        for n, c in enumerate(fn.calls):
            name = f"{fn.name} {n} {c.kernel}"
            yield Mutant(f"{name}: deleted", having(without(fn.calls, n)))
            for rounds in {c.rounds - 1, c.rounds + 1} if c.rounds > 1 else {2}:
                yield Mutant(
                    f"{name}: {rounds} rounds",
                    having(put(fn.calls, n, replace(c, rounds=rounds))),
                )
            for i, arg in enumerate(c.args):
                for new in shifted(arg):
                    call = replace(c, args=put(c.args, i, new))
                    yield Mutant(
                        f"{name}: {arg} -> {new}",
                        having(put(fn.calls, n, call)),
                    )


def of_stated(p: Plan) -> Iterator[Mutant]:
    """Yield plans with a stated number changed in a call, a tensor or a table alone, or in its
    line; or with a line that has another count or is missing."""
    names = {s.what for s in p.stated}
    for f, fn in enumerate(p.fns):
        for n, c in enumerate(
            fn.calls if fn.name.split(".")[0] in check.BODIES else ()
        ):
            for i, formal in enumerate(kernel(c.kernel).formals):
                for new in (
                    shifted(c.args[i]) if formal.number and formal.name in names else ()
                ):
                    calls = put(fn.calls, n, replace(c, args=put(c.args, i, new)))
                    yield Mutant(
                        f"{fn.name} {n} {c.kernel}: {formal.name} {new}",
                        replace(p, fns=put(p.fns, f, replace(fn, calls=calls))),
                    )
    for part in ("tensors", "tables", "stated"):
        rows = getattr(p, part)
        for n, row in enumerate(rows):
            names_of = (
                names
                if part == "tensors"
                else {f.name for f in dataclasses.fields(row)}
            )
            for name in sorted(names_of & {f.name for f in dataclasses.fields(row)}):
                for new in other(getattr(row, name)):
                    yield Mutant(
                        f"{part} {row}: {name} {new}",
                        replace(
                            p,
                            **{part: put(rows, n, replace(row, **{name: new}))},
                        ),
                    )
    for n, row in enumerate(p.stated):
        yield Mutant(f"without {row}", replace(p, stated=without(p.stated, n)))
        for what in ("nothing", min(names - {row.what})):
            yield Mutant(
                f"{row} as {what}",
                replace(p, stated=put(p.stated, n, replace(row, what=what))),
            )


def of_lists(p: Plan) -> Iterator[Mutant]:
    """Yield plans with unused or duplicate entries, with a launch for fewer elements than its calls
    have, and with a round's step outside rounds."""
    yield Mutant("more events", replace(p, events=(*p.events, Event("more", 1))))
    more = plan.Class("more", "host", "own", "all", 1, 2**40, 0)
    host = [replace(c, at=c.at + 2**40) for c in p.classes if c.arena == "host"]
    rest = [c for c in p.classes if c.arena != "host"]
    yield Mutant("more classes", replace(p, classes=(*rest, more, *host)))
    fn = next(f for f in p.fns if f.name.startswith("fwd."))
    ghost = replace(fn, name="fwd.ghost", calls=fn.calls[::-1])
    yield Mutant("fwd.ghost", replace(p, fns=(*p.fns, ghost)))
    if p.tables:
        yield Mutant("a table twice", replace(p, tables=(*p.tables, p.tables[0])))
    a, b = (
        n
        for n, t in enumerate(p.tensors)
        if t.shape == p.tensors[-1].shape and t.count == 1
    )
    same = replace(p.tensors[a], parts=p.tensors[b].parts)
    yield Mutant("one name in the file", replace(p, tensors=put(p.tensors, a, same)))
    own = {
        c.launch
        for f in p.fns
        if f.name.split(".")[0] not in check.BODIES
        for c in f.calls
    }
    for n, l in enumerate(p.launches):
        if l.name in own and l.shape:
            less = replace(l, shape=(l.shape[0] // 2, *l.shape[1:]))
            yield Mutant(
                f"{l.name} of fewer elements",
                replace(p, launches=put(p.launches, n, less)),
            )
    yield from of_rounds(p, own)


def of_rounds(p: Plan, own: set[str]) -> Iterator[Mutant]:
    for f, fn in enumerate(p.fns):
        for n, c in enumerate(fn.calls if fn.calls[0].launch in own else ()):
            for i, arg in enumerate(c.args):
                if isinstance(arg, Operand):
                    args = put(c.args, i, replace(arg, by_round=4096))
                    calls = put(fn.calls, n, replace(c, args=args))
                    yield Mutant(
                        f"{fn.name} {n} {i}: rounds",
                        replace(p, fns=put(p.fns, f, replace(fn, calls=calls))),
                    )


def idle(p: Plan, row: object, name: str, by: int) -> bool:
    """Return whether a change has no effect: a step that is never taken, more space at an arena's
    end."""
    last = {c.arena: c for c in p.classes}
    return (name == "key_step" and row.count == 1) or (
        by > 0 and row in last.values() and name != "slots"
    )


def of_tables(p: Plan) -> Iterator[Mutant]:
    """Yield plans with a number of a class, a flat or a tensor changed by one unit, or without a
    state."""
    units = {
        "slots": 1,
        "stride": 4096,
        "at": 4096,
        "count": 1,
        "elems": 1024,
        "shard": 1024,
        "nodes": 1,
        "mask": 1,
        "first": 1024,
        "n": 1024,
        "offset": 1024,
        "offset_step": 1024,
        "flat_step": 1,
        "key": 1,
        "key_step": 1,
        "ranks": 1,
        "size": 1,
    }
    groups = [g.name for g in p.groups]
    for n, s in enumerate(p.stores):
        yield Mutant(
            f"{s.cls} without its store",
            replace(p, stores=without(p.stores, n)),
        )
        for name, value in (
            *(("over", word) for word in ("", *groups)),
            ("dtype", "f16"),
            ("what", "m" if s.what != "m" else "v"),
            ("cls", "ctl"),
        ):
            if getattr(s, name) != value:
                yield Mutant(
                    f"{s.cls}: {name} {value}",
                    replace(p, stores=put(p.stores, n, replace(s, **{name: value}))),
                )
    for n, flat in enumerate(p.flats):
        for word in groups:
            if word != flat.owners:
                new = replace(flat, owners=word)
                yield Mutant(
                    f"{flat.name} owned by {word}",
                    replace(p, flats=put(p.flats, n, new)),
                )
    yield from of_levels(p)
    for part in ("axes", "groups", "classes", "flats", "stores", "tensors"):
        rows = getattr(p, part)
        for n, row in enumerate(rows):
            for f in dataclasses.fields(row):
                for by in (1, -1):
                    if f.name in units and not idle(p, row, f.name, by):
                        new = replace(
                            row,
                            **{f.name: getattr(row, f.name) + by * units[f.name]},
                        )
                        yield Mutant(
                            f"{getattr(row, 'cls', '') or row.name} {f.name}: {by * units[f.name]}",
                            replace(p, **{part: put(rows, n, new)}),
                        )


def of_levels(p: Plan) -> Iterator[Mutant]:
    """Yield plans with a level of a sum dropped, moved by one or replaced; with other axes; with
    hosts that cut axes; and with a group whose places are in another order along its axes."""
    levels, groups = p.head.order.levels, [g.name for g in p.groups]
    others = [without(levels, n) for n in range(len(levels))]
    others += [
        (*levels[:n], levels[n + 1], levels[n], *levels[n + 2 :])
        for n in range(len(levels) - 1)
    ]
    others += [
        put(levels, n, word)
        for n, level in enumerate(levels)
        for word in groups
        if word != level
    ]
    for other in others:
        yield Mutant(
            f"levels {','.join(other)}",
            replace(p, head=replace(p.head, order=plan.Order(other))),
        )
    for a, b in itertools.permutations(range(len(p.axes)), 2):
        x, y = p.axes[a], p.axes[b]
        axes = put(p.axes, a, replace(x, stride=y.stride))
        yield Mutant(f"{x.name} {y.stride} apart", replace(p, axes=axes))
    for n in range(2, p.head.ranks):
        if any(a.stride < n < a.stride * a.size for a in p.axes):
            head = replace(p.head, local=n)
            yield Mutant(f"hosts of {n} ranks", replace(p, head=head))
    for n, g in enumerate(p.groups):
        for axes in (g.axes[::-1], g.axes[:-1]):
            if axes != g.axes:
                new = replace(g, axes=axes)
                yield Mutant(
                    f"{g.name} along {','.join(axes)}",
                    replace(p, groups=put(p.groups, n, new)),
                )
