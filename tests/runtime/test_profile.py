"""test_profile.py -- tests out/train --profile: the bits stay, every command of a profiled step is
noted once, the table adds up, Perfetto can read the file, and errors come at the start."""

from __future__ import annotations

import collections
import itertools
import json
import pathlib
import re
import resource

import pytest
from zg.facts import queues
from zg.plan.plan import Plan
from zg.predict import cost
from zg.read import spec as reader
from zg.search import search

from tests.lib import law, program, trainer

QUEUES = list(queues.QUEUES)
RUNTIME = pathlib.Path(__file__).resolve().parents[2] / "runtime"
STEPS = "steps"  # the thread of whole steps
OFFLOAD = "zero.offload_optimizer.device=cpu"
FILED = (
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=/tmp",
)
ALL_FILED = (
    *FILED,
    "zero.offload_param.device=nvme",
    "zero.offload_param.nvme_path=/tmp",
    "zero.sub_group_size=20000",
    "train.accumulate=layers",
)
WAYS = [
    (0, 1, ()),
    (0, 2, ()),
    (1, 2, ()),
    (2, 4, ()),
    (3, 1, ()),
    (3, 4, ()),
    (3, 2, ("train.accumulate=layers",)),
    (3, 2, ("zero.overlap_comm=false",)),
    (1, 2, (OFFLOAD,)),
    (2, 2, FILED),
    (3, 2, (OFFLOAD, "zero.offload_param.device=cpu", "train.precision=bf16")),
]

Event = dict[str, object]


def keys(stage: int, ranks: int, more: tuple[str, ...]) -> list[str]:
    return [
        f"zero.stage={stage}",
        f"cluster.ranks={ranks}",
        "train.micro_batch=1",
        "train.global_batch=8",
        "zero.reduce_bucket_size=9000",
        *more,
    ]


def plan_of(*settings: str) -> Plan:
    return search.find(reader.load(str(law.path("gpt")), settings)).plan


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("profile") / "tokens"
    trainer.write_tokens(path, law.tokens(256, 5000))
    return path


def run(
    binary: pathlib.Path,
    tokens: pathlib.Path,
    *options: object,
    steps: int = 3,
    **settings: object,
) -> program.Result:
    return program.run(
        binary,
        "--data",
        tokens,
        "--steps",
        steps,
        "--threads",
        1,
        "--hash",
        *options,
        **settings,
    )


def read(path: pathlib.Path) -> dict[tuple[int, str], list[Event]]:
    """Return the complete events of each rank and thread, sorted by time."""
    events = json.loads(path.read_text())
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["name"] == "thread_name" and e["ph"] == "M"
    }
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        f"rank {pid}" for pid, _ in threads
    }
    found: dict[tuple[int, str], list[Event]] = {
        (pid, t): [] for (pid, _), t in threads.items()
    }
    for e in events:
        if e["ph"] == "X":
            assert e["dur"] >= 0
            found[e["pid"], threads[e["pid"], e["tid"]]].append(e)
        else:
            assert e["ph"] == "M"
    return {
        at: sorted(row, key=lambda e: (e["ts"], e["ts"] + e["dur"]))
        for at, row in found.items()
    }


def ns(us: float) -> int:
    return round(us * 1000)


def one_after_the_other(row: list[Event]) -> None:
    for a, b in itertools.pairwise(row):
        assert ns(a["ts"]) + ns(a["dur"]) <= ns(b["ts"]), (a, b)


def units(p: Plan, name: str) -> list[str]:
    """Return the units of a forward or backward function's calls, in the plan's order."""
    return [
        f"{name} {x.unit[:-1].split('[')[1]}"
        for x in p.section("micro_batch").steps
        if x.op == name.replace("_", ".", 1)
    ] * p.section("micro_batch").repeat


def named(e: Event) -> str:
    """Return an event's name without the number of the unit."""
    return str(e["name"]).split()[0]


def commands(p: Plan, queue: str) -> collections.Counter[str]:
    """Return the commands of a queue in a step by name; a wait has the name of the queue that it is
    for."""
    out: collections.Counter[str] = collections.Counter()
    for s in p.step:
        for x in s.steps:
            if x.queue == queue and x.op != "mark":
                out[x.op.replace(".", "_")] += s.repeat
            if x.queue == queue:
                out["wait"] += s.repeat * len(x.waits)
    return +out


def check(
    p: Plan, path: pathlib.Path, first: int, last: int, gpu: bool = False
) -> None:
    """Check the file of a run of this plan. A GPU does nothing for `done` and for some waits."""
    found = read(path)
    used = {x.queue for s in p.sections for x in s.steps}
    assert set(found) == {
        (rank, name) for rank in range(p.head.ranks) for name in {*used, STEPS}
    }
    for rank in range(p.head.ranks):
        whole = {e["name"]: e for e in found[rank, STEPS]}
        assert list(whole) == [f"step {n}" for n in range(first, last + 1)]
        for step in range(first, last + 1):
            of_step = {
                q: [e for e in found[rank, q] if e["args"]["step"] == step]
                for q in used
            }
            for queue, row in of_step.items():
                want, noted = (
                    commands(p, queue),
                    collections.Counter(map(named, row)),
                )
                if gpu:
                    assert noted["wait"] <= want["wait"]
                    want["done"], want["wait"] = 0, noted["wait"]
                assert noted == +want
                for name in noted:  # in the order of the plan
                    assert [e["args"]["call"] for e in row if named(e) == name] == list(
                        range(noted[name])
                    )
            for name in ("fwd_block", "bwd_block"):
                assert [
                    e["name"] for e in of_step["main"] if named(e) == name
                ] == units(p, name)
            wire = sum(
                e["args"].get("bytes", 0)
                for row in of_step.values()
                for e in row
                if e["name"] != "copy"
            )
            assert wire == cost.training_wire(p).bytes
            outer = whole[f"step {step}"]
            for e in (e for row in of_step.values() for e in row):
                assert ns(outer["ts"]) <= ns(e["ts"])
                assert ns(e["ts"]) + ns(e["dur"]) <= ns(outer["ts"]) + ns(outer["dur"])
        for queue in (*used, STEPS):
            one_after_the_other(found[rank, queue])


# ---- the commands that it notes


@pytest.mark.parametrize("stage,ranks,more", WAYS)
def test_every_command_once_and_the_same_bits(
    tmp_path: pathlib.Path,
    tokens: pathlib.Path,
    stage: int,
    ranks: int,
    more: tuple[str, ...],
) -> None:
    settings = keys(stage, ranks, more)
    p, binary = (
        plan_of(*settings),
        trainer.build(trainer.generate(law.path("gpt"), *settings)),
    )
    plain = run(binary, tokens)
    assert plain.code == 0, plain.err
    for mode in ("eager", "late", "shuffled:3"):
        done = run(binary, tokens, "--profile", tmp_path / "p", "--queue", mode)
        assert done.code == 0, done.err
        assert done.line("weights") == plain.line("weights")
        assert done.line("wire") == plain.line("wire")
        check(p, tmp_path / "p", 2, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("kind", [trainer.GCC, trainer.EMULATED], ids=["cpu", "gpu"])
def test_bytes_of_copies(
    tmp_path: pathlib.Path, tokens: pathlib.Path, kind: trainer.Kind
) -> None:
    settings = [*keys(1, 2, FILED), "train.global_batch=2"]
    binary = trainer.build(trainer.generate(law.path("gpt"), *settings), kind)
    assert run(binary, tokens, "--profile", tmp_path / "p").code == 0
    want = collections.Counter()
    for s in plan_of(*settings).step:
        for x in s.steps:
            want[x.queue] += s.repeat * sum(
                i.value for i in x.ints if x.op == "copy" and i.name == "bytes"
            )
    assert all(want[queue] for queue in ("down", "up", "load", "store"))
    for (_, queue), row in read(tmp_path / "p").items():
        moved = sum(e["args"]["bytes"] for e in row if e["name"] == "copy")
        assert moved == 2 * want[queue]  # of two steps


@pytest.mark.slow
@pytest.mark.parametrize("kind", [trainer.ASAN, trainer.TSAN], ids=["asan", "tsan"])
@pytest.mark.parametrize("mode", ["eager", "shuffled:1"])
def test_sanitizers_find_nothing(
    tmp_path: pathlib.Path, tokens: pathlib.Path, kind: trainer.Kind, mode: str
) -> None:
    settings = keys(3, 2, (OFFLOAD,))
    binary = trainer.build(trainer.generate(law.path("gpt"), *settings), kind)
    law.run(
        binary,
        "--data",
        tokens,
        "--steps",
        3,
        "--threads",
        2,
        "--profile",
        tmp_path / "p",
        "--queue",
        mode,
        log=tmp_path / "log",
        under=program.in_place() if kind is trainer.TSAN else (),
    )
    check(plan_of(*settings), tmp_path / "p", 2, 3)


# ---- the profiled steps


@pytest.fixture(scope="module")
def tiny() -> pathlib.Path:
    return trainer.build(trainer.generate(law.path("gpt"), *keys(3, 2, ())))


@pytest.mark.parametrize(
    "steps,option,first,last",
    [
        (1, (), 1, 1),
        (2, (), 2, 2),
        (6, (), 2, 4),
        (3, ("--profile-steps", "1-1"), 1, 1),
        (5, ("--profile-steps", "3-5"), 3, 5),
    ],
)
def test_which_steps(
    tmp_path: pathlib.Path,
    tokens: pathlib.Path,
    tiny: pathlib.Path,
    steps: int,
    option: tuple[str, ...],
    first: int,
    last: int,
) -> None:
    done = run(
        tiny,
        tokens,
        "--profile",
        tmp_path / "p",
        *option,
        "--val",
        tokens,
        "--val-every",
        1,
        steps=steps,
    )
    assert done.code == 0, done.err
    assert f"profile: steps {first} to {last}; " in done.err
    check(plan_of(*keys(3, 2, ())), tmp_path / "p", first, last)


# ---- the table


def numbers(line: str) -> list[float]:
    return [float(word) for word in re.findall(r"(?<!\S)-?\d+(?:\.\d+)?(?!\S)", line)]


@pytest.mark.parametrize("more", [(), ALL_FILED], ids=["plain", "filed"])
def test_the_table_adds_up(
    tmp_path: pathlib.Path, tokens: pathlib.Path, more: tuple[str, ...]
) -> None:
    """The parts of ZR_MAIN's time sum up to the step, and each command's calls are the plan's."""
    settings = keys(3, 2, more)
    binary = trainer.build(trainer.generate(law.path("gpt"), *settings))
    # above any processor's peak, because a share above its own peak is not printed
    done = run(binary, tokens, "--profile", tmp_path / "p", ZR_PEAK_GFLOPS=1000)
    lines = done.out.splitlines()
    begin = next(
        n for n, line in enumerate(lines) if line.startswith("profile of rank 0")
    )
    wall = float(re.search(r"([\d.]+) ms a step", lines[begin])[1])
    queue = next(n for n, line in enumerate(lines) if line.startswith("each queue"))
    parts = [line for line in lines[begin + 2 : queue]]
    assert {
        "forward",
        "backward",
        "head",
        "step",
        "waits for gather",
        "no command",
    } <= {re.split(r" {2,}", line)[0] for line in parts}
    # Each is rounded to 0.001
    assert sum(numbers(line)[-2] for line in parts) == pytest.approx(
        wall, abs=0.001 * len(parts)
    )
    p = plan_of(*settings)
    table, at = [], ""
    for line in lines[queue + 1 : lines.index(done.line("loss"))]:
        if line.startswith("  "):
            table.append([at, *line.split()])
        else:
            at = line.split()[0]
            works, waits = (float(x) for x in re.findall(r"([\d.]+) ms", line))
            assert at in QUEUES and works + waits <= wall + 0.002
    for name in {x.queue for s in p.sections for x in s.steps}:
        want = commands(p, name)
        waits = want.pop("wait", 0)
        rows = [row for row in table if row[0] == name]
        assert {row[1]: int(row[2]) for row in rows if row[1] != "waits"} == want
        # Waits for QUEUE N
        assert sum(int(row[4]) for row in rows if row[1] == "waits") == waits
    whole = read(tmp_path / "p")[0, STEPS]
    assert wall == pytest.approx(
        sum(e["dur"] for e in whole) / 1000 / len(whole), abs=0.001
    )
    flops = {row[1]: row for row in table if row[-1] == "peak"}
    for row in flops.values():  # 2 ranks; of 1000 GFLOP/s
        assert int(row[-3].rstrip("%")) == pytest.approx(0.2 * float(row[-4]), abs=0.6)
    assert set(flops) == {"fwd_block", "bwd_block", "train_head"}
    wire = ("gather", "alltoall", "allreduce")
    assert (
        sum(int(row[5]) for row in table if row[1] in wire)
        == cost.training_wire(p).bytes
    )


# ---- errors


@pytest.mark.parametrize(
    "options,said",
    [
        (("--profile-steps", "1-2"), "--profile-steps needs --profile FILE"),
        (
            ("--profile", "p", "--profile-steps", "2"),
            "must be A-B, with 1 <= A <= B <= 3",
        ),
        (
            ("--profile", "p", "--profile-steps", "0-1"),
            "must be A-B, with 1 <= A <= B <= 3",
        ),
        (
            ("--profile", "p", "--profile-steps", "3-2"),
            "must be A-B, with 1 <= A <= B <= 3",
        ),
        (
            ("--profile", "p", "--profile-steps", "2-4"),
            "must be A-B, with 1 <= A <= B <= 3",
        ),
        (
            ("--profile", "p", "--profile-steps", "1-2x"),
            "must be A-B, with 1 <= A <= B <= 3",
        ),
        (
            ("--profile", "/nowhere/at/all"),
            "--profile /nowhere/at/all: No such file",
        ),
        (("--profile", "/dev/null"), "--profile /dev/null: is not a regular file"),
        (("--profile", "."), "--profile .: is not a regular file"),
    ],
)
def test_errors_come_first(
    tokens: pathlib.Path,
    tiny: pathlib.Path,
    options: tuple[str, ...],
    said: str,
) -> None:
    done = run(tiny, tokens, *options)
    assert done.code == 2 and said in done.err and "step 1/" not in done.err, done.err


def test_no_input_is_written_over(
    tmp_path: pathlib.Path, tokens: pathlib.Path, tiny: pathlib.Path
) -> None:
    before = tokens.read_bytes()
    done = run(tiny, tokens, "--profile", tokens)
    assert done.code == 2 and "is the input file of --data" in done.err
    done = run(tiny, tokens, "--log", tmp_path / "log", "--profile", tmp_path / "log")
    assert done.code == 2 and "is the file of --log" in done.err
    # The name of a profile while it is written
    part = tmp_path / "q.part"
    part.write_bytes(before)
    done = run(tiny, part, "--profile", tmp_path / "q")
    assert done.code == 2 and "q.part: is the input file of --data" in done.err
    assert tokens.read_bytes() == part.read_bytes() == before
    assert (tmp_path / "log").read_text() == ""
    done = run(tiny, tokens, "--profile", tmp_path / "p", steps=0)
    assert (
        done.code == 2 and "--steps is 0" in done.err and not (tmp_path / "p").exists()
    )


def test_a_folder_that_takes_no_file(
    tmp_path: pathlib.Path, tokens: pathlib.Path, tiny: pathlib.Path
) -> None:
    """A folder that takes no new file is reported at the start: the existing file would be
    overwritten, but the profile is first made beside it."""
    (tmp_path / "p").write_text("before")
    (tmp_path / "p.part").mkdir()
    done = run(tiny, tokens, "--profile", tmp_path / "p")
    assert (
        done.code == 2
        and "p.part: is not a regular file" in done.err
        and "step 1/" not in done.err
    )
    assert (tmp_path / "p").read_text() == "before"


def test_nothing_is_half_written(tmp_path: pathlib.Path, tokens: pathlib.Path) -> None:
    """No partial profile is left if a file may not grow beyond some KiB, and the old one stays."""
    (tmp_path / "p").write_text("before")
    alone = trainer.build(trainer.generate(law.path("gpt"), *keys(3, 1, ())))
    done = program.run(
        alone,
        "--data",
        tokens,
        "--steps",
        3,
        "--profile",
        tmp_path / "p",
        limits=(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))),
    )
    said = [line for line in done.err.splitlines() if "File too large" in line]
    assert done.code == 0 and said == [
        f"cannot write {tmp_path}/p: File too large; the run continues without it",
        f"{tmp_path}/p is incomplete: File too large",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert (tmp_path / "p").read_text() == "before"


# ---- a GPU's program


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [(), (OFFLOAD,)], ids=["", "the optimizer on the host"]
)
@pytest.mark.parametrize(
    "order,graph",
    [("eager", []), ("shuffled:1", []), ("late", ["--no-graph"])],
)
def test_on_a_gpu(
    tmp_path: pathlib.Path,
    tokens: pathlib.Path,
    order: str,
    graph: list[str],
    more: tuple[str, ...],
) -> None:
    """The second of three steps is profiled on a GPU. Graphs are played before and after it, unless
    the optimizer is offloaded. A wait for an event of a graph is not noted."""
    settings = [*keys(3, 2, more), "train.global_batch=2"]
    binary = trainer.build(
        trainer.generate(law.path("gpt"), *settings), trainer.EMULATED
    )
    plain = run(binary, tokens, *graph, ZR_EMULATE=order)
    assert plain.code == 0, plain.err
    assert ("graphs: " in plain.out) == (not graph and not more)
    done = run(
        binary,
        tokens,
        *graph,
        "--profile",
        tmp_path / "p",
        "--profile-steps",
        "2-2",
        ZR_EMULATE=order,
    )
    assert done.code == 0, done.err
    assert "profile: steps 2 to 2, without CUDA graphs; " in done.err
    assert done.line("weights") == plain.line("weights")
    assert done.line("wire") == plain.line("wire")
    check(plan_of(*settings), tmp_path / "p", 2, 2, gpu=True)


def test_queues_are_those_of_the_runtime() -> None:
    """The runtime's queues have the order, names, arenas and kernels of the generator's. Those that
    copy are between two arenas; those with collectives come first."""
    arenas = {"ZR_ARENA": "device", "ZR_HOSTED": "host", "ZR_FILED": "file"}
    rows = re.findall(
        r'ROW\(ZR_(\w+), "(\w+)", (\w+), (\w+), ([01]), \d\)',
        (RUNTIME / "zr.h").read_text(),
    )
    assert [
        (name, word, arenas[reads], arenas[writes], kernels == "1")
        for name, word, reads, writes, kernels in rows
    ] == [
        (q.name.upper(), q.name, q.reads, q.writes, q.kernels)
        for q in queues.QUEUES.values()
    ]
    for n, q in enumerate(queues.QUEUES.values()):
        assert q.wire == (n <= QUEUES.index("reduce"))
        assert (q.reads != q.writes) == (not q.kernels and not q.wire)
