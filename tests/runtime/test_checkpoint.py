"""test_checkpoint.py -- tests checkpoints: their content, their number, refusals, runs that are
told to leave, and runs with checkpoints that cannot be written."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from zg.facts import ops

from tests.lib import files, law, program, trainer
from tests.lib.patience import LIMIT, busy

KEYS = (
    "zero.stage=2",
    "cluster.ranks=2",
    "train.global_batch=4",
    "train.micro_batch=1",
)
LONG = 100000  # steps that no test waits for


@functools.cache
def built(*keys: str) -> Path:
    return trainer.build(trainer.generate(law.path("gpt"), *KEYS, *keys))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    trainer.write_tokens(path, law.tokens(256, 4000))
    return path


def arguments(
    data: Path, steps: int, *options: object, keys: tuple[str, ...] = ()
) -> list[object]:
    where = ("--checkpoints", data.parent / "ck")
    return [built(*keys), "--data", data, "--steps", steps, *where, *options]


def run(
    data: Path, steps: int, *options: object, keys: tuple[str, ...] = ()
) -> program.Result:
    return program.run(*arguments(data, steps, *options, keys=keys))


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return program.chaos_library(tmp_path_factory.mktemp("chaos"))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield start(command), for runs in a process group that ends with the test."""
    all_: list[subprocess.Popen[str]] = []

    def begin(*command: object, **settings: object) -> subprocess.Popen[str]:
        running = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=program.environment(**settings),
            start_new_session=True,
        )
        all_.append(running)
        return running

    yield begin
    for running in all_:
        running.kill()
        running.stderr.close()
        running.wait(LIMIT)


Start = Callable[..., subprocess.Popen[str]]


def steps(data: Path) -> list[int]:
    """Return the steps of the folders that exist. Assert that nothing else does but the lock."""
    names = sorted(path.name for path in (data.parent / "ck").iterdir())
    assert names[:1] == [".lock"]
    return [int(name.removeprefix("step-")) for name in names[1:]]


def there(data: Path) -> list[int]:
    """Return the checkpoints that a user sees while the run goes on."""
    found = (data.parent / "ck").glob("step-*")
    return [int(path.name.removeprefix("step-")) for path in found]


def folder(data: Path, step: int) -> Path:
    return data.parent / "ck" / f"step-{step:08d}"


def tensors(path: Path) -> dict[str, str]:
    """Return the type of each tensor, as safetensors reads it."""
    with safe_open(path, "numpy") as f:
        return {
            name: f.get_slice(name).get_dtype()
            for name in f.keys()  # noqa: SIM118
        }


# ---- room


@pytest.mark.parametrize(
    "last,options,most",
    [
        (LONG, ("--save-every", 1, "--keep", 3), 4),
        (LONG, ("--save-every", 1, "--keep", 1), 2),
        (LONG, ("--save-every", LONG // 2), 2),  # no more are written
        (LONG, (), 1),
    ],
)
def test_room_is_held_from_the_start_on(
    data: Path, start: Start, last: int, options: tuple[object, ...], most: int
) -> None:
    """Space is reserved for the checkpoints that stay and one more, if so many are written, and
    freed at the end."""
    (where := data.parent / "ck").mkdir()

    def held() -> int:  # of all folders; one that is renamed meanwhile counts once
        return len({x.inode() for x in os.scandir(where) if x.name != ".lock"})

    running = start(*arguments(data, last, *options))
    until = time.monotonic() + LIMIT
    found: list[int] = []
    while found.count(most) < 50:
        assert running.poll() is None and time.monotonic() < until, found
        time.sleep(0.005)
        found.append(held())
    assert max(found) == most
    whole = False
    while not whole:  # a file that was just made has no space yet
        assert running.poll() is None and time.monotonic() < until
        os.killpg(running.pid, signal.SIGSTOP)
        rooms = [path.stat() for path in where.glob(".room-*/*")]
        os.killpg(running.pid, signal.SIGCONT)
        whole = all(512 * room.st_blocks >= room.st_size > 0 for room in rooms)
    assert len(rooms) == 4 * most or 1 in options  # none is written yet
    running.terminate()
    assert running.wait(LIMIT) == 75
    assert not list(where.glob(".room-*")) + list(where.glob(".step-*"))


def test_files_of_a_checkpoint_are_its_own(data: Path, start: Start) -> None:
    """Linked files keep their content when the checkpoint is deleted and others are written."""
    linked = data.parent / "linked"
    options = ("--keep", 1, "--save-every", 1)
    running = start(*arguments(data, LONG, *options))
    until = time.monotonic() + LIMIT

    def wait_beyond(step: int) -> None:
        while max(there(data), default=0) <= step:
            assert running.poll() is None and time.monotonic() < until
            time.sleep(0.02)

    wait_beyond(2)
    os.killpg(running.pid, signal.SIGSTOP)
    step = max(there(data))
    shutil.copytree(folder(data, step), linked, copy_function=os.link)
    kept = {path.name: path.read_bytes() for path in linked.iterdir()}
    os.killpg(running.pid, signal.SIGCONT)
    wait_beyond(step + 5)
    running.terminate()
    assert running.wait(LIMIT) == 75
    assert {x.name: x.read_bytes() for x in linked.iterdir()} == kept


def test_there_is_no_room_at_the_start(data: Path, chaos: Path) -> None:
    done = program.run(
        *arguments(data, 9, "--keep", 2, "--save-every", 1),
        LD_PRELOAD=chaos,
        FAIL="room:5",
    )
    assert done.code == 3
    assert re.search(r"(?m)^rank 0: --checkpoints .*bytes are needed", done.err)
    assert there(data) == []
    assert run(data, 1).code == 0 and steps(data) == [1]


# ---- beside the next step


def pauses(log: Path) -> list[tuple[int, float, float]]:
    """Return each checkpoint's step, seconds, and seconds that training stood still."""
    lines = map(json.loads, log.read_text().splitlines())
    return [
        (x["step"], x["checkpoint"], x["pause"]) for x in lines if "checkpoint" in x
    ]


HALVES = *KEYS, "train.precision=bf16", "zero.stage=1"
HOSTED = ("zero.offload_optimizer.device=cpu",)
FILED = (
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=/tmp",
    "zero.sub_group_size=4096",
)
EACH = 4, 3, 2, 1
CPU = [
    *(
        (kind, (), queue, EACH)
        for kind in (trainer.GCC, trainer.TSAN, trainer.ASAN)
        for queue in ("eager", "shuffled:1")
    ),
    (trainer.GCC, FILED, "eager", EACH),
    (trainer.TSAN, FILED, "shuffled:1", EACH),
]
GPU = [
    (trainer.EMULATED, (), "shuffled:1", (3, 1)),
    (trainer.EMULATED, HOSTED, "late", (2,)),
    (trainer.EMULATED, FILED, "shuffled:2", (3, 2)),
]


def bytes_of(path: Path) -> dict[str, bytes]:
    """Return the bytes of each file of tensors."""
    return {x.name: x.read_bytes() for x in path.glob("*.safetensors")}


@pytest.mark.parametrize(
    "kind,keys,queue,looked",
    [*CPU, *[pytest.param(*row, marks=pytest.mark.slow) for row in GPU]],
)
def test_training_goes_on_while_a_checkpoint_is_written(
    data: Path,
    kind: trainer.Kind,
    keys: tuple[str, ...],
    queue: str,
    looked: tuple[int, ...],
) -> None:
    """Training goes on beside a save, up to the next update. Each checkpoint has the bytes of a run
    that stops at its step, and the run has the bits of one that saves nothing."""
    binary = trainer.build(trainer.generate(law.path("gpt"), *HALVES, *keys), kind)
    order = "eager" if kind is trainer.EMULATED else queue
    run = functools.partial(program.run, ZR_EMULATE=queue)
    options = ["--data", data, "--hash", "--queue", order, "--steps"]
    kept = ["--checkpoints", data.parent / "ck", "--save-every", 1]
    log = data.parent / "log"
    still = program.in_place() if kind is trainer.TSAN else []
    command = [*map(Path, still[:1]), *still[1:], binary]
    last = looked[0]
    done = run(*command, *options, last, *kept, "--keep", 9, "--log", log)
    assert done.code == 0, done.err
    found = pauses(log)
    assert [step for step, *_ in found] == [*range(1, last + 1)]
    assert all(0 < pause <= whole for _, whole, pause in found)
    assert found[-1][1] == found[-1][2]
    for step in range(last, 0, -1):
        if step in looked:
            stopped = data.parent / f"stopped-{step}"
            plain = run(*command, *options, step, "--checkpoints", stopped)
            again = run(*command, *options, step, *kept)
            assert (plain.code, again.code) == (0, 0), again.err
            assert f"resumes from step {step}," in again.err
            assert plain.line("weights ") == again.line("weights ")
            there = bytes_of(folder(data, step))
            assert there == bytes_of(stopped / f"step-{step:08d}")
            assert "exp_avg.safetensors" in there
        shutil.rmtree(folder(data, step))


@pytest.mark.parametrize(
    "kind,batch",
    [
        (trainer.GCC, 400),
        pytest.param(trainer.EMULATED, 16, marks=pytest.mark.slow),
    ],
    ids=["cpu", "gpu"],
)
@pytest.mark.alone
@pytest.mark.parametrize("keys", [(), FILED], ids=["memory", "file"])
def test_a_long_step_hides_a_slow_disk(
    data: Path,
    chaos: Path,
    kind: trainer.Kind,
    batch: int,
    keys: tuple[str, ...],
) -> None:
    """Training stands still for the last checkpoint alone. It takes as long to write as the one
    before, some 0.14 s, and a step several times as long."""
    long = f"train.global_batch={batch}"
    source = trainer.generate(law.path("gpt"), *HALVES, *keys, long)
    log = data.parent / "log"
    options = ["--data", data, "--steps", 2, "--log", log, "--save-every", 1]
    done = program.run(
        trainer.build(source, kind),
        *options,
        "--checkpoints",
        data.parent / "ck",
        LD_PRELOAD=chaos,
        SLOW=1000,
        ZR_EMULATE="late",
    )
    assert done.code == 0, done.err
    (_, _, first), (_, _, last) = pauses(log)
    assert first < last / 2


# Ways in which an update could fail to wait for a checkpoint.
HASTY = [
    (trainer.GCC, ()),
    (trainer.GCC, FILED),
    pytest.param(trainer.EMULATED, (), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kind,keys", HASTY)
def test_an_update_that_does_not_wait_is_seen(
    data: Path, chaos: Path, kind: trainer.Kind, keys: tuple[str, ...]
) -> None:
    """An update that does not wait is detected: the checkpoint has content of the next step, and
    the emulation reports a race on the device (a control)."""
    source = trainer.generate(law.path("gpt"), *HALVES, *keys)
    hasty, n = re.subn(r"zr_replay\(z, ZR_UPDATE, (\w+)\)", r"\1(z)", source)
    assert n == 1
    made, stopped = trainer.build(hasty, kind), trainer.build(source, kind)
    options = ["--data", data, "--save-every", 1, "--keep", 9, "--steps"]
    command = [made, *options, 3, "--checkpoints", data.parent / "ck"]
    done = program.run(*command, LD_PRELOAD=chaos, SLOW=1000)
    if kind is trainer.EMULATED:
        assert done.code and "race at byte" in done.err, done.err
        return
    assert done.code == 0, done.err
    plain = data.parent / "stopped"
    program.run(stopped, *options, 1, "--checkpoints", plain)
    assert bytes_of(folder(data, 1)) != bytes_of(plain / "step-00000001")


@pytest.mark.slow
@pytest.mark.parametrize("patience,lost", [(1, ["1", "2"]), (100, [])])
def test_an_update_does_not_wait_for_ever(
    data: Path, chaos: Path, patience: int, lost: list[str]
) -> None:
    """An update gives up a checkpoint that is too slow, but the last one is awaited."""
    log = data.parent / "log"
    done = program.run(
        *arguments(data, 3, "--save-every", 1, "--log", log, "--hash"),
        LD_PRELOAD=chaos,
        SLOW=40000,
        ZR_SAVE_S=patience,
    )
    assert done.code == 0, done.err
    told = re.findall(
        r"^no checkpoint of step (\d+): the next update has waited for it too long \(ZR_SAVE_S\)$",
        done.err,
        re.M,
    )
    assert told == lost, done.err
    assert steps(data) == [3] if lost else [1, 2, 3]
    plain = program.run(built(), "--data", data, "--steps", 3, "--hash")
    assert done.line("weights ") == plain.line("weights ")


# ---- the content of a checkpoint


def test_a_checkpoint_opens_in_safetensors(data: Path) -> None:
    """A checkpoint has the model's own names, and model.safetensors has the content of --save."""
    done = run(data, 2, "--save", data.parent / "out", "--hash")
    assert done.code == 0, done.err
    made = folder(data, 2)
    assert sorted(path.name for path in made.iterdir()) == [
        "exp_avg.safetensors",
        "exp_avg_sq.safetensors",
        "model.safetensors",
        "run.json",
    ]
    saved = load_file(data.parent / "out" / "model.safetensors")
    model = load_file(made / "model.safetensors")
    assert saved.keys() == model.keys()
    for name, x in saved.items():
        assert np.array_equal(x, model[name])
    moments = load_file(made / "exp_avg_sq.safetensors")
    assert moments.keys() == model.keys()
    assert all((x >= 0).all() and x.any() for x in moments.values())
    said = json.loads((made / "run.json").read_text())
    assert said["format"] == 1 and said["steps"] == 2
    assert said["control"]["step"] == said["control"]["applied"] == 2
    assert "train.optimizer.lr: 0.001" in said["recipe"]
    assert said["sums"]["model"].keys() == model.keys()


def test_each_state_has_its_own_type(data: Path) -> None:
    keys = (
        "train.precision=bf16",
        "train.optimizer={type: SGD, lr: 0.01, momentum: 0.9}",
        'train.optimizer.groups=[{match: ["*ln*"], frozen: true}]',
    )
    assert run(data, 1, keys=keys).code == 0
    made = {path.stem: tensors(path) for path in folder(data, 1).glob("*.safetensors")}
    assert made.keys() == {"model", "master", "momentum"}
    assert set(made["model"].values()) == {"BF16"}
    assert set(made["master"].values()) == {"F32"}
    trained = {name for name in made["model"] if "ln" not in name}
    assert made["master"].keys() == made["momentum"].keys() == trained
    half = load_file(folder(data, 1) / "master.safetensors")["wte.weight"]
    bits = half.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    raw = (folder(data, 1) / "model.safetensors").read_bytes()
    head = int.from_bytes(raw[:8], "little")
    at, end = json.loads(raw[8 : 8 + head])["wte.weight"]["data_offsets"]
    stored = np.frombuffer(raw[8 + head + at : 8 + head + end], "<u2")
    assert np.array_equal(stored, nearest.ravel().astype(np.uint16))


def test_which_stay(data: Path) -> None:
    assert run(data, 7, "--save-every", 1, "--keep", 2).code == 0
    assert steps(data) == [6, 7]
    more = ("--save-every", 2, "--keep", 1, "--keep-every", 10)
    assert run(data, 13, *more).code == 0
    assert steps(data) == [10, 13]


def test_a_folder_that_is_not_ours_stays(data: Path) -> None:
    """A folder without a run.json stays; leftovers of an unfinished save are removed."""
    other = folder(data, 5)
    other.mkdir(parents=True)
    (other / "mine").write_text("x")
    part = data.parent / "ck" / ".step-00000003.part"
    part.mkdir()
    (part / "model.safetensors").write_text("x")
    assert run(data, 3, "--save-every", 1, "--keep", 1).code == 0
    assert steps(data) == [3, 5] and not part.exists()
    assert [path.name for path in other.iterdir()] == ["mine"]


def test_what_somebody_has_put_beside_it_stays(data: Path) -> None:
    assert run(data, 1).code == 0
    (folder(data, 1) / "mine").write_text("x")
    done = run(data, 2, "--keep", 1)
    assert done.code == 0
    assert "checkpoint of step 1: cannot be removed: Directory not" in done.err
    gone = data.parent / "ck" / ".step-00000001.gone"
    assert run(data, 3).code == 0 and sorted(there(data)) == [2, 3]
    assert [path.name for path in gone.iterdir()] == ["mine"]


def test_what_a_killed_run_of_another_recipe_held_goes(
    data: Path, start: Start
) -> None:
    """The space reserved by a killed run of another recipe is freed."""
    momentum = "train.optimizer={type: SGD, lr: 0.01, momentum: 0.9}"
    running = start(*arguments(data, LONG, keys=(momentum,)))
    room = data.parent / "ck" / ".room-0"
    until = time.monotonic() + LIMIT
    while not (room / "momentum.safetensors").exists():
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(LIMIT)
    assert room.exists()
    assert run(data, 1).code == 0
    assert steps(data) == [1]


def test_files_of_all_states_are_known() -> None:
    """The runtime knows the files of every recipe's states and can clear them."""
    source = (program.RUNTIME / "zr_checkpoint.c").read_text()
    states = re.search(r"states\[\] = \{(.*?)\}", source, re.DOTALL)
    assert states is not None
    known = {*re.findall(r'"(\w+)"', states[1])}
    kept = {
        ops.saved(rule, state)
        for rule, names in ops.OPTIMIZERS.items()
        for state in names
    }
    assert known == kept | {"model", "master"}


def test_names_that_are_not_ours_stay(data: Path) -> None:
    """Files that are not ours stay, also inside a folder that is."""
    where = data.parent / "ck"
    mine = [
        ".room-mine/model.safetensors",
        ".room-1x/run.json",
        ".step-notes/run.json",
        ".step-00000003.mine/model.safetensors",
        ".room-7/mine",
    ]
    for name in mine:
        (where / name).parent.mkdir(parents=True)
        (where / name).write_text("x")
    assert run(data, 1).code == 0 and there(data) == [1]
    assert [(where / name).read_text() for name in mine] == ["x"] * len(mine)


def test_room_of_others_is_told(data: Path) -> None:
    mine = data.parent / "ck" / ".room-0" / "mine"
    mine.parent.mkdir(parents=True)
    mine.write_text("x")
    refused(data, 2, "/.room-0: File exists; it has files that no run wrote")
    assert mine.read_text() == "x"


def test_where_a_link_leads_stays(data: Path) -> None:
    """A link's target stays, whichever checkpoint or leftover the link stands for."""
    assert run(data, 1).code == 0
    elsewhere = folder(data, 1).rename(data.parent / "elsewhere")
    folder(data, 1).symlink_to(elsewhere)
    part = data.parent / "ck" / ".step-00000003.part"
    part.symlink_to(elsewhere)
    kept = sorted(elsewhere.iterdir())
    done = run(data, 2, "--keep", 1)
    assert done.code == 0 and "resumes from step 1" in done.err
    assert "checkpoint of step 1: cannot be removed: Not a dir" in done.err
    assert sorted(elsewhere.iterdir()) == kept and part.is_symlink()
    assert there(data) == [2]
    done = run(data, 3)
    assert done.code == 3 and "no checkpoint of step 3: " in done.err
    assert "Not a dir" in done.err
    assert sorted(elsewhere.iterdir()) == kept and there(data) == [2]


def test_files_have_the_users_mask(data: Path) -> None:
    done = program.run(*arguments(data, 1), limits=lambda: os.umask(0o027))
    assert done.code == 0, done.err
    modes = {path.stat().st_mode & 0o777 for path in folder(data, 1).iterdir()}
    assert modes == {0o640}
    assert folder(data, 1).stat().st_mode & 0o777 == 0o750


def test_nothing_is_left_to_do(data: Path) -> None:
    first = run(data, 3, "--hash")
    again = run(data, 3, "--hash")
    assert first.code == again.code == 0
    assert first.line("weights") == again.line("weights")
    assert steps(data) == [3]


@pytest.mark.slow
def test_skipped_steps_in_a_row_go_on(data: Path) -> None:
    """The number of skipped steps in a row is kept, and a smaller bound applies to it."""
    broken = ("train.precision=f16", "train.loss_scale.scale=1e30")
    first = run(data, 8, keys=(*broken, "train.max_skips=9"))
    assert first.code == 0, first.err
    assert json.loads((folder(data, 8) / "run.json").read_text())["skips"] == 8
    done = run(data, 30, keys=(*broken, "train.max_skips=3"))
    assert done.code == 6 and "up to step 9, were not finite" in done.err


# ---- refusals


def refused(data: Path, code: int, said: str, *options: object, steps: int = 4) -> None:
    done = run(data, steps, *options)
    assert done.code == code and said in done.err, (done.code, done.err)


def test_another_recipe_is_refused_by_its_line(data: Path) -> None:
    other = ("train.optimizer.lr=0.002",)
    assert run(data, 2).code == 0
    done = run(data, 4, keys=other)
    assert done.code == 4
    assert (
        "the checkpoint's run had train.optimizer.lr: 0.001, but this program has "
        "train.optimizer.lr: 0.002; if that is meant, --accept-change train.optimizer.lr\n"
        in done.err
    )
    keys = "train.seed,train.optimizer.lr"
    done = run(data, 4, "--accept-change", keys, keys=other)
    assert done.code == 0, done.err
    said = json.loads((folder(data, 4) / "run.json").read_text())
    assert said["accepted"] == keys


def test_what_is_accepted_is_a_key(data: Path) -> None:
    assert run(data, 2).code == 0
    for keys in ("seed", "data,seed", "train.seed,seed,data"):
        said = "--accept-change seed: neither this program nor the checkpoint"
        refused(data, 2, said, "--accept-change", keys)
    assert run(data, 4, "--accept-change", "data,train.seed").code == 0


def test_what_was_accepted_may_be_again(data: Path) -> None:
    """A run can repeat a command with an accepted change that its checkpoint lost."""
    assert run(data, 2).code == 0
    record = folder(data, 2) / "run.json"
    said = json.loads(record.read_text())
    said["recipe"].append("data.other: 1")
    record.write_bytes(files.sealed(json.dumps(said).encode()))
    for steps in (3, 4):
        done = run(data, steps, "--accept-change", "data.other")
        assert done.code == 0, done.err


def test_other_data_are_refused(data: Path) -> None:
    assert run(data, 2).code == 0
    moved = data.with_name("moved")
    shutil.move(data, moved)
    done = program.run(*arguments(moved, 3))
    assert done.code == 0, done.err
    trainer.write_tokens(moved, law.tokens(256, 4001))
    done = program.run(*arguments(moved, 4))
    assert done.code == 4 and "the checkpoint's run had data of 1 file, 8000 bytes" in (
        done.err
    )
    done = program.run(*arguments(moved, 4, "--accept-change", "data"))
    assert done.code == 0, done.err


def test_what_options_must_say(data: Path) -> None:
    assert run(data, 3, "--save-every", 1).code == 0
    refused(data, 2, "has a checkpoint of step 3", "--resume", "no")
    refused(data, 2, "is of step 3", steps=2)
    refused(data, 2, "has no checkpoint of this step", "--resume", 9, steps=9)
    refused(data, 2, "which the run would write again", "--resume", 2)
    refused(data, 2, "a whole number from 1", "--resume", "yes")
    refused(data, 2, "give one of them", "--resume", 3, "--load", data.parent)
    done = program.run(built(), "--data", data, "--steps", 1, "--keep", 2)
    assert done.code == 2 and "--keep needs --checkpoints DIR" in done.err
    file = data.parent / "file"
    file.write_text("")
    done = program.run(built(), "--data", data, "--steps", 1, "--checkpoints", file)
    assert done.code == 2 and "not a folder" in done.err


def test_a_step_behind_the_newest_can_be_taken(data: Path) -> None:
    """A run can resume from an older step if the newer checkpoints were moved away."""
    whole = run(data, 4, "--save-every", 1, "--hash")
    shutil.rmtree(folder(data, 4))
    shutil.rmtree(folder(data, 3))
    done = run(data, 4, "--resume", 2, "--hash")
    assert done.code == 0, done.err
    assert done.line("weights") == whole.line("weights")


def test_numbers_may_be_any_rows_of_the_states(data: Path) -> None:
    """A program with many numbers among its states, before all others, resumes."""
    source = trainer.generate(law.path("gpt"), *KEYS)
    numbers = re.findall(r' +{"\w+", CTL\(0\) [^}]*},\n', source)
    assert len(numbers) == len(ops.CONTROL)
    for row in numbers:
        source = source.replace(row, "")
    more = [numbers[0].replace('"step"', f'"step{n}"') for n in range(40)]
    head = "static const zr_state states[] = {\n"
    source = source.replace(head, head + "".join([*more, *numbers]))
    words = (trainer.build(source), "--data", data, "--hash", "--steps")
    whole = program.run(*words, 3)
    where = ("--checkpoints", data.parent / "ck")
    for steps_ in (2, 3):
        done = program.run(*words, steps_, *where)
        assert done.code == 0, done.err
    assert done.line("weights") == whole.line("weights")
    control = json.loads((folder(data, 3) / "run.json").read_text())["control"]
    assert control["step"] == control["step39"] == 3


def test_a_step_of_nine_digits_is_found(data: Path) -> None:
    assert run(data, 2).code == 0
    newest = folder(data, 2).rename(folder(data, 123456789))
    refused(data, 2, "is of step 123456789")
    newest.rename(newest.with_name("step-12345678901"))
    assert run(data, 1).code == 0


@pytest.mark.parametrize("name", ["model", "exp_avg", "exp_avg_sq"])
def test_a_bit_that_has_changed_is_named(data: Path, name: str) -> None:
    assert run(data, 2).code == 0
    file = folder(data, 2) / f"{name}.safetensors"
    raw = bytearray(file.read_bytes())
    head = 8 + int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8:head])["h.1.mlp.c_fc.weight"]
    raw[head + entry["data_offsets"][0] + 5] ^= 4
    file.write_bytes(raw)
    refused(
        data,
        2,
        f"{name}.safetensors: tensor h.1.mlp.c_fc.weight is damaged",
    )


def rest(text: bytes) -> bytes:
    """Return run.json after its brace, without the numbers of skipped steps."""
    kept = re.sub(rb'"(skipped|skips)": 0 *,\n', b"", text)
    assert len(text) - len(kept) > 60
    return kept[1:]


def test_a_line_of_the_recipe_twice_stands_for_no_other(data: Path) -> None:
    assert run(data, 2).code == 0
    path = folder(data, 2) / "run.json"
    text = path.read_bytes()
    assert b'"train.seed: 1"' in text
    other = text.replace(b'"train.seed: 1"', b'"train.precision: \\"f32\\""')
    path.write_bytes(files.sealed(other))
    refused(data, 4, "had no such key, but this program has ")


def test_what_is_no_checkpoint_is_told(data: Path) -> None:
    assert run(data, 2).code == 0
    made = folder(data, 2)
    kept = {path.name: path.read_bytes() for path in made.iterdir()}

    def broken(name: str, content: bytes | None, said: str) -> None:
        path = made / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        done = run(data, 3)
        assert done.code == 2 and said in done.err, done.err
        path.write_bytes(kept[name])

    def other(was: bytes, now: bytes) -> bytes:
        assert was in text
        return files.sealed(text.replace(was, now))

    text = kept["run.json"]
    damaged = "its checksum is wrong"
    none = "run.json: is not the run.json of a checkpoint\n"
    broken("run.json", b"", damaged)
    broken("run.json", text[:-9], damaged)
    broken("run.json", text.replace(b'"applied": 2', b'"applied": 3'), damaged)
    broken("run.json", text.replace(b"train.seed: 1", b"train.seed: 3"), damaged)
    broken("run.json", files.sealed(b""), "byte 0")
    broken("run.json", files.sealed(text[:-99]), "byte")
    broken("run.json", files.sealed(b'{"format": 1, '), none)
    broken("run.json", other(b'"format": 1', b'"format": 2'), "format 2")
    broken("run.json", other(b'"data"', b'"date"'), none)
    for numbers in (b'"skipped": 3, "skips": 0', b'"skipped": 0, "skips": 1'):
        few = files.sealed(b"{" + numbers + b", " + rest(text))
        broken("run.json", few, none)
    broken("run.json", other(b'"steps": 2', b'"steps": 1'), "is a checkpoint of step 1")
    broken(
        "run.json",
        other(b'"applied"', b'"implied"'),
        "numbers of the training state are missing",
    )
    broken("exp_avg.safetensors", None, "exp_avg.safetensors: No such file")
    broken("model.safetensors", kept["model.safetensors"][:-9], "data")
    broken("model.safetensors", kept["model.safetensors"][:3], "3 bytes are")
    assert run(data, 3).code == 0


@pytest.mark.parametrize("n", [1, 2, 9])
def test_a_disk_that_cannot_be_read_is_the_host_s_fault(
    data: Path, n: int, chaos: Path
) -> None:
    """A disk that cannot read run.json, a header or tensors is reported as the host's fault."""
    assert run(data, 2).code == 0
    command = arguments(data, 4)
    done = program.run(*command, LD_PRELOAD=chaos, FAIL=f"read:{n}")
    assert done.code == 3 and "step-00000002/" in done.err
    assert "Input/output error" in done.err


def test_so_it_is_of_weights_and_of_tokens_amid_training(
    data: Path, chaos: Path
) -> None:
    """A disk that cannot read weights, or tokens during training, is reported as the host's fault,
    too. Chaos takes their folders for a checkpoint's. Checks at the start read tokens less often
    than fifty steps do."""
    base, moved = (data.parent / f"step-{x}" for x in ("base", "data"))
    words = (built(), "--steps", 0, "--save", base, "--data", data)
    assert program.run(*words).code == 0
    moved.mkdir()
    shutil.copy(data, moved / "tokens")
    for n, given in (
        (9, ("--data", data, "--steps", 0, "--load", base)),
        (60, ("--data", moved / "tokens", "--steps", 50)),
    ):
        done = program.run(built(), *given, LD_PRELOAD=chaos, FAIL=f"read:{n}")
        assert done.code == 3, done.err
        assert "/step-" in done.err and "Input/output error" in done.err


@pytest.mark.parametrize("option", ["--checkpoints", "--save"])
def test_a_disk_that_cannot_be_written_is_the_host_s_fault(
    data: Path, chaos: Path, option: str
) -> None:
    """A disk that cannot be written is reported as the host's fault."""
    where = (option, data.parent / ".step-", "--steps", 1)
    done = program.run(
        *(built(), "--data", data, *where),
        LD_PRELOAD=chaos,
        FAIL="folder:1",
    )
    assert done.code == 3 and "Read-only file system" in done.err


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(data: Path) -> None:
    assert run(data, 1).code == 0
    with open(data.parent / "ck" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begun = time.monotonic()
        refused(data, 2, "another run is writing there")
        assert time.monotonic() - begun > 9


def test_a_run_waits_for_one_that_is_about_to_end(data: Path, start: Start) -> None:
    assert run(data, 1).code == 0
    with open(data.parent / "ck" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = start(*arguments(data, LONG))
        time.sleep(1)
    running.terminate()
    assert running.wait(LIMIT) == 75


# ---- checkpoints that cannot be written


def test_a_checkpoint_that_cannot_be_written_ends_no_run(data: Path) -> None:
    """A file in the place of step 2's folder prevents its checkpoint, and the run goes on."""
    (data.parent / "ck").mkdir()
    whole = run(data, 4, "--hash")
    shutil.rmtree(data.parent / "ck")
    done = run(data, 1)
    (data.parent / "ck" / ".step-00000002.part").mkdir()
    keep = data.parent / "ck" / "step-00000002"
    keep.write_text("")
    done = run(data, 4, "--save-every", 1, "--hash")
    assert done.code == 0, done.err
    assert "no checkpoint of step 2: " in done.err
    assert done.line("weights") == whole.line("weights")
    assert keep.read_text() == ""
    keep.unlink()
    assert steps(data) == [1, 3, 4]


def test_a_last_one_that_is_not_written_is_no_good_end(data: Path) -> None:
    """A run whose last checkpoint cannot be written ends with an error, after all its other work.
    The same command then only saves it."""
    (data.parent / "ck").mkdir()
    folder(data, 2).write_text("")
    saved = data.parent / "saved"
    options = ("--save-every", 1, "--save", saved, "--hash")
    done = run(data, 2, *options)
    assert done.code == 3 and done.line("weights ")
    assert done.err.count("the last checkpoint, of step 2, could not be saved") == 1
    assert load_file(saved / "model.safetensors")
    folder(data, 2).unlink()
    again = run(data, 2, *options)
    assert again.code == 0 and again.line("weights ") == done.line("weights ")
    assert steps(data) == [1, 2]


def test_no_checkpoint_is_there_that_could_not_be_synced(
    data: Path, chaos: Path
) -> None:
    """A checkpoint whose sync fails is not published. Each sync fails in turn with those after it:
    of rank 0's three files, of run.json, of the folder, and of its parent."""
    for n in range(1, 100):
        shutil.rmtree(data.parent / "ck", ignore_errors=True)
        command = arguments(data, 1)
        done = program.run(*command, LD_PRELOAD=chaos, FAIL=f"sync:{n}")
        struck = "chaos: struck" in done.err
        assert (done.code, there(data)) == ((3, []) if struck else (0, [1]))
        if not struck:
            break
    assert n == 7


@pytest.mark.parametrize(
    "rank,said", [(0, "File too large"), (1, "another rank could not write")]
)
def test_a_write_that_fails_ends_no_run(
    data: Path, rank: int, said: str, start: Start
) -> None:
    """A write that fails on one rank, as on a full disk, ends no run."""
    running = start(*arguments(data, LONG, "--save-every", 20, "--keep", 1))
    wait_for(data, 20, running)
    victim = program.children(running.pid)[rank]
    most = resource.prlimit(victim, resource.RLIMIT_FSIZE)
    resource.prlimit(victim, resource.RLIMIT_FSIZE, (1000, most[1]))
    told = ""
    while "no checkpoint of step" not in told or "File too large" not in told:
        line = running.stderr.readline()
        assert line and running.poll() is None
        told += line
    assert said in told
    resource.prlimit(victim, resource.RLIMIT_FSIZE, most)
    wait_for(data, max(there(data)) + 100, running)
    running.terminate()
    assert running.wait(LIMIT) == 75


# ---- runs that are asked to leave


def wait_for(data: Path, step: int, running: subprocess.Popen[str]) -> None:
    until = time.monotonic() + LIMIT
    while max(there(data), default=0) < step:
        assert running.poll() is None and time.monotonic() < until, (
            running.stderr.read()
        )
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize("to", ["parent", "rank"])
def test_a_signal_saves_and_leaves(
    data: Path, number: signal.Signals, to: str, start: Start
) -> None:
    running = start(
        *arguments(data, LONG, "--save-every", 5, "--log", data.parent / "log")
    )
    wait_for(data, 5, running)
    ranks = program.children(running.pid)
    os.kill(running.pid if to == "parent" else ranks[1], number)
    assert running.wait(LIMIT) == 75
    assert program.gone(ranks)
    lines = [
        json.loads(line) for line in (data.parent / "log").read_text().splitlines()
    ]
    last = max(line["step"] for line in lines if "loss" in line)
    assert steps(data)[-1] == last
    assert f"stops after step {last}; its checkpoint is saved" in (
        running.stderr.read()
    )


@pytest.mark.parametrize("to", ["parent", "rank"])
def test_who_leaves_without_its_checkpoint_says_so(
    data: Path, to: str, chaos: Path, start: Start
) -> None:
    """A run that leaves without its checkpoint exits with 3, or it would be queued for ever."""
    running = start(*arguments(data, LONG), LD_PRELOAD=chaos, FAIL="write:1")
    program.wait_for_step(running, 1)
    ranks = program.children(running.pid)
    os.kill(running.pid if to == "parent" else ranks[1], signal.SIGTERM)
    assert running.wait(LIMIT) == 3
    assert "the run was asked to stop but could not save its checkpoint" in (
        running.stderr.read()
    )
    assert steps(data) == []


def test_a_second_signal_ends_at_once(data: Path, start: Start) -> None:
    running = start(*arguments(data, LONG))
    program.wait_for_step(running, 1)
    running.send_signal(signal.SIGSTOP)
    for rank in program.children(running.pid):
        os.kill(rank, signal.SIGSTOP)
    running.send_signal(signal.SIGCONT)
    running.terminate()
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    assert running.wait(LIMIT) == 128 + signal.SIGINT


def test_with_nothing_new_it_leaves_at_once(data: Path, start: Start) -> None:
    """A run asked to leave before its first step leaves at once, with nothing new to save."""
    assert run(data, 1).code == 0
    with open(data.parent / "ck" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = start(*arguments(data, LONG))
        time.sleep(1)
        running.terminate()
        time.sleep(0.3)
    assert running.wait(LIMIT) == 75
    assert "stops after step 1; its checkpoint was saved before" in (
        running.stderr.read()
    )
    assert steps(data) == [1]


def test_without_checkpoints_a_signal_ends_a_run(data: Path, start: Start) -> None:
    running = start(built(), "--data", data, "--steps", LONG)
    program.wait_for_step(running, 1)
    running.terminate()
    assert running.wait(LIMIT) == 143


# ---- limited time


@pytest.mark.parametrize(
    "said",
    ["90", "1h1h", "1m1h", "h", "5 m", "0s", "-1s", "1w", "1" * 10 + "s"],
)
def test_a_time_has_its_units(data: Path, said: str) -> None:
    refused(data, 2, "such as 90s, 45m, 3h50m or 1d is", "--max-time", said)


def test_a_time_needs_checkpoints(data: Path) -> None:
    for name in ("--max-time", "--grace"):
        options = ("--steps", 1, name, "1d2h3m4s")
        done = program.run(built(), "--data", data, *options)
        assert done.code == 2 and f"{name} needs --checkpoints" in done.err


@pytest.mark.slow
def test_before_the_time_has_passed_it_saves_and_leaves(data: Path) -> None:
    """A run saves and leaves when less time is left than the longest step and checkpoint so far.
    Repeated runs arrive at the weights of a run with unlimited time."""
    whole = run(data, 12, "--hash")
    shutil.rmtree(data.parent / "ck")
    command = arguments(data, 12, "--hash", "--save-every", 1, "--max-time", "2s")
    codes: list[int] = []
    while not codes or codes[-1] == 75:
        log = data.parent / f"log{len(codes)}"
        done = program.run(*command, "--log", log, ZR_GATHER_DELAY_US=100000)
        codes.append(done.code)
        lines = list(map(json.loads, log.read_text().splitlines()))
        said = re.search(
            r"--max-time: (\S+) s .* takes (\S+) s, a checkpoint (\S+) s", done.err
        )
        assert (said is not None) == (done.code == 75), done.err
        if said:
            left, step, checkpoint = map(float, said.groups())
            assert left <= 1.01 * (step + checkpoint)
            assert 1.01 * step >= max(x.get("seconds", 0) for x in lines[:-1])
            *before, _ = [seconds for _, seconds, _ in pauses(log)]
            assert checkpoint == pytest.approx(max(before), rel=0.01)
    assert codes[0] == 75 and codes[-1] == 0, done.err
    assert done.line("weights") == whole.line("weights")


def test_each_run_makes_a_step(data: Path, start: Start) -> None:
    """Each run makes at least one step, however little time it has."""
    assert run(data, 1).code == 0
    with open(data.parent / "ck" / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        running = start(*arguments(data, LONG, "--max-time", "1s"))
        time.sleep(1.5)
    assert running.wait(LIMIT) == 75
    assert steps(data) == [1, 2]


# ---- tensors


@pytest.mark.parametrize("keys", [(), ("train.precision=bf16",)])
def test_tensors_of_several_pieces(data: Path, keys: tuple[str, ...]) -> None:
    """Ranks write and read 131072 elements at once, and the seams do not show."""
    keys = ("model.vocab=6000", "zero.stage=1", *keys)  # 6000 x 60
    assert run(data, 2, keys=keys).code == 0
    done = run(data, 3, "--hash", "--resume", 2, keys=keys)
    whole = data.parent / "whole"
    whole.mkdir()
    (whole / "tokens").symlink_to(data)
    other = run(whole / "tokens", 3, "--hash", keys=keys)
    assert done.code == other.code == 0, done.err
    assert done.out.splitlines()[-1] == other.out.splitlines()[-1]
    saved = sorted(folder(data, 3).glob("*.safetensors"))
    assert len(saved) > 2
    for path in saved:
        same = folder(whole / "tokens", 3) / path.name
        assert path.read_bytes() == same.read_bytes()


# ---- time that a signal leaves for saving


@pytest.mark.parametrize("grace,saved", [("1s", False), ("1d", True)])
@pytest.mark.parametrize("to", ["parent", "rank"])
def test_a_step_that_outlasts_the_grace(
    data: Path, grace: str, saved: bool, to: str, start: Start
) -> None:
    """A rank is stopped until the grace is over: nothing new is saved, and no leftovers remain."""
    assert run(data, 1).code == 0
    running = start(*arguments(data, LONG, "--grace", grace))
    while not running.stderr.readline().startswith("step "):
        assert running.poll() is None
    ranks = program.children(running.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(running.pid if to == "parent" else ranks[0], signal.SIGTERM)
    time.sleep(1.2)
    os.kill(ranks[1], signal.SIGCONT)
    assert running.wait(LIMIT) == 75
    said = running.stderr.read()
    assert ("its checkpoint is saved" in said) == saved
    if not saved:
        step = re.search(r"stops after step (\d+); its checkpoint is incomplete", said)
        assert f"no checkpoint of step {step[1]}: the time of --gr" in said
        assert said.endswith("\nthe newest checkpoint is of step 1\n")
        assert steps(data) == [1]


@pytest.mark.slow
def test_a_rank_that_is_stopped_as_it_saves(
    data: Path, chaos: Path, start: Start
) -> None:
    """A rank that stops while it saves at the end is noticed after the same time as in a step."""
    slow = {"LD_PRELOAD": chaos, "SLOW": 40000, "ZR_TIMEOUT_S": 2 * busy()}
    running = start(*arguments(data, 1), **slow)
    part = data.parent / "ck" / ".step-00000001.part"
    until = time.monotonic() + LIMIT
    while not part.exists():
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    ranks = program.children(running.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    assert running.wait(LIMIT) == 7
    said = running.stderr.read()
    assert "(ZR_TIMEOUT_S): rank 1 makes no progress" in said
    assert program.gone(ranks)


@pytest.mark.slow
def test_the_grace_is_not_for_the_weights(
    data: Path, chaos: Path, start: Start
) -> None:
    """A signal while --save writes the weights, which takes longer than the grace, ends nothing."""
    saved = data.parent / "saved"
    running = start(
        *arguments(data, 2, "--grace", "1s", "--save", saved),
        LD_PRELOAD=chaos,
        SLOW_WEIGHTS=100000,
    )
    wait_for(data, 2, running)
    running.terminate()
    assert running.wait(LIMIT) == 0, running.stderr.read()
    assert (saved / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("last", [LONG, 2])
def test_a_checkpoint_that_outlasts_the_grace(
    data: Path, last: int, chaos: Path, start: Start
) -> None:
    """A checkpoint that outlasts the grace of a signal is given up; without --grace it is awaited.
    A run is not complete without its last one."""
    assert run(data, 1).code == 0
    part = data.parent / "ck" / ".step-00000002.part"

    def told_while_it_writes(code: int, *options: object) -> str:
        running = start(
            *arguments(data, last, "--save-every", 1, *options),
            LD_PRELOAD=chaos,
            SLOW=40000,
        )
        until = time.monotonic() + LIMIT
        while not part.exists():
            assert running.poll() is None and time.monotonic() < until
            time.sleep(0.02)
        running.terminate()
        assert running.wait(LIMIT) == code
        return running.stderr.read()

    said = told_while_it_writes(75, "--grace", "1s")
    assert "no checkpoint of step 2: the time of --grace has passed\n" in said
    assert said.count("no checkpoint of step") == 1
    assert said.endswith("the newest checkpoint is of step 1\n")
    assert steps(data) == [1]
    awaited = told_while_it_writes(0 if last == 2 else 75)
    assert ("stops after step 2; its checkp" in awaited) == (last > 2)
    assert steps(data) == [1, 2]


# ---- killed


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_killed_goes_on(data: Path, seed: int, start: Start) -> None:
    """A run killed a few times at arbitrary moments resumes and arrives at its end."""
    total = 60
    whole = run(data, total, "--hash")
    shutil.rmtree(data.parent / "ck")
    rng = np.random.default_rng(seed)
    kept = 0
    for _ in range(4):
        running = start(*arguments(data, total, "--save-every", 1))
        time.sleep(rng.uniform(0.02, 0.3))
        ranks = program.children(running.pid)
        victim = int(rng.integers(0, len(ranks) + 1))
        with_rank = [*ranks, running.pid][victim]
        if running.poll() is None:
            os.kill(with_rank, signal.SIGKILL)
        running.wait(LIMIT)
        assert program.gone(ranks)
        assert max(there(data), default=0) >= kept
        kept = max(there(data), default=0)
    done = run(data, total, "--hash")
    assert done.code == 0, done.err
    assert done.line("weights") == whole.line("weights")


# ---- the reader of run.json


@pytest.mark.slow
def test_mutants(tmp_path: Path) -> None:
    """Mutants of run.json never crash the reader, in at most eight seconds; an accepted one has the
    program's recipe and data."""
    fuzzer = files.build("fuzz/run.c")
    done = files.run(fuzzer, tmp_path, 40000, 8)
    tried, accepted = (int(x) for x in done.stdout.split()[1::2])
    assert tried >= 1000 and tried // 50 < accepted < tried // 2, done.stdout
