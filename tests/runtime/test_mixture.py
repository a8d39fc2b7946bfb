"""test_mixture.py -- tests runs on several sources with shuffled samples: the samples match an
independent reference, on any ranks and from any step on; and the messages and refusals of such
runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.lib import law, program, trainer
from tests.lib.program import IGNORE, STEPS, T, line_of, masters_of, samples, train

SEED, MASK = 7, 2**64 - 1
MADE = STEPS * program.MICRO_BATCHES * program.B  # samples of a run
Turns = Iterator[tuple[int, int]]

# ---- the order by its definition, from the root down


def mixed(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def permuted(source: int, epoch: int, n: int, at: int) -> int:
    key = mixed((SEED + 0x9E3779B97F4A7C15) & MASK)
    key = mixed((mixed((key + source) & MASK) + epoch) & MASK)
    half = 1
    while 4**half < n:
        half += 1
    while True:
        left, right = divmod(at, 2**half)
        for k in range(1, 9):
            drawn = mixed(mixed((key + k) & MASK) ^ right) % 2**half
            left, right = right, left ^ drawn
        at = left * 2**half + right
        if at < n:
            return at


def turns(weights: list[int]) -> Turns:
    """Return (source, number of its samples before) for each sample."""
    trees: list[tuple[int, int, object]] = [(w, k, k) for k, w in enumerate(weights)]
    while len(trees) > 1:
        trees.sort(key=lambda tree: tree[:2])
        (a, _, x), (b, _, y), *rest = trees
        number = len(weights) + len(weights) - len(trees)
        trees = [*rest, (a + b, number, (a, x, b, y))]

    def way(tree: object, m: int) -> tuple[int, int]:
        if isinstance(tree, int):
            return tree, m
        a, x, b, y = tree
        first, then = ((2 * i * a + a + b) // (2 * (a + b)) for i in (m, m + 1))
        return way(x, first) if then > first else way(y, m - first)

    return (way(trees[0][2], m) for m in range(MADE))


def stream(
    files: list[Path], weights: list[int], shuffle: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, int64 [MADE, T]."""
    of, found = [samples(file) for file in files], []
    for source, at in turns(weights):
        n = len(of[source][0])
        epoch, place = divmod(at, n)
        if shuffle:
            place = permuted(source, epoch, n, place)
        found.append([part[place] for part in of[source]])
    inputs, targets = np.array(found).swapaxes(0, 1)
    return inputs, targets


@pytest.fixture(scope="session")
def shuffled() -> Path:
    return program.built("plain", "-DSHUFFLE=1")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return files of 37, 20 and 9 samples: a run of 144 goes through each several times."""
    folder = tmp_path_factory.mktemp("sources")
    made = [folder / name for name in "abc"]
    for seed, (path, n) in enumerate(zip(made, (37, 20, 9), strict=True)):
        drawn = np.random.default_rng(seed).integers(0, IGNORE + 1, n * T + 1)
        drawn.astype("<u2").tofile(path)
    return made


def sources(files: list[Path], weights: list[str]) -> list[object]:
    pairs = zip(files, weights, strict=False)
    return [
        word
        for file, weight in pairs
        for word in ("--data", f"{file}:{weight}" if weight else file)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize(
    "weights, whole",
    [
        ([""], [1]),
        (["", ""], [1, 1]),
        (["0.7", "0.3"], [7, 3]),
        (["1.5", "0.0001", "2."], [15000, 1, 20000]),
    ],
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_samples_are_those_of_the_definition(
    program: Path,
    shuffled: Path,
    files: list[Path],
    weights: list[str],
    whole: list[int],
    shuffle: bool,
    ranks: int,
) -> None:
    wanted = stream(files[: len(whole)], whole, shuffle)
    binary = shuffled if shuffle else program
    first, *more = sources(files, weights)[1::2]
    others = [word for file in more for word in ("--data", file)]
    done = train(binary, first, *others, RANKS=ranks)
    assert done.code == 0, done.err
    assert done.line("weights") == line_of(masters_of(*wanted, STEPS))


@pytest.mark.slow
def test_an_epoch_has_another_order_than_the_one_before(
    shuffled: Path, files: list[Path]
) -> None:
    """The reference draws another order in each epoch (a control)."""
    n = 37
    drawn = [[permuted(0, e, n, i) for i in range(n)] for e in range(2)]
    assert sorted(drawn[0]) == sorted(drawn[1]) and drawn[0] != drawn[1]


@pytest.mark.slow
def test_validation_is_never_shuffled(
    program: Path, shuffled: Path, files: list[Path]
) -> None:
    said = []
    for binary in (program, shuffled):
        options = ("--val", files[1], "--sample", 5, "--val-tokens", 30)
        done = train(binary, files[0], *options, steps=0)
        assert done.code == 0, done.err
        said.append([x for x in done.out.splitlines() if "start" not in x])
    assert said[0] == said[1]


# ---- messages about sources


def test_each_source_is_told(program: Path, files: list[Path], tmp_path: Path) -> None:
    options = sources(files, ["2", "0.5"])
    done = train(program, options[1], *options[2:], "--log", tmp_path / "log")
    assert done.code == 0, done.err
    run, step, *_ = map(json.loads, (tmp_path / "log").open())
    told = [(x["file"], x["samples"], x["weight"]) for x in run["data"]]
    assert told == [(str(files[0]), 37, 4), (str(files[1]), 20, 1)]
    assert step["epoch"] == pytest.approx(48 / 57)
    assert f"{files[0]}: 186 tokens, 192.0 a step; --steps 3 is 3.11" in (done.err)
    assert f"{files[1]}: 101 tokens, 48.0 a step; --steps 3 is 1.45" in (done.err)


def test_a_name_with_a_colon_is_a_name(
    program: Path, files: list[Path], tmp_path: Path
) -> None:
    named = tmp_path / "a:2"
    named.write_bytes(files[0].read_bytes())
    wanted = program_line(program, files[0])
    assert program_line(program, named) == wanted
    assert program_line(program, f"{named}:3") == wanted
    assert program_line(program, f"--data={named}:0.5") == wanted


def program_line(binary: Path, data: object) -> str:
    words = [data] if str(data).startswith("--") else ["--data", data]
    done = program.run(binary, *words, "--steps", STEPS, "--hash")
    assert done.code == 0, done.err
    return done.line("weights")


def test_a_folder_stands_for_its_files(
    program: Path, files: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "train.bin").write_bytes(files[0].read_bytes())
    (tmp_path / "val.bin").write_bytes(files[1].read_bytes())
    found, wanted = (
        train(program, data, "--val", val, steps=1).out.splitlines()
        for data, val in [(tmp_path, tmp_path), files[:2]]
    )
    same = ("loss", "val loss", "weights")
    lines = [[x for x in t if x.startswith(same)] for t in (found, wanted)]
    assert lines[0] == lines[1] and len(lines[0]) == 3


@pytest.mark.parametrize(
    "said, words",
    [
        ("x:0", "--data x:0: a weight from 0.0001 to 1000"),
        ("x:0.00001", "a weight from 0.0001 to 1000"),
        ("x:1001", "a weight from"),
        ("x:99999999999999999999", "a weight from"),
        ("x:1000.0001", "a weight from"),
        ("x:1e3", "x:1e3: No such file"),
        ("x:-1", "x:-1: No such file"),
        ("x:.", "x:.: No such file"),
        ("x:", "x:: No such file"),
        ("x:2", "rank 0: --data x: No such file"),
        (":2", "rank 0: --data : No such file"),
    ],
)
def test_what_is_no_weight(program: Path, said: str, words: str) -> None:
    done = program_run(program, "--data", said, "--steps", 1)
    assert done.code == 2 and words in done.err, done.err


def program_run(binary: Path, *words: object) -> program.Result:
    return program.run(binary, *words, RANKS=1)


def test_how_many_sources_there_may_be(program: Path, files: list[Path]) -> None:
    words = ["--data", files[0]] * 64
    done = program_run(program, *words, "--steps", 1)
    assert done.code == 0, done.err
    done = program_run(program, *words, "--data", files[1], "--steps", 1)
    assert done.code == 2 and "more than 64 sources" in done.err


def test_a_file_of_any_source_is_no_log(program: Path, files: list[Path]) -> None:
    words = ["--data", files[0], "--data", files[1], "--log", files[1]]
    done = program_run(program, *words, "--steps", 1)
    assert done.code == 2 and "is the input file of --data" in done.err


# ---- resuming

KEYS = ("train.global_batch=4", "train.micro_batch=1")
SHUFFLE = "data.shuffle=true"


def built(stage: int, ranks: int, *keys: str) -> Path:
    spread = (f"zero.stage={stage}", f"cluster.ranks={ranks}")
    source = trainer.generate(law.path("gpt"), *KEYS, *spread, *keys)
    return trainer.build(source)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Return --data of two sources: a run of 6 steps, 24 samples, goes through both."""
    folder = tmp_path_factory.mktemp("two")
    for name, n in ("a", 10), ("b", 5):
        trainer.write_tokens(folder / name, law.tokens(256, n * 33 + 1))
    return ["--data", f"{folder}/a:3", "--data", f"{folder}/b"]


@pytest.mark.slow
def test_it_goes_on_from_any_step(two: list[object], tmp_path: Path) -> None:
    """A run resumes from any step to the bit, on other ranks and stages."""
    ways = [built(0, 1, SHUFFLE), built(3, 2, SHUFFLE), built(2, 4, SHUFFLE)]
    log = tmp_path / "log"
    steps = 6
    whole = law.run(ways[0], *two, "--steps", steps, log=log)
    plain = law.run(built(0, 1), *two, "--steps", steps, log=log)
    assert whole.weights != plain.weights
    for step in range(1, steps):
        where = ("--checkpoints", tmp_path / f"ck{step}")
        law.run(ways[step % 3], *two, "--steps", step, *where, log=log)
        way = ways[(step + 1) % 3]
        found = law.run(way, *two, "--steps", steps, *where, log=log)
        assert found.weights == whole.weights
        assert found.steps == whole.steps[step:]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a, b: [a, b.replace("b", "b:2")], "data.weights: [3, 1]"),
        (lambda a, b: [b, a], "data of 2 files, "),
        (lambda a, b: [a.replace(":3", "")], "data of 2 files, "),
    ],
    ids=["weights", "order", "one"],
)
def test_other_sources_are_refused(
    two: list[object], tmp_path: Path, change: object, words: str
) -> None:
    where = ("--checkpoints", tmp_path / "ck", "--steps")
    binary = built(0, 1, SHUFFLE)
    a, b = two[1::2]
    done = program.run(binary, *two, *where, 1)
    assert done.code == 0, done.err
    folder, b = str(b).rsplit("/", 1)
    others = [f"{folder}/{x}" for x in change(str(a).rsplit("/", 1)[1], b)]
    others = [word for file in others for word in ("--data", file)]
    done = program.run(binary, *others, *where, 2)
    assert done.code == 4 and words in done.err, done.err
    keys = ("--accept-change", "data,data.weights")
    done = program.run(binary, *others, *where, 2, *keys)
    assert done.code == 0, done.err


def test_shuffling_is_a_line_of_the_recipe(two: list[object], tmp_path: Path) -> None:
    where = ("--checkpoints", tmp_path / "ck", "--steps")
    done = program.run(built(0, 1, SHUFFLE), *two, *where, 1)
    assert done.code == 0, done.err
    said = json.loads((tmp_path / "ck/step-00000001/run.json").read_text())
    assert said["recipe"][-2:] == [
        "data.shuffle: true",
        "data.weights: [3, 1]",
    ]
    done = program.run(built(0, 1), *two, *where, 2)
    assert done.code == 4 and "had data.shuffle: true" in done.err


def test_a_line_that_the_checkpoint_lacks(two: list[object], tmp_path: Path) -> None:
    """A key that the checkpoint lacks is named and may be accepted like any other change."""
    where = ("--checkpoints", tmp_path / "ck", "--steps")
    done = program.run(built(0, 1), *two, *where, 1)
    assert done.code == 0, done.err
    binary = built(0, 1, SHUFFLE)
    done = program.run(binary, *two, *where, 2)
    assert done.code == 4, done.err
    assert "no such key, but this program has data.shuffle: true" in done.err
    accepted = ("--accept-change", "data.shuffle")
    done = program.run(binary, *two, *where, 2, *accepted)
    assert done.code == 0, done.err


# ---- large vocabularies


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [128256, 151936])
def test_a_vocabulary_beyond_uint16_trains(tmp_path: Path, vocab: int) -> None:
    """Vocabularies beyond uint16, Llama 3's and Qwen's, train on uint32; 4294967295 is no
    target."""
    file = tmp_path / "tokens"
    drawn = np.random.default_rng(1).integers(0, vocab, 33 * 8 + 1)
    drawn[[5, 40]] = 2**32 - 1
    drawn[7] = vocab - 1
    drawn.astype("<u4").tofile(file)
    keys = (f"model.vocab={vocab}", "train.global_batch=4")
    binary = built(1, 2, *keys)
    words = ("--data", file, "--tokens", "uint32", "--steps", 2)
    law.run(binary, *words, log=tmp_path / "log")
    steps = [json.loads(x) for x in (tmp_path / "log").open()][1:3]
    assert [step["valid"] for step in steps] == [4 * 33 - 2, 4 * 33]
    assert all(abs(x["loss"] - np.log(vocab)) < 0.5 for x in steps)


# ---- train.c


def test_without_the_key_train_c_is_as_it_was() -> None:
    """A spec without the key has the same train.c as before, and recipes of older checkpoints fit
    new programs."""
    plain, said, shuffled = (
        trainer.unsigned(trainer.generate(law.path("gpt"), *keys))
        for keys in ((), ("data.shuffle=false",), (SHUFFLE, "train.seed=5"))
    )
    assert plain == said and "shuffle" not in plain
    assert ".shuffle = 1, .seed = 5," in shuffled
    assert '"data.shuffle: true",' in shuffled
