"""test_checkpoint_tool.py -- tests tools/checkpoint.py: its report on checkpoints, that it finds
every changed bit, and that bad files make it fail only with a message of one line."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoint
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.lib import law, program, trainer
from tests.lib.files import element, raw_file, sealed

KEYS = (
    "zero.stage=2",
    "cluster.ranks=2",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.precision=bf16",
    "train.optimizer={type: SGD, lr: 0.01, momentum: 0.9}",
)
STATES = ("model", "master", "momentum")
NAME, SHAPE = "h.1.mlp.c_fc.weight", (60, 240)
AT = 250  # an element of the tensor


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    trainer.write_tokens(folder / "tokens", law.tokens(256, 4000))
    done = program.run(
        *(trainer.build(trainer.generate(law.path("gpt"), *KEYS)), "--data"),
        *(folder / "tokens", "--steps", 4, "--save-every", 2),
        *("--checkpoints", folder / "ck"),
    )
    assert done.code == 0, done.err
    return folder / "ck"


@pytest.fixture
def ck(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "ck")


Tell = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Tell:
    def call(*words: object) -> tuple[int, list[str]]:
        code = checkpoint.main(list(map(str, words)))
        said = capsys.readouterr()
        return code, (said.out + said.err).splitlines()

    return call


def step(ck: Path, number: int = 4) -> Path:
    return ck / f"step-{number:08d}"


def edit(ck: Path, change: Callable[[dict], object], number: int = 4) -> None:
    """Change run.json."""
    path = step(ck, number) / "run.json"
    run = json.loads(path.read_text())
    change(run)
    path.write_bytes(sealed(json.dumps(run).encode()))


def place(path: Path, name: str) -> tuple[int, int]:
    """Return the place of a tensor's data in a file."""
    raw = path.read_bytes()
    head = 8 + int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8:head])[name]["data_offsets"]
    return head + begin, head + end


def flip(path: Path, name: str, element: int, width: int) -> None:
    """Flip a bit of an element."""
    raw = bytearray(path.read_bytes())
    raw[place(path, name)[0] + element * width + width - 1] ^= 1
    path.write_bytes(raw)


def widths(state: str) -> int:
    return 2 if state == "model" else 4


# ---- the checksum


def test_the_checksum_is_the_one_that_a_run_writes(made: Path, tell: Tell) -> None:
    code, said = tell("verify", made)
    assert code == 0 and len(said) == 2
    n = len(load_file(step(made) / "master.safetensors")) * 3
    for line in said:
        assert f"the checksums of all {n} tensors are right" in line
    assert tell("verify", step(made)) == (0, said[1:])


def test_the_checksum_is_that_of_its_definition() -> None:
    """The checksum follows its definition, over more elements than are read at a time."""
    n = 2 * checkpoint.CHUNK + 3
    bits = np.random.default_rng(1).integers(0, 2**32, n, dtype=np.uint32)
    total = 0
    for i, x in enumerate(bits.tolist()):
        total += element(i, x)
    found = sum(
        checkpoint.mixture(bits[at : at + checkpoint.CHUNK], at)
        for at in range(0, n, checkpoint.CHUNK)
    )
    assert found % 2**64 == total % 2**64


@pytest.mark.parametrize("state", STATES)
def test_a_bit_that_has_changed_is_found(ck: Path, tell: Tell, state: str) -> None:
    path = step(ck) / f"{state}.safetensors"
    flip(path, NAME, AT, widths(state))
    code, said = tell("verify", ck)
    assert code == 1 and len(said) == 2
    assert f"{path}: tensor {NAME} is damaged: its checksum is" in said[1]
    assert tell("verify", step(ck, 2))[0] == 0


def test_elements_that_have_changed_places_are_found(ck: Path, tell: Tell) -> None:
    path = step(ck) / "master.safetensors"
    raw = bytearray(path.read_bytes())
    at = place(path, NAME)[0]
    raw[at : at + 8] = raw[at + 4 : at + 8] + raw[at : at + 4]
    path.write_bytes(raw)
    assert tell("verify", ck)[0] == 1


def test_progress_is_told(
    made: Path, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PROGRESS_S", 0)
    said = [x for x in tell("verify", made)[1] if x.startswith("verify: ")]
    size = sum(path.stat().st_size for path in made.glob("step-*/*"))
    assert len(said) > 2 and f" of {size} bytes" in said[0]
    done = [int(line.split()[1]) for line in said]
    assert done == sorted(done) and done[-1] < size < done[-1] * 1.2


# ---- list


def test_what_is_there_is_listed(made: Path, tell: Tell) -> None:
    code, (head, first, second) = tell("list", made)
    assert code == 0
    assert head.split() == ["step", "tokens", "bytes", "written", "state"]
    size = str(sum(path.stat().st_size for path in step(made).iterdir()))
    for line, steps in ((first, 2), (second, 4)):
        row = line.split()
        assert row[:3] == [str(steps), str(steps * 4 * 33), size]
        assert row[3].endswith("Z") and row[4].rstrip(";") == "whole"
    assert "--resume" not in first
    assert second.endswith("whole; --resume auto takes it")


def test_what_is_missing_is_listed(ck: Path, tell: Tell) -> None:
    (step(ck) / "momentum.safetensors").unlink()
    shutil.copytree(step(ck), ck / "step-123456789")
    (ck / "step-123456789" / "run.json").unlink()
    (ck / ".step-00000006.part").mkdir()
    (ck / "step-7").mkdir()
    code, (_, two, four, last, left) = tell("list", ck)
    assert code == 1 and two.endswith("whole")
    assert four.endswith(
        "momentum.safetensors: No such file or directory; --resume auto takes it"
    )
    assert last.endswith("run.json: No such file or directory")
    assert left == (
        ".step-00000006.part: unfinished, or being removed; the next run removes it"
    )
    with open(ck / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert tell("list", ck)[1][-1].endswith("a run is writing here")


def test_a_run_takes_what_is_marked(made: Path, ck: Path, tell: Tell) -> None:
    """A run resumes from the marked checkpoint, not from the newest folder, which has no
    run.json."""
    step(ck, 6).mkdir()
    _, _, four, six = tell("list", ck)[1]
    assert "--resume" in four and "--resume" not in six
    done = program.run(
        *(trainer.build(trainer.generate(law.path("gpt"), *KEYS)), "--data"),
        *(made.parent / "tokens", "--steps", 4, "--checkpoints", ck),
    )
    assert done.code == 0 and "resumes from step 4" in done.err, done.err


# ---- diff


def test_equal_checkpoints(made: Path, ck: Path, tell: Tell) -> None:
    assert tell("diff", step(made), step(ck)) == (
        0,
        ["equal: model, master, momentum, and the data in run.json"],
    )


@pytest.mark.parametrize("state", STATES)
def test_the_first_element_that_differs(
    made: Path, ck: Path, tell: Tell, state: str
) -> None:
    path = step(ck) / f"{state}.safetensors"
    for at in (AT, AT + 7):
        flip(path, NAME, at, widths(state))
    code, (line,) = tell("diff", step(made), step(ck))
    assert code == 1
    where = f"{state}: {NAME}[{AT // SHAPE[1]}, {AT % SHAPE[1]}]: "
    assert line.startswith(where)
    n = len(load_file(step(made) / "master.safetensors"))
    assert line.endswith(
        f"; 2 of {SHAPE[0] * SHAPE[1]} elements differ; 1 of {n} tensors differ"
    )
    numbers = []
    for folder in (made, ck):
        raw = (step(folder) / path.name).read_bytes()
        begin, end = place(path, NAME)
        x = np.frombuffer(raw[begin:end], checkpoint.TYPES["F32"][:2] + "4")
        if state == "model":
            bits = np.frombuffer(raw[begin:end], "<u2")[AT]
            number = (bits.astype(np.uint32) << 16).view(np.float32)
            numbers.append(f"{number!s} (0x{bits:04x})")
        else:
            number = x[AT].view(np.float32)
            numbers.append(f"{number!s} (0x{x[AT]:08x})")
    assert " -> ".join(numbers) in line


def test_what_of_run_json_differs(made: Path, ck: Path, tell: Tell) -> None:
    def change(run: dict) -> None:
        recipe = [x for x in run["recipe"] if "seed" not in x]
        run["recipe"] = [x.replace("lr: 0.01", "lr: 0.02") for x in recipe]
        run["data"] = "other"
        run["plan"] = "other"

    edit(ck, change)
    code, said = tell("diff", step(made), step(ck))
    assert code == 1 and said[:-2] == [
        "A  train.optimizer.lr: 0.01",
        "B  train.optimizer.lr: 0.02",
        "A  train.seed: 1",
        "B  train.seed: none",
    ]
    assert said[-2].startswith("A  data: 1 file, 8000 bytes")
    assert said[-1] == "B  data: other"


def test_a_state_that_one_alone_has(made: Path, ck: Path, tell: Tell) -> None:
    edit(ck, lambda run: run["sums"].pop("momentum"))
    code, (line,) = tell("diff", step(made), step(ck))
    n = len(load_file(step(made) / "momentum.safetensors"))
    assert code == 1
    assert line == (f"momentum: wte.weight: only in A; {n} of {n} tensors differ")


# ---- folders that are no checkpoints


def test_what_is_not_there(ck: Path, tell: Tell) -> None:
    (ck.parent / "empty").mkdir()
    for words in (
        ("list", ck.parent / "no"),
        ("verify", ck.parent / "no"),
        ("diff", ck / "no", step(ck)),
        ("diff", step(ck), ck / "no"),
    ):
        code, (line,) = tell(*words)
        assert code == 2 and line.startswith("run checkpoint: ")
        assert line.endswith("No such file or directory")
    for verb in ("list", "verify"):
        code, (line,) = tell(verb, ck.parent / "empty")
        assert code == 2 and "has no checkpoint" in line
    assert tell("list", step(ck) / "run.json")[0] == 2
    for words in ([], ["lst"], ["list"], ["diff", "a"]):
        with pytest.raises(SystemExit) as left:
            checkpoint.main(words)
        assert left.value.code == 2


def header(**changed: object) -> bytes:
    """Return the header of a file whose only tensor has a byte too many, or other changes."""
    good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    return raw_file({"a": {**good, **changed}}, bytes(8))


DEEP = b'{"a":' + b"[" * 100000
BROKEN = [
    ("run.json", b"", "run.json: not JSON"),
    ("run.json", b"\xff{}", "run.json: not JSON"),
    ("run.json", DEEP, "run.json: not JSON"),
    ("run.json", b'{"format": ' + b"9" * 5000 + b"}", "run.json: not JSON"),
    ("run.json", b'{"format": 1, "format": 1}', "not JSON: a duplicate key"),
    ("run.json", b"[]", "run.json: not a JSON object"),
    ("run.json", b'{"format": 2}', "run.json: its format is not 1"),
    ("run.json", b'{"format": 1}', "run.json: steps: is missing or invalid"),
    ("model.safetensors", b"abc", "3 bytes are not a safetensors file"),
    ("model.safetensors", b"\xff" * 99, "a header of 18446744073709551615"),
    ("model.safetensors", b"\1" + bytes(99), "a header of 1 bytes"),
    ("model.safetensors", b"\x99" + bytes(99), "truncated: a header of 153"),
    ("model.safetensors", raw_file(b"{]"), "header: not JSON"),
    ("model.safetensors", raw_file(DEEP), "header: not JSON"),
    ("model.safetensors", raw_file([1]), "header: not a JSON object"),
    ("model.safetensors", raw_file({"a": 1}), "tensor a: not a JSON object"),
    ("model.safetensors", header(dtype="F64"), "allowed: F32, BF16, F16"),
    ("model.safetensors", header(dtype=[]), "allowed: F32, BF16, F16"),
    ("model.safetensors", header(shape=[-2]), "not a list of at most 8 sizes"),
    ("model.safetensors", header(shape=[True] * 2), "at most 8 sizes"),
    ("model.safetensors", header(shape=[1] * 9), "at most 8 sizes"),
    ("model.safetensors", header(shape=[2**62] * 8), "do not make F32"),
    ("model.safetensors", header(data_offsets=[8]), "not [begin, end]"),
    ("model.safetensors", header(data_offsets=[8, 0]), "do not make F32"),
    (
        "model.safetensors",
        header(data_offsets=[8, 16]),
        "does not follow the previous tensor's",
    ),
    ("model.safetensors", header(shape=[4], data_offsets=[0, 16]), "(trunc"),
    ("model.safetensors", header(shape=[0], data_offsets=[0, 0]), "has 8"),
    ("model.safetensors", header(), "tensor a is not in run.json"),
]


@pytest.mark.parametrize("name,content,said", BROKEN)
def test_what_is_no_checkpoint_is_told(
    ck: Path, tell: Tell, name: str, content: bytes, said: str
) -> None:
    (step(ck) / name).write_bytes(content)
    code, lines = tell("verify", step(ck))
    assert code == 1 and len(lines) == 1
    assert said in lines[0] and str(step(ck) / name) in lines[0]
    code, lines = tell("list", ck)
    assert code == 1 and f"{name}: " in lines[-1]
    code, lines = tell("diff", step(ck, 2), step(ck))
    assert code == 2 and said in lines[-1]


@pytest.mark.parametrize(
    "change,said",
    [
        (lambda run: run.update(steps=2), "run.json: is a checkpoint of step 2"),
        (lambda run: run.update(steps=4.0), "run.json: steps: "),
        (lambda run: run.update(steps=2**63), "run.json: steps: "),
        (lambda run: run.update(recipe=[1]), "run.json: recipe: "),
        (lambda run: run.update(control={"a": [1]}), "run.json: control: "),
        (lambda run: run["sums"].update({"../a": {}}), "run.json: sums: "),
        (lambda run: run["sums"].update(model=[]), "run.json: sums: "),
        (lambda run: run["sums"]["model"].update(a="0"), "run.json: sums: "),
        (
            lambda run: run["sums"]["model"].update(a="0" * 16),
            "tensor a is not in model.safetensors",
        ),
        (
            lambda run: run["sums"].update(exp_avg={}),
            "exp_avg.safetensors: No such file",
        ),
    ],
)
def test_what_a_run_does_not_write_is_told(
    ck: Path, tell: Tell, change: Callable[[dict], object], said: str
) -> None:
    edit(ck, change)
    code, lines = tell("verify", ck)
    assert code == 1 and len(lines) == 2 and said in lines[1]


def test_each_byte_of_run_json_counts(ck: Path, tell: Tell) -> None:
    """Every byte of run.json counts, because nothing else covers the numbers that a step takes
    over."""
    path = step(ck) / "run.json"
    text = path.read_bytes()
    rng = random.Random(1)
    for at in range(0, len(text)):
        raw = bytearray(text)
        raw[at] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        with pytest.raises(checkpoint.Bad):
            checkpoint.read_run(step(ck))
    assert b'"applied": 4 ' in text
    path.write_bytes(text.replace(b'"applied": 4', b'"applied": 5'))
    code, lines = tell("verify", step(ck))
    assert code == 1 and lines == [f"{path}: is damaged: its checksum is wrong"]


def test_a_name_cannot_reach_the_terminal(ck: Path, tell: Tell) -> None:
    edit(ck, lambda run: run["sums"]["model"].update({"\x1b[2J": "0" * 16}))
    assert "tensor ?[2J is not" in tell("verify", ck)[1][1]


def test_mutants(made: Path, ck: Path, tell: Tell) -> None:
    """Each mutant ends with an exit code and a line, some of them with success."""
    rng = random.Random(1)
    words = [b"", b"{", b"]", b'"', b"0", b"-1", b"1e9", b"null", b"\xff"]
    codes = []
    for _ in range(100):
        name = rng.choice(("run.json", "momentum.safetensors"))
        raw = bytearray((step(made) / name).read_bytes())
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(min(len(raw), 6000))
            raw[at : at + rng.choice((0, 1, 1, 9))] = rng.choice(words)
        (step(ck) / name).write_bytes(raw)
        code, lines = tell("diff", step(made), step(ck))
        assert lines and (code == 2) == lines[-1].startswith("run checkpoint")
        codes.append(code)
        shutil.copy(step(made) / name, step(ck) / name)
    assert {0, 1, 2} >= set(codes) >= {1, 2}
