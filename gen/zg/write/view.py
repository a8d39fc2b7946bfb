"""view.py -- a Plan, rolled, as ready strings of C: all that the templates print.

Every choice is made here; a template only lays lines out. Names in C: class ring.block ->
RING_BLOCK(i), event full.block -> FULL_BLOCK(i), function fwd.block -> fwd_block.
"""
from __future__ import annotations

import re
from itertools import groupby, takewhile
from typing import Iterator, Sequence

from ..facts import ops, queues, reserve
from ..plan import plan, roll
from ..plan.operand import Arg, Index, Operand, base
from ..plan.plan import Plan
from ..plan.text import digest, layout_digest
from .tables import (affine, columns, filed, files, functions, groups, inbox, launch_name, lower,
                     number, real, recipe, slots, spans, states, upper, wrap, COLUMNS, VARS)

WORDS = {"null": "NULL", "recipe": "&recipe"}
QUEUES = {name: f"ZR_{name.upper()}" for name in queues.QUEUES}

# Of steps in which ranks meet: what follows queue and group in the call.
MEETINGS = {"gather": "{0}, {from_step}, {1}, {step}, {bytes}",
            "alltoall": "{0}, {step}, {1}, {bytes}",
            "reducescatter": "{0}, {step}, {1}, {bytes}, {type}",
            "allreduce": "{0}, {1}, {count}", "done": "{0}, {1}"}

POINTERS = {"out": "HOST", "sources": "FROM"}       # formals that are no places in the arena


class _Steps:
    """The lines of a section."""

    def __init__(self, p: Plan) -> None:
        self.p = p
        self.fns = {f.name: f for f in p.fns}

    def numbers(self, line: roll.Line) -> Iterator[str]:
        values = roll.numbers(line.step)
        for n, (v, m) in enumerate(zip(values, line.moduli)):
            grows = [g[n] for g in line.growth]
            text = affine(v, grows)
            yield f"{text if text in VARS else f'({text})'} % {m}" if m > 1 and any(grows) else text

    def statements(self, line: roll.Line) -> list[str]:
        s, it = line.step, self.numbers(line)
        next(it)                                # the unit's number is for readers of the plan
        queue = QUEUES[s.queue]
        refs = []
        for r in (*s.ins, *s.outs):
            index, at = next(it), next(it)
            place = f"{upper(r.cls)}({index})" + (f" + {at}" if at != "0" else "")
            refs.append(f"zr_last({place})" if r.last else place)
        ints = {}
        for i in s.ints:
            base = next(it)
            ints[i.name] = f"{base} + {number(i.per)} * g" if i.per and base != "0" else \
                affine(0, [], i.per) if i.per else base
        events = [f"{upper(e.name)}({next(it)})" for e in s.waits]
        wait = "zr_waits" if len(events) > 1 else "zr_wait"
        waits = [f"{wait}(z, {queue}, {', '.join(events)});"] if events else []
        recs = [f"zr_record(z, {queue}, {upper(e.name)}({next(it)}));" for e in s.recs]
        return [*waits, *self.work(s, queue, refs, ints), *recs]

    def work(self, s: plan.Step, queue: str, refs: list[str], ints: dict[str, str]) -> list[str]:
        if s.op == "mark":
            return []
        if s.op in MEETINGS:
            width = "F32" if ints.get("width") == "4" else self.p.head.real.upper()
            rest = MEETINGS[s.op].format(*refs, **ints, type=f"ZR_{width}")
            return [f"zr_{s.op}(z, {queue}, {upper(s.group)}, {rest});"]
        if s.op == "batch":
            times = "" if ints["of_rank"] == "1" else f"{ints['of_rank']} * "
            grain = f"{times}zr_rank(z) + {ints['grain']}"
            return [f"zr_batch(z, {grain});" if self.p.together == 1 else
                    f"zr_batch_at(z, {grain}, {refs[0]} - TOKENS(0));"]
        if s.op == "copy":
            per = [f" + zr_rank(z) * {ints[n]}" if ints[n] != "0" else ""
                   for n in ("from_rank", "to_rank")]
            return [f"zr_copy(z, {queue}, {refs[0]}{per[0]}, {refs[1]}{per[1]}, {ints['bytes']});"]
        fn = self.fns[s.op]
        operands = [*refs, *(ints[n] for n in fn.ints)] or ["0"]
        return [f"zr_call(z, {queue}, {lower(s.op)}, {', '.join(operands)});"]

    def lines(self, nodes: Sequence[roll.Node], depth: int = 0) -> list[str]:
        out, pad = [], 4 * (depth + 1)
        for node in nodes:
            if isinstance(node, roll.Loop):
                v, body = VARS[depth], self.lines(node.body, depth + 1)
                head = f"{' ' * pad}for (int64_t {v} = 0; {v} < {node.count}; {v}++)"
                out += [head, *body] if len(body) == 1 else [head + " {", *body, " " * pad + "}"]
            else:
                for text in self.statements(node):
                    out += wrap(text, pad)
        return handed(out)


def handed(lines: list[str]) -> list[str]:
    """A record, and the wait of another queue for it right behind, are one line."""
    out: list[str] = []
    for line in lines:
        wait = re.fullmatch(r"( *)zr_wait\(z, (\w+), (.*)\);", line)
        made = wait and out and re.fullmatch(rf"{wait[1]}zr_record\(z, (\w+), "
                                             rf"{re.escape(wait[3])}\);", out[-1])
        if made:
            out[-1] = f"{wait[1]}zr_before(z, {made[1]}, {wait[2]}, {wait[3]});"
        else:
            out.append(line)
    return out


class _Fns:
    """Functions of kernel calls: those of a line stand on one, like the rows of a table."""

    def __init__(self, p: Plan) -> None:
        self.p = p
        self.classes = {c.name for c in p.classes}

    def operand(self, arg: Arg, formals: dict[str, str]) -> str:
        if isinstance(arg, Operand):
            return self.place(arg, formals)
        if isinstance(arg, Index):
            return index(arg, formals)
        if isinstance(arg, int):
            return number(arg)
        return self.word(arg, formals) if isinstance(arg, str) else repr(arg)

    def place(self, arg: Operand, formals: dict[str, str]) -> str:
        terms = [formals.get(arg.base) or f"a + {upper(arg.base)}(0)"]
        if arg.at:
            terms.append(number(arg.at))
        if arg.by_rank:
            terms.append(f"zr_rank(z) * {number(arg.by_rank)}")
        if arg.by_round:
            terms.append(f"{formals['c']} * {number(arg.by_round)}")
        return " + ".join(terms)

    def word(self, text: str, formals: dict[str, str]) -> str:
        if text in WORDS:
            return WORDS[text]
        if text.startswith("&"):
            return f"ONE({formals[text[1:]]})"
        return lower(text) if text.startswith("freq.") else formals[text]

    def operands(self, args: Sequence[Arg], formals: dict[str, str]) -> Iterator[str]:
        """Of a call; the three that choose tensors and elements of a flat have one name."""
        it = iter(args)
        for arg in it:
            if not of_a_flat(arg):
                yield self.operand(arg, formals)
                continue
            first, size = next(it), next(it)
            if first.more:
                yield from of_spans(self.p, arg)
                yield from (self.operand(x, formals) for x in (first, size))
            else:
                yield f"{part_name(self.p, arg, first, size)}({formals['l']})"

    def one(self, fn: plan.Fn) -> list[str]:
        """A function; what is named once stands where it is used, the rest gets a variable."""
        names = [*fn.ins, *(o for o in fn.outs if o not in fn.ins), *fn.ints]
        at = {n: i for i, n in reversed(list(enumerate([*fn.ins, *fn.outs, *fn.ints])))}
        used = [base(a) for c in fn.calls for a in c.args]
        place = {c: f"a + {upper(c)}(0)" for c in sorted(self.classes) if c in used}
        place |= {n: f"i[{at[n]}]" if n in fn.ints else f"AT({at[n]})" for n in names}
        place |= {n: f"{where}({at[n]})" for n, where in POINTERS.items() if n in at}
        often = [n for n in place if used.count(n) > 1 and n not in fn.ints]
        variables = ", ".join(f"*{lower(n)} = {place[n]}" for n in often)
        formals = {**place, **{n: lower(n) for n in often}, "c": "c"}
        lines = wrap(f"void {variables};", 4) if often else []
        for rounds, calls in groupby(fn.calls, key=lambda c: c.rounds):
            body = [f"{c.kernel}(k, {launch_name(c.launch)}, "
                    f"{', '.join(self.operands(c.args, formals))});" for c in calls]
            if rounds > 1:
                lines.append(f"    for (int64_t c = 0; c < {rounds}; c++) {{")
            for text in body:
                lines += wrap(text, 8 if rounds > 1 else 4)
            lines += ["    }"] * (rounds > 1)
        short = f"FN({lower(fn.name)}) {{ {lines[0].strip()} }}"
        if len(lines) == 1 and len(short) <= COLUMNS:
            return [short]
        return [f"FN({lower(fn.name)})", "{", *lines, "}", ""]


def sections(p: Plan, flat: bool) -> list[dict[str, object]]:
    """Functions of steps; a grain's forward, which is an evaluation's too, is one of its own."""
    steps = _Steps(p)
    as_is = lambda x: roll.Line(x, (0,) * len(roll.numbers(x)))
    issued = {s.name: [x for x in s.steps if x.op != "batch"] for s in p.sections}
    rolled = {name: tuple(map(as_is, steps)) if flat else roll.roll(steps)
              for name, steps in issued.items()}
    grain = rolled["grain"]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(grain, rolled["eval"]))
    forward = [] if flat or p.together > 1 else [node for node, _ in same]
    out = []
    for name, nodes in rolled.items():
        lines = steps.lines(nodes)
        if forward and name == "grain":
            out.append({"name": "forward", "lines": steps.lines(forward)})
            lines = ["    forward(z);", *steps.lines(grain[len(forward):])]
        if forward and name == "eval":
            lines = ["    forward(z);", *steps.lines(nodes[len(forward):])]
        out.append({"name": name, "lines": lines or ["    (void)z;"]})
    return out


def grains(p: Plan) -> list[str]:
    """Of a step: a grain's tokens come before all else of it, which does not depend on the grain;
    or those of all grains that go through the units together."""
    steps = _Steps(p)
    lines = steps.lines(roll.roll([s for s in p.section("grain").steps if s.op == "batch"]))
    run = "    zr_replay(z, ZR_GRAIN, grain);"
    if p.together > 1:
        return [*lines, run]
    return [f"    for (int64_t g = 0; g < {p.head.grains}; g++) {{",
            *(f"    {line}" for line in (*lines, run)), "    }"]


def index(i: Index, formals: dict[str, str]) -> str:
    terms = [f"{formals['l']} * {number(i.by_layer)}"]
    if i.by_rank:
        terms.append(f"zr_rank(z) * {number(i.by_rank)}")
    if i.at:
        terms.append(number(i.at))
    if i.more:
        terms.append(formals[i.more])
    return " + ".join(terms)


def of_a_flat(arg: Arg) -> bool:
    """Whether it names a flat's tensors: behind it come the first element and how many."""
    return isinstance(arg, str) and arg.startswith("spans.")


def part_name(p: Plan, text: str, first: Index, size: int) -> str:
    """spans.block from its first element on: ALL_BLOCK, or, of a rank, PART_BLOCK, of which what
    stays on the device is HERE_BLOCK and the rest THERE_BLOCK."""
    f = p.flat(text.removeprefix("spans."))
    if not first.by_rank:
        part = "ALL"
    elif size == f.shard:
        part = "PART"
    else:
        part = "THERE" if first.at else "HERE"
    return f"{part}_{upper(f.name)}"


def of_spans(p: Plan, text: str) -> tuple[str, str]:
    """The table of a flat's tensors, and how many there are."""
    flat = text.removeprefix("spans.")
    return lower(text), str(sum(t.flat == flat for t in p.tensors))


def parts(p: Plan) -> list[str]:
    """What PART_ and ALL_ stand for; a shard is cut in two at most."""
    out: dict[str, str] = {}
    for c in (c for fn in p.fns for c in fn.calls):
        for n, text in enumerate(c.args):
            if of_a_flat(text) and not c.args[n + 1].more:
                first, size = c.args[n + 1:n + 3]
                start = index(first, {"l": "(l)"})
                name = part_name(p, text, first, size)
                what = f"{', '.join(of_spans(p, text))}, {start}, {number(size)}"
                if out.setdefault(name, what) != what:
                    raise ValueError(f"{name} would be {out[name]} and {what}")
    return [f"#define {name}(l) {text}" for name, text in sorted(out.items())]


def sample(p: Plan) -> list[str]:
    """The draw from the row of logits that is the last thing an evaluation makes."""
    fn = next(f for f in p.fns if f.name == "eval.head")
    row = fn.calls[-1].args[0]
    at = p.cls(row.base).at + row.at
    return wrap(f"d->token = zk_sample(k, a + {number(at)}, {p.head.vocab}, "
                "(float)d->temperature, d->u);", 4)


def left(p: Plan) -> list[str]:
    """What the runtime is told of the SMs that products leave to NCCL."""
    n, kept = p.head.margin, reserve.kept(p.head)
    share = f".blocks = {reserve.blocks(kept)}, .channels = {reserve.channels(kept)}"
    return [f".margin = {n}, {share},"] if n else []


def used(p: Plan) -> list[str]:
    """Those that the plan's steps use; a run's hash loads masters from the file."""
    found = {step.queue for s in p.sections for step in s.steps} | {"main"}
    found |= {"load" for f in p.flats for s in p.masters(f) if p.cls(s.cls).arena == "file"}
    return [q for q in QUEUES if q in found]


def view(p: Plan, cost: dict[str, object], memory: str, flat: bool) -> dict[str, object]:
    """Everything the templates need."""
    fns = _Fns(p)
    event, events = 0, []
    for e in p.events:
        events.append(f"#define {upper(e.name)}(i) ({event} + (int)(i))")
        event += e.index
    return {
        "name": p.head.spec, "plan": digest(p), "layout": layout_digest(p),
        "memory": memory, "head": p.head,
        "summary": f"{p.head.spec}: ZeRO {p.head.zero}, {p.head.ranks} ranks, {p.head.grains} "
                   f"grains a rank and step, {p.head.real}, prefetch {p.head.prefetch}",
        "classes": [f"#define {upper(c.name)}(i) (INT64_C({c.at}) + INT64_C({c.stride}) * (i))"
                    for c in p.classes],
        "events": events, "nevents": event,
        "group_names": ", ".join(upper(g.name) for g in p.groups), "all": upper(plan.ALL),
        "groups": groups(p),
        "launches": columns(p),
        "columns": [f'{{"{t}", {number(p.arena(t))}, {number(n)}}},' for t in p.head.targets
                    for n in [reserve.nccl_of(p.head, t)]],
        "host": number(p.host), "desk": number(p.cls("desk").at),
        "space": number(p.cls("space").at), "inlet": number(p.cls("inlet").at),
        "inlets": p.cls("inlet").slots, "inlet_step": number(p.cls("inlet").stride),
        "spans": [{"name": lower(f.name), "rows": spans(p, f)} for f in p.flats],
        "tables": [{"name": lower(t.name).replace("table", "freq"),
                    "rows": [real(x) + "," for x in t.freq]} for t in p.tables],
        "recipe": recipe(p),
        "fns": sorted((fns.one(f) for f in p.fns), key=lambda lines: len(lines) == 1),
        "parts": parts(p),
        "sections": sections(p, flat), "grains": grains(p),
        "functions": functions(p), "states": states(p), "slots": slots(p),
        "besides": [*inbox(p), *left(p), *filed(p, cost)],
        "files": files(p), "sample": sample(p),
        "tokens": number(p.cls("tokens").at), "targets": number(p.cls("targets").at),
        "skips": p.recipe.skips, "dtype": ops.TYPES[p.head.real],
        "shared": number(p.shared), "hosted": number(p.hosted),
        "queues": " | ".join(f"1 << {QUEUES[q]}" for q in used(p)), "cost": cost,
    }
