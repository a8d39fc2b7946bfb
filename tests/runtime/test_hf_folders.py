"""test_hf_folders.py -- tests folders as transformers has them, loaded and saved: shards with their
index, types, config.json and the tokenizer's files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.lib import law, program, trainer
from tests.lib.files import (
    Bench,
    Weights,
    arenas,
    build,
    layout,
    raw_file,
    run,
    same_bits,
    weights_of,
)

INDEX = "model.safetensors.index.json"
BF16 = 1  # ZR_BF16
CONFIG = '{\n  "model_type": "gpt2",\n  "torch_dtype": "float32" ,\n  "n": 1\n}'
COPIED = {
    "generation_config.json": "{}",
    "tokenizer.json": '{"version": "1.0"}',
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "added_tokens.json": "{}",
    "vocab.json": "{}",
    "merges.txt": "#version: 0.2\n",
    "tokenizer.model": "\0\1",
    "chat_template.jinja": "{{ messages }}",
}


@pytest.fixture(scope="session")
def tool() -> Path:
    return build("runtime/weights.c")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets how the tool saves: largest bytes of a file, type, and the folder
    that was loaded."""

    def ask(**how: object) -> None:
        for name in ("MOST", "TYPE", "FROM", "TAKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in how.items():
            monkeypatch.setenv(name, str(value))

    return ask


# bytes that the first tensors fill
FULL = sum(w.nbytes for w in list(weights_of(layout(1)).values())[:3])


def filled(weights: Weights, most: int) -> list[set[str]]:
    """Return the names in each file: tensors in order, each in the file of those before it while
    that has room."""
    parts: list[set[str]] = []
    room = 0
    for name, w in weights.items():
        if w.nbytes > room:
            parts.append(set())
            room = most
        parts[-1].add(name)
        room -= w.nbytes
    return parts


def shard(number: int, of: int) -> str:
    return f"model-{number:05}-of-{of:05}.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def all_of(folder: Path) -> Weights:
    """Return the tensors that the library reads from the files of an index. Assert that each lies
    where the index says."""
    index = json.loads((folder / INDEX).read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(folder / file)
        named = {k for k, v in index["weight_map"].items() if v == file}
        assert part.keys() == named
        found |= part
    total = sum(w.nbytes for w in found.values())
    assert index["metadata"] == {"total_size": total}
    return found


def source(into: Path, weights: Weights, config: str = CONFIG) -> Path:
    """Write a folder as it is downloaded, with foreign files beside it."""
    into.mkdir()
    save_file(weights, into / "model.safetensors", {"format": "pt"})
    for name, text in {**COPIED, "config.json": config}.items():
        (into / name).write_text(text)
    (into / "README.md").write_text("no file of a model")
    return into


# ---- shards


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("most", [1, FULL, 300, 100000])
def test_shards_are_what_the_library_reads(
    tool: Path, tmp_path: Path, asked, ranks: int, most: int
) -> None:
    """The library reads the same shards, and they load again. No file has more than MOST bytes of
    tensors, except one with a single tensor."""
    bench = Bench(tool, tmp_path, layout(ranks))
    weights = weights_of(bench.program)
    asked(MOST=most)
    assert bench.save(weights).returncode == 0
    files = sorted(os.listdir(tmp_path / "saved"))
    if most == 100000:
        assert files == ["model.safetensors"]
        return
    n = len(files) - 1
    assert files == [*(shard(i + 1, n) for i in range(n)), INDEX]
    assert n > 1 and (most > 1 or n == len(weights))
    got = all_of(tmp_path / "saved")
    assert got.keys() == weights.keys()
    assert all(same_bits(got[name], weights[name]) for name in weights)
    shards = [load_file(tmp_path / "saved" / file) for file in files[:-1]]
    assert [set(part) for part in shards] == filled(weights, most)
    for file in files[:-1]:
        with safe_open(tmp_path / "saved" / file, "numpy") as f:
            assert f.metadata()["format"] == "pt"
    for rank, wanted in enumerate(arenas(bench.program, weights, False)):
        assert same_bits(bench.load("saved", rank)[0], wanted)


@pytest.mark.slow
def test_an_old_index_takes_its_own_shards_with_it(
    tool: Path, tmp_path: Path, asked
) -> None:
    bench = Bench(tool, tmp_path, layout(2))
    weights, saved = weights_of(bench.program), tmp_path / "saved"

    def files() -> set[str]:
        return set(os.listdir(saved))

    asked(MOST=1)
    assert bench.save(weights).returncode == 0
    many = files()
    mine = {shard(99, 99), "notes.safetensors", "README.md"}  # in no index
    for name in mine:
        (saved / name).write_text("mine")
    index = json.loads((saved / INDEX).read_text())
    index["weight_map"] |= {"x": "notes.safetensors", "y": "../saved"}
    (saved / INDEX).write_text(json.dumps(index))
    asked(MOST=300)
    assert bench.save(weights).returncode == 0
    few = files() - mine
    assert mine < files() and INDEX in few and not few & many - {INDEX}
    assert all_of(saved).keys() == weights.keys()
    assert bench.save(weights).returncode == 0  # the same names again
    assert files() == mine | few and all_of(saved).keys() == weights.keys()
    asked()
    assert bench.save(weights).returncode == 0
    assert files() == mine | {"model.safetensors"}
    asked(MOST=300)
    assert bench.save(weights).returncode == 0
    assert files() == mine | few


@pytest.mark.slow
def test_what_was_left_of_shards_is_cleared_away(
    tool: Path, tmp_path: Path, asked
) -> None:
    """A save beside another run is refused and changes nothing. A run that ends removes its files;
    those of a killed run are removed by the next save."""
    bench = Bench(tool, tmp_path, layout(1))
    weights, saved = weights_of(bench.program), tmp_path / "saved"
    asked(MOST=300)
    command = [str(tool), str(tmp_path / "program"), "begin", str(saved)]
    pipe = subprocess.PIPE
    for kill in (False, True):
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
            assert other.stdout.readline() == "begun\n"
            there = set(os.listdir(saved))
            assert ".model.safetensors.part.1" in there
            assert "another run" in bench.save(weights).stderr
            assert set(os.listdir(saved)) == there
            if kill:
                other.kill()
        left = os.listdir(saved)
        assert set(left) == there if kill else left == []
    asked()
    assert bench.save(weights).returncode == 0
    assert os.listdir(saved) == ["model.safetensors"]


def test_a_rename_that_fails_leaves_no_files_that_do_not_belong_together(
    tool: Path, tmp_path: Path, asked
) -> None:
    """A shard's name is taken by a folder, so no index is written, and the new files keep the names
    that a message gives."""
    bench = Bench(tool, tmp_path, layout(2))
    weights, saved = weights_of(bench.program), tmp_path / "saved"
    asked(MOST=300)
    assert bench.save(weights).returncode == 0
    whole = contents(saved)
    n = len(whole) - 1
    assert n > 2
    asked(MOST=300, TAKEN=saved / shard(2, n))
    said = bench.save(weights).stderr
    assert (
        f"{shard(2, n)}: Is a directory; the weights are whole: rename "
        f".model.safetensors.part ({INDEX}) to .part.2 ({shard(2, n)})" in said
    )
    (saved / shard(2, n)).rmdir()
    parts = [INDEX, shard(1, n), shard(2, n)]
    assert set(os.listdir(saved)) == {
        *(".model.safetensors.part" + rest for rest in ("", ".1", ".2")),
        *(shard(i, n) for i in range(1, n + 1) if i != 2),  # 1 is the old one
    }
    for name, rest in zip(parts, ("", ".1", ".2"), strict=True):
        (saved / f".model.safetensors.part{rest}").rename(saved / name)
    assert contents(saved) == whole


# ---- types


def rounded(x: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bf16, ties to even."""
    u = x.view(np.uint32).astype(np.uint64)
    nearest = u + 0x7FFF + (u >> np.uint64(16) & np.uint64(1))
    bits = np.where(np.isnan(x), u | np.uint64(0x400000), nearest)
    return (bits >> np.uint64(16)).astype(np.uint16)


def stored(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return the dtype and bytes of each tensor of all files, parsed here because numpy has no
    bf16."""
    found = {}
    for path in folder.glob("*.safetensors"):
        file = path.read_bytes()
        n = 8 + int.from_bytes(file[:8], "little")
        head = json.loads(file[8:n])
        del head["__metadata__"]
        for name, entry in head.items():
            a, b = entry["data_offsets"]
            found[name] = (entry["dtype"], file[n + a : n + b])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_type_that_is_asked_for(
    tool: Path, tmp_path: Path, asked, ranks: int
) -> None:
    bench = Bench(tool, tmp_path, layout(ranks))
    weights = weights_of(bench.program, every=True)
    asked(TYPE=BF16)
    assert bench.save(weights).returncode == 0
    got = stored(tmp_path / "saved")
    wanted = {k: ("BF16", rounded(w).tobytes()) for k, w in weights.items()}
    assert got == wanted


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("most", [100, 100000])
def test_each_tensor_has_the_type_of_its_source(
    tool: Path, tmp_path: Path, asked, ranks: int, most: int
) -> None:
    """A folder that is loaded and saved without a step has the same bytes, in f32, bf16 and f16."""
    bench = Bench(tool, tmp_path, layout(ranks))
    header, data = {}, b""
    for k, name in enumerate(weights_of(bench.program)):
        shape = weights_of(bench.program)[name].shape
        kind, width = [("F32", 4), ("BF16", 2), ("F16", 2)][k % 3]
        some = np.random.default_rng(k).integers(
            0, 100, width * int(np.prod(shape)), np.uint8
        )
        end = len(data) + some.size
        place = {"dtype": kind, "shape": shape}
        header[name] = place | {"data_offsets": [len(data), end]}
        data += some.tobytes()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.safetensors").write_bytes(
        raw_file(header | {"__metadata__": {"format": "pt"}}, data)
    )
    files = []
    for rank in range(ranks):
        arena, note, why = bench.load("in", rank)
        assert (note, why) == ("", "")
        files.append(tmp_path / f"loaded{rank}")
        arena.tofile(files[-1])
    asked(FROM=tmp_path / "in", MOST=most)
    done = run(tool, tmp_path / "program", "save", tmp_path / "saved", *files)
    assert done.returncode == 0, done.stderr
    assert stored(tmp_path / "saved") == stored(tmp_path / "in")


# ---- other files of a folder


def test_what_is_copied(tool: Path, tmp_path: Path, asked) -> None:
    bench = Bench(tool, tmp_path, layout(2))
    weights = weights_of(bench.program)
    asked(FROM=source(tmp_path / "in", weights), MOST=300)
    assert bench.save(weights).returncode == 0
    saved = tmp_path / "saved"
    assert all_of(saved).keys() == weights.keys()
    beside = {**COPIED, "config.json": CONFIG}
    for name, text in beside.items():
        assert (saved / name).read_text() == text
    names = set(os.listdir(saved)) - {INDEX} - beside.keys()
    assert names and all(x.startswith("model-0") for x in names)
    # onto itself
    asked(FROM=tmp_path / "in")
    assert bench.save(weights, "in").returncode == 0
    assert set(os.listdir(tmp_path / "in")) == {
        *beside,
        "README.md",
        "model.safetensors",
    }
    assert (tmp_path / "in/tokenizer.json").read_text() == COPIED["tokenizer.json"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"torch_dtype": "float32" ,', '"torch_dtype": "bfloat16" ,'),
        ('"dtype":null,', '"dtype": "bfloat16",'),
        (
            '"dtype": "float16", "torch_dtype": "float16",',
            '"dtype": "bfloat16", "torch_dtype": "bfloat16",',
        ),
        ('"dty\\u0070e": "float16",', '"dty\\u0070e": "bfloat16",'),
        (
            '"deep": {"torch_dtype": "x"}, "torch_dtype":"y",',
            '"deep": {"torch_dtype": "x"}, "torch_dtype": "bfloat16",',
        ),
    ],
)
def test_config_says_the_type(
    tool: Path, tmp_path: Path, asked, before: str, after: str
) -> None:
    """config.json gets the type in place: every other byte stays."""
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    text = '{ "a\\n": 1.5e3, %s "b": [{}]}\n'
    asked(FROM=source(tmp_path / "in", weights, text % before), TYPE=BF16)
    assert bench.save(weights).returncode == 0
    assert (tmp_path / "saved/config.json").read_text() == text % after


@pytest.mark.parametrize("rest", [{}, {"a": 1}])
def test_config_without_a_type_gets_one(
    tool: Path, tmp_path: Path, asked, rest: dict[str, int]
) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    given = source(tmp_path / "in", weights, json.dumps(rest))
    asked(FROM=given, TYPE=BF16)
    assert bench.save(weights).returncode == 0
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config == {"torch_dtype": "bfloat16", **rest}


@pytest.mark.parametrize(
    "bad", ["", "[]", '{"a": "\0"}', "{\0}", '{"a": 1', '{"a": 1} x', "{}}"]
)
def test_config_that_is_no_json(tool: Path, tmp_path: Path, asked, bad: str) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    asked(FROM=source(tmp_path / "in", weights, bad), TYPE=BF16)
    done = bench.save(weights)
    assert done.returncode == 2 and "in/config.json: " in done.stderr
    assert not (tmp_path / "saved").exists()


def test_a_model_of_no_family_is_told(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    done = bench.save(weights_of(bench.program))
    assert done.stdout == (
        f"{tmp_path}/saved gets no config.json: transformers has no such model family\n"
    )


# ---- loading


def test_an_index_that_lies(tool: Path, tmp_path: Path) -> None:
    """An index is refused if a file lacks its tensor, if a tensor is in two files, or if a file
    lies elsewhere."""
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    names, folder = sorted(weights), tmp_path / "in"
    half = len(names) // 2
    parts = {"a.st": names[:half], "b.st": names[half:]}
    folder.mkdir()
    for file, part in parts.items():
        save_file({k: weights[k] for k in part}, folder / file)
    good = {k: file for file, part in parts.items() for k in part}

    def write(index: dict[str, str]) -> None:
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / INDEX).write_text(text)

    write(good)
    wanted = arenas(bench.program, weights, False)[0]
    assert same_bits(bench.load("in")[0], wanted)
    write(good | {names[0]: "b.st"})
    lacks = f"b.st: does not have tensor {names[0]}, which the index lists\n"
    assert bench.refused().endswith(lacks)
    write(good | {"x": "a.st"})
    assert "a.st: does not have tensor x" in bench.refused()
    for file in ("../in/a.st", str(folder / "a.st"), ".."):
        write(good | {names[0]: file})
        bench.refused()
    write(good)
    both = [*parts["b.st"], names[0]]
    save_file({k: weights[k] for k in both}, folder / "b.st")
    assert f"tensor {names[0]} twice" in bench.refused()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickles_are_refused_with_what_converts_them(
    tool: Path, tmp_path: Path, name: str
) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(b"")
    why = bench.refused()
    assert why.startswith(f"{tmp_path}/in: pytorch_model.bin is not read")
    assert why.endswith("torch_dtype='auto').save_pretrained('.')\"\n")
    weights = weights_of(bench.program)
    save_file(weights, tmp_path / "in/model.safetensors")
    assert bench.load("in")[2] == ""


@pytest.mark.parametrize(
    "there,told",
    [
        ("adapter_config.json", "these are adapters: --adapter names their"),
        ("run.json", "this is a checkpoint: --checkpoints"),
        ("step-00000010/run.json", "these are checkpoints: --checkpoints"),
        ("snapshots/5f0b/config.json", "lies in a folder below snapshots"),
        ("zero_to_fp32.py", "DeepSpeed; run there: python zero_to_fp32.py"),
        ("__0_0.distcp", "a distributed checkpoint of PyTorch"),
        ("model-00001-of-00002.safetensors", f"shards, and their {INDEX} is"),
        ("consolidated.safetensors", "in its author's own format"),
        ("model.Q4_K_M.gguf", "GGUF files are llama.cpp's"),
        ("weights.safetensors", "another name of a file is not read"),
        ("README.md", f"has neither model.safetensors nor {INDEX}"),
    ],
)
def test_a_folder_of_something_else(
    tool: Path, tmp_path: Path, there: str, told: str
) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    file = tmp_path / "in" / there
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    assert told in bench.refused()


def test_names_of_a_base_model(tool: Path, tmp_path: Path) -> None:
    """Names of a base model load: LlamaModel's own files lack the prefix of LlamaForCausalLM's."""
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    (tmp_path / "in").mkdir()
    file = tmp_path / "in/model.safetensors"
    save_file({f"model.{k}": w for k, w in weights.items()}, file)
    wanted = arenas(bench.program, weights, False)[0]
    assert same_bits(bench.load("in")[0], wanted)


# ---- the program


def run_program(program: Path, *words: object, code: int = 0) -> str:
    command = [str(program), *map(str, words)]
    env = {**os.environ, "ZR_SHARD_BYTES": "150000"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def tokens(folder: Path) -> Path:
    file = folder / "tokens.bin"
    some = np.random.default_rng(3).integers(0, 256, 4000)
    trainer.write_tokens(file, some)
    return file


def test_from_nothing_to_a_folder_and_on(tmp_path: Path) -> None:
    """llama-tiny trains from scratch in bf16 and in shards. Saving again without a step gives the
    same files, and a checkpoint loads, too."""
    spec = trainer.ROOT / "model_specs/llama-tiny.yaml"
    program = trainer.build(trainer.generate(spec))
    data = ("--data", tokens(tmp_path))
    a, b, ck = tmp_path / "a", tmp_path / "b", tmp_path / "ck"
    first = run_program(
        program,
        *data,
        *("--steps", 1, "--hash", "--save", a, "--save-dtype", "bf16"),
        *("--checkpoints", ck),
    )
    config = json.loads((a / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["rope_scaling"]["rope_type"] == "llama3"
    (a / "tokenizer.json").write_text("{}")
    run_program(program, *data, "--steps", 0, "--load", a, "--save", b)
    assert set(os.listdir(a)) == set(os.listdir(b))
    for file in os.listdir(a):
        assert (a / file).read_bytes() == (b / file).read_bytes()
    again = run_program(
        program,
        *data,
        *("--steps", 0, "--hash", "--load", ck / "step-00000001"),
    )
    assert again.splitlines()[-1] in first and "weights " in first


def test_wrong_words(tmp_path: Path) -> None:
    spec = trainer.ROOT / "model_specs/llama-tiny.yaml"
    program = trainer.build(trainer.generate(spec))
    few = ("--steps", 0)
    said = run_program(program, *few, "--save", tmp_path, "--save-dtype", "x", code=2)
    assert "--save-dtype x: f32, bf16 or f16 is needed" in said
    said = run_program(program, *few, "--save-dtype", "f32", code=2)
    assert "--save-dtype needs --save DIR" in said
    given = source(tmp_path / "in", {"x": np.zeros(3, np.float32)})
    said = run_program(program, *few, "--load", given, "--save", tmp_path / "w", code=2)
    assert f"--load {given}: tensor model.embed_tokens.weight is" in said
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_name_that_a_folder_has_is_told_before_training(
    tmp_path: Path, name: str
) -> None:
    """A name taken by a folder is reported before training, for a saved file or for an old index
    that one file replaces."""
    spec = trainer.ROOT / "model_specs/llama-tiny.yaml"
    program = trainer.build(trainer.generate(spec))
    folder = tmp_path / "saved" / name
    folder.mkdir(parents=True)
    options = ("--data", tokens(tmp_path), "--steps", 2)
    said = run_program(program, *options, "--save", folder.parent, code=2)
    assert re.search(rf"--save {folder}: (Is a directory|no regular file)", said)
    assert "step 1" not in said
    assert os.listdir(folder.parent) == [name]


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    """A run killed in the middle of saving several files leaves none."""
    spec = trainer.ROOT / "model_specs/llama-tiny.yaml"
    program = trainer.build(trainer.generate(spec))
    saved = tmp_path / "saved"
    command = [program, "--data", tokens(tmp_path), "--steps", 10**6]
    env = {**os.environ, "ZR_SHARD_BYTES": "150000"}
    with subprocess.Popen(
        [*map(str, command), "--save", str(saved)],
        stderr=subprocess.DEVNULL,
        env=env,
    ) as going:
        part = saved / ".model.safetensors.part.4"
        while not part.exists() and going.poll() is None:
            time.sleep(0.01)
        going.send_signal(signal.SIGTERM)
    assert going.returncode == 128 + signal.SIGTERM
    assert os.listdir(saved) == []


# ---- numbers that no tensor shows


def loaded(folder: Path, *keys: str, code: int = 0) -> str:
    """Return the message of a Llama with these keys about a folder."""
    made = trainer.build(trainer.generate(law.path("llama"), *keys))
    words = ("--data", folder / "tokens", "--load", folder, "--steps", 0)
    done = program.run(made, *words)
    assert done.code == code, done.err
    return done.err


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    trainer.write_tokens(folder / "tokens", law.tokens(256, 400))
    made = trainer.build(trainer.generate(law.path("llama")))
    words = ("--data", folder / "tokens", "--steps", 0, "--save", folder)
    assert program.run(made, *words).code == 0
    return folder


ATTENTION = "model.units[1].ops[0].residual[1].attention"
OF_ANOTHER = "config.json: is of another model than the program: "


@pytest.mark.parametrize(
    "key,told",
    [
        ("rope.theta=10000", "rope_theta 500000, the program 10000"),
        ("rope.scaling.factor=4", "factor 8, the program 4"),
        ("rope.scaling=null", "factor 8, the program none"),
    ],
)
def test_a_folder_of_another_model_is_told(llama: Path, key: str, told: str) -> None:
    assert OF_ANOTHER + told in loaded(llama, f"{ATTENTION}.{key}")


def test_another_size_is_told(llama: Path, tmp_path: Path) -> None:
    """A model of another size is reported by config.json, before a tensor that does not fit."""
    said = json.loads((llama / "config.json").read_text())
    for name in ("tokens", "model.safetensors"):
        (tmp_path / name).symlink_to(llama / name)
    said |= {"num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152}
    (tmp_path / "config.json").write_text(json.dumps(said))
    told = (
        "num_hidden_layers 30, the program 2; hidden_size 576, the program "
        "64; vocab_size 49152, the program 256"
    )
    assert OF_ANOTHER + told in loaded(tmp_path)


def test_a_folder_of_the_same_model_is_not(llama: Path, tmp_path: Path) -> None:
    """A folder of the same model is accepted, also in transformers 5's spelling and with keys that
    a program does not have."""
    assert OF_ANOTHER not in loaded(llama)
    said = json.loads((llama / "config.json").read_text())
    rope = said.pop("rope_scaling") | {"rope_theta": said.pop("rope_theta")}
    said |= {"rope_parameters": rope, "initializer_range": 0.02, "x": [{}]}
    for name in ("tokens", "model.safetensors"):
        (tmp_path / name).symlink_to(llama / name)
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert OF_ANOTHER not in loaded(tmp_path)
    rope["low_freq_factor"] = 2
    (tmp_path / "config.json").write_text(json.dumps(said))
    told = OF_ANOTHER + "low_freq_factor 2, the program 1"
    assert told in loaded(tmp_path)
    for broken in ("", "{", '{"rope_theta": ', "[]"):
        (tmp_path / "config.json").write_text(broken)
        assert "config.json: byte " in loaded(tmp_path, code=2)
