"""test_file.py -- tests offloading to a file: its bytes, its bits, its possible failures, and that
no file is left.

tests/law/test_law.py tests the bits over all ways of spreading the work, too.
"""

import contextlib
import json
import os
import pathlib
import re
import signal
from dataclasses import replace

import pytest
from zg import build
from zg.check import check
from zg.plan.plan import Plan
from zg.predict import cost
from zg.read import spec
from zg.search import budget, search
from zg.write import explain

from tests.check import test_mutants
from tests.lib import law, mutants, program, trainer
from tests.lib.covering import covering
from tests.lib.patience import LIMIT, patient
from tests.lib.plans import planned

STATES = (
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=/tmp",
)
PARAMS = "zero.offload_param.device=nvme", "zero.offload_param.nvme_path=/tmp"
STATES_CPU, PARAMS_CPU = (
    "zero.offload_optimizer.device=cpu",
    "zero.offload_param.device=cpu",
)
MIXED = {
    "states": STATES,
    "states, parameters on the host": (*STATES, PARAMS_CPU),
    "parameters": (STATES_CPU, *PARAMS),
    "all": (*STATES, *PARAMS),
}
RATIO = "zero.offload_optimizer.ratio=0.4"
ALONE = {
    "parameters alone": PARAMS,
    "parameters, states on both": (STATES_CPU, *PARAMS, RATIO),
}
TILE = "zero.sub_group_size=5000"


# ---- bytes


def offloaded(p: Plan, *words: str) -> int:
    """Return the bytes of a rank's classes of these names, without rounding to pages."""
    return sum(
        f.count * f.shard * (cost.ops.BYTES[p.head.real] if w == "param" else 4)
        for f in p.flats
        for w in words
        if any(c.name == f"{w}.{f.name}" for c in p.classes)
        and p.cls(f"{w}.{f.name}").arena == "file"
    )


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("name", MIXED)
def test_what_lies_in_the_file_is_counted_to_the_byte(
    name: str, precision: str
) -> None:
    """The file has the bytes that the device or the host had, and the host has slots of tiles for
    it."""
    keys = (
        "zero.stage=3",
        "cluster.ranks=2",
        f"train.precision={precision}",
        TILE,
    )
    here = planned("gpt-tiny", *keys, STATES_CPU, *[PARAMS_CPU] * (name != "states"))
    there = planned("gpt-tiny", *keys, *MIXED[name])
    moved = [c for c in there.classes if c.arena == "file"]
    assert (
        there.filed
        == sum(c.slots * c.stride for c in moved)
        == offloaded(there, "param", "master", "m", "v")
    )
    assert all(
        here.cls(c.name).slots * here.cls(c.name).stride == c.slots * c.stride
        and here.cls(c.name).arena == "host"
        for c in moved
    )
    slots = sum(
        c.slots * c.stride
        for c in there.classes
        if c.name.startswith(("tile.", "fetched."))
    )
    assert here.hosted - there.hosted == there.filed - slots
    assert here.arena("cpu") == there.arena("cpu")
    assert dict(cost.memory(there))["the file arena"] == there.filed
    assert f"{there.filed:,}" in explain.memory(
        there
    ) and "the file arena" in explain.memory(there)
    assert all(c.at % 4096 == c.stride % 4096 == 0 for c in moved)


@pytest.mark.parametrize(
    "keys",
    [
        ("zero.offload_optimizer={device: cpu, nvme_path: /other}",),
        (
            "train.memory_budget=1GiB",
            "zero.stage3_param_persistence_threshold=0",
        ),
        ("zero.offload_optimizer.device=cpu",),
    ],
)
def test_the_path_is_that_of_what_lies_in_the_file(
    keys: tuple[str, ...],
) -> None:
    """The file's path is that of the offloaded state with a path for the file, whoever moved other
    states elsewhere."""
    params = "zero.offload_param={device: nvme, nvme_path: /disk}"
    if "train.memory_budget=1GiB" in keys:
        s = spec.load(str(law.path("gpt")), ("zero.stage=3", params, *keys))
        rows = budget.search(s, 1 << 30).rows.values()
        specs = {r.way.spec.zero.offload_optimizer.device: r.way.spec for r in rows}
        made = {device: build.build(x).plan for device, x in specs.items()}
        assert "cpu" in made
    else:
        made = {"cpu": planned("gpt-tiny", "zero.stage=3", params, *keys)}
    assert {f.path for p in made.values() for f in p.files} == {"/disk"}


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_parameters_alone_are_counted_to_the_byte(precision: str) -> None:
    """Parameters alone move from the host to the file to the byte. The host has a slot for each
    shard in transit. Each step writes new parameters once and reads them for each gather."""
    keys = (
        "zero.stage=3",
        "cluster.ranks=2",
        f"train.precision={precision}",
        "train.global_batch=8",
        "train.micro_batch=1",
    )
    here, there = (
        planned("gpt-tiny", *keys, *more) for more in ((PARAMS_CPU,), PARAMS)
    )
    moved = [c for c in there.classes if c.arena == "file"]
    assert there.filed == here.hosted == offloaded(there, "param") > 0
    assert {c.name for c in moved} == {"param.embed", "param.block"}
    assert here.arena("cpu") == there.arena("cpu")
    assert {
        c.name for c in there.classes if c.arena == "host" and c.targets == "all"
    } == {"fetched.embed", "fetched.block"}
    ups = sum(
        i.value
        for s in here.section("micro_batch").steps
        if s.queue == "up"
        for i in s.ints
    )
    assert cost.moved(there) == (here.head.micro_batches * ups, there.filed)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_what_moves_in_a_step(precision: str) -> None:
    """A step reads and writes every state once and reads parameters once per gather of a
    micro-batch. In bf16 it also writes the parameters; in f32 they are the masters."""
    p = planned(
        "gpt-tiny",
        "zero.stage=3",
        "cluster.ranks=2",
        f"train.precision={precision}",
        TILE,
        "train.global_batch=8",
        "train.micro_batch=1",
        *STATES,
        *PARAMS,
    )
    gathers = {f.name: 0 for f in p.flats}
    for s in p.section("micro_batch").steps:
        if s.op == "copy" and s.queue == "fetch":
            gathers[s.ins[0].cls.partition(".")[2]] += 1
    fetched = p.head.micro_batches * sum(
        n * p.flat(f).shard * cost.ops.BYTES[precision] for f, n in gathers.items()
    )
    states, params = offloaded(p, "master", "m", "v"), offloaded(p, "param")
    assert cost.moved(p) == (
        fetched + states + (params if precision == "f32" else 0),
        states + params,
    )
    said = explain.explain(p)
    assert f"{cost.moved(p)[0]:,} are read and {cost.moved(p)[1]:,} written" in said
    update = {
        q: sum(s.queue == q for s in p.section("update").steps)
        for q in ("load", "store")
    }
    assert re.search(
        rf"update +x1 .* load {update['load']} +store {update['store']} ", said
    )


# ---- max_in_cpu

IN_CPU = "zero.offload_param.max_in_cpu"


def shards(p: Plan) -> dict[str, int]:
    """Return the elements of a rank's parameters in gathered flats, in the plan's order."""
    return {
        f.name: f.count * f.shard for f in p.flats if p.stored("params", f.name)[0].over
    }


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("states", [(), (STATES_CPU,), STATES, (*STATES, RATIO)])
def test_parameters_stay_on_the_host_up_to_a_number(
    name: str, states: tuple[str, ...]
) -> None:
    """Parameters stay on the host up to max_in_cpu: whole flats in the plan's order that still fit,
    and all of them if they may."""
    keys = (
        "zero.stage=3",
        "cluster.ranks=2",
        TILE,
        *PARAMS,
        *states,
        "zero.stage3_param_persistence_threshold=0",
    )
    sizes = shards(planned(name, *keys))
    bounds = {
        0,
        1,
        *(n + by for n in (*sizes.values(), sum(sizes.values())) for by in (-1, 0)),
    }
    seen = set()
    for most in sorted(bounds):
        p, left, kept = planned(name, *keys, f"{IN_CPU}={most}"), most, set()
        for f, n in sizes.items():
            if n <= left:
                kept.add(f)
                left -= n
        assert {f for f in sizes if p.cls(f"param.{f}").arena == "host"} == kept
        assert {f for f in sizes if p.cls(f"param.{f}").arena == "file"} == set(
            sizes
        ) - kept
        assert offloaded(p, "param") == sum(
            n * 4 for f, n in sizes.items() if f not in kept
        )
        seen.add(len(kept))
    assert seen >= {0, 1, len(sizes)}
    assert planned(name, *keys, f"{IN_CPU}=0") == planned(name, *keys)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.slow
def test_one_hash_of_the_host_and_the_file(
    folder: pathlib.Path, precision: str
) -> None:
    """The hash is the same with the embedding on the host and blocks in the file, where the first
    flat that a micro-batch reads from the file is its second."""
    base = (
        f"train.precision={precision}",
        "train.global_batch=8",
        "train.micro_batch=1",
        TILE,
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=0",
    )
    want = run((*base, "zero.stage=0"), folder)
    for ranks, states, queue in (
        (1, (), "late"),
        (2, (STATES_CPU,), "shuffled:1"),
        (2, (*STATES, RATIO), "shuffled:2"),
        (4, STATES, "eager"),
    ):
        keys = (*base, f"cluster.ranks={ranks}", *PARAMS, *states)
        way = (
            *keys,
            f"{IN_CPU}={shards(planned('gpt-tiny', *keys))['embed']}",
        )
        p = planned("gpt-tiny", *way)
        assert [p.cls(f"param.{f}").arena for f in ("embed", "block")] == [
            "host",
            "file",
        ]
        assert run(way, folder, "--queue", queue) == want


def test_plans_without_a_file_say_nothing_of_it() -> None:
    p = planned("gpt-tiny", "zero.stage=3", STATES_CPU, PARAMS_CPU)
    assert p.filed == 0 and not p.files and "file" not in explain.memory(p)
    source = trainer.generate(law.path("gpt"), "zero.stage=3", STATES_CPU)
    assert "ZR_LOAD" not in source and ".filed" not in source


# ---- bits


def run(
    way: tuple[str, ...],
    folder: pathlib.Path,
    *options: object,
    kind: trainer.Kind = trainer.GCC,
    **settings: object,
) -> law.Result:
    made = trainer.build(trainer.generate(law.path("gpt"), *way), kind)
    return law.run(
        made,
        "--data",
        folder / "tokens",
        "--val",
        folder / "tokens",
        "--steps",
        3,
        *options,
        log=folder / "log",
        **settings,
    )


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 40 * 30, holes=True))
    return tmp_path


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.slow
def test_one_hash(folder: pathlib.Path, precision: str) -> None:
    """The hash is the same without offloading, with the host, the file and both, at every stage and
    with every order of queues."""
    base = (
        f"train.precision={precision}",
        "train.global_batch=8",
        "train.micro_batch=1",
        TILE,
    )
    found = {(): run((*base, "zero.stage=0"), folder)}
    for stage, ranks, keys, queue, more in (
        (1, 2, STATES, "late", ("zero.offload_optimizer.buffer_count=1",)),
        (2, 1, STATES, "shuffled:1", ("zero.overlap_comm=false",)),
        (3, 2, STATES, "shuffled:2", ()),
        (
            3,
            4,
            MIXED["states, parameters on the host"],
            "late",
            ("train.recompute=full",),
        ),
        (
            3,
            2,
            MIXED["parameters"],
            "shuffled:3",
            ("zero.offload_optimizer.buffer_count=2",),
        ),
        (3, 2, MIXED["all"], "late", ("zero.stage3_prefetch_bucket_size=0",)),
        (3, 4, MIXED["all"], "shuffled:4", ("zero.aio.block_size=4096",)),
        (
            3,
            1,
            MIXED["all"],
            "eager",
            ("zero.stage3_param_persistence_threshold=0",),
        ),
        (3, 2, PARAMS, "shuffled:5", ()),
        (
            3,
            4,
            PARAMS,
            "late",
            ("train.accumulate=layers", "zero.overlap_comm=false"),
        ),
        (3, 2, (*MIXED["all"], RATIO), "shuffled:6", ()),
        (3, 1, ALONE["parameters, states on both"], "late", ()),
    ):
        way = (
            *base,
            f"zero.stage={stage}",
            f"cluster.ranks={ranks}",
            *keys,
            *more,
        )
        found[way, queue] = run(way, folder, "--queue", queue)
    law_of = next(iter(found.values()))
    assert not [name for name, result in found.items() if result != law_of]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [(*STATES, *PARAMS), PARAMS, (*STATES, *PARAMS, RATIO)]
)
def test_weights_go_out_and_in(folder: pathlib.Path, keys: tuple[str, ...]) -> None:
    """--save from the file and --load into it keep the weights."""
    way = ("zero.stage=3", "cluster.ranks=2", TILE)
    first = run(way, folder, "--save", folder / "host")
    assert run((*way, *keys), folder, "--save", folder / "file") == first
    assert (folder / "host/model.safetensors").read_bytes()[4096:] == (
        folder / "file/model.safetensors"
    ).read_bytes()[4096:]
    more = run(way, folder, "--load", folder / "host")
    assert run((*way, *keys), folder, "--load", folder / "file") == more != first


# ---- a run with a file: its transfers, its place, and its leftovers


def made(*keys: str, kind: trainer.Kind = trainer.GCC) -> pathlib.Path:
    return trainer.build(
        trainer.generate(
            law.path("gpt"),
            "zero.stage=3",
            "cluster.ranks=2",
            TILE,
            *STATES,
            *PARAMS,
            *keys,
        ),
        kind,
    )


def size(*keys: str) -> int:
    return planned(
        "gpt-tiny",
        "zero.stage=3",
        "cluster.ranks=2",
        TILE,
        *STATES,
        *PARAMS,
        *keys,
    ).filed


def arenas(pid: int, folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files in a folder that a process and its children have open, deleted or not."""
    found = []
    for p in (pid, *program.children(pid)):
        for fd in pathlib.Path(f"/proc/{p}/fd").iterdir():
            try:
                found += [fd] * os.readlink(fd).startswith(f"{folder}/")
            except OSError:
                continue
    return found


def test_the_file_has_the_bytes_that_were_said_and_no_name(
    folder: pathlib.Path,
) -> None:
    """The file of a run has the stated bytes and no name, so nothing is left after SIGKILL
    either."""
    disk = folder / "disk"
    disk.mkdir()
    running = program.start(
        made(), folder / "tokens", "--nvme", disk, "--steps", 1000000
    )
    try:
        said = running.stderr.readline()
        assert re.fullmatch(
            rf"file arena: {size()} bytes a rank in {disk}, by "
            "(io_uring|reads and writes), (past|through) the page cache\n",
            said,
        )
        program.wait_for_step(running, 1)
        files = arenas(running.pid, disk)
        sizes = {
            (s.st_dev, s.st_ino): (s.st_size, s.st_blocks, s.st_nlink)
            for s in map(os.stat, files)
        }
        assert len(sizes) == 2 and list(disk.iterdir()) == []
        assert all(
            n == size() and 512 * blocks >= n and links == 0
            for n, blocks, links in sizes.values()
        )
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    assert list(disk.iterdir()) == []


def test_a_run_says_what_it_moves(folder: pathlib.Path) -> None:
    done = program.run(
        made(), "--data", folder / "tokens", "--steps", 3, "--nvme", folder
    )
    read, written = cost.moved(
        planned(
            "gpt-tiny",
            "zero.stage=3",
            "cluster.ranks=2",
            TILE,
            *STATES,
            *PARAMS,
        )
    )
    assert done.code == 0, done.err
    assert f"file {read} bytes read and {written} written per rank and step" in done.out


@pytest.mark.parametrize(
    "where,code,said",
    [
        (
            "missing",
            3,
            "creating a file in {}: No such file or directory; set another folder with --nvme DIR",
        ),
        ("tokens", 3, "a file in {}: Not a directory"),
        ("/proc", 3, "a file in /proc: "),
        ("x" * 5000, 2, "the path is too long"),
    ],
)
def test_no_place_for_the_file(
    folder: pathlib.Path, where: str, code: int, said: str
) -> None:
    done = program.run(
        made(),
        "--data",
        folder / "tokens",
        "--steps",
        1,
        "--nvme",
        folder / where,
    )
    assert (done.code, said.format(folder / where) in done.err) == (
        code,
        True,
    ), done.err


def test_a_program_without_a_file_takes_no_place_for_one(
    folder: pathlib.Path,
) -> None:
    done = program.run(
        trainer.build(trainer.generate(law.path("gpt"))),
        "--data",
        folder / "tokens",
        "--steps",
        1,
        "--nvme",
        folder,
    )
    assert done.code == 2 and "does not offload to a file" in done.err


# ---- disks that fail


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    library = tmp_path_factory.mktemp("faults") / "disk.so"
    trainer.sh(
        "gcc",
        "-O1",
        "-Wall",
        "-Werror",
        "-shared",
        "-fPIC",
        "tests/faults/disk.c",
        "-o",
        library,
        "-ldl",
    )
    return library


def faults(folder: pathlib.Path, library: pathlib.Path, fault: str) -> program.Result:
    """Run three steps of two ranks with a fault. Assert that nothing is left in the directory."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    done = program.run(
        made(),
        "--data",
        folder / "tokens",
        "--steps",
        3,
        "--hash",
        "--nvme",
        disk,
        LD_PRELOAD=library,
        FAULT=fault,
    )
    assert list(disk.iterdir()) == [] and "Sanitizer" not in done.err
    return done


@pytest.mark.slow
def test_every_disk_gives_the_same_bits(
    folder: pathlib.Path, faulty: pathlib.Path
) -> None:
    """Every disk gives the same bits, with io_uring and without, with short and slow transfers."""
    whole = faults(folder, faulty, "")
    for fault in ("short", "ringless", "ringless short", "ringless slow"):
        done = faults(folder, faulty, fault)
        ring = "by io_uring" in whole.err and "ringless" not in fault
        assert ("by io_uring" if ring else "by reads and writes") in done.err
        assert (done.code, done.line("weights")) == (0, whole.line("weights"))


@pytest.mark.parametrize(
    "fault,said",
    [
        (
            "ringless read",
            "reading [0-9]+ bytes at [0-9]+ of .*: Input/output error",
        ),
        (
            "ringless write",
            "writing [0-9]+ bytes at [0-9]+ of .*: No space left on device",
        ),
        (
            "enter late",
            "(reading|writing) [0-9]+ bytes at [0-9]+ of .*: Input/output error",
        ),
        (
            "full",
            "[0-9]+ bytes are needed, but the disk has [0-9]+ free; set another disk with --nvme DIR",
        ),
    ],
)
def test_a_disk_that_fails_ends_the_run(
    folder: pathlib.Path, faulty: pathlib.Path, fault: str, said: str
) -> None:
    """A disk that fails ends all ranks within seconds, with the documented code and one line with
    the reason, though several queues of a rank fail at once."""
    done = faults(folder, faulty, fault)
    assert done.code == 3 and done.seconds < patient(60)
    assert re.search(f"rank [01]: .*{said}", done.err), done.err


def test_a_file_that_is_cut_ends_the_run(folder: pathlib.Path) -> None:
    disk = folder / "disk"
    disk.mkdir()
    running = program.start(
        made(), folder / "tokens", "--nvme", disk, "--steps", 1000000
    )
    program.wait_for_step(running, 1)
    while running.poll() is None:  # a write would extend it again
        with contextlib.suppress(OSError):
            for file in arenas(running.pid, disk):
                os.truncate(file, 0)
    _, said = running.communicate(timeout=LIMIT)
    assert running.returncode == 3 and "the file is too short" in said
    assert list(disk.iterdir()) == []


# ---- a DeepSpeed configs, from the file to the run

ZERO = "zero_optimization"
STAGE_3 = {
    "stage": 3,
    "sub_group_size": 5000,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": 100,
}
CONFIGS = {
    "states on the host, parameters in a file": {
        ZERO: {
            **STAGE_3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/tmp",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        },
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    },
    "all on the host": {
        ZERO: {
            **STAGE_3,
            "allgather_partitions": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
        }
    },
    "all in a file": {
        ZERO: {
            **STAGE_3,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/tmp",
                "buffer_count": 4,
                "pipeline_read": True,
                "pipeline_write": True,
            },
            "offload_param": {"device": "nvme", "nvme_path": "/tmp"},
        }
    },
}


@pytest.mark.slow
def test_deepspeeds_configurations_run(folder: pathlib.Path) -> None:
    found = set()
    for config in ({ZERO: {"stage": 0}}, *CONFIGS.values()):
        (folder / "ds.json").write_text(json.dumps(config))
        source = trainer.sh(
            "gen/zgen",
            law.path("gpt"),
            "--zero",
            folder / "ds.json",
            "--set",
            "cluster.ranks=2",
            "--set",
            "train.precision=bf16",
        )
        found.add(
            law.run(
                trainer.build(source),
                "--data",
                folder / "tokens",
                "--steps",
                3,
                log=folder / "log",
            )
        )
    assert len(found) == 1


# ---- refusals


@pytest.mark.parametrize(
    "keys,said",
    [
        (
            ("zero.stage=1", STATES[0]),
            "zero.offload_optimizer.nvme_path: is missing; device nvme",
        ),
        (
            ("zero.stage=3", STATES_CPU, PARAMS[0]),
            "zero.offload_param.nvme_path: is missing",
        ),
        (
            ("zero.stage=0", *STATES),
            "at stage 0 every rank updates all parameters, so there is nothing to offload",
        ),
        (
            ("zero.stage=2", *STATES, *PARAMS),
            "at stage 2 parameters are not sharded",
        ),
        (
            (
                "zero.stage=3",
                *STATES,
                PARAMS[0],
                "zero.offload_param.nvme_path=/other",
            ),
            "zero.offload_param.nvme_path: a rank has one file, and the optimizer's nvme_path is /tmp",
        ),
        (
            (
                "zero.stage=1",
                STATES[0],
                'zero.offload_optimizer.nvme_path="a b"',
            ),
            "is not valid",
        ),
        (
            ("zero.stage=1", *STATES, "zero.aio.block_size=5000"),
            "not a multiple of 4096",
        ),
        (
            ("zero.stage=1", *STATES, "zero.aio.queue_depth=0"),
            "an integer from 1 to 4096",
        ),
        (("zero.stage=1", *STATES, "zero.aio.threads=2"), "is not a key here"),
    ],
)
def test_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(spec.SpecError) as e:
        planned("gpt-tiny", *keys)
    assert said in str(e.value)


@pytest.mark.parametrize(
    "keys,said",
    [
        (
            ("zero.stage=1", STATES_CPU, STATES[1]),
            "nvme_path: has no effect unless the device is nv",
        ),
        (
            ("zero.stage=3", PARAMS_CPU, f"{IN_CPU}=9"),
            "max_in_cpu: has no effect unless the device",
        ),
        (
            ("zero.aio.queue_depth=4",),
            "zero.aio: has no effect: nothing is offloaded to nvme",
        ),
    ],
)
def test_noted(keys: tuple[str, ...], said: str) -> None:
    assert [said in note for note in spec.load(str(law.path("gpt")), keys).notes] == [
        True
    ]


@pytest.mark.parametrize("device", [PARAMS, (PARAMS_CPU,)])
def test_nothing_to_offload_is_noted(device: tuple[str, ...]) -> None:
    keys = ("zero.stage=3", "cluster.ranks=2", *device)
    said = "zero.offload_param: has no effect: every tensor is persistent"
    for threshold, count in ((10**6, 1), (10**3, 0)):
        small = f"zero.stage3_param_persistence_threshold={threshold}"
        made = spec.load("model_specs/gpt-tiny.yaml", (*keys, small))
        assert search.find(made).notes.count(said) == count


def test_what_stays_on_the_host_is_noted() -> None:
    keys = ("zero.stage=3", "cluster.ranks=2", *PARAMS)
    sizes = shards(planned("gpt-tiny", *keys))
    for most, said in (
        (
            5,
            f"is too small for any unit's parameters; the smallest have {min(sizes.values())} elements",
        ),
        (
            10**9,
            f"{sum(sizes.values())} elements of a rank stay on the host: emb",
        ),
    ):
        made = spec.load("model_specs/gpt-tiny.yaml", (*keys, f"{IN_CPU}={most}"))
        notes = search.find(made).notes
        assert [said in note for note in notes if "max_in_cpu" in note] == [True]


# ---- the checker


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,precision",
    covering([*MIXED, *ALONE], ("f32", "bf16")),
)
@test_mutants.OF
def test_a_broken_move_is_refused(
    name: str, precision: str, of: test_mutants.Choice, tmp_path: pathlib.Path
) -> None:
    """A move that is left out, has other bytes or another place, or runs too early or too late is
    refused or harmless: a tile in a class of one slot may be copied to another slot as well."""
    p = planned(
        "gpt-tiny",
        "zero.stage=3",
        f"train.precision={precision}",
        *(MIXED | ALONE)[name],
        "zero.sub_group_size=20000",
    )
    tried = [
        m for m in mutants.mutants(p) if re.search(r"\d (load|store|fetch) ", m.what)
    ]
    assert len(tried) > 300
    data = tmp_path / "tokens"
    trainer.write_tokens(data, law.tokens(128, 33 * 60))
    test_mutants.judge(p, of(tried), data)


@pytest.mark.parametrize(
    "queue,where",
    [
        ("load", "begin"),
        ("load", "update"),
        ("store", "update"),
        ("fetch", "micro_batch"),
        ("up", "micro_batch"),
    ],
)
def test_every_queue_has_its_arenas(queue: str, where: str) -> None:
    """Tiles come by load alone, shards by fetch, and both leave by store."""
    p = planned("gpt-tiny", "zero.stage=3", *STATES, *PARAMS)
    section = p.section(where)
    n = next(n for n, s in enumerate(section.steps) if s.queue == queue)
    for other in {"main", "host", "up", "down", "load", "store", "fetch"} - {queue}:
        steps = list(section.steps)
        steps[n] = replace(steps[n], queue=other)
        with pytest.raises(check.CheckError):
            check.check(mutants.changed(p, section, steps))
