"""test_tune.py -- tests ./run tune and ./run chat: a chat model from a folder and conversations,
stopped and continued, repeated by hand, and talked with."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tune
from checkpoint import Bad
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from zg.read import hf

from tests.lib import trainer
from tests.lib.patience import LIMIT
from tests.tools import test_jobs
from tests.tools.test_sample import speaker

PROMPT = """{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a model's folder with a chat template, and conversations."""
    folder = tmp_path_factory.mktemp("tune")
    base = test_jobs.chat_model(folder)
    said = {"eos_token": "<|im_end|>", "chat_template": test_jobs.CHATML + PROMPT}
    (base / "tokenizer_config.json").write_text(json.dumps(said))
    return [base, test_jobs.chats(folder)]


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    name = f"{tmp_path.parent.parent.name}-{tmp_path.name}"
    yield tmp_path / name
    for build in (trainer.ROOT / "build").glob(f"tune-{name}*"):
        shutil.rmtree(build)


def command(*words: object) -> list[str]:
    return [sys.executable, *map(str, [trainer.ROOT / "tools/tune.py", *words])]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{trainer.ROOT}/gen"}


OPTIONS = ("--sequence", 64, "--lr", 0.01, "--lora", 4, "--val", 4)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def lines(said: str) -> list[str]:
    return [x[2:] for x in said.splitlines() if x.startswith("$ ")]


def adapter(folder: Path) -> dict[str, bytes]:
    return {x.name: x.read_bytes() for x in (folder / "adapter").iterdir()}


@pytest.mark.slow
def test_what_is_printed_can_be_typed(inputs: list[Path], out: Path) -> None:
    """The printed commands make the same adapter, which learnt something; the end names chat."""
    done = run(*inputs, "-o", out, *OPTIONS, "--epochs", 2, "--merge")
    assert done.returncode == 0, done.stderr + done.stdout
    typed = lines(done.stderr)
    assert [shlex.split(x)[0].rpartition("/")[2] for x in typed] == [
        "run",
        "zgen",
        "ninja",
        "train",
        "train",
    ]
    assert f"./run chat {out}/model" in done.stderr
    records = [json.loads(x) for x in (out / "log.jsonl").read_text().splitlines()]
    found = [x["val_loss"] for x in records if "val_loss" in x]
    assert min(found) < found[0]
    steps = int(re.search(r"train.schedule.steps=(\d+)", typed[1])[1])
    assert f"--epochs 2: {steps} steps of 8 samples" in done.stderr
    assert (out / "model" / "model.safetensors").exists()

    twin = out.with_name("twin")
    for line in typed[:1] + typed[3:4]:
        line = line.replace(str(out), str(twin))
        again = subprocess.run(
            line, shell=True, cwd=trainer.ROOT, capture_output=True, text=True
        )
        assert again.returncode == 0, again.stderr
    assert adapter(twin) == adapter(out)


@pytest.mark.slow
def test_the_same_command_goes_on(inputs: list[Path], out: Path) -> None:
    """TERM to the command saves and exits with 75. The same command ends as one that was not
    stopped, and once more changes nothing. With dropout over a base in 8 bits it is so, too; another
    base is refused."""
    words = (*OPTIONS, "--epochs", 6, "--base", "int8", "--lora-dropout", 0.1)
    running = subprocess.Popen(
        command(*inputs, "-o", out, *words),
        env=environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    until = time.monotonic() + LIMIT
    while not any((out / "checkpoints").glob("step-*")):
        assert running.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=LIMIT)
    assert running.returncode == 75, said
    assert "stopped and saved; the same command goes on" in said
    assert not (out / "adapter" / "adapter_model.safetensors").exists()
    again = run(*inputs, "-o", out, *words)
    assert again.returncode == 0 and "resumes from step" in again.stderr
    assert "./run data" not in again.stderr
    assert "{rank: 4, alpha: 8, base: int8, dropout: 0.1}" in again.stderr
    other = run(*inputs, "-o", out, *words, "--base", "nf4")
    assert other.returncode == 4
    assert 'had train.lora.base: "int8", but this program has' in other.stderr
    first = adapter(out)
    last = run(*inputs, "-o", out, *words)
    assert last.returncode == 0 and "nothing to train" in last.stderr
    assert adapter(out) == first

    whole = out.with_name(f"{out.name}-whole")
    assert run(*inputs, "-o", whole, *words).returncode == 0
    assert adapter(whole) == first


@pytest.mark.slow
def test_a_model_without_rows_for_its_tokens(
    inputs: list[Path], out: Path, tmp_path: Path
) -> None:
    """A model with fewer rows than its tokenizer has tokens, such as one of a chat template, gets
    the rows, is trained whole beside the adapters, and talks."""
    base, talks = inputs
    few = tmp_path / "few"
    shutil.copytree(base, few)
    config = json.loads((few / "config.json").read_text())
    tokens = config["vocab_size"]
    (few / "config.json").write_text(json.dumps({**config, "vocab_size": tokens - 2}))
    old = load_file(base / "model.safetensors")
    cut = {n: x[: tokens - 2] if len(x) == tokens else x for n, x in old.items()}
    save_file(cut, few / "model.safetensors")
    words = (few, talks, "-o", out, *OPTIONS, "--epochs", 2, "--merge")
    done = run(*words, "--set", "train.lora.whole=[embed_tokens, lm_head]")
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"{tokens} tokens, and the model has {tokens - 2} rows" in done.stderr
    assert f"--vocab {tokens} " in lines(done.stderr)[1]
    made = load_file(out / "model" / "model.safetensors")
    assert {n: x.shape for n, x in made.items()} == {n: x.shape for n, x in old.items()}
    said = json.loads((out / "model" / "config.json").read_text())
    assert said["vocab_size"] == tokens
    for folder in ("model", "adapter"):
        told = talk(out / folder, "--tokens", 3, said="One?\n")
        assert told.returncode == 0, told.stderr
    asked = ("--vocab", tokens - 1)
    again = run(few, talks, "-o", out.with_name("other"), *OPTIONS, *asked)
    assert again.returncode == 2
    assert f"--vocab {tokens - 1}: the tokenizer has {tokens} tokens" in again.stderr


# ---- wrong input


@pytest.mark.parametrize(
    "words, told",
    [
        (["--sequence", 1000], "--sequence 1000: the model has 64 positions"),
        (["--batch", 7, "--micro-batch", 2], "--batch 7: must be a multiple"),
        (["--lora", 0], "--lora: must be a whole number"),
        (["--lora", "full", "--merge"], "--merge: with --lora full there are no adap"),
        (["--lora", "full", "--base", "nf4"], "--base: with --lora full there are no"),
        (["--vocab", 7], "--vocab 7: the model has"),
        (["--base", "int4"], "--base: invalid choice: 'int4'"),
        (["--lora-dropout", 1], "--lora-dropout: must be a number from 0 to 0.99"),
        (["--lr", "nan"], "--lr: must be a number above 0"),
        (["--epochs", 0], "--epochs: must be a whole number"),
        (["--epoch", 1], "--epoch"),
        (["--set", "train.global_batch=32"], "--set train.global_batch: the number of"),
    ],
)
def test_wrong_options(
    words: list[object], told: str, inputs: list[Path], tmp_path: Path
) -> None:
    done = run(*inputs, "-o", tmp_path / "out", *words)
    assert done.returncode == 2 and told in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_wrong_files(inputs: list[Path], tmp_path: Path) -> None:
    base, talks = inputs
    for words, told in (
        ((tmp_path, talks), "has no config.json: a Hugging Face folder is needed"),
        ((base, tmp_path / "none"), "none: No such file"),
    ):
        done = run(*words, "-o", tmp_path / "out")
        assert done.returncode == 2 and told in done.stderr, done.stderr
        assert not (tmp_path / "out").exists()
    (tmp_path / "mine").write_text("x")
    done = run(base, talks, "-o", tmp_path)
    assert done.returncode == 2 and "not a folder of ./run tune" in done.stderr


def job(inputs: list[Path], out: Path, *more: object) -> tune.Job:
    return tune.checked(tune.arguments([*map(str, [*inputs, "-o", out, *more])]))


def test_each_folder_has_its_program(inputs: list[Path], tmp_path: Path) -> None:
    places = {job(inputs, tmp_path / x / "out").build for x in ("a", "b", "a/../b")}
    assert len(places) == 2


def test_sizes_that_config_json_leaves_out(inputs: list[Path], tmp_path: Path) -> None:
    """A config.json without vocab_size and positions has those of its family, as for gen/zgen, so a
    tokenizer with more tokens gives the model new rows."""
    folder, talks = inputs
    shutil.copytree(folder, tmp_path / "base")
    said = json.loads((folder / "config.json").read_text())
    known = hf.load(str(folder))
    for key in ("vocab_size", "max_position_embeddings"):
        del said[key]
    (tmp_path / "base" / "config.json").write_text(json.dumps(said))
    usual = hf.load(str(tmp_path / "base"))
    made = job([tmp_path / "base", talks], tmp_path / "out", "--sequence", 1000)
    rows, most = made.rows, usual.context
    assert rows == usual.model.value["vocab"].value > known.model.value["vocab"].value
    assert most > 1000 > known.context
    for tokens, asked in ((rows + 1, ["--vocab", f"{rows + 1}"]), (rows, [])):
        words = tune.generate(made, tune.Made(9, 1, tokens))
        at = words.index("--vocab") if "--vocab" in words else len(words)
        assert words[at : at + 2] == asked
    for options, told in (
        (("--vocab", rows - 1), f"--vocab {rows - 1}: the model has {rows} rows"),
        (("--sequence", most + 1), f"the model has {most} positions"),
    ):
        with pytest.raises(Bad, match=told):
            job([tmp_path / "base", talks], tmp_path / "out", *options)


def test_a_model_that_is_not_read(inputs: list[Path], tmp_path: Path) -> None:
    """A config.json that gen/zgen refuses is refused before anything is written, in its words."""
    folder, talks = inputs
    shutil.copytree(folder, tmp_path / "base")
    said = json.loads((folder / "config.json").read_text())
    text = json.dumps(said | {"vocab_size": "many"}, indent=1)
    (tmp_path / "base" / "config.json").write_text(text)
    done = run(tmp_path / "base", talks, "-o", tmp_path / "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert re.search(r"config.json:\d+: vocab_size: .*'many'", done.stderr)


@pytest.mark.parametrize(
    "said, words, base",
    [
        ({"load_in_4bit": True}, (), ", base: nf4"),
        ({"load_in_8bit": True, "load_in_4bit": False}, (), ", base: int8"),
        ({"load_in_4bit": True}, ("--base", "int8"), ", base: int8"),
        ({"load_in_4bit": True}, ("--base", "none"), ""),
        ({"load_in_4bit": True}, ("--lora", "full"), None),
        (None, (), ""),
    ],
)
def test_a_quantized_folder_has_its_base(
    inputs: list[Path], tmp_path: Path, said: object, words: tuple[str, ...], base: str
) -> None:
    """Adapters of a folder that bitsandbytes quantized have a base of as many bits."""
    folder, talks = inputs
    shutil.copytree(folder, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config | {"quantization_config": said})
    (tmp_path / "base" / "config.json").write_text(text)
    made = job([tmp_path / "base", talks], tmp_path / "out", *words)
    commands = tune.generate(made, tune.Made(9, 1, 1))
    found = [x for x in commands if x.startswith("train.lora=")]
    lora = f"train.lora={{rank: 16, alpha: 32{base}}}"
    assert found == ([] if base is None else [lora])


def test_data_are_made_again_until_there_is_a_checkpoint(
    inputs: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = job(inputs, out)
    assert not tune.same(first)
    tune.note(first)
    assert not tune.same(first)  # the data are not complete
    (out / "data").mkdir()
    (out / tune.DONE).write_text("{}")
    assert tune.same(first) and tune.same(job(inputs, out, "--epochs", 9))
    assert tune.same(job(inputs, out, "--base", "nf4"))  # data are of any base
    other = job(inputs, out, "--sequence", 32)
    assert not tune.same(other)
    (out / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert tune.same(first)
    with pytest.raises(Bad, match="with --sequence 64, and this command has 32"):
        tune.same(other)
    base, talks = inputs
    beside = tmp_path / "beside"
    beside.symlink_to(base)
    assert tune.same(job([beside, talks], out))
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(talks.read_bytes())
    with pytest.raises(Bad, match="with DATA .*copy.jsonl"):
        tune.same(job([base, copy], out))
    tune.note(job([base, copy], out))
    copy.write_bytes(2 * talks.read_bytes())
    with pytest.raises(Bad, match="with files of DATA that have changed since; use"):
        tune.same(job([base, copy], out))


# ---- ./run chat


def talk(*words: object, said: str) -> subprocess.CompletedProcess[str]:
    return trainer.tool("talk.py", *words, input=said)


def test_a_talk(inputs: list[Path], tmp_path: Path) -> None:
    """Each line is a turn; the prompt is the whole talk by the template, and an answer ends at the
    token that ends a turn."""
    base, _ = inputs
    ids = {x: n for n, x in enumerate(("<|endoftext|>",))}
    saved = json.loads((base / "tokenizer.json").read_text())
    ids |= {x["content"]: x["id"] for x in saved["added_tokens"]}
    vocab = saved["model"]["vocab"]
    program = speaker(tmp_path, vocab["H"], vocab["i"], ids["<|im_end|>"], vocab["X"])
    script = program.read_text().split("\n")
    keep = 'while [ $# -gt 1 ]; do [ "$1" = --prompt-tokens ] && cat "$2" >> "$0.seen"; shift; done'
    program.write_text("\n".join([script[0], keep, *script[1:]]))
    done = talk(
        *(base, "--program", program, "--system", "Be."), said="One?\n\n  Two? \n"
    )
    assert (done.returncode, done.stdout) == (0, "Hi\nHi\n"), done.stderr
    seen = Path(f"{program}.seen").read_bytes()
    text = Tokenizer.from_file(str(base / "tokenizer.json")).decode(
        np.frombuffer(seen, "<u4").tolist(), skip_special_tokens=False
    )
    turn = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    turn += "<|im_start|>assistant\n"
    more = "Hi<|im_end|>\n<|im_start|>user\n  Two? <|im_end|>\n<|im_start|>assistant\n"
    assert text == turn + turn + more


def test_what_a_talk_needs(inputs: list[Path], tmp_path: Path) -> None:
    base, _ = inputs
    program = speaker(tmp_path, code=3)
    done = talk(base, "--program", program, said="a\nb\n")
    assert (done.returncode, done.stderr) == (3, "told\n")
    assert talk(base, "--program", program, said="").returncode == 0
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(base / "tokenizer.json", bare)
    done = talk(bare, "--program", program, said="a\n")
    assert done.returncode == 2 and "has no chat template" in done.stderr
    adapters = {"base_model_name_or_path": "/nowhere"}
    (bare / "adapter_config.json").write_text(json.dumps(adapters))
    done = talk(bare, "--program", program, said="a\n")
    assert done.returncode == 2
    assert "base_model_name_or_path: /nowhere is not a folder; --base" in done.stderr


def test_adapters_are_loaded_with_their_base(
    inputs: list[Path], tmp_path: Path
) -> None:
    base, _ = inputs
    own = tmp_path / "adapter"
    own.mkdir()
    (own / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(base)})
    )
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$@" > "$0.seen"\n')
    program.chmod(0o755)
    for more, loaded in (((), base), (("--base", tmp_path), tmp_path)):
        shutil.copy(base / "tokenizer.json", tmp_path)
        shutil.copy(base / "tokenizer_config.json", tmp_path)
        done = talk(own, "--program", program, *more, said="a\n")
        assert done.returncode == 0, done.stderr
        seen = Path(f"{program}.seen").read_text()
        assert seen.startswith(f"--load {loaded} --adapter {own} --steps 0 ")
