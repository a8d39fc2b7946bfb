"""test_weights.py -- tests safetensors files saved and loaded, compared bit for bit with the
format's own library, on one rank and several."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from tests.lib.files import (
    Bench,
    Flat,
    Program,
    Tensor,
    Weights,
    arenas,
    build,
    layout,
    raw_file,
    run,
    same_bits,
    weights_of,
)


@pytest.fixture(scope="session")
def tool() -> Path:
    return build("runtime/weights.c")


# ---- saving


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 200])
def test_saved_is_what_the_library_reads(
    tool: Path, tmp_path: Path, ranks: int
) -> None:
    bench = Bench(tool, tmp_path, layout(ranks))
    weights = weights_of(bench.program, every=True)
    assert bench.save(weights, "a/new/place").returncode == 0
    file = tmp_path / "a/new/place/model.safetensors"
    got = load_file(file)
    assert got.keys() == weights.keys()
    assert all(same_bits(got[name], weights[name]) for name in weights)
    assert (8 + struct.unpack("<Q", file.read_bytes()[:8])[0]) % 4096 == 0
    with safetensors.safe_open(file, "numpy") as f:
        assert f.metadata() == {
            "format": "pt",
            "plan": "feed",
            "layout": "beef",
        }
    assert os.listdir(file.parent) == ["model.safetensors"]


@pytest.mark.slow
def test_saved_bytes_do_not_depend_on_the_ranks(tool: Path, tmp_path: Path) -> None:
    files = []
    for ranks in 1, 3, 5:
        (tmp_path / str(ranks)).mkdir()
        bench = Bench(tool, tmp_path / str(ranks), layout(ranks))
        weights = weights_of(bench.program, every=True)
        assert bench.save(weights).returncode == 0
        files.append((bench.into / "saved/model.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]


@pytest.mark.slow
def test_a_save_replaces_what_is_there(tool: Path, tmp_path: Path) -> None:
    """A save replaces the old file, removes leftovers of a killed run, and leaves nothing else."""
    bench = Bench(tool, tmp_path, layout(2))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/model.safetensors").write_bytes(b"old")
    (tmp_path / "saved/.model.safetensors.part").write_bytes(b"left behind" * 10000)
    assert bench.save(weights_of(bench.program)).returncode == 0
    assert os.listdir(tmp_path / "saved") == ["model.safetensors"]
    got = load_file(tmp_path / "saved/model.safetensors")
    assert got.keys() == weights_of(bench.program).keys()


def test_a_save_that_fails_leaves_the_old_file(tool: Path, tmp_path: Path) -> None:
    """A save that fails leaves the old file: one of two ranks dies before it has written anything
    (its arena cannot be read)."""
    bench = Bench(tool, tmp_path, layout(2))
    assert bench.save(weights_of(bench.program)).returncode == 0
    old = (tmp_path / "saved/model.safetensors").read_bytes()
    done = run(
        tool,
        tmp_path / "program",
        "save",
        tmp_path / "saved",
        tmp_path / "arena0",
        "none",
    )
    assert done.returncode == 2
    assert os.listdir(tmp_path / "saved") == ["model.safetensors"]
    assert (tmp_path / "saved/model.safetensors").read_bytes() == old


def test_a_place_where_another_run_saves_is_refused(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    command = [
        str(tool),
        str(tmp_path / "program"),
        "begin",
        str(tmp_path / "saved"),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "begun\n"
        done = bench.save(weights_of(bench.program))
        assert done.returncode == 2 and "another run" in done.stderr
        assert os.listdir(tmp_path / "saved") == [".model.safetensors.part"]
    assert other.returncode == 0 and os.listdir(tmp_path / "saved") == []
    assert bench.save(weights_of(bench.program)).returncode == 0


def test_no_room(tool: Path, tmp_path: Path) -> None:
    """A save of twice the free space is refused before anything is written, and the old file
    stays."""
    v = os.statvfs(tmp_path)
    rows = 2 * v.f_bavail * v.f_frsize // 4096 + 1
    flat, tensor = (
        Flat(0, 0, 1024 * rows, 1, 0),
        Tensor("a", 0, 0, (rows, 1024), 0, 0, 1, 0),
    )
    program = Program((flat,), (tensor,), 1)
    (tmp_path / "program").write_text(program.text())
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/model.safetensors").write_bytes(b"old")
    done = run(tool, tmp_path / "program", "begin", tmp_path / "saved")
    assert done.returncode == 2 and done.stdout == ""
    assert f"{4096 + rows * 4096} bytes are needed, but the disk has " in done.stderr
    assert os.listdir(tmp_path / "saved") == ["model.safetensors"]
    assert (tmp_path / "saved/model.safetensors").read_bytes() == b"old"


def test_no_place(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "file").write_bytes(b"")
    assert "file: not a folder" in bench.save(weights_of(bench.program), "file").stderr
    assert (
        "Not a directory" in bench.save(weights_of(bench.program), "file/below").stderr
    )
    assert "too long" in bench.save(weights_of(bench.program), "long/" * 1000).stderr
    (tmp_path / "taken/model.safetensors/x").mkdir(parents=True)
    done = bench.save(weights_of(bench.program), "taken")
    assert done.returncode == 2 and "taken/model.safetensors" in done.stderr
    assert os.listdir(tmp_path / "taken") == ["model.safetensors"]


# ---- loading


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 200])
@pytest.mark.parametrize("shards", [0, 3])
def test_loaded_is_what_the_library_wrote(
    tool: Path, tmp_path: Path, ranks: int, shards: int
) -> None:
    """Every byte of a rank's arena is right after loading: masters as in the file, all else
    unchanged."""
    bench = Bench(tool, tmp_path, layout(ranks))
    weights = weights_of(bench.program)
    (tmp_path / "in").mkdir()
    if shards:
        place = {
            name: f"model-{k % shards}.safetensors" for k, name in enumerate(weights)
        }
        for file in set(place.values()):
            part = {name: w for name, w in weights.items() if place[name] == file}
            save_file(part, tmp_path / "in" / file)
        index = {"metadata": {"total_size": 1}, "weight_map": place}
        (tmp_path / "in/model.safetensors.index.json").write_text(
            json.dumps(index, indent=2)
        )
    else:
        save_file(weights, tmp_path / "in/model.safetensors", {"format": "pt"})
    for rank, wanted in enumerate(arenas(bench.program, weights, False)):
        if rank not in (0, 1, 2, 7, ranks - 1):
            continue
        got, note, why = bench.load("in", rank)
        assert (note, why) == ("", "") and same_bits(got, wanted)


def test_what_was_saved_comes_back(tool: Path, tmp_path: Path) -> None:
    """Weights saved by 3 ranks load on 2 of another layout of the same model."""
    (tmp_path / "two").mkdir()
    three, two = (
        Bench(tool, tmp_path, layout(3)),
        Bench(tool, tmp_path / "two", layout(2)),
    )
    weights = weights_of(three.program)
    assert three.save(weights, "two/in").returncode == 0
    for rank, wanted in enumerate(arenas(two.program, weights, False)):
        assert same_bits(two.load("in", rank)[0], wanted)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_number(
    tool: Path, tmp_path: Path, dtype: str, ranks: int
) -> None:
    """Every finite 16-bit number loads exactly, also subnormals; zeros stand for the others."""
    bits = np.arange(65536, dtype=np.uint16)
    exponent = 0x7C00 if dtype == "F16" else 0x7F80
    bits[bits & exponent == exponent] = 0
    wanted = bits.astype(np.uint32) << 16
    if dtype == "F16":
        wanted = bits.view(np.float16).astype(np.float32).view(np.uint32)
    flat, tensor = (
        Flat(0, 0, -(-65536 // ranks), 1, 0),
        Tensor("a", 0, 0, (256, 256), 0, 0, 1, 0),
    )
    bench = Bench(tool, tmp_path, Program((flat,), (tensor,), ranks))
    (tmp_path / "in").mkdir()
    entry = {"dtype": dtype, "shape": [256, 256], "data_offsets": [0, 131072]}
    file = raw_file({"a": entry}, bits.tobytes())
    assert safetensors.deserialize(file)[0][1]["dtype"] == dtype
    (tmp_path / "in/model.safetensors").write_bytes(file)
    got = np.concatenate(
        [bench.load("in", rank)[0].view(np.uint32) for rank in range(ranks)]
    )
    assert np.array_equal(got[:65536], wanted)


def test_names_of_gpt2_with_and_without_their_prefix(
    tool: Path, tmp_path: Path
) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    wanted = arenas(bench.program, weights, False)[0]
    (tmp_path / "in").mkdir()
    file = tmp_path / "in/model.safetensors"
    save_file({"transformer." + name: w for name, w in weights.items()}, file)
    assert same_bits(bench.load("in")[0], wanted)
    prefixed = tuple(
        replace(t, name="transformer." + t.name) for t in bench.program.tensors
    )
    bench = Bench(tool, tmp_path, Program(bench.program.flats, prefixed, 1))
    save_file(weights, file)
    assert same_bits(bench.load("in")[0], wanted)


def test_what_the_model_does_not_need(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    (tmp_path / "in").mkdir()
    wanted = arenas(bench.program, weights, False)[0]
    mask = np.ones((1, 1, 2, 2), np.uint8)
    buffers = {
        f"h.{i}.attn.{end}": mask for i in range(4) for end in ("bias", "masked_bias")
    }

    def note(extra: Weights, *drop: str) -> str:
        save_file({**weights, **extra}, tmp_path / "in/model.safetensors")
        arena, note, why = bench.load("in", 0, *drop)
        assert why == "" and same_bits(arena, wanted)
        return note.partition(": ")[2]

    def refused(extra: Weights) -> str:
        save_file({**weights, **extra}, tmp_path / "in/model.safetensors")
        return bench.refused().removeprefix(f"{tmp_path}/in: the model lacks ")

    assert note({}) == ""
    assert note(buffers) == "not needed: 8 buffers\n"
    ends = ("bias", "masked_bias", "rotary_emb.inv_freq")
    neox = {f"gpt_neox.layers.0.attention.{end}": mask for end in ends}
    assert note(neox) == "not needed: 3 buffers\n"
    for name in ("lm_head.weight", "embed_out.weight"):
        said = note(buffers | {name: weights["wte.weight"]})
        assert said == f"not needed: 8 buffers, {name} (the same as the embedding)\n"
    # an untied head has no place in a tied model, nor have Qwen2's biases and Qwen3's norms of
    # heads in Llama: without them it would be another model
    allowed = "; use a spec that has them, or --drop-unknown"
    untied = (
        "; its head is not tied to its embedding: generate the program with "
        "tie_word_embeddings false in config.json\n"
    )
    dropped = "warning: ignored, as they are not in the model: "
    other = weights["wte.weight"].copy()
    other.view(np.uint32)[10, 4] ^= 1
    head = {"lm_head.weight": other}
    listed = "1 of the tensors: lm_head.weight"
    assert refused(head) == listed + allowed + untied
    assert note(head, "drop") == dropped + "1 of the tensors: lm_head.weight\n"
    for name in "self_attn.q_proj.bias", "self_attn.k_norm.weight":
        biases = {f"model.layers.{i}.{name}": np.zeros(i, np.float32) for i in range(6)}
        listed = "6 of the tensors: " + ", ".join([*biases][:4]) + ", ..."
        said = refused(buffers | biases)
        assert said.startswith(f"{listed}{allowed}; {tool} is the program of ")
        assert note(buffers | biases, "drop") == dropped + listed + "\n"
    assert "h.x.attn.bias" in refused({"h.x.attn.bias": np.zeros(1)})


@pytest.mark.parametrize("prefix", ["", "transformer.", "model.", "gpt_neox."])
@pytest.mark.parametrize("noted", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_a_tied_embedding_as_its_head_alone(
    tool: Path, tmp_path: Path, prefix: str, noted: bool, shards: bool
) -> None:
    """A tied embedding saved as its head alone loads: safetensors' save_model keeps one name of a
    shared tensor and notes the other."""
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    wanted = arenas(bench.program, weights, False)[0]
    given = {prefix + k: w for k, w in weights.items()}
    own = prefix + "wte.weight"
    given["lm_head.weight"] = given.pop(own)
    (tmp_path / "in").mkdir()
    name = "one.safetensors" if shards else "model.safetensors"
    metadata = {own: "lm_head.weight"} if noted else {"format": "pt"}
    save_file(given, tmp_path / "in" / name, metadata)
    if shards:
        index = {"weight_map": dict.fromkeys(given, name)}
        (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index))
    arena, note, why = bench.load("in")
    assert (note, why) == ("", "") and same_bits(arena, wanted)


def test_a_tensor_under_a_name_that_metadata_notes(tool: Path, tmp_path: Path) -> None:
    """A tensor that save_model left out loads under the name that the metadata notes. Notes on
    tensors that are there, and notes that name none, have no effect."""
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    wanted = arenas(bench.program, weights, False)[0]
    other = {k: w for k, w in weights.items() if k != "h.2.ln_1.weight"}
    other["norm.weight"] = weights["h.2.ln_1.weight"]
    file = tmp_path / "in/model.safetensors"
    file.parent.mkdir()
    noted = {
        "h.2.ln_1.weight": "norm.weight",
        "h.1.ln_1.weight": "norm.weight",
        "x": "y",
    }
    save_file(other, file, noted)
    arena, note, why = bench.load("in")
    assert (note, why) == ("", "") and same_bits(arena, wanted)
    save_file(other, file, {"h.2.ln_1.weight": "norm"})
    assert "tensor h.2.ln_1.weight is missing" in bench.refused()


def test_a_head_of_its_own_is_not_taken_for_the_embedding(
    tool: Path, tmp_path: Path
) -> None:
    """An untied model needs both the head and the embedding; a tied folder is reported."""
    tied = layout(1)
    last = replace(tied.flats[2], shard=tied.flats[2].shard + 55)
    head = Tensor("lm_head.weight", 91, 0, (11, 5), 2, 0, 1, 0)
    program = Program((*tied.flats[:2], last), (*tied.tensors, head), 1)
    bench = Bench(tool, tmp_path, program)
    weights = weights_of(program)
    (tmp_path / "in").mkdir()
    for left in "wte.weight", "lm_head.weight":
        given = {k: w for k, w in weights.items() if k != left}
        save_file(given, tmp_path / "in/model.safetensors")
        said = bench.refused()
        assert f"tensor {left} is missing" in said
        assert "the folder's model is tied (tie_word_embeddings), the " in said
