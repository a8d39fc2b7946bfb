"""steps.py -- a plan's sections as functions of train.c: loops of verbs, each verb a function.

Names in C: class ring.block -> RING_BLOCK(i), event full.block -> FULL_BLOCK(i), function fwd.block
-> fwd_block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import takewhile

from ..facts import ops, queues
from ..plan import plan, roll
from ..plan.plan import Plan
from .calls import enum
from .letters import number
from .tables import (
    VARS,
    affine,
    comment,
    flat_names,
    lower,
    pieces,
    upper,
    wrap,
)
from .verbs import BY, Kind, Number, Verb, Verbs

QUEUES = {name: f"ZR_{name.upper()}" for name in queues.QUEUES}

# Of steps in which ranks meet: what follows queue and group in the call.
MEETINGS = {
    "gather": "{0}, {from_step}, {1}, {step}, {bytes}",
    "alltoall": "{0}, {step}, {1}, {bytes}",
    "reducescatter": "{0}, {step}, {1}, {bytes}, {type}",
    "allreduce": "{0}, {1}, {count}",
    "done": "{0}, {1}",
}
WIDTHS = (1, *sorted(set(ops.BYTES.values())))  # bytes of an element
SIZES = (
    "n",
    "at",
    "step",
    "from_step",
    "bytes",
    "from_rank",
    "to_rank",
)  # of flats' shards

# What a verb does, by the first word of its name.
TELLS = {
    **{name: f"Moves {{0}}, queue {name}" for name in queues.QUEUES},
    "gather": "Gathers {0}",
    "reduce": "Adds the ranks' gradients of {0}, each rank those of its shard",
    "done": "{0} was read by its owners",
    "allreduce": "Adds {0} of all ranks",
    "run": "Calls {0}",
}

HANDED = re.compile(
    r"( *)zr_record\(z, (\w+), (.*)\);\n\1zr_wait\(z, (\w+), \3\);"
)
HEAD = comment(
    "---- steps with their waits and their records; l: the unit, slot: "
    "of the ring that its buffers take turns in; NAME_now: without the waits of NAME"
)


class Steps:
    """The lines of steps."""

    def __init__(self, p: Plan) -> None:
        self.p = p
        self.fns = {f.name: f for f in p.fns}
        self.flats = {f.name: f for f in p.flats}
        self.verbs: dict[str, Verb] = {}
        self.pieces = pieces(p)
        self.sizes: dict[
            str, int
        ] = {}  # what a unit's number is multiplied by

    # ---- numbers

    def numbers(self, line: roll.Line) -> Iterator[str]:
        values = roll.numbers(line.step)
        for n, (v, m) in enumerate(zip(values, line.moduli, strict=True)):
            grows = [g[n] for g in line.growth]
            text = affine(v, grows)
            if m > 1 and any(grows):
                text = f"{text if text in VARS else f'({text})'} % {m}"
            yield text

    def flat(self, s: plan.Step) -> plan.Flat | None:
        """The flat that a step is of: by its classes, its function, its unit."""
        classes = (r.cls.partition(".")[2] for r in (*s.ins, *s.outs))
        parts = [*classes, s.op.partition(".")[2], roll.unit_of(s)[0]]
        return next((self.flats[x] for x in parts if x in self.flats), None)

    def size(self, s: plan.Step, text: str) -> str:
        """A number of elements, or of bytes, of a shard or of pieces of it, where it is that."""
        f, found = self.flat(s), re.fullmatch(r"(?:INT64_C\()?(\d+)\)?", text)
        n = int(found[1]) if found else 0
        if not f or not n:
            return text
        names = flat_names(self.p, f)
        piece, name = self.pieces.get(f.name, 0), upper(f.name)
        if piece:
            names[f.shard % piece] = f"REST_{name}"
        for elements, called in reversed(names.items()):
            for width in WIDTHS:
                if n == elements * width:
                    return times(width, called, n)
        whole = piece and not n % piece
        return times(n // piece, f"PIECE_{name}", n) if whole else text

    def said(self, s: plan.Step, x: Number, cls: str = "") -> str:
        """A number of a verb's body. cls: of the place in which it counts bytes, else ''."""
        if not x.of:
            return number(x.base)
        if x.of != BY or not cls:
            return line(x, self.size(s, number(abs(x.by))))
        unit = roll.unit_of(s)[0]
        name = f"{upper(cls.partition('.')[2] or cls)}_{upper(unit)}"
        while self.sizes.setdefault(name, x.by) != x.by:
            name += "_"
        rest = f"{number(x.base)} + " if x.base else ""
        return f"{rest}{BY} * {name}"

    def texts(self, s: plan.Step, values: Sequence[Number]) -> Iterator[str]:
        """The numbers of a step of a verb, in the order of `roll.numbers`."""
        left = iter(values)
        yield self.said(s, next(left))
        for r in (*s.ins, *s.outs):
            yield self.said(s, next(left))
            yield self.said(s, next(left), r.cls)
        yield from (self.said(s, x) for x in left)

    # ---- statements

    def statements(self, s: plan.Step, texts: Iterator[str]) -> list[str]:
        """Of a step whose numbers are these texts."""
        unit, queue, refs = next(texts), QUEUES[s.queue], []
        for r in (*s.ins, *s.outs):
            index, at = next(texts), self.size(s, next(texts))
            plain = s.op in self.verbs
            place = f"{upper(r.cls)}({index})" + f" + {at}" * (at != "0")
            refs.append(
                index if plain else f"zr_last({place})" if r.last else place
            )
        ints = {i.name: self.given(s, i, next(texts)) for i in s.ints}
        events = [f"{upper(e.name)}({next(texts)})" for e in s.waits]
        wait = "zr_waits" if len(events) > 1 else "zr_wait"
        waits = [f"{wait}(z, {queue}, {', '.join(events)});"] if events else []
        recs = [
            f"zr_record(z, {queue}, {upper(e.name)}({next(texts)}));"
            for e in s.recs
        ]
        return [*waits, *self.work(s, unit, queue, refs, ints), *recs]

    def given(self, s: plan.Step, i: plan.Int, text: str) -> str:
        """A number of a step."""
        if i.name == "count" and i.value == ops.SUMS:
            return "ZK_SUMS"
        if i.per:
            more = affine(0, [], i.per)
            return f"{text} + {more}" if text != "0" else more
        plain = i.name.rstrip("0123456789")
        return self.size(s, text) if plain in SIZES else text

    def work(
        self,
        s: plan.Step,
        unit: str,
        queue: str,
        refs: list[str],
        ints: dict[str, str],
    ) -> list[str]:
        if s.op == "mark":
            return []
        if s.op in self.verbs:
            by = [unit] if self.verbs[s.op].grows else []
            return [f"{s.op}({', '.join(['z', *by, *refs, *ints.values()])});"]
        if s.op in MEETINGS:
            width = (
                "F32" if ints.get("width") == "4" else self.p.head.real.upper()
            )
            rest = MEETINGS[s.op].format(*refs, **ints, type=f"ZR_{width}")
            return [f"zr_{s.op}(z, {queue}, {upper(s.group)}, {rest});"]
        if s.op == "batch":
            return [self.batch(refs, ints)]
        if s.op == "copy":
            return [self.copy(queue, refs, ints)]
        fn = self.fns[s.op]
        operands = [*refs, *(ints[n] for n in fn.ints)] or ["0"]
        return [f"zr_call(z, {queue}, {lower(s.op)}, {', '.join(operands)});"]

    def batch(self, refs: list[str], ints: dict[str, str]) -> str:
        times = "" if ints["of_rank"] == "1" else f"{ints['of_rank']} * "
        grain = f"{times}RANK + {ints['grain']}"
        if self.p.together == 1:
            return f"zr_batch(z, {grain});"
        return f"zr_batch_at(z, {grain}, {refs[0]} - TOKENS(0));"

    def copy(self, queue: str, refs: list[str], ints: dict[str, str]) -> str:
        ranks = [ints["from_rank"], ints["to_rank"]]
        source, to = (
            f"{ref} + RANK * {by}" if by != "0" else ref
            for ref, by in zip(refs, ranks, strict=True)
        )
        return f"zr_copy(z, {queue}, {source}, {to}, {ints['bytes']});"

    def lines(self, nodes: Sequence[roll.Node], depth: int = 0) -> list[str]:
        out, pad = [], 4 * (depth + 1)
        for node in nodes:
            if isinstance(node, roll.Line):
                for text in self.statements(node.step, self.numbers(node)):
                    out += wrap(text, pad)
                continue
            v, body = VARS[depth], self.lines(node.body, depth + 1)
            head = (
                f"{' ' * pad}for (int64_t {v} = 0; {v} < {node.count}; {v}++)"
            )
            one = len(body) == 1
            out += (
                [head, *body]
                if one
                else [f"{head} {{", *body, " " * pad + "}"]
            )
        return handed(out)

    # ---- verbs

    def suffix(self, s: plan.Step) -> str:
        """What of a step a verb's name says: its flat, of a copy the class of that, or what it
        reads."""
        f = self.flat(s)
        classes = [r.cls for r in (*s.ins, *s.outs)]
        of_flats = [c for c in classes if c.partition(".")[2] in self.flats]
        if s.op == "copy" and of_flats:
            return lower(of_flats[0])
        return lower(f.name if f else s.ins[0].cls)

    def rest(self, v: Verb, core: Verb) -> str:
        """The call of what a verb does behind its waits, which are numbers that its core lacks."""
        first = v.steps[0]
        places = len(first.ins) + len(first.outs)
        waits = 1 + 2 * places + len(first.ints)
        values = [x for step in v.values for x in step]
        del values[waits : waits + len(first.waits)]
        given = [values[x.at] for x in core.parameters]
        if core.grows:
            given.insert(0, values[0])
        args = [self.said(first, x) for x in given]
        return f"{core.name}({', '.join(['z', *args])});"

    def verb(self, v: Verb) -> list[str]:
        """A verb's function."""
        first, last = v.steps[0], v.steps[-1]
        waits = " and ".join(tell(e.name) for e in first.waits)
        recs = " and ".join(tell(e.name) for e in last.recs)
        called, _, of = v.name.partition("_")
        what = TELLS[called].format(re.sub(r"(_v\d+)?(_now)?$", "", of))
        when = f"Waits until {waits}" if waits else "Waits for nothing"
        then = f"; then {recs}" if recs else ""
        by = [f"int64_t {BY}"] if v.grows else []
        formals = ["zr *z", *by, *(f"int64_t {x.name}" for x in v.parameters)]
        body: list[str] = []
        if v.core:
            texts = self.texts(v.steps[0], v.values[0])
            wait = self.statements(v.steps[0], texts)[0]
            body = [wait, self.rest(v, self.verbs[v.core])]
        else:
            for s, values in zip(v.steps, v.values, strict=True):
                body += self.statements(s, self.texts(s, values))
        lines = handed([line for text in body for line in wrap(text, 4)])
        head = wrap(f"static void {v.name}({', '.join(formals)})", 0)
        return [*comment(f"{what}. {when}{then}."), *head, "{", *lines, "}"]


def times(by: int, of: str, n: int) -> str:
    """by * of, which is n, in as many bits as that needs."""
    if by == 1:
        return of
    return f"{by if n < 2**31 else f'INT64_C({by})'} * {of}"


def line(x: Number, by: str) -> str:
    """base + by * of."""
    more = x.of if by == "1" else f"{by} * {x.of}"
    if not x.base:
        return more if x.by > 0 else f"-{more}"
    return f"{number(x.base)} {'+' if x.by > 0 else '-'} {more}"


def tell(event: str) -> str:
    """What an event says: full.ring.block -> RING_BLOCK is full."""
    word, _, what = event.partition(".")
    if word in ("full", "free"):
        return f"{upper(what)} is {word}"
    if word == "end":
        return f"{QUEUES[what]} has done all it was given"
    return f"parameters are {word}"


def handed(lines: list[str]) -> list[str]:
    """A record, and the wait of another queue for it right behind, are one line."""
    out: list[str] = []
    for text in lines:
        both = f"{out[-1] if out else ''}\n{text}"
        made = HANDED.fullmatch(both)
        if made:
            pad, queue, event, other = made.groups()
            out[-1] = f"{pad}zr_before(z, {queue}, {other}, {event});"
        else:
            out.append(text)
    return out


Rolled = dict[str, tuple[roll.Node, ...]]


def _parts(rolled: Rolled, shared: bool) -> Rolled:
    """Functions of nodes. shared: a grain's forward, an evaluation's too, is one of its own."""
    grain, other = rolled["grain"], rolled["eval"]
    pairs = zip(grain, other, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if not shared or not same:
        return rolled
    out: Rolled = {}
    for name, nodes in rolled.items():
        if name == "grain":
            out["forward"] = nodes[:same]
        out[name] = nodes[same:] if name in ("grain", "eval") else nodes
    return out


def _lines(nodes: Sequence[roll.Node]) -> Iterator[roll.Line]:
    for node in nodes:
        yield from [node] if isinstance(node, roll.Line) else _lines(node.body)


def _flat(steps: Sequence[plan.Step]) -> tuple[roll.Node, ...]:
    return tuple(roll.Line(x, (0,) * len(roll.numbers(x))) for x in steps)


def sections(p: Plan, flat: bool) -> dict[str, object]:
    """Functions of steps, and their verbs."""
    steps = Steps(p)
    issued = {
        s.name: [x for x in s.steps if x.op != "batch"] for s in p.sections
    }
    shared = not flat and p.together == 1
    if flat:
        parts = _parts({name: _flat(x) for name, x in issued.items()}, shared)
    else:
        verbs = Verbs(issued, steps.suffix)
        parts = _rolled(verbs, shared)
        but = _once(verbs, parts)
        if but:
            verbs = Verbs(issued, steps.suffix, but)
            parts = _rolled(verbs, shared)
        steps.verbs = verbs.verbs
    out = []
    for name, nodes in parts.items():
        begins = (
            ["    forward(z);"]
            if "forward" in parts and name in ("grain", "eval")
            else []
        )
        lines = [*begins, *steps.lines(nodes)]
        out.append({"name": name, "lines": lines or ["    (void)z;"]})
    return {"sections": out, "verbs": _verbs(steps)}


def _verbs(steps: Steps) -> list[list[str]]:
    """The verbs, and before them what they count by."""
    made = [steps.verb(v) for v in steps.verbs.values()]
    beside = "bytes from a unit's part to the next one's"
    sizes = [
        (f"{name} = {number(n)}", beside) for name, n in steps.sizes.items()
    ]
    return [[*HEAD, *(enum(sizes) if sizes else [])], *made] if made else []


def _once(verbs: Verbs, parts: Rolled) -> frozenset[Kind]:
    """Kinds of single steps that would be called in one place."""
    called = Counter(
        x.step.op for nodes in parts.values() for x in _lines(nodes)
    )
    return frozenset(
        kind
        for name, kind in verbs.of.items()
        if called[name] + called[f"{name}_now"] < 2 and len(kind) == 1
    )


def _rolled(verbs: Verbs, shared: bool) -> Rolled:
    rolled = {name: roll.roll(x) for name, x in verbs.sections.items()}
    return _parts(rolled, shared)


def grains(p: Plan) -> list[str]:
    """Of a step: a grain's tokens come before all else of it, which does not depend on the grain;
    or those of all grains that go through the units together."""
    steps = Steps(p)
    batches = [s for s in p.section("grain").steps if s.op == "batch"]
    lines = steps.lines(roll.roll(batches))
    run = "    zr_replay(z, ZR_GRAIN, grain);"
    if p.together > 1:
        return [*lines, run]
    return [
        f"    for (int64_t g = 0; g < {p.head.grains}; g++) {{",
        *(f"    {text}" for text in (*lines, run)),
        "    }",
    ]
