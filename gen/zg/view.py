"""view.py -- a Plan, rolled, as ready strings of C: all that the templates print.

Every choice is made here; a template only lays lines out. Names in C: class ring.block ->
RING_BLOCK(i), event full.block -> FULL_BLOCK(i), function fwd.block -> fwd_block.
"""
from __future__ import annotations

import re
from itertools import groupby, takewhile
from typing import Iterator, Sequence

from . import ops, plan, reserve, roll
from .plan import Plan
from .tables import (affine, columns, filed, files, flats, functions, launch_name, lower, number,
                     real, recipe, spans, upper, wrap, COLUMNS, VARS)
from .text import digest, layout_digest

QUEUES = {name: f"ZR_{name.upper()}" for name in ("main", "gather", "reduce", "host", "up", "down",
                                                 "load", "store", "fetch")}


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
            refs.append(f"{upper(r.cls)}({index})" + (f" + {at}" if at != "0" else ""))
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
        if s.op == "gather":
            return [f"zr_gather(z, {queue}, {refs[0]}, {ints['from_step']}, {refs[1]}, "
                    f"{ints['step']}, {ints['bytes']});"]
        if s.op == "batch":
            times = "" if ints["of_rank"] == "1" else f"{ints['of_rank']} * "
            grain = f"{times}zr_rank(z) + {ints['grain']}"
            return [f"zr_batch(z, {grain});" if self.p.together == 1 else
                    f"zr_batch_at(z, {grain}, {refs[0]} - TOKENS(0));"]
        if s.op == "alltoall":
            return [f"zr_alltoall(z, {queue}, {refs[0]}, {ints['step']}, {refs[1]}, "
                    f"{ints['bytes']});"]
        if s.op == "reducescatter":
            kind = "ZR_F32" if ints["width"] == "4" else f"ZR_{self.p.head.real.upper()}"
            return [f"zr_reducescatter(z, {queue}, {refs[0]}, {ints['step']}, {refs[1]}, "
                    f"{ints['bytes']}, {kind});"]
        if s.op == "copy":
            per = [f" + zr_rank(z) * {ints[n]}" if ints[n] != "0" else ""
                   for n in ("from_rank", "to_rank")]
            return [f"zr_copy(z, {queue}, {refs[0]}{per[0]}, {refs[1]}{per[1]}, {ints['bytes']});"]
        if s.op == "done":
            return [f"zr_done(z, {queue});"]
        if s.op == "allreduce":
            return [f"zr_allreduce(z, {queue}, {refs[0]}, {refs[1]}, {ints['count']});"]
        if s.op == "drop":
            return [f"zr_drop(z, {queue}, {refs[0]}, {number(self.p.cls(s.outs[0].cls).stride)});"]
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
        return out


class _Fns:
    """Functions of kernel calls: those of a line stand on one, like the rows of a table."""

    def __init__(self, p: Plan) -> None:
        self.p = p
        self.classes = {c.name for c in p.classes}

    def term(self, word: str, formals: dict[str, str], first: bool) -> str:
        if "*" in word:
            name, factor = word.split("*")
            return f"{'zr_rank(z)' if name == 'r' else formals[name]} * {number(int(factor))}"
        if word in formals:
            return formals[word]
        if word in self.classes:
            return f"a + {upper(word)}(0)" if first else upper(word)
        return number(int(word))

    def operand(self, text: str, formals: dict[str, str]) -> str:
        if text in ("null", "recipe", "sources"):
            return {"null": "NULL", "recipe": "&recipe",
                    "sources": "SOURCES"}[text]
        if text.startswith("&"):
            return f"ONE({self.operand(text[1:], formals)})"
        if text.startswith("freq."):
            return lower(text)
        if re.fullmatch(r"-?\d+", text):
            return number(int(text))
        if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text) or text in ("inf", "nan"):
            return text
        words = text.split("+")
        return " + ".join(self.term(w, formals, i == 0) for i, w in enumerate(words)
                          if w != "0" or i == 0)

    def operands(self, args: Sequence[str], formals: dict[str, str]) -> Iterator[str]:
        """Of a call; the three that choose tensors and elements of a flat have one name."""
        it = iter(args)
        for text in it:
            if text.startswith(("spans.", "moved.")):
                first, size = next(it), next(it)
                if "at" in first.split("+"):
                    yield from self.tile(text, first, size, formals)
                else:
                    yield f"{part_name(self.p, text, first, size)}({formals['l']})"
            else:
                yield self.operand(text, formals)

    def tile(self, text: str, first: str, size: str, formals: dict[str, str]) -> Iterator[str]:
        """The tensors and elements of a part of a shard."""
        yield from of_spans(self.p, text)
        yield from (self.operand(text, formals) for text in (first, size))

    def one(self, fn: plan.Fn) -> list[str]:
        """A function; what is named once stands where it is used, the rest gets a variable."""
        names = [*fn.ins, *(o for o in fn.outs if o not in fn.ins), *fn.ints]
        at = {n: i for i, n in reversed(list(enumerate([*fn.ins, *fn.outs, *fn.ints])))}
        used = [re.split(r"[+&*]", a)[a.startswith("&")] for c in fn.calls for a in c.args]
        place = {c: f"a + {upper(c)}(0)" for c in sorted(self.classes) if c in used}
        place |= {n: f"i[{at[n]}]" if n in fn.ints else f"AT({at[n]})" for n in names}
        place |= {"out": f"HOST({at['out']})"} if "out" in at else {}
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


def part_name(p: Plan, text: str, first: str, size: str) -> str:
    """spans.block from its first element on: ALL_BLOCK, or, of a rank, PART_BLOCK, of which what
    stays on the device is HERE_BLOCK and the rest THERE_BLOCK; moved.block, what is not frozen of
    it: MOVED_ALL_BLOCK ..."""
    kind, _, flat = text.partition(".")
    moved, f = "MOVED_" if kind == "moved" else "", p.flat(flat)
    part = "ALL" if "r*" not in first else "PART" if int(size) == f.shard else \
        "THERE" if first.endswith(f"+{f.near}") else "HERE"
    return f"{moved}{part}_{upper(flat)}"


def of_spans(p: Plan, text: str) -> tuple[str, str]:
    """The table of a flat's tensors, and how many are meant: those that are frozen come last."""
    kind, _, flat = text.partition(".")
    mine = [t for t in p.tensors if t.flat == flat]
    return f"spans_{flat}", str(sum(not t.frozen or kind == "spans" for t in mine))


def parts(p: Plan) -> list[str]:
    """What PART_ and ALL_ stand for."""
    out = {}
    for c in (c for fn in p.fns for c in fn.calls):
        for n, text in enumerate(c.args):
            if text.startswith(("spans.", "moved.")) and "at" not in c.args[n + 1].split("+"):
                first, size = c.args[n + 1:n + 3]
                start = _Fns(p).operand(first, {"l": "(l)"})
                out[part_name(p, text, first, size)] = \
                    f"{', '.join(of_spans(p, text))}, {start}, {number(int(size))}"
    return [f"#define {name}(l) {text}" for name, text in sorted(out.items())]


def sample(p: Plan) -> list[str]:
    """The draw from the row of logits that is the last thing an evaluation makes."""
    fn = next(f for f in p.fns if f.name == "eval.head")
    base, _, at = fn.calls[-1].args[0].partition("+")
    return wrap(f"d->token = zk_sample(k, a + {number(p.cls(base).at + int(at))}, {p.head.vocab}, "
                "(float)d->temperature, d->u);", 4)


def queues(p: Plan) -> list[str]:
    """Those that the plan's steps use."""
    used = {step.queue for s in p.sections for step in s.steps} | {"main"}
    return [q for q in QUEUES if q in used]


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
        "launches": columns(p),
        "columns": [f'{{"{t}", {number(p.arena(t))}, {number(reserve.nccl(t, p.head.ranks))}}},'
                    for t in p.head.targets],
        "host": number(p.host), "desk": number(p.cls("desk").at),
        "space": number(p.cls("space").at), "inlet": number(p.cls("inlet").at),
        "inlets": p.cls("inlet").slots, "inlet_step": number(p.cls("inlet").stride),
        "spans": [{"name": f.name, "rows": spans(p, f)} for f in p.flats],
        "tables": [{"name": lower(t.name).replace("table", "freq"),
                    "rows": [real(x) + "," for x in t.freq]} for t in p.tables],
        "recipe": recipe(p),
        "fns": sorted((fns.one(f) for f in p.fns), key=lambda lines: len(lines) == 1),
        "parts": parts(p), "sources": "ZR_REDUCE" if p.head.overlap else "ZR_MAIN",
        "sections": sections(p, flat), "grains": grains(p),
        "functions": functions(p), "flats": flats(p), "filed": filed(p, cost),
        "files": files(p), "sample": sample(p),
        "tokens": number(p.cls("tokens").at), "targets": number(p.cls("targets").at),
        "skips": p.recipe.skips, "dtype": ops.TYPES[p.head.real],
        "shared": number(p.shared), "hosted": number(p.end("hosted")),
        "queues": " | ".join(f"1 << {QUEUES[q]}" for q in queues(p)), "cost": cost,
    }
