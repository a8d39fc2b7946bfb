"""files.py -- shared parts of the tests of file readers: small C programs that call the readers,
built with sanitizers, and a model in files and in the memory of ranks."""

from __future__ import annotations

import json
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.lib import trainer
from tests.lib.patience import LIMIT

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [
    "zr_data.c",
    "zr_file.c",
    "zr_foreign.c",
    "zr_json.c",
    "zr_looks.c",
    "zr_mix.c",
    "zr_tokens.c",
]
READERS = {  # program -> the files of its readers
    "choices": ["zr_choices.c", "zr_file.c", "zr_foreign.c", "zr_looks.c"],
    "data": TOKENS,
    "order": TOKENS,
    "run": [
        "zr_file.c",
        "zr_foreign.c",
        "zr_grow.c",
        "zr_json.c",
        "zr_lora.c",
        "zr_names.c",
        "zr_packed.c",
        "zr_run.c",
        "zr_safetensors.c",
        "zr_weights.c",
    ],
    "sum": [],
    "weights": [
        "zr_file.c",
        "zr_foreign.c",
        "zr_grow.c",
        "zr_json.c",
        "zr_lora.c",
        "zr_names.c",
        "zr_packed.c",
        "zr_safetensors.c",
        "zr_save.c",
        "zr_weights.c",
    ],
}


def build(source: str) -> Path:
    """Build a program from tests/`source` and its readers; every undefined behaviour is fatal."""
    own = ROOT / "tests" / source
    parts = [ROOT / "runtime" / name for name in READERS[own.stem]]
    flags = "-g -O1 -ffp-contract=off -fno-sanitize-recover=all -fsanitize=address,undefined"
    return trainer.compiled(own, parts, *flags.split())


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a program of `build`. An exit code that the tests do not know is a crash."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode in (0, 2), done.stderr
    return done


def element(i: int, bits: int) -> int:
    """Return the summand of element i in a checksum of zr_sum.h."""
    x = (i + 1) * 0x9E3779B97F4A7C15 % 2**64 ^ bits
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9 % 2**64
    return x ^ x >> 29


def sealed(text: bytes) -> bytes:
    """Return run.json with its last key, the checksum, computed anew."""
    told, key, _ = text.rpartition(b'"checksum": ')
    told = told if key else text
    total = sum(element(i, byte) for i, byte in enumerate(told))
    return told + b'"checksum": "%016x"}\n' % (total % 2**64)


Weights = dict[str, np.ndarray]
POISON = 0xA5  # content of an arena where nothing was written


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
    type: int = 0  # of parameters: ZR_F32, ZR_BF16, ZR_F16

    @property
    def arena(self) -> int:
        return max(
            f.at
            + (f.count - 1) * f.stride
            + 4 * f.shard * (self.ranks if f.whole else 1)
            for f in self.flats
        )

    def text(self) -> str:
        lines = [f"arena {self.arena} {self.ranks}", f"type {self.type}"]
        lines += [
            f"flat {f.at} {f.stride} {f.shard} {f.count} {f.whole}" for f in self.flats
        ]
        for t in self.tensors:
            shape = [*t.shape, 0][:2]
            numbers = [
                t.offset,
                t.offset_step,
                len(t.shape),
                *shape,
                t.flat,
                t.flat_step,
                t.count,
            ]
            lines.append(f"tensor {t.name} {' '.join(map(str, numbers))} {t.first}")
        return "\n".join(lines) + "\n"


def layout(ranks: int) -> Program:
    """Return a ragged model: four layers, each in its own instance of a flat; the norms of all
    layers in one flat that every rank has whole; embeddings in a third. Between them lie elements
    that belong to no tensor, and some ranks have no part of some tensors."""
    shapes = {
        "h.%d.attn.c_attn.weight": (5, 9),
        "h.%d.attn.c_attn.bias": (9,),
        "h.%d.mlp.c_fc.weight": (5, 7),
    }
    tensors, offset = [], 3
    for name, shape in shapes.items():
        tensors.append(Tensor(name, offset, 0, shape, 0, 1, 4, 0))
        offset += int(np.prod(shape)) + 5
    block = Flat(64, 0, -(-offset // ranks), 4, 0)
    block = Flat(64, 4 * block.shard + 12, block.shard, 4, 0)
    tensors.append(Tensor("h.%d.ln_1.weight", 2, 6, (5,), 1, 0, 4, 0))
    norms = Flat(block.at + 4 * block.stride + 20, 0, -(-30 // ranks), 1, 1)
    tensors += [
        Tensor("wte.weight", 0, 0, (11, 5), 2, 0, 1, 0),
        Tensor("wpe.weight", 60, 0, (6, 5), 2, 0, 1, 0),
    ]
    last = Flat(norms.at + 4 * ranks * norms.shard + 4, 0, -(-91 // ranks), 1, 0)
    return Program((block, norms, last), tuple(tensors), ranks)


def every_bit(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return f32 of all kinds: random bits, with infinities, subnormals and NaNs with payloads."""
    bits = np.random.default_rng(seed).integers(
        0, 2**32, int(np.prod(shape)), dtype=np.uint32
    )
    bits[::7] = [
        0x7F800000,
        0xFF800000,
        0x7FC00001,
        0xFFA00000,
        1,
        0x80000000,
    ][seed % 6]
    return bits.view(np.float32).reshape(shape)


def finite(x: np.ndarray) -> np.ndarray:
    """Return the same f32, with another exponent for infinities and NaNs."""
    bits = x.view(np.uint32)
    bits = np.where(np.isfinite(x), bits, bits ^ np.uint32(1 << 30))
    return bits.view(np.float32)


def weights_of(program: Program, every: bool = False) -> Weights:
    """Return weights, finite as loading requires, or of every kind."""
    names = [(name, t.shape) for t in program.tensors for name in t.names()]
    all_bits = {name: every_bit(k, shape) for k, (name, shape) in enumerate(names)}
    if every:
        return all_bits
    return {name: finite(w) for name, w in all_bits.items()}


def arenas(program: Program, weights: Weights, part_of_whole: bool) -> list[np.ndarray]:
    """Return the memory of each rank. part_of_whole: of a flat that is whole on every rank, only
    its own part, which is the part it saves."""
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
                for value, e in zip(raw[mine], where[mine], strict=True):
                    at = base + 4 * (e - (0 if f.whole else rank * f.shard))
                    out[rank][at : at + 4] = np.frombuffer(value.tobytes(), np.uint8)
    return out


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@dataclass(frozen=True)
class Bench:
    """A program's description, its files and the tool that reads them, in a folder."""

    tool: Path
    into: Path
    program: Program

    def __post_init__(self) -> None:
        (self.into / "program").write_text(self.program.text())

    def save(
        self, weights: Weights, where: str = "saved"
    ) -> subprocess.CompletedProcess[str]:
        for rank, arena in enumerate(arenas(self.program, weights, True)):
            arena.tofile(self.into / f"arena{rank}")
        files = [self.into / f"arena{rank}" for rank in range(self.program.ranks)]
        return run(self.tool, self.into / "program", "save", self.into / where, *files)

    def load(
        self, where: str, rank: int = 0, *drop: str
    ) -> tuple[np.ndarray, str, str]:
        """Return the arena after loading, stdout, and stderr, which is "" if nothing was wrong."""
        arena = self.into / "loaded"
        np.full(self.program.arena, POISON, np.uint8).tofile(arena)
        done = run(
            self.tool,
            self.into / "program",
            "load",
            self.into / where,
            rank,
            arena,
            *drop,
        )
        assert (done.returncode == 2) == (done.stderr != "")
        return np.fromfile(arena, np.uint8), done.stdout, done.stderr

    def refused(self, where: str = "in") -> str:
        """Return the error of a directory that the reader must refuse. No master may have
        changed."""
        arena, note, why = self.load(where)
        assert (arena == POISON).all() and note == ""
        assert why[-1:] == "\n" and why[:-1].isprintable()
        return why


def raw_file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
