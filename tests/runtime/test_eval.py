"""test_eval.py -- tests multiple choice (--eval): the number of examples that a model gets right,
in llm.c's format, and malformed files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tests.cuda import test_cuda
from tests.lib import choices, files, law, trainer
from tests.lib import program as by_hand
from tests.lib.choices import Example, header, packed
from tests.lib.program import STEPS, VOCAB, T, run

RANKS = [1, 2, 3]


def drawn(count: int, seed: int = 1) -> list[Example]:
    """Return examples of two to five completions, up to the longest possible."""
    chance = np.random.default_rng(seed)

    def tokens(n: int) -> list[int]:
        return [int(x) for x in chance.integers(0, VOCAB, n)]

    found = []
    for _ in range(count):
        many = int(chance.integers(2, 6))
        context = tokens(int(chance.integers(1, T + 1)))
        room = T + 1 - len(context)
        each = [tokens(int(chance.integers(1, room + 1))) for _ in range(many)]
        found.append(Example(context, each, int(chance.integers(many))))
    return found


def losses(example: Example, completion: list[int]) -> list[int]:
    """Return program.c's losses of a completion: each token is the target of the one before it."""
    stream = [*example.context, *completion]
    targets = range(len(example.context), len(stream))
    return [stream[i - 1] + 1000 * stream[i] for i in targets]


def right(examples: list[Example], by: object = np.mean) -> int:
    """Return how many examples have their label at the first of the least losses."""
    found = 0
    for x in examples:
        each = [by(losses(x, completion)) for completion in x.completions]
        found += each.index(min(each)) == x.label
    return found


def written(folder: Path, examples: list[Example]) -> Path:
    path = folder / "eval.bin"
    path.write_bytes(choices.file(examples))
    return path


def score(binary: Path, path: Path, *options: object, **env: object) -> str:
    """Return the line of the result."""
    done = run(binary, "--steps", 0, "--eval", path, *options, **env)
    assert done.code == 0, done.err
    return done.line("eval ")


def test_what_is_right(program: Path, tmp_path: Path) -> None:
    """An example is right by the mean over a completion's tokens, on any number of ranks and with
    any order of queues."""
    examples = drawn(101)
    want = right(examples)
    assert 10 < want < 60 and want != right(examples, np.sum)
    path = written(tmp_path, examples)
    said = f"eval {path}: {want} of 101 ({want / 101:.4f})"
    log = tmp_path / "log"
    for ranks in (*RANKS, 8):
        assert score(program, path, "--log", log, RANKS=ranks) == said
    for mode in ("late", "shuffled:3"):
        assert score(program, path, "--queue", mode, RANKS=2) == said
    records = map(json.loads, log.read_text().splitlines())
    found = [x for x in records if "eval_right" in x]
    assert found == 4 * [
        {
            "step": 0,
            "eval_right": want,
            "eval_examples": 101,
            "eval_accuracy": want / 101,
        }
    ]


def test_of_equal_ones_the_first_counts(program: Path, tmp_path: Path) -> None:
    same = [[7, 7], [7], [7, 7]]
    examples = [Example([7, 7], same, label) for label in (0, 0, 1)]
    path = written(tmp_path, examples)
    assert score(program, path).endswith(": 2 of 3 (0.6667)")


def test_behind_training(program: Path, data: Path, tmp_path: Path) -> None:
    """An evaluation after training leaves the weights as without it and allocates nothing in a
    step."""
    path = written(tmp_path, drawn(11))
    options = ("--val", data, "--val-every", 1, "--eval", path)
    done = by_hand.train(program, data, *options, RANKS=2)
    assert done.code == 0, done.err
    assert done.line("eval ").startswith(f"eval {path}: ")
    assert done.line("weights ") == by_hand.weights_line(data, STEPS)


def test_the_log_is_another_file(program: Path, tmp_path: Path) -> None:
    path = written(tmp_path, drawn(3))
    before = path.read_bytes()
    done = run(program, "--steps", 0, "--eval", path, "--log", path)
    assert done.code == 2 and "is the input file of --eval" in done.err
    assert path.read_bytes() == before


# ---- a model


def val_loss(binary: Path, weights: Path, folder: Path, x: Example) -> list[float]:
    """Return --val's loss of each completion, computed with a file of labels."""
    sequence, hole, found = 40, 65535, []
    for completion in x.completions:
        stream = [*x.context, *completion]
        rest = sequence + 1 - len(stream)
        trainer.write_tokens(folder / "val.bin", np.array(stream + rest * [3]))
        labels = len(x.context) * [hole] + list(completion) + rest * [hole]
        trainer.write_tokens(folder / "labels", np.array(labels))
        named = {"tokens": sequence + 1, "labels": "labels"}
        meta = {"format": 1, "vocab": 256, "dtype": "uint16", "ignore": hole}
        (folder / "meta.json").write_text(
            json.dumps({**meta, "files": {"val.bin": named}})
        )
        options = ("--steps", 0, "--load", weights, "--val", folder)
        trainer.sh(binary, *options, "--log", folder / "log")
        last = (folder / "log").read_text().splitlines()[-2]
        found.append(json.loads(last)["val_loss"])
    return found


def test_as_validation_has_it(tmp_path: Path) -> None:
    """Every example is right with the labels of single samples' losses, none with others, whatever
    the stage, ranks and threads."""
    spec = law.path("gpt")
    binary = trainer.build(trainer.generate(spec))
    tokens = tmp_path / "tokens"
    trainer.write_tokens(tokens, law.tokens(256, 4001))
    weights = tmp_path / "weights"
    trainer.sh(binary, "--data", tokens, "--steps", 3, "--save", weights)
    words = [int(x) for x in law.tokens(256, 400)]
    best, others = [], []
    for i in range(3):
        context = words[40 * i : 40 * i + 7]
        each = [words[60 * i + 9 * k :][: 3 + 2 * k] for k in range(3)]
        found = val_loss(binary, weights, tmp_path, Example(context, each, 0))
        least = found.index(min(found))
        best.append(Example(context, each, least))
        others.append(Example(context, each, (least + 1) % 3))
    split = ("zero.stage=3", "cluster.ranks=3", "train.global_batch=12")
    for way in (binary, trainer.build(trainer.generate(spec, *split))):
        for examples, told in ((best, "3 of 3"), (others, "0 of 3")):
            path = written(tmp_path, examples)
            options = ("--load", weights, "--threads", 2)
            assert told in score(way, path, *options)


@pytest.mark.slow
def test_a_gpus_program_has_the_same_on_any_ranks(tmp_path: Path) -> None:
    """A GPU's program gets the same result on any ranks with two kinds of labels, since a rank
    averages its own sums."""
    chance = np.random.default_rng(3).integers(0, 250, (6, 3, 5)).tolist()
    ways = (("cluster.ranks=1",), ("cluster.ranks=2", "zero.stage=3"))
    told = []
    for way in ways:
        source = trainer.generate(test_cuda.SPEC, *test_cuda.SMALL, *way)
        binary = trainer.build(source, trainer.EMULATED)
        for label in range(2):
            examples = [Example(x[0], x[1:], label) for x in chance]
            path = written(tmp_path, examples)
            told.append(score(binary, path, ZR_SHARE_GPU=1))
    assert told[:2] == told[2:] and ": 0 of" not in told[0] + told[1]


# ---- malformed files

GOOD = Example([1, 2], [[3], [4, 5]], 1)
WORDS = GOOD.words(0)


def but(at: int, word: int) -> bytes:
    """Return the example with one word changed."""
    words = [*WORDS]
    words[at] = word
    return header(1, 2 * len(words)) + packed(words)


WHOLE = choices.file([GOOD, GOOD])
BAD = {
    "empty": (b"", "0 bytes; the header"),
    "short": (WHOLE[:1023], "1023 bytes; the header"),
    "magic": (header(1, 26, magic=20240520), "magic 20240520, version 1;"),
    "version": (header(1, 26, version=2), "version 2;"),
    "gzip": (gzip.compress(WHOLE), "is compressed by gzip; unpack it"),
    "numpy": (b"\x93NUMPY\1\0" + WHOLE, "is a numpy array (.npy)"),
    "JSON": (b'{"ctx": ""}\n' * 100, "./run eval converts JSON lines"),
    "none": (header(0, 26), "0 examples"),
    "negative": (header(-1, 26) + packed(WORDS), "-1 examples"),
    "many": (header(2**31 - 1, 26) + packed(WORDS), "2147483647 examples"),
    "longest": (header(1, -5) + packed(WORDS), "longest example has -5"),
    "longer": (
        header(1, 18) + packed(WORDS),
        "example 0: 26 bytes; must be an even number from",
    ),
    "begin": (but(0, 1), "example 0: begins with 1"),
    "no bytes": (but(1, 0), "example 0: 0 bytes"),
    "odd": (but(1, 25), "example 0: 25 bytes"),
    "number": (but(2, 7), "example 0: its number is 7, but must be 0"),
    "label": (but(3, 2), "the right completion is number 2, but there are 2,"),
    "no completion": (but(4, 0), "but there are 0,"),
    "fewer": (but(4, 1), "the right completion is number 1, but there are 1,"),
    "more": (but(4, 3), "ends before its completion"),
    "no context": (but(5, 0), "a context without a token"),
    "context": (but(5, 65535), "a context of 65535 tokens, where 7 are"),
    "no token": (but(8, 0), "a completion without a token"),
    "completion": (but(10, 3), "a completion of 3 tokens, where 2 are"),
    "behind": (but(10, 1), "26 bytes; its tokens end at 24"),
    "vocabulary": (
        but(12, VOCAB),
        "token 1 of a completion is 100; the vocabulary has 100 (ids 0 to 99): the model's embedding has no more rows",
    ),
    "context's": (but(6, 65535), "token 0 of a context is 65535;"),
    "truncated": (WHOLE[:-2], "example 1: 26 bytes, of which"),
    "cut": (choices.file([GOOD] * 3)[:-20], "example 2: the file ends 6"),
    "rest": (WHOLE + b"\0\0", "2 examples end at 1076"),
    "room": (
        choices.file([GOOD, Example([1] * 4, [[2, 3, 4], [5]], 0)]),
        "example 1: a context of 4 tokens and a completion of 3;",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_such_file(program: Path, tmp_path: Path, name: str) -> None:
    text, told = BAD[name]
    path = tmp_path / "bad.bin"
    path.write_bytes(text)
    done = run(program, "--steps", 0, "--eval", path, RANKS=2)
    assert done.code == 2 and f"--eval {path}: " in done.err, done.err
    assert told in done.err and "eval " not in done.out, done.err


def test_what_is_no_file(program: Path, tmp_path: Path) -> None:
    for path, told in (
        (tmp_path / "none", "No such file"),
        (tmp_path, "not a regular file"),
    ):
        done = run(program, "--steps", 0, "--eval", path)
        assert done.code == 2 and told in done.err


@pytest.mark.slow
def test_mutants(tmp_path: Path) -> None:
    """Accepted mutants have tokens of the vocabulary and enough room; see fuzz/choices.c."""
    fuzzer = files.build("fuzz/choices.c")
    done = files.run(fuzzer, tmp_path, 20000, 5)
    tried, accepted = map(int, done.stdout.split()[1::2])
    assert tried > 1000 and 20 < accepted < tried
