"""test_weights.py -- safetensors out and in, held bit for bit to the format's own library, on one rank and several."""
from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from files import build, run

POISON = 0xA5                             # what an arena holds where nothing was put


@dataclass(frozen=True)
class Flat:
    at: int
    stride: int
    shard: int
    count: int
    whole: int


@dataclass(frozen=True)
class Tensor:
    name: str
    offset: int
    offset_step: int
    shape: tuple[int, ...]
    flat: int
    flat_step: int
    count: int
    first: int

    def names(self) -> list[str]:
        return [self.name.replace("%d", str(self.first + i)) for i in range(self.count)]


@dataclass(frozen=True)
class Program:
    flats: tuple[Flat, ...]
    tensors: tuple[Tensor, ...]
    ranks: int

    @property
    def arena(self) -> int:
        return max(f.at + (f.count - 1) * f.stride + 4 * f.shard * (self.ranks if f.whole else 1) for f in self.flats)

    def text(self) -> str:
        lines = [f"arena {self.arena} {self.ranks}"]
        lines += [f"flat {f.at} {f.stride} {f.shard} {f.count} {f.whole}" for f in self.flats]
        for t in self.tensors:
            shape = [*t.shape, 0][:2]
            lines.append(f"tensor {t.name} {t.offset} {t.offset_step} {len(t.shape)} {shape[0]} {shape[1]} {t.flat} "
                         f"{t.flat_step} {t.count} {t.first}")
        return "\n".join(lines) + "\n"


def layout(ranks: int) -> Program:
    """A ragged model: four layers in a flat of their own each, norms of all layers whole in one, an embedding
    in two row slices, elements that belong to no tensor between all of them, tensors that some ranks have no part of."""
    shapes = {"h.%d.attn.c_attn.weight": (5, 9), "h.%d.attn.c_attn.bias": (9,), "h.%d.mlp.c_fc.weight": (5, 7)}
    tensors, offset = [], 3
    for name, shape in shapes.items():
        tensors.append(Tensor(name, offset, 0, shape, 0, 1, 4, 0))
        offset += int(np.prod(shape)) + 5
    block = Flat(64, 0, -(-offset // ranks), 4, 0)
    block = Flat(64, 4 * block.shard + 12, block.shard, 4, 0)
    tensors.append(Tensor("h.%d.ln_1.weight", 2, 6, (5,), 1, 0, 4, 0))
    norms = Flat(block.at + 4 * block.stride + 20, 0, -(-30 // ranks), 1, 1)
    tensors += [Tensor("wte.weight", 0, 0, (11, 5), 2, 0, 1, 0), Tensor("wpe.weight", 60, 0, (6, 5), 2, 0, 1, 0)]
    last = Flat(norms.at + 4 * ranks * norms.shard + 4, 0, -(-91 // ranks), 1, 0)
    return Program((block, norms, last), tuple(tensors), ranks)


def every_bit(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """f32 of all kinds: any bits, so infinities, subnormals and NaNs with payloads among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, int(np.prod(shape)), dtype=np.uint32)
    bits[::7] = [0x7F800000, 0xFF800000, 0x7FC00001, 0xFFA00000, 1, 0x80000000][seed % 6]
    return bits.view(np.float32).reshape(shape)


def weights_of(program: Program) -> dict[str, np.ndarray]:
    names = [(name, t.shape) for t in program.tensors for name in t.names()]
    return {name: every_bit(k, shape) for k, (name, shape) in enumerate(names)}


def arenas(program: Program, weights: dict[str, np.ndarray], part_of_whole: bool) -> list[np.ndarray]:
    """What each rank's memory holds; part_of_whole: of a flat held whole only its own part, to be saved."""
    out = [np.full(program.arena, POISON, np.uint8) for _ in range(program.ranks)]
    for t in program.tensors:
        f = program.flats[t.flat]
        for i, name in enumerate(t.names()):
            raw = weights[name].reshape(-1).view(np.uint32)
            where = t.offset + i * t.offset_step + np.arange(raw.size)
            for rank in range(program.ranks):
                own = (where >= rank * f.shard) & (where < (rank + 1) * f.shard)
                mine = own if part_of_whole or not f.whole else np.full(raw.size, True)
                base = f.at + i * t.flat_step * f.stride
                for value, e in zip(raw[mine], where[mine]):
                    at = base + 4 * (e - (0 if f.whole else rank * f.shard))
                    out[rank][at : at + 4] = np.frombuffer(value.tobytes(), np.uint8)
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.fixture(scope="session")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("runtime/weights.c", tmp_path_factory.mktemp("weights"))


@dataclass(frozen=True)
class Bench:
    """A program's description, its files and the tool that reads them, in a folder."""
    tool: Path
    into: Path
    program: Program

    def __post_init__(self) -> None:
        (self.into / "program").write_text(self.program.text())

    def save(self, weights: dict[str, np.ndarray], where: str = "saved") -> subprocess.CompletedProcess[str]:
        for rank, arena in enumerate(arenas(self.program, weights, True)):
            arena.tofile(self.into / f"arena{rank}")
        files = [self.into / f"arena{rank}" for rank in range(self.program.ranks)]
        return run(self.tool, self.into / "program", "save", self.into / where, *files)

    def load(self, where: str, rank: int = 0) -> tuple[np.ndarray, subprocess.CompletedProcess[str]]:
        np.full(self.program.arena, POISON, np.uint8).tofile(self.into / "loaded")
        done = run(self.tool, self.into / "program", "load", self.into / where, rank, self.into / "loaded")
        return np.fromfile(self.into / "loaded", np.uint8), done

    def refused(self, where: str = "in") -> str:
        """What the reader says of a directory that it must refuse; no master may have changed."""
        arena, done = self.load(where)
        assert done.returncode == 2 and (arena == POISON).all()
        assert done.stderr.count("\n") == 1 and done.stderr.isprintable() is False  # one line, its end alone
        assert done.stderr[:-1].isprintable()
        return done.stderr


def raw_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# ---- out


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 200])
def test_saved_is_what_the_library_reads(tool: Path, tmp_path: Path, ranks: int) -> None:
    bench = Bench(tool, tmp_path, layout(ranks))
    weights = weights_of(bench.program)
    assert bench.save(weights, "a/new/place").returncode == 0
    file = tmp_path / "a/new/place/model.safetensors"
    got = load_file(file)
    assert got.keys() == weights.keys()
    assert all(same_bits(got[name], weights[name]) for name in weights)
    assert (8 + struct.unpack("<Q", file.read_bytes()[:8])[0]) % 4096 == 0
    with safetensors.safe_open(file, "numpy") as f:
        assert f.metadata() == {"format": "pt", "plan": "feed", "layout": "beef"}
    assert os.listdir(file.parent) == ["model.safetensors"]


def test_saved_bytes_do_not_depend_on_the_ranks(tool: Path, tmp_path: Path) -> None:
    files = []
    for ranks in 1, 3, 5:
        (tmp_path / str(ranks)).mkdir()
        bench = Bench(tool, tmp_path / str(ranks), layout(ranks))
        assert bench.save(weights_of(bench.program)).returncode == 0
        files.append((bench.into / "saved/model.safetensors").read_bytes())
    assert files[0] == files[1] == files[2]


def test_a_save_replaces_what_is_there(tool: Path, tmp_path: Path) -> None:
    """An older file stays whole until the new one is; what a killed run left behind is cleared away."""
    bench = Bench(tool, tmp_path, layout(2))
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/model.safetensors").write_bytes(b"old")
    (tmp_path / "saved/.model.safetensors.part").write_bytes(b"left behind" * 10000)
    assert bench.save(weights_of(bench.program)).returncode == 0
    assert os.listdir(tmp_path / "saved") == ["model.safetensors"]
    assert load_file(tmp_path / "saved/model.safetensors").keys() == weights_of(bench.program).keys()


def test_a_place_where_another_run_saves_is_refused(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    command = [str(tool), str(tmp_path / "program"), "begin", str(tmp_path / "saved")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "begun\n"
        done = bench.save(weights_of(bench.program))
        assert done.returncode == 2 and "another run" in done.stderr
        assert os.listdir(tmp_path / "saved") == [".model.safetensors.part"]
    assert other.returncode == 0 and os.listdir(tmp_path / "saved") == []
    assert bench.save(weights_of(bench.program)).returncode == 0


def test_no_room(tool: Path, tmp_path: Path) -> None:
    """Twice what the disk has free: refused before anything is written, the old file untouched."""
    v = os.statvfs(tmp_path)
    rows = 2 * v.f_bavail * v.f_frsize // 4096 + 1
    program = Program((Flat(0, 0, 1024 * rows, 1, 0),), (Tensor("a", 0, 0, (rows, 1024), 0, 0, 1, 0),), 1)
    (tmp_path / "program").write_text(program.text())
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/model.safetensors").write_bytes(b"old")
    done = run(tool, tmp_path / "program", "begin", tmp_path / "saved")
    assert done.returncode == 2 and done.stdout == ""
    assert f"{4096 + rows * 4096} bytes are needed, the disk has " in done.stderr
    assert os.listdir(tmp_path / "saved") == ["model.safetensors"]
    assert (tmp_path / "saved/model.safetensors").read_bytes() == b"old"


def test_no_place(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "file").write_bytes(b"")
    assert "file: not a directory" in bench.save(weights_of(bench.program), "file").stderr
    assert "Not a directory" in bench.save(weights_of(bench.program), "file/below").stderr
    assert "too long" in bench.save(weights_of(bench.program), "long/" * 1000).stderr
    (tmp_path / "taken/model.safetensors/x").mkdir(parents=True)
    done = bench.save(weights_of(bench.program), "taken")
    assert done.returncode == 2 and "taken/model.safetensors" in done.stderr
    assert os.listdir(tmp_path / "taken") == ["model.safetensors"]


# ---- in


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 200])
@pytest.mark.parametrize("shards", [0, 3])
def test_loaded_is_what_the_library_wrote(tool: Path, tmp_path: Path, ranks: int, shards: int) -> None:
    """Every byte of every rank's arena: masters as in the file, all else as it was."""
    bench = Bench(tool, tmp_path, layout(ranks))
    weights = weights_of(bench.program)
    (tmp_path / "in").mkdir()
    if shards:
        place = {name: f"model-{k % shards + 1:05}-of-{shards:05}.safetensors" for k, name in enumerate(weights)}
        for file in set(place.values()):
            save_file({name: w for name, w in weights.items() if place[name] == file}, tmp_path / "in" / file)
        index = {"metadata": {"total_size": 1}, "weight_map": place}
        (tmp_path / "in/model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    else:
        save_file(weights, tmp_path / "in/model.safetensors", {"format": "pt"})
    for rank, wanted in enumerate(arenas(bench.program, weights, False)):
        if rank not in (0, 1, 2, 7, ranks - 1):
            continue
        got, done = bench.load("in", rank)
        assert done.returncode == 0 and done.stdout == "", done.stderr
        assert same_bits(got, wanted)


def test_what_was_saved_comes_back(tool: Path, tmp_path: Path) -> None:
    """Saved by 3 ranks, loaded by 2 of another layout of the same model."""
    (tmp_path / "two").mkdir()
    three, two = Bench(tool, tmp_path, layout(3)), Bench(tool, tmp_path / "two", layout(2))
    weights = weights_of(three.program)
    assert three.save(weights, "two/in").returncode == 0
    for rank, wanted in enumerate(arenas(two.program, weights, False)):
        assert same_bits(two.load("in", rank)[0], wanted)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_16_bit_number(tool: Path, tmp_path: Path, dtype: str, ranks: int) -> None:
    """All 65536 of them: subnormals, infinities, NaNs with their payloads."""
    bits = np.arange(65536, dtype=np.uint16)
    if dtype == "BF16":
        wanted = bits.astype(np.uint32) << 16
    else:
        wanted = bits.view(np.float16).astype(np.float32).view(np.uint32)
        nan = np.isnan(bits.view(np.float16))
        # hardware sets the quiet bit; we keep the payload as it is
        wanted[nan] = (bits[nan].astype(np.uint32) & 0x8000) << 16 | 0x7F800000 | (bits[nan].astype(np.uint32) & 1023) << 13
    shard = -(-65536 // ranks)
    program = Program((Flat(0, 0, shard, 1, 0),), (Tensor("a", 0, 0, (256, 256), 0, 0, 1, 0),), ranks)
    bench = Bench(tool, tmp_path, program)
    (tmp_path / "in").mkdir()
    file = raw_file({"a": {"dtype": dtype, "shape": [256, 256], "data_offsets": [0, 131072]}}, bits.tobytes())
    assert safetensors.deserialize(file)[0][1]["dtype"] == dtype
    (tmp_path / "in/model.safetensors").write_bytes(file)
    got = np.concatenate([bench.load("in", rank)[0].view(np.uint32) for rank in range(ranks)])
    assert np.array_equal(got[:65536], wanted)


def test_names_of_gpt2_with_and_without_their_prefix(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    wanted = arenas(bench.program, weights, False)[0]
    (tmp_path / "in").mkdir()
    save_file({"transformer." + name: w for name, w in weights.items()}, tmp_path / "in/model.safetensors")
    assert same_bits(bench.load("in")[0], wanted)
    prefixed = tuple(Tensor("transformer." + t.name, *list(vars(t).values())[1:]) for t in bench.program.tensors)
    bench = Bench(tool, tmp_path, Program(bench.program.flats, prefixed, 1))
    save_file(weights, tmp_path / "in/model.safetensors")
    assert same_bits(bench.load("in")[0], wanted)


def test_what_the_model_does_not_need(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    weights = weights_of(bench.program)
    (tmp_path / "in").mkdir()
    buffers = {f"h.{i}.attn.{kind}": np.ones((1, 1, 2, 2), np.uint8) for i in range(4) for kind in ("bias", "masked_bias")}

    def note(**extra: np.ndarray) -> str:
        save_file({**weights, **{k.replace("__", "."): v for k, v in extra.items()}}, tmp_path / "in/model.safetensors")
        arena, done = bench.load("in")
        assert done.returncode == 0 and same_bits(arena, arenas(bench.program, weights, False)[0])
        return done.stdout.partition(": ")[2]

    assert note() == ""
    assert note(**buffers) == "not needed: 8 buffers\n"
    assert note(**buffers, lm_head__weight=weights["wte.weight"]) == (
        "not needed: 8 buffers, lm_head.weight (the same as the embedding)\n")
    # a head of its own has no place in a tied model: that is worth a warning
    other = weights["wte.weight"].copy()
    other.view(np.uint32)[10, 4] ^= 1
    assert note(lm_head__weight=other) == "warning: the model has no place for 1 of the tensors: lm_head.weight\n"
    extra = {f"x{i}": np.zeros(i, np.int64) for i in range(6)}
    assert note(**extra, **buffers) == "warning: the model has no place for 6 of the tensors: x0, x1, x2, x3, ...\n"
    assert "h.x.attn.bias" in note(**{"h.x.attn.bias": np.zeros(1)})


# ---- bad input


def test_tensors_that_do_not_fit(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(2))
    weights = weights_of(bench.program)
    (tmp_path / "in").mkdir()

    def why(name: str, w: np.ndarray | None) -> str:
        changed = {k: v for k, v in weights.items() if k != name} | ({} if w is None else {name: w})
        save_file(changed, tmp_path / "in/model.safetensors")
        return bench.refused()

    assert "tensor h.2.mlp.c_fc.weight is missing; the model needs it with shape [5, 7]" in why("h.2.mlp.c_fc.weight", None)
    for shape in (7, 5), (35,), (1, 5, 7), (5, 8), ():
        said = why("h.3.mlp.c_fc.weight", np.zeros(shape, np.float32))
        assert f"tensor h.3.mlp.c_fc.weight has shape {list(shape)}; the model needs [5, 7]" in said
    assert "tensor wpe.weight is F64; F32, BF16 and F16 can be read" in why("wpe.weight", np.zeros((6, 5)))


@pytest.mark.parametrize("content, words", [
    (b"", "0 bytes are no safetensors file"),
    (b"1234567", "7 bytes are no safetensors file"),
    (bytes(8), "a header of 0 bytes"),
    (b"\xff" * 100, "a header of 18446744073709551615 bytes"),
    (struct.pack("<Q", 100_000_001) + b"{}", "a header of 100000001 bytes"),
    (struct.pack("<Q", 300) + b"{}", "truncated: a header of 300 bytes in a file of 10"),
    (b"version https://git-lfs.github.com/spec/v1\n", "no safetensors file"),
    (raw_file(b" {}"), "header, byte 1: an object is needed"),
    (raw_file(b"{} x"), "byte 3: something after the end"),
    (raw_file(b"{}\0 "), "something after the end"),
    (raw_file(b"[1, 2]"), "an object is needed"),
    (raw_file(b'{"a":'), "an object is needed"),
    (raw_file(b'{"a" {}}'), "a colon is needed"),
    (raw_file(b'{"a\xff": {}}'), "not UTF-8"),
    (raw_file(b'{"a\n": {}}'), "a control character"),
    (raw_file(b'{"a\\x": {}}'), "a bad escape"),
    (raw_file(b'{"a\\ud800": {}}'), "a bad escape"),
    (raw_file(b'{"a\\u0000": {}}'), "a bad escape"),
    (raw_file(b'{"a'), "a string without an end"),
    (raw_file({"a": {"dtype": "F32", "shape": [1]}}), "tensor a: dtype, shape or data_offsets is missing"),
    (raw_file({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "unknown dtype F31"),
    (raw_file({"a": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}, bytes(4)), "more than 8 dimensions"),
    (raw_file({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)), "a whole number is needed"),
    (raw_file({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, bytes(4)), "a whole number is needed"),
    (raw_file({"a": {"dtype": "F32", "shape": [2**63], "data_offsets": [0, 4]}}, bytes(4)), "beyond 2^63"),
    (raw_file({"a": {"dtype": "F32", "shape": [2**32, 2**31], "data_offsets": [0, 4]}}, bytes(4)), "do not make F32"),
    (raw_file({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, bytes(1)), "do not make F4 [3]"),
    (raw_file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)), "4 bytes of data do not make F32 [2]"),
    (raw_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, bytes(4)), "are no [begin, end]"),
    (raw_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(4)), "are no [begin, end]"),
    (raw_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8)), "its data begin at 4"),
    (raw_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "describes 4 bytes of data, the file has 0 (truncated?)"),
    (raw_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(5)), "describes 4 bytes of data, the file has 5\n"),
    (raw_file({n: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for n in "ab"}, bytes(4)), "its data begin at 0"),
    (raw_file(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"12"),
     "tensor a twice"),
    (raw_file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"1"), "dtype twice"),
    (raw_file(b'{"__metadata__":{"a":1}}'), "a string is needed"),
    (raw_file(b'{"a":{"x":' + b"[" * 100 + b"]" * 100 + b"}}"), "nested too deeply"),
    (raw_file(b'{"a":{"x":' + b"[" * 10_000_000 + b"}}"), "nested too deeply"),
    (raw_file({"\x1b[31mred\u202e": {"dtype": "F32"}}), "tensor ?[31mred???:"),
], ids=map(str, range(40)))
def test_bad_files_are_named(tool: Path, tmp_path: Path, content: bytes, words: str) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.safetensors").write_bytes(content)
    said = bench.refused()
    assert words in said and "in/model.safetensors" in said


@pytest.mark.parametrize("index, words", [
    ("", "an object is needed"),
    ("{}", "one weight_map is needed, it has 0"),
    ('{"weight_map": {}, "weight_map": {}}', "one weight_map is needed, it has 2"),
    ('{"weight_map": ["a"]}', "an object is needed"),
    ('{"weight_map": {"a": 1}}', "a string is needed"),
    ('{"weight_map": {"a": "one.safetensors"}', "a comma or an end is needed"),
    ('{"weight_map": {"a": "two.safetensors"}}', "two.safetensors: No such file"),
    ('{"weight_map": {"a": "../in/one.safetensors"}}', "no name of a file"),
    ('{"weight_map": {"a": ""}}', "no name of a file"),
    ('{"weight_map": {"a": ".."}}', "not a regular file"),
    ('{"weight_map": {"a": "one.safetensors", "b": "copy.safetensors"}}', "tensor a twice"),
    ('{"weight_map": {"a": "one.safetensors"}}', "tensor h.0.attn.c_attn.weight is missing"),
    ('{"weight_map": {}}', "tensor h.0.attn.c_attn.weight is missing"),
])
def test_bad_indices_are_named(tool: Path, tmp_path: Path, index: str, words: str) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "in").mkdir()
    for name in "one", "copy":
        save_file({"a": np.zeros(3, np.float32)}, tmp_path / f"in/{name}.safetensors")
    (tmp_path / "in/model.safetensors.index.json").write_text(index)
    assert words in bench.refused()


def test_directories_without_weights(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    assert "in: No such file or directory" in bench.refused()
    (tmp_path / "in").mkdir()
    assert "neither model.safetensors nor model.safetensors.index.json" in bench.refused()
    os.mkfifo(tmp_path / "in/model.safetensors")
    assert "not a regular file" in bench.refused()
    os.unlink(tmp_path / "in/model.safetensors")
    os.symlink("model.safetensors", tmp_path / "in/model.safetensors")
    assert "model.safetensors: Too many levels" in bench.refused()
    assert "Not a directory" in bench.refused("program")


def test_every_truncation_is_seen(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "in").mkdir()
    save_file(weights_of(bench.program), tmp_path / "in/whole")
    content = (tmp_path / "in/whole").read_bytes()
    for n in {*range(0, len(content), 97), len(content) - 1, 8, 9}:
        (tmp_path / "in/model.safetensors").write_bytes(content[:n])
        assert bench.refused()


def test_nothing_is_accepted_that_the_library_refuses(tool: Path, tmp_path: Path) -> None:
    """400 mutants of a header: where we say ok, the library must read the same tensors."""
    rng = random.Random(1)
    good = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "\u00e4": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}, "__metadata__": {"k": "v"}}
    words = ["0", "1", "-", "[", "]", "{", "}", ",", ":", '"', "\\", " ", "\n", "\u00e4", "\\u00e4", "1e2", "null", "[0]",
             '"x":1,', '"x":{"y":[]},', "F16", "\x7f", "24", '"shape":[],']
    texts = [json.dumps(good, ensure_ascii=False)]
    while len(texts) < 400:
        text = texts[0]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(len(text))
            text = text[:at] + rng.choice((rng.choice(words), "")) + text[at + rng.choice((0, 1, 1, 3)) :]
        texts.append(text)
    for k, text in enumerate(texts):
        (tmp_path / str(k)).mkdir()
        (tmp_path / str(k) / "model.safetensors").write_bytes(raw_file(text.encode(), bytes(range(32))))
    (tmp_path / "program").write_text(layout(1).text())
    said = run(tool, tmp_path / "program", "table", *(tmp_path / str(k) for k in range(400))).stdout.splitlines()
    accepted = [k for k in range(400) if said[k] == "ok"]
    assert said[0] == "ok" and 20 < len(accepted) < 380
    for k in accepted:
        safetensors.deserialize((tmp_path / str(k) / "model.safetensors").read_bytes())


def test_mutants(tmp_path: Path) -> None:
    """Deterministic mutants of headers, indices and whole files, ten seconds at most; none crashes."""
    fuzzer = build("fuzz/weights.c", tmp_path)
    done = run(fuzzer, tmp_path, 40000, 8)
    tried, accepted = (int(x) for x in done.stdout.split()[1::2])
    assert tried >= 4000 and tried // 100 < accepted < tried // 2, done.stdout
