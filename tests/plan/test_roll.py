"""test_roll.py -- tests loops: rolling loses nothing and shortens a deep model to a few lines, and
train.c, in loops or flat, follows the plan line by line and is readable.

golden/gpt2-124m/train.c is a whole one. After an intended change, write it anew with
    .venv/bin/python tests/plan/test_roll.py
and read it before you commit it.
"""

import functools
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

HERE = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "gen")]

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zg.facts import queues
from zg.plan import roll
from zg.plan.plan import Event, Int, Plan, Ref, Section, Step
from zg.predict import cost
from zg.write import emit, explain, tables, view
from zg.write.steps import SECTIONS

from tests.lib import trainer
from tests.lib.plans import EACH, NAMES, WAYS, keys, planned

TINY = [name for name in NAMES if "tiny" in name]


def source(p: Plan, flat: bool = False) -> str:
    return emit.train(view.view(p, cost.summary(p), explain.memory_line(p), flat))


# ---- rolling loses nothing


@EACH
def test_every_section_comes_back(name: str, way: str) -> None:
    for section in planned(name, *keys(name, way)).sections:
        assert roll.unroll(roll.roll(section.steps)) == section.steps


small = st.integers(0, 3)
refs = st.lists(
    st.builds(
        Ref,
        st.sampled_from(["x", "ring.a"]),
        small,
        st.sampled_from([0, 64]),
        st.booleans(),
    ),
    max_size=2,
).map(tuple)
events = st.lists(
    st.builds(Event, st.sampled_from(["full", "new"]), small), max_size=2
).map(tuple)
units = st.one_of(st.sampled_from(["", "head"]), st.builds("block[{}]".format, small))
ints = st.lists(
    st.builds(Int, st.just("n"), st.integers(-2, 3), small), max_size=1
).map(tuple)
steps = st.builds(
    Step,
    st.sampled_from(["main", "gather"]),
    st.sampled_from(["fwd", "done"]),
    units,
    refs,
    refs,
    ints,
    events,
    events,
)


@st.composite
def lists(draw) -> list[Step]:
    """Draw windows of steps that repeat, with numbers that grow evenly or nearly so."""
    out: list[Step] = []
    for _ in range(draw(st.integers(0, 3))):
        window = draw(st.lists(steps, min_size=1, max_size=7))
        grow = draw(st.integers(0, 2))
        for turn in range(draw(st.integers(1, 5))):
            for s in window:
                values = [v + turn * grow for v in roll.numbers(s)]
                out.append(roll.rebuild(s, values))
        if draw(st.booleans()):
            out.append(draw(steps))
    return out


@pytest.mark.slow
@settings(max_examples=300)
@given(lists())
def test_any_list_comes_back(made: list[Step]) -> None:
    nodes = roll.roll(made)
    assert roll.unroll(nodes) == tuple(made)
    assert sum(1 for _ in lines(nodes)) <= len(made)


def lines(nodes: tuple[roll.Node, ...]) -> Iterator[roll.Line]:
    for node in nodes:
        yield from [node] if isinstance(node, roll.Line) else lines(node.body)


def test_a_run_becomes_a_loop() -> None:
    """Equal steps with evenly growing numbers are rolled; one odd number prevents it (a
    control)."""
    run = [
        Step(
            "main",
            "fwd",
            f"block[{n}]",
            ins=(Ref("x", n),),
            outs=(Ref("x", n + 1),),
        )
        for n in range(9)
    ]
    assert roll.roll(run) == (
        roll.Loop(9, (roll.Line(run[0], (0,) * 5, ((1, 1, 0, 1, 0),)),)),
    )
    odd = [replace(s, outs=(Ref("x", 0),)) if n == 4 else s for n, s in enumerate(run)]
    assert len(list(lines(roll.roll(odd)))) == 3


def test_slots_in_turn_are_found_whatever_their_name() -> None:
    """Slots that wrap around have a modulus, also if they count down; others have none."""
    up = [
        Step(
            "main",
            "fwd",
            "",
            ins=(Ref("any", n % 3),),
            recs=(Event("e", (8 - n) % 4),),
        )
        for n in range(9)
    ]
    assert roll.roll(up) == (
        roll.Loop(9, (roll.Line(up[0], (0, 3, 0, 4), ((0, 1, 0, 3),)),)),
    )
    down = [Step("main", "bwd", "", ins=(Ref("any", 8 - n),)) for n in range(9)]
    assert roll.roll(down) == (
        roll.Loop(9, (roll.Line(down[0], (0,) * 3, ((0, -1, 0),)),)),
    )


def test_loops_nest_no_deeper_than_they_have_names() -> None:
    """Four nested repetitions, each with its own growth, become loops no deeper than there are
    variables."""
    steps = [
        Step(
            "main",
            "mark",
            "",
            recs=(Event("e", 1000 * a + 100 * b + 10 * c + d),),
        )
        for a in range(4)
        for b in range(4)
        for c in range(4)
        for d in range(4)
    ]

    def depth(n):
        return 1 + max(map(depth, n.body)) if isinstance(n, roll.Loop) else 0

    rolled = roll.roll(steps)
    assert max(map(depth, rolled)) == roll.DEPTH == len(tables.VARS) == 3
    assert roll.unroll(rolled) == tuple(steps)


# ---- rolling shortens


def deep(tmp_path: pathlib.Path, name: str, layers: int) -> pathlib.Path:
    text = (trainer.ROOT / "model_specs" / f"{name}.yaml").read_text()
    count = next(line for line in text.splitlines() if "- blocks:" in line)
    path = tmp_path / f"{name}-{layers}.yaml"
    path.write_text(text.replace(count, f"  - blocks: {layers}"))
    return path


def length(text: str) -> int:
    return len(text.splitlines())


def steps_of(text: str) -> str:
    """Return the part of a train.c with the plan's steps."""
    return text.partition("in order of issue")[2].partition("/* ---- the program")[0]


def work_of(text: str) -> str:
    """Return a train.c's functions and the names that they use, without launches."""
    return text.partition("/* ---- flat")[2].partition("/* ---- the program")[0]


def rolled_up(p: Plan) -> bool:
    """Return whether loops leave less than a tenth of the lines of steps."""
    return length(steps_of(source(p))) * 10 < length(steps_of(source(p, True)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["gpt2-124m", "llama3-8b"])
def test_length_is_of_the_kinds(name: str, stage: int, tmp_path: pathlib.Path) -> None:
    """Four times the blocks and 2,048 times the ranks have the same lines of steps, except where a
    wider number breaks a line or flats share a slot. Without loops each step is a line."""

    def made(layers: int, ranks: int) -> Plan:
        return planned(
            str(deep(tmp_path, name, layers)),
            f"zero.stage={stage}",
            f"cluster.ranks={ranks}",
            "train.micro_batch=1",
            f"train.global_batch={ranks * 2}",
        )

    base = length(steps_of(source(made(24, 8))))
    for layers, ranks in ((96, 8), (96, 16384)):
        p = made(layers, ranks)
        text = source(p)
        assert abs(length(steps_of(text)) - base) <= 8 and len(text) < 100_000
        assert length(source(p, True)) > sum(len(s.steps) for s in p.sections)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks,again", [(1, "none"), (8, "full"), (16384, "none")])
def test_a_deep_gpt_is_short(
    stage: int, ranks: int, again: str, tmp_path: pathlib.Path
) -> None:
    """96 blocks are loops. GPUs lengthen only the launch table and the runtime's fields."""

    def made(targets: str) -> Plan:
        return planned(
            str(deep(tmp_path, "gpt2-124m", 96)),
            f"zero.stage={stage}",
            f"cluster.ranks={ranks}",
            "train.micro_batch=1",
            f"train.recompute={again}",
            f"train.global_batch={ranks * 2}",
            f"targets=[{targets}]",
        )

    few, more = made("cpu"), made("cpu, sm_80, sm_90, sm_100")
    assert rolled_up(few)
    assert work_of(source(few)) == work_of(source(more))


@pytest.mark.parametrize("near", [0.2, 1.1, 100])
@pytest.mark.parametrize("ranks", [8, 16384])
def test_a_deep_gpt_some_of_which_stays(
    ranks: int, near: float, tmp_path: pathlib.Path
) -> None:
    """A deep model with units that stay gathered is rolled up. near: the reuse distance as a part
    of all elements."""
    path = str(deep(tmp_path, "gpt2-124m", 96))
    keys = (
        "zero.stage=3",
        f"cluster.ranks={ranks}",
        "train.micro_batch=1",
        "targets=[cpu]",
        f"train.global_batch={ranks * 2}",
        "zero.stage3_max_live_parameters=1000000000000",
    )
    size = planned(path, *keys).head.params
    p = planned(path, *keys, f"zero.stage3_max_reuse_distance={int(near * size)}")
    assert 0 < cost.staying(p) <= 97
    assert rolled_up(p)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 16384])
def test_a_deep_gpt_all_micro_batches_of_which_go_through_a_unit(
    ranks: int, tmp_path: pathlib.Path
) -> None:
    """Four times the micro-batches have the same lines, except where a wider number breaks a
    line."""
    path = str(deep(tmp_path, "gpt2-124m", 96))
    plans = [
        planned(
            path,
            "zero.stage=3",
            f"cluster.ranks={ranks}",
            "train.micro_batch=1",
            "targets=[cpu]",
            f"train.global_batch={ranks * micro_batches}",
            "train.accumulate=layers",
        )
        for micro_batches in (4, 16)
    ]
    few, more = (length(source(p)) for p in plans)
    assert all(map(rolled_up, plans)) and abs(few - more) <= 8


# ---- train.c does as the plan says

RANK = 1  # the rank that trace.c plays


def moved(
    p: Plan, s: Step, ints: dict[str, int], at: Callable[[Ref], int]
) -> list[int]:
    """Return the numbers that a command of the runtime gets."""
    group = ["", *(x.name for x in p.groups)].index(s.group) - 1
    ins, outs = [at(r) for r in s.ins], [at(r) for r in s.outs]
    match s.op:
        case "batch":
            place = s.outs[0].index * p.cls("tokens").stride
            of_rank = ints["of_rank"] + ints["micro_batch"]
            return [of_rank, place] if p.together > 1 else [of_rank]
        case "gather":
            step, size = ints["step"], ints["bytes"]
            return [group, ins[0], ints["from_step"], outs[0], step, size]
        case "alltoall":
            return [group, ins[0], ints["step"], outs[0], ints["bytes"]]
        case "reducescatter":
            size, width = ints["bytes"], ints["width"]
            return [group, ins[0], ints["step"], outs[0], size, width]
        case "allreduce":
            return [group, ins[0], outs[0], ints["count"]]
        case "done":
            return [group, *ins]
        case "copy":
            source = ins[0] + RANK * ints["from_rank"]
            return [source, outs[0] + RANK * ints["to_rank"], ints["bytes"]]
    raise AssertionError(f"no command {s.op}")


def awaited(lines: list[str]) -> list[str]:
    """Return the lines without records that are repeated before anyone waits for the event."""
    out = []
    for n, line in enumerate(lines):
        of_event = re.compile(rf"(rec|wait) \d+ {line.split()[-1]}")
        after = filter(of_event.fullmatch, lines[n + 1 :])
        if not line.startswith("rec ") or next(after, "") != line:
            out.append(line)
    return out


def said(p: Plan, flat: bool) -> Iterator[str]:
    """Yield the lines that trace.c prints for a program of this plan."""
    for section in p.sections:
        lines = lines_of(p, section)
        for g in range(section.repeat):
            one = [*lines(g)]
            yield from awaited(one) if flat else one


def lines_of(p: Plan, section: Section) -> Callable[[int], Iterator[str]]:
    order = [*queues.QUEUES]
    first, n = {}, 0
    for e in p.events:
        first[e.name], n = n, n + e.index

    def at(r):
        return p.cls(r.cls).at + r.index * p.cls(r.cls).stride + r.at + (r.last << 62)

    fns = {f.name: f for f in p.fns}

    def lines(g: int) -> Iterator[str]:
        for s in section.steps:
            q, ints = (
                order.index(s.queue),
                {i.name: i.value + g * i.per for i in s.ints},
            )
            yield from (f"wait {q} {first[e.name] + e.index}" for e in s.waits)
            if s.op in fns:
                values = [at(r) for r in (*s.ins, *s.outs)]
                values += [ints[name] for name in fns[s.op].ints]
                yield " ".join(map(str, [s.op.replace(".", "_"), q, *(values or [0])]))
            elif s.op != "mark":
                words = [s.op, q, *moved(p, s, ints, at)]
                yield " ".join(map(str, words))
            yield from (f"rec {q} {first[e.name] + e.index}" for e in s.recs)

    return lines


def traced(text: str, folder: pathlib.Path) -> list[str]:
    """Return the calls that a train.c makes to the runtime."""
    (folder / "train.c").write_text(text)
    trace = trainer.ROOT / "tests" / "trace"
    trainer.sh(
        "gcc",
        "-std=gnu11",
        "-O0",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-function",
        "-Wno-unused-const-variable",
        "-Iruntime",
        "-Ikernels",
        f"-I{trace}",
        "-include",
        trace / "trace.h",
        folder / "train.c",
        trace / "trace.c",
        "-static",
        "-Wl,--unresolved-symbols=ignore-all",
        "-o",
        folder / "traced",
    )
    return trainer.sh(folder / "traced").splitlines()


# Name, way, flat: small models in every way with loops; large ones; three without loops.
SAID = [
    *((name, way, False) for name in TINY for way in WAYS),
    ("gpt2-124m", "stage 0, 2 ranks", False),
    ("gpt2-124m", "stage 3, three micro-batches through a unit", False),
    ("llama3-405b", "as it stands", False),
    ("llama-tiny", "stage 1, 4 micro-batches per rank", True),
    ("gpt-tiny", "stage 3, a part of the optimizer on the host", True),
    ("gpt-tiny", "as it stands", True),
]


@pytest.mark.parametrize("name,way,flat", SAID)
def test_train_c_says_the_plan(
    name: str, way: str, flat: bool, tmp_path: pathlib.Path
) -> None:
    p = planned(name, *keys(name, way))
    got, want = traced(source(p, flat), tmp_path), list(said(p, flat))
    assert len(got) > 50
    assert got == want


def test_a_flat_step_records_nothing_in_vain() -> None:
    """Only the last one of gpt-tiny's updates has a record that is waited for, and flat steps make
    no other."""
    p = planned("gpt-tiny")
    assert len([*said(p, True)]) < len([*said(p, False)])
    update = source(p, True).partition("static void update(")[2]
    update = update.partition("\n}\n")[0]
    assert update.count("update_") == 5 and update.count("END_MAIN") == 1


@pytest.mark.parametrize("name", TINY)
def test_flat_and_in_loops_give_the_same_weights(
    name: str, tmp_path: pathlib.Path
) -> None:
    p = planned(name)
    trainer.write_tokens(tmp_path / "tokens.bin", np.arange(33 * 60) * 7919 % 251)
    out = [
        trainer.sh(
            trainer.build(source(p, flat)),
            "--data",
            tmp_path / "tokens.bin",
            "--steps",
            3,
            "--hash",
        )
        for flat in (False, True)
    ]
    told = [
        [x for x in text.splitlines() if x.startswith(("weights", "loss", "wire"))]
        for text in out
    ]
    assert told[0] == told[1] and len(told[0]) == 3


# ---- train.c is readable

GOLDEN = HERE / "golden" / "gpt2-124m" / "train.c"
READ = [
    *((name, "as it stands") for name in NAMES),
    *((name, way) for name in ("gpt-tiny", "llama-tiny") for way in [*WAYS][1:]),
    ("gpt2-1558m", "stage 3, all on the host"),
    ("gpt2-124m", "stage 0, 2 ranks"),
]


@functools.cache
def written(name: str, way: str) -> str:
    return source(planned(name, *keys(name, way)))


def functions_of(text: str) -> str:
    """Return the functions of kernel calls, and the verbs."""
    return text.partition("#define RANK")[2].partition("in order of issue")[0]


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 100]


def naked(text: str) -> list[str]:
    """Return operands without a name: an ordinal, bytes behind a pointer or in a step, or a
    kernel's number."""
    code = re.sub(r"(?s)enum \{.*?\};|#define.*?\n", "", text)
    kernels = re.findall(r"(?s)\bzk_\w+\(k, .*?\);", code)
    plain = [x for call in kernels for x in re.findall(r",\s+[\d.]+[,)]", call)]
    code = re.sub(r"(?s)([\d.]+ )?/\*.*?\*/|\bfor \(.*?\)|\bzr_batch\(.*?;", "", code)
    ordinal = r"(?<!= )\b(?:AT|HOST)\(\w+\)|(?<!= )(?<!\(z, )\bi\[\d+\]"
    return plain + re.findall(rf"{ordinal}|\b[a-z_]+ \+ \d+|(?<![\w.])\d{{4,}}\b", code)


def verbs(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the comment, the name and the body of each verb."""
    found = r"(?s)/\* ([^-/][^/]*?) \*/\nstatic void (\w+)\(zr \*z[^)]*\)\n\{\n(.*?)\}"
    for head, name, body in re.findall(found, text):
        if name in (*SECTIONS, "step"):
            continue
        yield re.sub(r"\s+(\* )?", " ", head), name, body


def told(text: str) -> set[str]:
    """Return the events in a part of a comment: RING_BLOCK is free -> FREE_RING_BLOCK."""
    out = set()
    for names, word in re.findall(r"([\w, ]*?) (?:is|are) (\w+)", text):
        events = re.findall(r"\b[A-Z]\w+", names)
        out |= {
            name.replace("ZR_", "END_") if word == "done" else f"{word.upper()}_{name}"
            for name in events
        }
        out |= {"UPDATED"} if word == "updated" else set()
    return out


def untold(text: str) -> list[str]:
    """Return verbs whose comments do not name exactly the events that they wait for from others and
    record for others."""
    out = []
    waited: dict[str, set[str]] = {}
    recorded: dict[str, set[str]] = {}
    for head, name, body in verbs(text):
        core = re.search(r"\b(\w+_now)\(z", body)
        waits = set(waited[core[1]] if core else ())
        recs = set(recorded[core[1]] if core else ())
        for line in re.findall(r"(?s)\bzr_(?:wait|record).*?;", body):
            events = set(re.findall(r"\b[A-Z]\w*\([^()]*\)", line))
            if line.startswith("zr_record"):
                recs |= events
            else:
                waits |= events - recs
                recs -= events
        waited[name], recorded[name] = waits, recs
        before, _, then = head.partition("; then ")
        said = before.partition(". Waits until ")[2], then.partition(". ")[0]
        want = [{x.partition("(")[0] for x in y} for y in (waits, recs)]
        out += [head] * ([*map(told, said)] != want)
    return out


def anothers(text: str) -> list[str]:
    """Return verbs, and calls of them, that count elements of a flat that is not in their name."""
    flat = r"(?<!SIZE\()\b(?:SHARD|NEAR|FAR|GATHER|REDUCE|TILE)_([A-Z]\w*)\b(?!\()"
    code = [(name, body) for _, name, body in verbs(text)]
    for name in [name for name, _ in code]:
        calls = re.findall(rf"(?s)\b{name}\(z, .*?\);", text)
        code += [(name, call) for call in calls]
    return [
        f"{name}: {of}"
        for name, used in code
        for of in re.findall(flat, used)
        if not re.sub(r"(_last|_now)+$", "", name).endswith(of.lower())
    ]


def twice(text: str) -> list[str]:
    """Return offsets that one enumeration has more than once."""
    out = []
    for body in re.findall(r"(?s)enum \{(.*?)\};", text):
        said = re.findall(r"= (?:INT64_C\()?(\d+)", body)
        out += [n for n in said if said.count(n) > 1]
    return out


def unheaded(text: str) -> list[str]:
    """Return functions without a comment before them."""
    heads = re.findall(r"(?m)^(.*)\n((?:FN\(\w+\)|static void \w+\([^)]*\))\n\{)", text)
    return [name for before, name in heads if not before.endswith("*/")]


FAULTS = {
    "too long": (too_long, "x" * 101),
    "an ordinal": (naked, "zk_add(k, L_add_0, AT(3), s + RESIDUAL);"),
    "a naked number": (naked, "zk_push(k, L_push_0, i[2]);"),
    "a naked offset": (naked, "zk_add(k, L_add_0, y, s + 3153920);"),
    "naked bytes of a step": (
        naked,
        "    down_sum_block(z, i, 53248 + 16384 * j, TILE);",
    ),
    "a kernel's number": (naked, "zk_push(k, L_push_0, node, 512, n);"),
    "a wait that is not told": (
        untold,
        "/* Gathers RING_BLOCK. Waits until RING is free. */\n"
        "static void gather_block(zr *z)\n{\n"
        "    zr_waits(z, ZR_GATHER, FULL_STAGE_BLOCK(0), FREE_RING(0));\n}",
    ),
    "a record that is not there": (
        untold,
        "/* Calls f; then RING is free. */\nstatic void run_f(zr *z)\n{\n}",
    ),
    "another's shard": (
        anothers,
        "/* Gathers it. */\nstatic void gather_block(zr *z)\n{\n"
        "    zr_gather(z, 4 * SHARD_EMBED);\n}",
    ),
    "another's shard in a call": (
        anothers,
        "/* Gathers it. */\nstatic void gather_block(zr *z, int64_t n)\n{\n}\n"
        "    gather_block(z, 4 * SHARD_EMBED);",
    ),
    "an offset twice": (twice, "enum {\n    A = 64,\n    B = 64,\n};"),
    "no head": (unheaded, "\nFN(fwd_block)\n{"),
    "no head over two lines": (
        unheaded,
        "\nstatic void reduce(zr *z, int64_t l,\n    int64_t slot)\n{",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    find, text = FAULTS[fault]
    assert find(text)


@pytest.mark.parametrize("name,way", READ)
def test_train_c_is_fit_to_be_read(name: str, way: str) -> None:
    text = written(name, way)
    code = functions_of(text)
    assert "FN(train_head" in code
    assert too_long(text) == []
    steps = steps_of(text)
    assert naked(code) == naked(steps) == []
    assert twice(code) == []
    assert unheaded(code) == []
    assert untold(code) == anothers(code + steps) == []


def test_two_units_show_no_line() -> None:
    """A slot is printed as a number minus the unit's if three units show that, not if two do."""
    found = [
        re.findall(
            r"\b\d+ [-+] l\b",
            functions_of(written(name, "stage 3, all recomputed")),
        )
        for name in ("llama-tiny", "gpt-tiny")
    ]
    assert found[0] == [] != found[1]


def golden_source() -> str:
    keys = ("zero.stage=3", "cluster.ranks=2")
    return trainer.generate(trainer.ROOT / "model_specs" / "gpt2-124m.yaml", *keys)


def test_golden_train_c() -> None:
    how = "train.c has changed; if that is meant: .venv/bin/python tests/plan/test_roll.py"
    assert golden_source() == GOLDEN.read_text(), how


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(golden_source())
