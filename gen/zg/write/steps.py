"""steps.py -- a plan's sections as functions of train.c: loops of verbs, each verb a function.

Names in C: class ring.block -> RING_BLOCK(i), event full.block -> FULL_BLOCK(i), function fwd.block
-> fwd_block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from ..facts import ops, queues
from ..plan import plan, roll
from ..plan.plan import Event, Plan, Step
from .letters import number
from .sizes import Sizes, What, product
from .tables import VARS, comment, flat_names, linear, lower, upper, wrap
from .verbs import BY, Kind, Number, Verb, Verbs

QUEUES = {name: f"ZR_{name.upper()}" for name in queues.QUEUES}

# Of commands: what a verb's head tells of one, {0} and {1} being the classes that it names; and, of
# those in which ranks meet, what follows queue and group in the call.
COMMANDS = {
    "copy": ("copies {2}{0} to {1}", ""),
    "gather": (
        "gathers {2}{0} to {1}",
        "{0}, {from_step}, {1}, {step}, {bytes}",
    ),
    "alltoall": (
        "sends each rank {2}its shard of {0}",
        "{0}, {step}, {1}, {bytes}",
    ),
    "reducescatter": (
        "adds the ranks' {0}, each rank {2}its shard",
        "{0}, {step}, {1}, {bytes}, {type}",
    ),
    "allreduce": ("adds the ranks' {0}", "{0}, {1}, {count}"),
    "done": ("ends when all ranks have read {1}", "{0}, {1}"),
}
# Bytes that are copied of what is no flat's.
COPIED = {
    "sums": "8 * ZK_SUMS",
    "hsums": "8 * ZK_SUMS",
    "ctl": "CTL_BYTES",
    "hctl": "CTL_BYTES",
}

# What a section is, and what two of them share.
SECTIONS = {
    "init": "first weights",
    "publish": "parameters from masters",
    "begin": "a step's constants",
    "forward": "a micro-batch's forward, an evaluation's too",
    "micro_batch": "a micro-batch: the loss, and gradients to their sums",
    "update": "norm, clipping, optimizer",
    "eval": "the loss of a micro-batch",
}

HANDED = re.compile(
    r"( *)zr_record\(z, (\w+), (.*)\);\n\1zr_wait\(z, (\w+), \3\);"
)
HEAD = comment(
    "---- steps with their waits and their records; l: the unit, slot: of the ring that its "
    "buffers take turns in, at: where in a buffer a piece begins, n: its "
    "elements; NAME_now: without the waits of NAME"
)


class Steps:
    """The lines of steps."""

    def __init__(self, p: Plan, sizes: Sizes) -> None:
        self.p, self.sizes = p, sizes
        self.fns = {f.name: f for f in p.fns}
        self.verbs: dict[str, Verb] = {}

    # ---- numbers

    def numbers(self, line: roll.Line) -> roll.Parts[str]:
        """Of a step in loops."""
        s, out = line.step, []
        of: Sizes | Verb = self.verbs.get(s.op, self.sizes)
        values = zip(
            of.whats(s).row, roll.numbers(s), line.moduli, strict=True
        )
        for n, (what, v, m) in enumerate(values):
            terms = [
                (x, g[n]) for x, g in zip(VARS, line.growth, strict=False)
            ]
            text = self.sizes.said(what, v, terms)
            if m > 1 and any(by for _, by in terms):
                text = f"{text if text in VARS else f'({text})'} % {m}"
            out.append(text)
        return roll.parts(s, out)

    def said(self, what: What, x: Number) -> str:
        """A number of a verb's body."""
        if x.of in ("", BY):
            return self.sizes.said(what, x.base, [(BY, x.by)])
        if not x.base:
            return linear(0, [(x.of, x.by)])
        each = replace(what, width=what.width // x.by, part=True)
        base = self.sizes.said(each, abs(x.base) // x.by)
        sign = "-" if x.base < 0 else "+"
        return product("", x.by, f"({x.of} {sign} {base})", 0)

    def texts(self, s: Step, values: Sequence[Number]) -> roll.Parts[str]:
        """Of a step of a verb."""
        pairs = zip(self.sizes.whats(s).row, values, strict=True)
        return roll.parts(s, [self.said(what, x) for what, x in pairs])

    # ---- statements

    def statements(self, s: Step, texts: roll.Parts[str]) -> list[str]:
        """Of a step whose numbers are these texts."""
        queue, refs = QUEUES[s.queue], []
        for r, (index, at) in zip(s.refs, texts.refs, strict=True):
            place = f"{upper(r.cls)}({index})" + f" + {at}" * (at != "0")
            called = s.op in self.verbs
            refs.append(
                index if called else f"zr_last({place})" if r.last else place
            )
        ints = {
            i.name: self.given(s, i, text)
            for i, text in zip(s.ints, texts.ints, strict=True)
        }
        waits, recs = (
            [f"{upper(e.name)}({n})" for e, n in zip(es, ns, strict=True)]
            for es, ns in ((s.waits, texts.waits), (s.recs, texts.recs))
        )
        wait = "zr_waits" if len(waits) > 1 else "zr_wait"
        return [
            *[f"{wait}(z, {queue}, {', '.join(waits)});"] * bool(waits),
            *self.work(s, texts.unit, queue, refs, ints),
            *(f"zr_record(z, {queue}, {x});" for x in recs),
        ]

    def given(self, s: Step, i: plan.Int, text: str) -> str:
        """A number of a step."""
        if i.name == "count" and i.value == ops.SUMS:
            return "ZK_SUMS"
        if s.op == "copy" and i.name == "bytes":
            cls = s.ins[0].cls
            whole = text == number(self.p.cls(cls).stride)
            return f"SIZE({upper(cls)})" if whole else COPIED.get(cls, text)
        if i.per:
            more = linear(0, [("g", i.per)])
            return f"{text} + {more}" if text != "0" else more
        return text

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
        if s.op in self.verbs:
            by = [unit] if self.verbs[s.op].grows else []
            return [f"{s.op}({', '.join(['z', *by, *refs, *ints.values()])});"]
        if s.group:
            width = (
                "F32" if ints.get("width") == "4" else self.p.head.real.upper()
            )
            rest = COMMANDS[s.op][1].format(*refs, **ints, type=f"ZR_{width}")
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
        more = ints["micro_batch"]
        micro_batch = f"{times}RANK" + f" + {more}" * (more != "0")
        if self.p.together == 1:
            return f"zr_batch(z, {micro_batch});"
        return f"zr_batch_at(z, {micro_batch}, {refs[0]} - TOKENS(0));"

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

    def rest(self, v: Verb, core: Verb) -> str:
        """The call of what a verb does behind its waits, which are numbers that its core lacks."""
        first, *others = v.values
        behind = replace(roll.parts(v.steps[0], first), waits=()).row
        values = [*behind, *(x for step in others for x in step)]
        args = [
            self.said(x.what, values[x.at].over(x.each))
            for x in core.parameters
        ]
        by = [self.said(What(BY), values[0])] * core.grows
        return f"{core.name}({', '.join(['z', *by, *args])});"

    def verb(self, v: Verb) -> list[str]:
        """A verb's function."""
        by = [f"int64_t {BY}"] if v.grows else []
        formals = ["zr *z", *by, *(f"int64_t {x.name}" for x in v.parameters)]
        body: list[str] = []
        for s, values in zip(v.steps, v.values, strict=True):
            body += self.statements(s, self.texts(s, values))
        if v.core:
            body = [body[0], self.rest(v, self.verbs[v.core])]
        lines = handed([line for text in body for line in wrap(text, 4)])
        head = wrap(f"static void {v.name}({', '.join(formals)})", 0)
        return [*comment(self.head(v)), *head, "{", *lines, "}"]

    def head(self, v: Verb) -> str:
        """What a verb does, what it waits for that is not its own, what others may wait for."""
        pairs = zip(v.steps, v.values, strict=True)
        does = [self.does(s, x) for s, x in pairs if s.op != "mark"]
        text = listed([*dict.fromkeys(does)])
        waits: list[Event] = []
        recs: list[tuple[Event, Number]] = []
        for s, values in zip(v.steps, v.values, strict=True):
            x = roll.parts(s, values)
            for e in zip(s.waits, x.waits, strict=True):
                if e in recs:
                    recs.remove(e)
                else:
                    waits.append(e[0])
            recs += zip(s.recs, x.recs, strict=True)
        text = f"{text[0].upper()}{text[1:]}"
        if waits:
            text += f". Waits until {tell(waits)}"
        if recs:
            text += f"; then {tell([e for e, _ in recs])}"
        if v.last:
            dead = "is dead" if len(v.last) == 1 else "are dead"
            text += f". Behind it {listed([upper(x) for x in v.last])} {dead}"
        return f"{text}."

    def does(self, s: Step, values: Sequence[Number]) -> str:
        """A step of a verb."""
        if s.op in self.fns:
            return f"calls {lower(s.op)}"
        whats, x = self.sizes.whats(s).ints, roll.parts(s, values).ints
        f = next(
            (f for f in self.p.flats if f.name == self.sizes.flat(s)), None
        )
        whole = flat_names(self.p, f) if f else {}
        some = f and any(
            n.of or n.base // what.width not in whole
            for n, what, i in zip(x, whats, s.ints, strict=True)
            if i.name == "bytes" and what.width
        )
        cut = "a piece of " * bool(some)
        read, *others = [upper(r.cls) for r in s.refs]
        tells = COMMANDS[s.op][0]
        if others == [read]:
            tells = tells.partition(" to ")[0]
        return tells.format(read, *others, *[""] * (1 - len(others)), cut)


def listed(words: Sequence[str]) -> str:
    *others, last = words or [""]
    return f"{', '.join(others)} and {last}" if others else last


def tell(events: Sequence[Event]) -> str:
    """What events say: full.ring.block -> RING_BLOCK is full."""
    said: dict[str, list[str]] = {}
    for e in events:
        word, _, what = e.name.partition(".")
        state = {"end": "done with all it was given"}.get(word, word)
        name = QUEUES[what] if word == "end" else upper(what) or "parameters"
        said.setdefault(state, []).append(name)
    out = []
    for state, x in said.items():
        one = len({*x}) == 1 and x[0] != "parameters"
        out.append(
            f"{listed([*dict.fromkeys(x)])} {'is' if one else 'are'} {state}"
        )
    return listed(out)


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
    """Functions of nodes. shared: a micro-batch's forward, an evaluation's too, is one of its
    own."""
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


def _flat(steps: Sequence[Step]) -> tuple[roll.Node, ...]:
    return tuple(roll.Line(x, (0,) * len(roll.numbers(x))) for x in steps)


def sections(p: Plan, sizes: Sizes, flat: bool) -> dict[str, object]:
    """Functions of steps, and their verbs."""
    steps = Steps(p, sizes)
    issued = {
        s.name: [x for x in s.steps if x.op != "batch"] for s in p.sections
    }
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
                "head": f"/* {SECTIONS[name]} */",
                "name": name,
                "lines": lines or ["    (void)z;"],
            }
        )
    return {"sections": out, "verbs": _verbs(steps)}


def _verbs(steps: Steps) -> list[list[str]]:
    made = [steps.verb(v) for v in steps.verbs.values()]
    return [HEAD, *made] if made else []


def _once(verbs: Verbs, parts: Rolled) -> frozenset[Kind]:
    """Kinds of single steps that would be called in one place."""
    called = Counter(
        x.step.op for nodes in parts.values() for x in _lines(nodes)
    )
    return frozenset(
        kind
        for name, kind in verbs.of.items()
        if called[name] + called[f"{name}_now"] < 2 and len(kind[0]) == 1
    )


def _rolled(verbs: Verbs, shared: bool) -> Rolled:
    rolled = {name: roll.roll(x) for name, x in verbs.sections.items()}
    return _parts(rolled, shared)


def micro_batches(p: Plan, sizes: Sizes) -> list[str]:
    """Of a step: a micro-batch's tokens come before all else of it, which does not depend on the
    micro-batch; or those of all micro-batches that go through the units together."""
    steps = Steps(p, sizes)
    batches = [s for s in p.section("micro_batch").steps if s.op == "batch"]
    lines = steps.lines(roll.roll(batches))
    run = "    zr_replay(z, ZR_MICRO_BATCH, micro_batch);"
    if p.together > 1:
        return [*lines, run]
    return [
        f"    for (int64_t g = 0; g < {p.head.micro_batches}; g++) {{",
        *(f"    {text}" for text in (*lines, run)),
        "    }",
    ]
