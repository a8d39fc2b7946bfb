"""steps.py -- prints a plan's sections as functions of train.c: loops of verbs, each verb a
function.

Names in C: class ring.block -> RING_BLOCK(i), event full.block -> FULL_BLOCK(i), function fwd.block
-> fwd_block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, takewhile

from ..facts import queues
from ..plan import plan, roll
from ..plan.plan import Event, Plan, Step
from ..plan.size import Size, times
from .sizes import PIECES, Sizes
from .tables import VARS, comment, place, wrap
from .verbs import BY, Affine, Kind, Verb, Verbs, over
from .words import call, group_name, in_c, linear, lower, product, upper, word

QUEUES = {name: f"ZR_{name.upper()}" for name in queues.QUEUES}

# For each command, the text in a verb's comment: {cut} is "a piece of " or '', {to} " to CLASS" or
# '', {over} and {of} name a group that is not all ranks; and for collectives the arguments that
# follow queue and group in the call, where {0} and {1} are the classes it names.
COMMANDS = {
    "copy": ("copies {cut}{0}{to}", ""),
    "gather": (
        "all-gathers {cut}{0}{to}{over}",
        "{0}, {from_step}, {1}, {step}, {bytes}",
    ),
    "exchange": (
        "exchanges {cut}{0}{to}{over}",
        "{0}, {from_step}, {1}, {step}, {bytes}",
    ),
    "alltoall": (
        "sends each rank{of} {cut}its part of {0}",
        "{0}, {step}, {1}, {bytes}",
    ),
    "reducescatter": (
        "reduce-scatters {cut}{0}{to}{over}",
        "{0}, {step}, {1}, {bytes}, {type}",
    ),
    "allreduce": ("all-reduces {0}{to}{over}", "{0}, {1}, {count}"),
    "done": ("waits until all ranks{of} have read {1}", "{0}, {1}"),
}
# Comment of each section; micro_batch and eval share `forward`.
SECTIONS = {
    "init": "initial weights",
    "publish": "parameters from masters, and tables, before the first step",
    "begin": "begin of a step: its constants; offloaded states start on their way to the device",
    "forward": "forward of a micro-batch, in training and evaluation",
    "micro_batch": "a micro-batch: its loss, and its gradients added to the sums",
    "update": "norm, clipping, optimizer",
    "eval": "evaluation: the loss of a micro-batch",
}

# The comment of micro_batch if several go through a unit together.
TOGETHER = "{}, unit by unit: their loss, and their gradients added to the sums"
HANDED = re.compile(r"( *)zr_record\(z, (\w+), (.*)\);\n\1zr_wait\(z, (\w+), \3\);")
HEAD = comment(
    "---- commands with their waits and records. l: the unit; slot, slot2: slots that units take "
    "in turn; at: where a piece begins in its buffer; n: its elements. NAME_now is NAME without "
    "its waits. zr_last(P): the last use of slot P, whose data is dead afterwards"
)


class StepWriter:
    """Prints the lines of steps."""

    def __init__(self, p: Plan, sizes: Sizes) -> None:
        self.p, self.sizes = p, sizes
        self.fns = {f.name: f for f in p.fns}
        self.verbs: dict[str, Verb] = {}

    # ---- numbers

    def numbers(self, line: roll.Line) -> roll.Parts[str]:
        """Return the numbers of a step inside loops, as C."""
        s = line.step
        out = []
        pairs = zip(roll.numbers(s), line.moduli, strict=True)
        for n, (v, m) in enumerate(pairs):
            grown = [growth[n] for growth in line.growth]
            terms = [*zip(VARS, grown, strict=False)]
            text = in_c(v, terms)
            if m > 1 and any(grown):
                if text not in VARS:
                    text = f"({text})"
                text = f"{text} % {m}"
            out.append(text)
        return roll.parts(s, out)

    # ---- statements

    def statements(self, s: Step, texts: roll.Parts[str]) -> list[str]:
        """Return the statements of a step. texts: its numbers, as C."""
        queue = QUEUES[s.queue]
        refs = []
        for r, (index, at) in zip(s.refs, texts.refs, strict=True):
            where = plus(f"{upper(r.cls)}({index})", at)
            if s.op in self.verbs:
                where = index
            elif r.by_rank:
                where += f" + {place(r.group)} * {in_c(r.by_rank)}"
            elif r.last:
                where = call("zr_last", where)
            refs.append(where)
        ints = {}
        for i, text in zip(s.ints, texts.ints, strict=True):
            ints[i.name] = given(i, text)
        waits = events(s.waits, texts.waits)
        out = self.work(s, texts.unit, queue, refs, ints)
        if waits:
            wait = "zr_waits" if len(waits) > 1 else "zr_wait"
            out.insert(0, f"{call(wait, 'z', queue, *waits)};")
        for x in events(s.recs, texts.recs):
            out.append(f"{call('zr_record', 'z', queue, x)};")
        return out

    def work(
        self,
        s: Step,
        unit: str,
        queue: str,
        refs: list[str],
        ints: dict[str, str],
    ) -> list[str]:
        if s.op == "mark":
            return []
        if s.op == "batch":
            return [self.batch(refs, ints)]
        if s.op in self.verbs:
            given = [*refs, *ints.values()]
            if self.verbs[s.op].grows:
                given.insert(0, unit)
            text = call(s.op, "z", *given)
        elif s.group:
            type_ = self.p.head.real.upper()
            if ints.get("width") == "4":
                type_ = "F32"
            said = COMMANDS[s.op][1].format(*refs, **ints, type=f"ZR_{type_}")
            text = call(f"zr_{s.op}", "z", queue, group_name(s.group), said)
        elif s.op == "copy":
            ranks = ints["from_rank"], ints["to_rank"]
            places = map(of_rank, refs, ranks)
            text = call("zr_copy", "z", queue, *places, ints["bytes"])
        else:
            given = [*refs, *(ints[n] for n in self.fns[s.op].ints)] or ["0"]
            text = call("zr_call", "z", queue, lower(s.op), *given)
        return [f"{text};"]

    def batch(self, refs: list[str], ints: dict[str, str]) -> str:
        *ranks, last = ints
        places = []
        for each, name in zip(ranks, self.p.head.order.groups, strict=True):
            by = f"{ints[each]} * " * (ints[each] != "1")
            places.append(by + place(name))
        micro_batch = plus(*places, ints[last])
        if self.p.together == 1:
            return f"zr_batch(z, {micro_batch});"
        return f"zr_batch_at(z, {micro_batch}, {refs[0]} - TOKENS(0));"

    def lines(self, nodes: Sequence[roll.Node], depth: int = 0) -> list[str]:
        out = []
        pad = 4 * (depth + 1)
        indent = " " * pad
        for node in nodes:
            if isinstance(node, roll.Line):
                for text in self.statements(node.step, self.numbers(node)):
                    out += wrap(text, pad)
                continue
            v, body = VARS[depth], self.lines(node.body, depth + 1)
            loop = f"for (int64_t {v} = 0; {v} < {node.count}; {v}++)"
            if len(body) > 1:
                loop += " {"
                body.append(f"{indent}}}")
            out += [indent + loop, *body]
        return handed(out)

    # ---- verbs

    def rest(self, v: Verb, core: Verb) -> str:
        """Return the call of a verb's core, the part of the verb after its waits."""
        first, *others = v.values
        behind = replace(roll.parts(v.steps[0], first), waits=()).row
        values = [*behind, *chain(*others)]
        args = []
        for x in core.parameters:
            args.append(of_verb(values[x.at].over(x.each)))
        if core.grows:
            args.insert(0, of_verb(values[0]))
        return f"{call(core.name, 'z', *args)};"

    def verb(self, v: Verb) -> list[str]:
        """Return the function of a verb."""
        formals = [x.name for x in v.parameters]
        if v.grows:
            formals.insert(0, BY)
        body: list[str] = []
        for s, values in v.pairs:
            texts = roll.parts(s, [of_verb(x) for x in values])
            body += self.statements(s, texts)
        if v.core:
            rest = self.rest(v, self.verbs[v.core])
            body = [body[0], rest]
        lines = [line for text in body for line in wrap(text, 4)]
        typed = [f"int64_t {name}" for name in formals]
        head = f"static void {call(v.name, 'zr *z', *typed)}"
        out = [*comment(self.head(v)), *wrap(head, 0)]
        return [*out, "{", *handed(lines), "}"]

    def head(self, v: Verb) -> str:
        """Return the comment of a verb: its commands, the events of others that it waits for, and
        the events that it records for others."""
        does = [self.does(s, x) for s, x in v.pairs if s.op != "mark"]
        text = listed([*dict.fromkeys(does)])
        text = f"{text[0].upper()}{text[1:]}"
        waits: list[Event] = []
        recs: list[tuple[Event, Affine]] = []
        for s, values in v.pairs:
            x = roll.parts(s, values)
            for e in zip(s.waits, x.waits, strict=True):
                if e in recs:
                    recs.remove(e)
                else:
                    waits.append(e[0])
            recs += zip(s.recs, x.recs, strict=True)
        if waits:
            text += f". Waits until {tell(waits)}"
        if recs:
            text += f"; then {tell([e for e, _ in recs])}"
        if v.last:
            dead = "is dead" if len(v.last) == 1 else "are dead"
            text += f". Afterwards {listed([upper(x) for x in v.last])} {dead}"
        return f"{text}."

    def does(self, s: Step, values: Sequence[Affine]) -> str:
        """Return the description of one step of a verb."""
        if s.op in self.fns:
            return f"calls {lower(s.op)}"
        read, *others = [upper(r.cls) for r in s.refs]
        group = "" if s.group == plan.ALL else group_name(s.group)
        return COMMANDS[s.op][0].format(
            read,
            *others,
            cut="a piece of " if self.some(s, values) else "",
            to=f" to {others[0]}" if others and others != [read] else "",
            over=f" over {group}" if group else "",
            of=f" of {group}" if group else "",
        )

    def some(self, s: Step, values: Sequence[Affine]) -> bool:
        """Return whether a step moves only a piece of a flat."""
        numbers = roll.parts(s, values).ints
        for i, n in zip(s.ints, numbers, strict=True):
            if i.name == "bytes" and isinstance(i.value, Size):
                names = (u.name for u, _ in i.value.terms)
                if n.of or any(word(name) in PIECES or "%" in name for name in names):
                    return True
        return False


def of_verb(x: Affine) -> str:
    """Return a number of a verb's body, as C."""
    if x.of in ("", BY):
        return in_c(x.base, [(BY, x.by)])
    if not x.base:
        return linear(0, [(x.of, x.by)])
    sign = "-" if x.base < 0 else "+"
    base = times(x.base, -1) if x.base < 0 else x.base
    beside = in_c(over(base, x.by))
    return product("", x.by, f"({x.of} {sign} {beside})", 0)


def given(i: plan.Int, text: str) -> str:
    """Return a number of a step, with its growth per micro-batch if any."""
    return plus(text, linear(0, [("g", i.per)])) if i.per else text


def plus(*texts: str) -> str:
    """Return the sum of the texts that are not "0"."""
    return " + ".join(x for x in texts if x != "0")


def of_rank(place: str, by: str) -> str:
    """Return a place that advances by `by` bytes per rank."""
    return place if by == "0" else f"{place} + RANK * {by}"


def events(of: Sequence[Event], numbers: Sequence[str]) -> list[str]:
    pairs = zip(of, numbers, strict=True)
    return [call(upper(e.name), n) for e, n in pairs]


def listed(words: Sequence[str]) -> str:
    *others, last = words or [""]
    return f"{', '.join(others)} and {last}" if others else last


def tell(events: Sequence[Event]) -> str:
    """Describe events: full.ring.block -> RING_BLOCK is full."""
    said: dict[str, list[str]] = {}
    for e in events:
        state, _, what = e.name.partition(".")
        name = upper(what) or "parameters"
        if state == "end":
            state, name = "done with all it was given before", QUEUES[what]
        said.setdefault(state, []).append(name)
    out = []
    for state, x in said.items():
        names = [*dict.fromkeys(x)]
        one = len(names) == 1 and names != ["parameters"]
        out.append(f"{listed(names)} {'is' if one else 'are'} {state}")
    return listed(out)


def handed(lines: list[str]) -> list[str]:
    """Join a record and another queue's wait for it on the next line into one call."""
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
    """Return the nodes of each function. shared: micro_batch and eval share their common beginning
    as the function `forward`."""
    micro_batch, other = rolled["micro_batch"], rolled["eval"]
    pairs = zip(micro_batch, other, strict=False)
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if not shared or not same:
        return rolled
    out: Rolled = {}
    for name, nodes in rolled.items():
        if name == "micro_batch":
            out["forward"] = nodes[:same]
        out[name] = nodes[same:] if name in ("micro_batch", "eval") else nodes
    return out


def _lines(nodes: Sequence[roll.Node]) -> Iterator[roll.Line]:
    for node in nodes:
        yield from [node] if isinstance(node, roll.Line) else _lines(node.body)


def _awaited(steps: Sequence[Step]) -> list[Step]:
    """Return the steps without records that their queue repeats before any queue waits for them. In
    a loop these stay: the record of its last round is waited for."""
    out: list[Step] = []
    # events whose next use is a record, with the queue that records
    anew: dict[Event, str] = {}
    for s in reversed(steps):
        recs = tuple(e for e in s.recs if anew.get(e) != s.queue)
        anew |= dict.fromkeys(s.recs, s.queue)
        for e in s.waits:
            anew.pop(e, None)
        out.append(s if recs == s.recs else replace(s, recs=recs))
    return out[::-1]


def _flat(steps: Sequence[Step]) -> tuple[roll.Node, ...]:
    return tuple(roll.Line(x, (0,) * len(roll.numbers(x))) for x in _awaited(steps))


def sections(p: Plan, sizes: Sizes, flat: bool) -> dict[str, object]:
    """Return the functions of sections, and the verbs that they call."""
    steps = StepWriter(p, sizes)
    issued = {s.name: [x for x in s.steps if x.op != "batch"] for s in p.sections}
    shared = not flat and p.together == 1
    if flat:
        parts = _parts({name: _flat(x) for name, x in issued.items()}, shared)
    else:
        verbs = Verbs(issued, sizes)
        parts = _rolled(verbs, shared)
        but = _once(verbs, parts)
        if but:
            verbs.define(but)
            parts = _rolled(verbs, shared)
        steps.verbs = verbs.verbs
    says = dict(SECTIONS)
    if p.together > 1:
        says["micro_batch"] = TOGETHER.format(p.several)
    out = []
    for name, nodes in parts.items():
        begins = (
            ["    forward(z);"]
            if "forward" in parts and name in ("micro_batch", "eval")
            else []
        )
        lines = [*begins, *steps.lines(nodes)]
        out.append(
            {
                "head": f"/* {says[name]} */",
                "name": name,
                "lines": lines or ["    (void)z;"],
            }
        )
    return {"sections": out, "verbs": _verbs(steps)}


def _verbs(steps: StepWriter) -> list[list[str]]:
    made = [steps.verb(v) for v in steps.verbs.values()]
    return [HEAD, *made] if made else []


def _once(verbs: Verbs, parts: Rolled) -> frozenset[Kind]:
    """Return kinds of single steps that would be called from one place only."""
    called = Counter(x.step.op for nodes in parts.values() for x in _lines(nodes))
    return frozenset(
        kind
        for name, kind in verbs.of.items()
        if called[name] + called[f"{name}_now"] < 2 and len(kind[0]) == 1
    )


def _rolled(verbs: Verbs, shared: bool) -> Rolled:
    rolled = {name: roll.roll(x) for name, x in verbs.sections.items()}
    return _parts(rolled, shared)


def micro_batches(p: Plan, sizes: Sizes) -> list[str]:
    """Return the lines of a training step's micro-batches. The tokens of a micro-batch are taken
    before the rest of it, which does not depend on the micro-batch's number. Those of micro-batches
    that go through units together are taken first."""
    steps = StepWriter(p, sizes)
    batches = [s for s in p.section("micro_batch").steps if s.op == "batch"]
    lines = steps.lines(roll.roll(batches))
    run = "    zr_replay(z, ZR_MICRO_BATCH, micro_batch);"
    repeat = p.section("micro_batch").repeat
    if p.together > 1 and repeat == 1:
        return [*lines, run]
    return [
        f"    for (int64_t g = 0; g < {repeat}; g++) {{",
        *(f"    {text}" for text in (*lines, run)),
        "    }",
    ]
