"""test_sample.py -- tests the command ./run sample, and the tokens that out/train draws after a
prompt."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import sample
import trained as trained_model
from encoding import Encoder, trained

from tests.lib import law, trainer
from tests.lib.patience import LIMIT

SPEC = law.path("gpt")
PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return weights of a model that has learnt to count by three."""
    folder = tmp_path_factory.mktemp("sample")
    trainer.write_tokens(folder / "tokens", np.arange(60000) * 3 % 256)
    trainer.sh(
        program(),
        *("--data", folder / "tokens", "--steps", 60),
        *("--save", folder / "weights"),
    )
    return folder / "weights"


def program(*keys: str) -> Path:
    recipe = ("train.optimizer.lr=0.01", "train.global_batch=12")
    return trainer.build(trainer.generate(SPEC, *recipe, *keys))


def draw(
    binary: Path, weights: Path, prompt: tuple[int, ...], *options: object
) -> subprocess.CompletedProcess[str]:
    file = weights.parent / "prompt"
    file.write_bytes(np.array(prompt, "<u4").tobytes())
    words = [binary, "--load", weights, "--steps", 0, "--prompt-tokens", file]
    return subprocess.run(
        [str(word) for word in (*words, *options)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def drawn(*given: object) -> list[int]:
    done = draw(*given)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.splitlines()[-1].split()]


@pytest.mark.slow
def test_what_it_learnt(weights: Path) -> None:
    """A sample continues the count from one token or from more than a sample holds, whatever the
    ranks and the stage."""
    sequence = 40
    for many in (1, sequence, 3 * sequence):
        prompt = tuple(7 + 3 * n & 255 for n in range(many))
        want = [7 + 3 * n & 255 for n in range(many, many + 9)]
        options = ("--sample", 9, "--temperature", 0)
        for keys in ((), ("cluster.ranks=3", "zero.stage=3")):
            binary = program(*keys)
            assert drawn(binary, weights, prompt, *options) == want


@pytest.mark.slow
def test_the_same_draws_on_all_ranks(weights: Path) -> None:
    options = ("--sample", 30, "--temperature", 3, "--top-k", 50)
    first = drawn(program(), weights, PROMPT, *options)
    assert first == drawn(program(), weights, PROMPT, *options)
    other = program("cluster.ranks=2", "zero.stage=2")
    assert first == drawn(other, weights, PROMPT, *options)
    seed = (*options, "--sample-seed", 1)
    assert first != drawn(program(), weights, PROMPT, *seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "narrow", [("--top-k", 1), ("--top-p", 0), ("--top-p", "1e-9")]
)
def test_of_one_there_is_no_choice(weights: Path, narrow: tuple[object, ...]) -> None:
    options = ("--sample", 20, "--temperature", 5, *narrow)
    likeliest = ("--sample", 20, "--temperature", 0)
    found = drawn(program(), weights, PROMPT, *options)
    assert found == drawn(program(), weights, PROMPT, *likeliest)


@pytest.mark.parametrize(
    "options,told",
    [
        (("--sample", 1, "--temperature", "hot"), "a number from 0 to 1000"),
        (("--sample", 1, "--temperature", "nan"), "a number from 0 to 1000"),
        (("--sample", 1, "--top-p", 1.01), "a number from 0 to 1 is needed"),
        (("--sample", 1, "--top-k", 0), "a whole number from 1"),
        ((), "--prompt-tokens needs --sample N"),
    ],
)
def test_wrong_options(weights: Path, options: tuple[object, ...], told: str) -> None:
    done = draw(program(), weights, PROMPT, *options)
    assert done.returncode == 2 and told in done.stderr


@pytest.mark.parametrize(
    "prompt,told",
    [
        ((), "must be a file of at least one token, of 4 bytes each"),
        ((5, 256), "token 1 is 256; the vocabulary has 256"),
        ((2**32 - 1,), "token 0 is 4294967295"),
    ],
)
def test_wrong_prompts(weights: Path, prompt: tuple[int, ...], told: str) -> None:
    done = draw(program(), weights, prompt, "--sample", 1)
    assert done.returncode == 2 and ": --prompt-tokens /" in done.stderr
    assert told in done.stderr


def test_a_wrong_prompt_is_told_before_training(weights: Path) -> None:
    data = weights.parent / "tokens"
    options = ("--data", data, "--steps", 2, "--sample", 1)
    words = (program(), *options, "--prompt-tokens", weights / "none")
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 2 and "none: No such file" in done.stderr
    assert "step 1" not in done.stdout + done.stderr


# ---- the command


def run(*words: object, **options) -> subprocess.CompletedProcess[str]:
    return trainer.tool("sample.py", *words, **options)


def test_text_comes_back(weights: Path) -> None:
    """The result is text, because the model's config.json says that tokens are bytes."""
    config = json.loads((weights / "config.json").read_text())
    assert config["vocab_size"] == 256
    done = run(
        *(weights, "--prompt", "147:", "--tokens", 5, "--temperature", 0),
        *("--program", program()),
    )
    assert (done.returncode, done.stdout) == (0, "=@CFI\n"), done.stderr


def speaker(folder: Path, *tokens: int, code: int = 0) -> Path:
    """Return a program that draws these tokens and prints other lines, too."""
    path = folder / "program"
    said = " ".join(f"{token} " for token in tokens).replace("  ", " ")
    path.write_text(
        f"#!/bin/sh\necho start 1 2 3\necho '{said}'\necho told >&2\nexit {code}\n"
    )
    path.chmod(0o755)
    return path


def test_letters_of_several_tokens(tmp_path: Path) -> None:
    text = "naïve Zürich 東京 🙂 end"
    recipe = trained(iter(["some text of another kind"]), 300)
    assert recipe.file
    (tmp_path / "tokenizer.json").write_text(recipe.file)
    ids = Encoder(recipe).ids(text)
    assert len(ids) > len(text)
    program = speaker(tmp_path, *ids, recipe.end, *ids)
    done = run(tmp_path, "--prompt", "a", "--program", program)
    assert (done.returncode, done.stdout) == (0, f"{text}\n"), done.stderr
    as_bytes = speaker(tmp_path, *text.encode(), 0xFF)
    bytes_ = ("--prompt", "a", "--tokenizer", "bytes", "--program", as_bytes)
    assert run(tmp_path, *bytes_).stdout == f"{text}{sample.CUT}\n"


def test_what_the_program_says_is_told(tmp_path: Path) -> None:
    program = speaker(tmp_path, code=3)
    options = ("--prompt", "a", "--tokenizer", "bytes", "--program")
    done = run(tmp_path, *options, program)
    assert (done.returncode, done.stderr) == (3, "told\n")
    done = run(tmp_path, *options, tmp_path / "none")
    assert done.returncode == 2 and "none: does not exist" in done.stderr
    done = run(tmp_path, "--prompt", "a", "--program", program)
    assert done.returncode == 2 and "tokenizer.json" in done.stderr
    done = run(tmp_path, *options, speaker(tmp_path, 300))
    assert done.returncode == 2 and "300 is not a byte" in done.stderr


def test_a_prompt_that_is_no_text(tmp_path: Path) -> None:
    options = ("--tokenizer", "bytes", "--program", speaker(tmp_path))
    done = run(tmp_path, "--prompt", "\udcff\udcfe", *options)
    assert done.returncode == 2 and "--prompt: is not UTF-8" in done.stderr


def test_a_program_of_this_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """./NAME is not looked up in PATH."""
    speaker(tmp_path, *b"hi").rename(tmp_path / "ls")
    monkeypatch.chdir(tmp_path)
    options = ("--prompt", "a", "--tokenizer", "bytes", "--program", "./ls")
    done = run(tmp_path, *options)
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr


def test_an_interrupt_ends_it_without_a_trace(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nkill -INT $PPID\nexec sleep 60\n")
    program.chmod(0o755)
    options = ("--prompt", "a", "--tokenizer", "bytes", "--program", program)
    done = run(tmp_path, *options)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_program_that_has_saved_the_folder(
    weights: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program is found by the plan's hash, else by the layout's; it is out/train if a folder
    names neither."""
    monkeypatch.setattr(trained_model, "ROOT", tmp_path)
    usual = tmp_path / "out/train"
    assert trained_model.program(weights) == usual  # none exists
    assert capsys.readouterr().err == ""
    (tmp_path / "out").mkdir()
    shutil.copy(trainer.build(trainer.generate(law.path("llama"))), usual)
    capsys.readouterr()  # of the generator, which says how it goes if it takes long
    assert trained_model.program(weights) == usual
    llama = f"program: {usual}, of model llama-tiny\n"
    assert capsys.readouterr().err == llama
    made = {}
    for name, keys in (("alike", ("zero.stage=3",)), ("its", ())):
        made[name] = tmp_path / "build" / name / "train"
        made[name].parent.mkdir(parents=True)
        shutil.copy(program(*keys), made[name])
    for name in ("no-program", "a-folder/train"):
        (tmp_path / "build" / name).mkdir(parents=True)
    (tmp_path / "build/no-program/train").write_text("of another kind")
    capsys.readouterr()
    for name in ("its", "alike"):
        assert trained_model.program(weights) == made[name]
        said = f"program: {made[name]}, of model gpt-tiny\n"
        assert capsys.readouterr().err == said
        made[name].unlink()
    assert trained_model.program(weights) == usual
    assert capsys.readouterr().err == llama
    for content in (b"", bytes(8), b"\x09" + bytes(7) + b"no header"):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert trained_model.program(tmp_path) == usual


def test_another_models_weights(weights: Path) -> None:
    """Weights of another model are refused, with the model that the program was made for."""
    llama = trainer.build(trainer.generate(law.path("llama")))
    words = ("--prompt", "a", "--program", llama)
    done = run(weights, *words)
    assert done.returncode == 2 and done.stdout == ""
    assert "is the program of llama-tiny (" in done.stderr
