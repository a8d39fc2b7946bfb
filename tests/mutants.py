"""mutants.py -- broken plans, and when two plans are the same program after all.

A mutant is a plan with one thing changed: a step deleted, two neighbours swapped, a wait or a
record dropped, one number of a step changed.

The canonical form. What a program does is settled by three things: which work it does (operation,
operands, numbers), and for any two pieces of work of which one writes what the other reads or
writes, that they are ordered, and which comes first. Two plans with the same work and the same
order of all such pairs compute the same whatever the queues do in between: swapping two steps that
touch different slots changes nothing, nor does dropping a wait for what another wait implies.
`forced` gives the pairs of a plan that has no race, each with the accesses next to it only (the
others follow, as order is transitive); `same` looks whether another plan does the same work and
orders these pairs so. A step's unit is for readers: train.c does not have it.

What a step touches is stated here again, apart from the checker: a whole slot, but for pieces of
collectives, which touch a range within every rank's part of it. A collective's peers read this
rank's memory while it runs (all-to-all: until its `done`), so its own order stands for theirs.
"""
from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from zg import check, plan
from zg.plan import Event, Int, Plan, Ref, Section, Step

ALL = 1 << 62
READ = ("tokens", "targets", "ctl", "hctl", "table")    # named by functions and only read
REDUCES = ('alltoall', 'reducescatter')
LEAVES, SCALE = (72, 80), (80, 88)              # bytes of ctl: what other steps touch is all of it
CTL = {'count': LEAVES, 'recount': LEAVES, 'sum': LEAVES, 'own': LEAVES, 'train': SCALE}
PLAY = ("init", "publish", "step", "step", "eval", "step")


# ---- what the checker says

def refused(p: Plan) -> bool:
    return fails(lambda: check.check(p))


def refusal(p: Plan) -> Callable[[Plan], bool]:
    """`refused` of plans that differ from a good one in their steps alone: what the checker proves
    of the rest it proves once."""
    check.check(p)
    units = check.units(p)
    facts = check.functions(p, units)

    def differs(other: Plan) -> None:
        assert replace(other, sections=p.sections) == p
        check.sections(other)
        now = check.units(other)
        check.play(other, facts if now == units else check.functions(other, now))

    return lambda other: fails(lambda: differs(other))


def fails(act: Callable[[], None]) -> bool:
    try:
        act()
    except check.CheckError:
        return True
    return False


# ---- one thing changed

@dataclass(frozen=True)
class Mutant:
    what: str
    plan: Plan


def changed(p: Plan, section: Section, steps: list[Step]) -> Plan:
    new = replace(section, steps=tuple(steps))
    return replace(p, sections=tuple(new if s is section else s for s in p.sections))


def without(items: tuple, n: int) -> tuple:
    return items[:n] + items[n + 1:]


def put(items: tuple, n: int, new: object) -> tuple:
    return items[:n] + (new,) + items[n + 1:]


def numbers(s: Step) -> Iterator[tuple[str, Step]]:
    """The step with one of its numbers changed by one slot, one grain or one page."""
    for part in ('ins', 'outs'):
        refs = getattr(s, part)
        for n, r in enumerate(refs):
            for by in (-1, 1):
                for new in (Ref(r.cls, r.index + by, r.at), Ref(r.cls, r.index, r.at + by * 4096)):
                    if new.index >= 0 and new.at >= 0:
                        yield f'{part} {r} -> {new}', replace(s, **{part: put(refs, n, new)})
    for n, i in enumerate(s.ints):
        for more, per in ((1, 0), (-1, 0), (0, 1)):
            new = Int(i.name, i.value + more, i.per + per)
            yield f'{i} -> {new}', replace(s, ints=put(s.ints, n, new))
    for part in ('waits', 'recs'):
        events = getattr(s, part)
        for n, e in enumerate(events):
            for index in {e.index + 1, max(e.index - 1, 0)} - {e.index}:
                new = Event(e.name, index)
                yield f'{part} {e} -> {new}', replace(s, **{part: put(events, n, new)})
    if '[' in s.unit:
        name, _, index = s.unit.partition('[')
        yield 'the next unit', replace(s, unit=f'{name}[{int(index[:-1]) + 1}]')


def broken(s: Step) -> Iterator[tuple[str, Step]]:
    """The step with one wait, record or number changed."""
    for n, e in enumerate(s.waits):
        yield f'no wait for {e}', replace(s, waits=without(s.waits, n))
    for n, e in enumerate(s.recs):
        yield f'no record of {e}', replace(s, recs=without(s.recs, n))
    yield from numbers(s)


def mutants(p: Plan) -> Iterator[Mutant]:
    """Every mutant of a plan."""
    for section in p.sections:
        steps = list(section.steps)
        for n, s in enumerate(steps):
            name = f'{section.name} {n} {s.queue} {s.op} {s.unit}'
            yield Mutant(f'{name}: deleted', changed(p, section, steps[:n] + steps[n + 1:]))
            if n + 1 < len(steps):
                swapped = steps[:n] + [steps[n + 1], s] + steps[n + 2:]
                yield Mutant(f'{name}: swapped with the next', changed(p, section, swapped))
            for what, new in broken(s):
                after = steps[:n] + [new] + steps[n + 1:]
                yield Mutant(f'{name}: {what}', changed(p, section, after))


# ---- the canonical form

@dataclass(frozen=True)
class Touch:
    slot: tuple[str, int]
    lo: int
    hi: int
    write: bool


@dataclass
class Work:
    """A step as it ran: what it is, its place on its queue, what of every queue came before it."""
    key: tuple
    queue: str
    at: int
    clock: dict[str, int]
    touches: list[Touch]


def program(p: Plan) -> Iterator[tuple[Step, int]]:
    """Steps in order of issue over a few training steps, with the grain."""
    batch = Step('main', 'batch', '', outs=(Ref('tokens', 0), Ref('targets', 0)))
    for name in PLAY:
        for part in ('begin', 'grain', 'update') if name == 'step' else (name,):
            section = p.section(part)
            for g in range(section.repeat):
                if part == 'eval':
                    yield batch, g
                yield from ((s, g) for s in section.steps)


class _Footprints:
    def __init__(self, p: Plan) -> None:
        self.p = p
        classes = {c.name for c in p.classes}
        words = {f.name: {a.split('+')[0] for c in f.calls for a in c.args} for f in p.fns}
        self.named = {f.name: words[f.name] & classes - {*f.ins, *f.outs} for f in p.fns}
        self.brought: dict[str, Ref | None] = {}    # queue -> what its last all-to-all brings

    def of(self, s: Step, g: int) -> list[Touch]:
        lo, hi = CTL.get(s.op.split('.')[0], (0, ALL))
        return [replace(t, lo=lo, hi=hi) if t.slot == ('ctl', 0) else t for t in self.slots(s, g)]

    def slots(self, s: Step, g: int) -> list[Touch]:
        ints = {i.name: i.value + g * i.per for i in s.ints}
        whole = lambda r, write: Touch((r.cls, r.index), 0, ALL, write)
        piece = lambda r, size, write: Touch((r.cls, r.index), r.at, r.at + size, write)
        sources = Touch(('sources', len(s.queue)), 0, ALL, s.op in (*REDUCES, 'done'))
        body = s.op.split('.')[0]
        if s.op == 'gather':
            return [piece(s.ins[0], ints['bytes'], False), piece(s.outs[0], ints['bytes'], True)]
        if s.op == 'copy':
            return [piece(s.ins[0], ints['bytes'], False), piece(s.outs[0], ints['bytes'], True)]
        if s.queue == 'host' and 'n' in ints:
            constants = [Touch(('hctl', 0), 0, ALL, False)] if 'hctl' in self.named[s.op] else []
            return [*constants, *(piece(r, 4 * ints['n'], False) for r in s.ins),
                    *(piece(r, 4 * ints['n'], True) for r in s.outs)]
        if body.startswith('near_'):            # the first elements of what it reads and makes
            near = self.p.flat(s.op.partition('.')[2]).near
            widths = {'real': 4 if self.p.head.real == 'f32' else 2}
            return [piece(r, widths.get(r.cls.split('.')[0], 4) * near, write)
                    for refs, write in ((s.ins, False), (s.outs, True)) for r in refs] + \
                [Touch((name, 0), 0, ALL, False) for name in sorted(self.named[s.op])]
        if body == 'init' and s.outs[0].at:
            return [piece(s.outs[0], ALL, True)]
        if s.op in REDUCES:
            self.brought[s.queue] = s.ins[0]
            return [sources, whole(s.ins[0], False), whole(s.outs[0], True)]
        if s.op == 'done':
            ref = self.brought.get(s.queue)
            return [sources, *([whole(ref, False)] if ref else [])]
        if body in ('sum', 'join'):
            ctl = [Touch(('ctl', 0), 0, ALL, False)] if 'ctl' in self.named[s.op] else []
            return [sources, Touch(('inbox', 0), 0, ALL, False), *ctl,
                    piece(s.outs[0], 4 * ints['n'], True)]
        out = [whole(r, False) for r in s.ins] + [whole(r, True) for r in s.outs]
        for name in sorted(self.named.get(s.op, ())):
            out.append(Touch((name, 0), 0, ALL, name.split('.')[0] not in READ))
        return out


def played(p: Plan) -> list[Work]:
    """All work in order of issue."""
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
        if s.op != 'mark':
            key = (s.queue, s.op, s.ins, s.outs, tuple(i.value + g * i.per for i in s.ints))
            seen[key] += 1
            out.append(Work((*key, seen[key]), s.queue, count[s.queue], dict(clock), feet.of(s, g)))
        for e in s.recs:
            events[e] = dict(clock)
    return out


def before(a: Work, b: Work) -> bool:
    return a.at <= b.clock.get(a.queue, 0)


def forced(works: list[Work]) -> list[tuple[tuple, tuple]]:
    """The pairs whose order matters, of a plan without a race."""
    slots: dict[tuple, list[tuple[Work, Touch]]] = defaultdict(list)
    pairs = []
    for w in works:
        for t in w.touches:
            for other, o in reversed(slots[t.slot]):
                if (o.write or t.write) and o.lo < t.hi and t.lo < o.hi:
                    assert before(other, w), f'{other.key} and {w.key} are not ordered'
                    pairs.append((other.key, w.key))
                    if o.write and o.lo <= t.lo and t.hi <= o.hi:
                        break
        for t in w.touches:
            slots[t.slot].append((w, t))
    return pairs


def same(p: Plan, original: list[Work], pairs: list[tuple[tuple, tuple]]) -> bool:
    """Does p the work of `original`, with these pairs in order?"""
    works = {w.key: w for w in played(p)}
    if works.keys() != {w.key for w in original}:
        return False
    return all(before(works[a], works[b]) for a, b in pairs)


# ---- one thing changed in a function or a table

def shifted(arg: str) -> Iterator[str]:
    """An operand's place or number, changed by one, or none."""
    base, plus, rest = arg.partition('+')
    at, grows, by = rest.partition('+c*')
    if plus and at.isdigit():
        yield 'null'
        for new in (int(at) + 64, int(at) - 64):
            if new >= 0:
                yield f'{base}+{new}{grows}{by}'
        if grows:
            yield f'{base}+{at}'
            yield from (f'{base}+{at}+c*{int(by) + more}' for more in (-64, 64))
    elif arg in ('c', 'at'):
        yield from ('0', '1')
    elif arg.lstrip('-').isdigit():
        yield from (str(int(arg) + 1), str(int(arg) - 1))


def of_calls(p: Plan) -> Iterator[Mutant]:
    """A call deleted, or one of its operands or whole numbers changed."""
    for f, fn in enumerate(p.fns):
        def having(calls: tuple[plan.Call, ...]) -> Plan:
            return replace(p, fns=put(p.fns, f, replace(fn, calls=calls)))
        for n, c in enumerate(fn.calls):
            name = f'{fn.name} {n} {c.kernel}'
            yield Mutant(f'{name}: deleted', having(without(fn.calls, n)))
            for rounds in {c.rounds - 1, c.rounds + 1} if c.rounds > 1 else {2}:
                yield Mutant(f'{name}: {rounds} rounds',
                             having(put(fn.calls, n, replace(c, rounds=rounds))))
            for i, arg in enumerate(c.args):
                for new in shifted(arg):
                    call = replace(c, args=put(c.args, i, new))
                    yield Mutant(f'{name}: {arg} -> {new}', having(put(fn.calls, n, call)))


def idle(p: Plan, row: object, name: str, by: int) -> bool:
    """No change at all: a step that is never taken, more room at the arena's end."""
    last = {c.kind: c for c in p.classes}
    return (name == 'key_step' and row.count == 1) or \
        (by > 0 and row in (last['gpu'], last['host'], last.get('filed')) and name != 'slots')


def of_tables(p: Plan) -> Iterator[Mutant]:
    """A number of a class, a flat or a tensor changed by one of its units; a state left out."""
    units = {'slots': 1, 'stride': 4096, 'at': 4096, 'count': 1, 'elems': 1024, 'shard': 1024,
             'nodes': 1, 'mask': 1, 'near': 1024, 'offset': 1024, 'offset_step': 1024,
             'flat_step': 1, 'key': 1, 'key_step': 1}
    for n, f in enumerate(p.flats):
        for s in range(len(f.states)):
            less = replace(f, states=without(f.states, s))
            yield Mutant(f'{f.name} without {f.states[s]}',
                         replace(p, flats=put(p.flats, n, less)))
    for part in ('classes', 'flats', 'tensors'):
        rows = getattr(p, part)
        for n, row in enumerate(rows):
            for f in dataclasses.fields(row):
                for by in (1, -1):
                    if f.name in units and not idle(p, row, f.name, by):
                        new = replace(row, **{f.name: getattr(row, f.name) + by * units[f.name]})
                        yield Mutant(f'{row.name} {f.name}: {by * units[f.name]}',
                                     replace(p, **{part: put(rows, n, new)}))
