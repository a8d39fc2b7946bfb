"""test_data.py -- tests token files: samples, refusals, and that no file crashes the reader."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.lib.files import build, run

T, VOCAB, IGNORE = 5, 300, 65535
ALL = 1 << 40  # more samples than any file here has


@pytest.fixture(scope="session")
def data() -> Path:
    return build("runtime/data.c")


def header(count: int, magic: int = 20240520, version: int = 1) -> bytes:
    return struct.pack("<256i", magic, version, count, *[0] * 253)


def tokens_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype("<u2")


def read(
    data: Path,
    file: Path,
    *,
    t: int = T,
    vocab: int = VOCAB,
    ignore: int = IGNORE,
    first: int = 0,
    n: int = ALL,
    rank: int = 0,
    ranks: int = 1,
    rows: int = 1,
    width: int = 0,
) -> tuple[np.ndarray | None, str]:
    """Return int [rows, 2, t] of tokens and targets, or None, and the reader's message."""
    done = run(data, file, t, vocab, ignore, first, n, rank, ranks, rows, width)
    if done.returncode:
        assert done.stdout == "" and done.stderr.count("\n") == 1
        return None, done.stderr
    return np.array([int(x) for x in done.stdout.split()]).reshape(rows, 2, t), ""


@pytest.mark.slow
@pytest.mark.parametrize("head", [b"", header(64)])
def test_samples_wrap(data: Path, tmp_path: Path, head: bytes) -> None:
    """Samples wrap around: 64 tokens are 12 samples of 5 and one more token, because the 13th would
    lack its last target."""
    tokens = tokens_of(64)
    (tmp_path / "t.bin").write_bytes(head + tokens.tobytes())
    got, _ = read(data, tmp_path / "t.bin", first=3, rows=30)
    for b in range(30):
        at = (3 + b) % 12 * T
        assert np.array_equal(
            got[b], [tokens[at : at + T], tokens[at + 1 : at + T + 1]]
        )


@pytest.mark.slow
def test_an_exact_number_of_samples(data: Path, tmp_path: Path) -> None:
    """11 tokens are 2 samples, the last token being only a target; 10 tokens are 1 sample."""
    tokens = tokens_of(11)
    for n, samples in (11, 2), (10, 1), (6, 1):
        (tmp_path / "t.bin").write_bytes(tokens[:n].tobytes())
        got, _ = read(data, tmp_path / "t.bin", rows=samples + 1)
        assert np.array_equal(got[samples], got[0])
        assert samples == 1 or not np.array_equal(got[1], got[0])


def test_a_row_longer_than_one_read(data: Path, tmp_path: Path) -> None:
    """A sample longer than one read of 16384 tokens shows no seam."""
    tokens = tokens_of(2 * 40001 + 1)
    (tmp_path / "t.bin").write_bytes(tokens.tobytes())
    got, _ = read(data, tmp_path / "t.bin", t=40001, first=1)
    assert np.array_equal(got[0], [tokens[40001:80002], tokens[40002:80003]])


def test_ignored_tokens(data: Path, tmp_path: Path) -> None:
    tokens = np.array([7, IGNORE, 9, IGNORE, IGNORE, 11, 12], "<u2")
    (tmp_path / "t.bin").write_bytes(tokens.tobytes())
    got, _ = read(data, tmp_path / "t.bin", t=6)
    assert got[0].tolist() == [[7, 0, 9, 0, 0, 11], [-1, 9, -1, -1, 11, 12]]
    assert "token 1 is 65535" in read(data, tmp_path / "t.bin", t=6, ignore=-1)[1]
    got, _ = read(data, tmp_path / "t.bin", t=6, ignore=-1, vocab=65536)
    assert got[0, 0].tolist() == tokens[:6].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (b"\1", "1 bytes, an odd number"),
        (bytes(2 * T), "5 tokens; one sample needs 6"),
        (bytes(101), "101 bytes, an odd number"),
        (header(3) + bytes(6), "3 tokens; one sample needs 6"),
        (
            header(100) + bytes(198),
            "says 100 tokens of 2 bytes, which does not match the 1222 bytes that the file has",
        ),
        (header(100) + bytes(202), "the 1226 bytes"),
        (header(100) + bytes(199), "the 1223 bytes"),
        (header(-1) + bytes(200), "says -1 tokens"),
        (header(2**31 - 1) + bytes(200), "says 2147483647 tokens"),
        (header(50)[:1000], "bytes of llm.c's header; the file is cut off"),
        (header(0)[:4], "bytes of llm.c's header; the file is cut off"),
        (header(50, version=7) + bytes(100), "version 7"),
        (header(25, magic=20240522) + bytes(100), "evaluation file"),
        (header(25, magic=20240326) + bytes(100), "an llm.c model"),
        (b"MMIDIDX\0\0" + bytes(100), "Megatron"),
        (b"\x93NUMPY\1\0" + bytes(100), "numpy"),
    ],
)
def test_bad_files_are_named(
    data: Path, tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "t.bin").write_bytes(content)
    got, why = read(data, tmp_path / "t.bin")
    assert got is None and words in why and str(tmp_path / "t.bin") in why


def test_what_is_no_file(data: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "No such file" in read(data, tmp_path / "none")[1]
    assert "not a regular file" in read(data, tmp_path)[1]
    assert "not a regular file" in read(data, tmp_path / "pipe")[1]
    assert "not a regular file" in read(data, Path("/dev/zero"))[1]


# ---- files that are something else

rng = np.random.default_rng(3)
KJV = (Path(__file__).resolve().parents[1] / "data" / "kjv.txt").read_bytes()
TALL = b"".join(chr(c).encode() for c in rng.integers(0x4E00, 0x9FFF, 9000))
WIDE = rng.integers(0, 50257, 40000)
# As in text: small ids are more frequent
RANKED = np.minimum(rng.zipf(1.2, 80000), 50256)
ODD = np.where((np.arange(80000) % 2 == 1) & (np.arange(80000) // 2 % 100 < 31), 0, 7)
LARGE = rng.integers(0, 256000, 40000)
TINY = rng.integers(0, 4, 4000)
LETTERS = np.frombuffer(KJV, np.uint8)[:8000]
HOLES = np.where(np.arange(40000) % 3, WIDE, -100)
WEIGHTS = rng.normal(0, 0.02, 40000)


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype("<f4").view("<u4") >> 16).astype("<u2")


WRONG = [
    ("text", KJV),
    ("text", KJV[:1001]),
    ("text", KJV.replace(b"\n", b"\r\n")),
    ("text", TALL),
    ("text", "Où l'été commence à Genève, là-bas. ".encode("latin-1") * 100),
    ("JSON", b'{"text": "In the beginning\\n"}\n' * 1000),
    ("JSON", b'\n [{"tokens": [464, 3290, 318]}]\n' * 1000),
    ("text", KJV[:5000] + bytes(40) + KJV[5000:]),
    ("UTF-16 text", "\ufeffIn the beginning".encode("utf-16-le") * 100),
    ("UTF-16 text", "\ufeffIn the beginning".encode("utf-16-be") * 100),
    *(("uint32 ", x.astype("<u4")) for x in (WIDE, LARGE, TINY, LETTERS)),
    ("uint32 ", HOLES.astype("<i4")),
    *(("uint32, big", x.astype(">u4")) for x in (WIDE, LARGE, TINY, LETTERS)),
    *(("int64 ", x.astype("<i8")) for x in (WIDE, LARGE, TINY, HOLES)),
    ("int64 ", WIDE[:16].astype("<i8")),
    *(("int64, big", x.astype(">i8")) for x in (WIDE, LARGE, TINY, HOLES)),
    *(("float32", x.astype("<f4")) for x in (WIDE, TINY, HOLES, WEIGHTS)),
    *(("float64", x.astype("<f8")) for x in (WIDE, TINY, HOLES, WEIGHTS)),
    *(("bfloat16", bf16(x)) for x in (WIDE, TINY, WEIGHTS)),
    ("uint8", TINY.astype("u1")),
    ("uint8", (RANKED % 64).astype("u1")),
]


@pytest.mark.parametrize("width", [0, 2, 4])
@pytest.mark.parametrize("what, content", WRONG)
def test_other_things_are_no_tokens(
    data: Path, tmp_path: Path, what: str, content: object, width: int
) -> None:
    """Files of other types are refused, and whatever --tokens says, no wrong type is
    recommended."""
    if what == "uint32 " and width == 4:
        return
    file = tmp_path / "t.bin"
    file.write_bytes(bytes(memoryview(content)))
    got, why = read(data, file, vocab=256000, width=width)
    assert got is None and f"{file}: looks like {what}" in why, why
    if "text" in what or "JSON" in what:
        assert "./run data" in why
    else:
        assert "meta.json" in why
    assert ("--tokens" in why) == (what == "uint32 ")
    assert "--tokens uint16" not in why


@pytest.mark.parametrize("x", [WIDE, RANKED, LARGE[LARGE < 65000]])
def test_uint16_is_no_uint32(data: Path, tmp_path: Path, x: np.ndarray) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(x[: len(x) // 2 * 2].astype("<u2").tobytes())
    _, why = read(data, file, vocab=65536, width=4)
    assert "looks like uint16" in why and "--tokens uint16" in why


def test_what_is_refused_by_its_looks_is_taken_by_its_header(
    data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(header(8000) + TINY.astype("<u4").tobytes())
    got, why = read(data, file)
    assert got is not None, why


TINY_WORDS = [
    rng.integers(0, n, 64).astype("<u2")
    for n in (2, 3, 20, 64, 256, 50257)
    for _ in range(3)
]


@pytest.mark.parametrize("width", [0, 2])
@pytest.mark.parametrize(
    "content",
    [
        np.frombuffer(KJV, np.uint8).astype("<u2").tobytes(),
        np.frombuffer(TALL, np.uint8).astype("<u2").tobytes(),
        WIDE.astype("<u2").tobytes(),
        RANKED.astype("<u2").tobytes(),
        (RANKED % 32000).astype("<u2").tobytes(),
        rng.integers(0, 65535, 80000).astype("<u2").tobytes(),
        rng.integers(0, 4, 80000).astype("<u2").tobytes(),
        rng.integers(0, 2, 80000).astype("<u2").tobytes(),
        rng.integers(100, 400, 80000).astype("<u2").tobytes(),
        np.where(np.arange(80000) % 1000 < 390, 0, WIDE.repeat(2))
        .astype("<u2")
        .tobytes(),
        ODD.astype("<u2").tobytes(),
        np.where(ODD == 0, rng.integers(0, 50, 80000), 7).astype("<u2").tobytes(),
        np.where(np.arange(80000) % 9 < 7, 65535, WIDE.repeat(2))
        .astype("<u2")
        .tobytes(),
        header(len(KJV) // 2) + KJV[: len(KJV) // 2 * 2],
        header(80000) + WIDE.astype("<u4").tobytes(),
        WIDE.astype("<u2").tobytes() * 14 + KJV[: 1 << 20],
        bytes(4000),
        b"\xff" * 4000,
        KJV[:126],
        bytes(126),
        *(x.tobytes() for x in TINY_WORDS),
    ],
)
def test_tokens_are_taken_for_tokens(
    data: Path, tmp_path: Path, content: bytes, width: int
) -> None:
    """Tokens of any vocabulary are accepted. A header is trusted, only the first MiB is judged, and
    fewer than 64 tokens are not."""
    (tmp_path / "t.bin").write_bytes(content)
    assert read(data, tmp_path / "t.bin", vocab=65536, width=width)[1] == ""


@pytest.mark.parametrize(
    "x",
    [
        WIDE,
        LARGE,
        RANKED,
        LETTERS,
        TINY,
        WIDE | 1,
        WIDE & ~1,
        WIDE % 2,
        np.where(np.arange(40000) % 2, WIDE, 0),
        np.where(np.arange(40000) % 100 < 97, 0, LARGE),
        np.where(np.arange(40000) % 9 < 7, -1, WIDE),
        np.full(4000, 65536),
        np.full(4000, 50256),
        np.append(0xFEFF, WIDE),
        np.append(0x1FFFE, WIDE),
        np.zeros(4000),
        WIDE[:40],
        TINY[:40],
    ],
)
def test_uint32_is_taken_for_uint32(data: Path, tmp_path: Path, x: np.ndarray) -> None:
    """uint32 is accepted for uint32: odd tokens, even ones, every second one 0 (except the last),
    and mostly padding."""
    x = x.astype("<i8")
    x[-1] = 1
    (tmp_path / "t.bin").write_bytes(x.astype("<u4").tobytes())
    got, why = read(data, tmp_path / "t.bin", vocab=256000, ignore=-1, width=4)
    assert got is not None, why
    assert (got[0, 0] == np.where(x[:T] < 0, 0, x[:T])).all()


PACKED = {
    "gzip": gzip.compress(KJV),
    "bzip2": bz2.compress(KJV),
    "by bzip2": bz2.compress(KJV, 1),
    "xz": lzma.compress(KJV),
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(200),
    "tar": b"kjv.txt".ljust(257, b"\0") + b"ustar\0" + bytes(500),
    "Parquet": b"PAR1" + bytes(200),
    "Arrow": b"ARROW1\0\0" + bytes(200),
    "pickle": pickle.dumps([*range(300)]),
    "a Python pickle": pickle.dumps([*range(300)], 2),
    "zip": b"PK\3\4" + bytes(200),
    "safetensors": struct.pack("<Q", 200) + b'{"a":'.ljust(400),
    "Git LFS": b"version https://git-lfs.example/spec/v1\noid sha256:0\n",
    "old index": b"TNTIDX\0\0" + bytes(200),
    "GGUF": b"GGUF" + bytes(200),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(200),
    "numpy": b"\x93NUMPY\1\0" + bytes(200),
}


@pytest.mark.parametrize("width", [0, 2, 4])
@pytest.mark.parametrize("what", PACKED)
def test_files_of_other_programs_are_named(
    data: Path, tmp_path: Path, what: str, width: int
) -> None:
    (tmp_path / "t.bin").write_bytes(PACKED[what])
    got, why = read(data, tmp_path / "t.bin", vocab=65536, width=width)
    assert got is None and what in why and "t.bin: is " in why, why


# ---- ids beyond the vocabulary

ROWS = "the model's embedding has no more rows"


@pytest.mark.parametrize(
    "kind, token, words",
    [
        ("<u2", 300, ROWS),
        ("<u4", 301, ROWS),
        (
            "<u2",
            65436,
            "it is -100, which other programs use for tokens that are not targets",
        ),
        ("<u2", 65436, "data.ignore: 65436"),
        ("<u4", 2**32 - 100, "data.ignore: 4294967196"),
        ("<u4", 1 << 28, "another type"),
    ],
)
def test_an_id_beyond_the_vocabulary_has_a_cause(
    data: Path, tmp_path: Path, kind: str, token: int, words: str
) -> None:
    tokens = tokens_of(61).astype(kind)
    tokens[17] = token
    (tmp_path / "t.bin").write_bytes(tokens.tobytes())
    _, why = read(data, tmp_path / "t.bin", width=int(kind[-1]))
    assert f"t.bin: token 17 is {token}; the vocabulary has 300 (ids" in why
    assert words in why
    if words == ROWS:
        assert "model.vocab" in why and "--vocab N" in why


@pytest.mark.parametrize("width", [0, 2])
def test_uint16_of_the_other_order_is_told(
    data: Path, tmp_path: Path, width: int
) -> None:
    (tmp_path / "t.bin").write_bytes(tokens_of(4000).astype(">u2").tobytes())
    _, why = read(data, tmp_path / "t.bin", width=width)
    assert "the file is big endian" in why


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("at", [0, 1, 41, 42, 43, 58, 59, 60])
def test_some_rank_finds_an_id_beyond_the_vocabulary(
    data: Path, tmp_path: Path, at: int, ranks: int
) -> None:
    tokens = tokens_of(61)
    tokens[at] = VOCAB
    (tmp_path / "t.bin").write_bytes(header(61) + tokens.tobytes())
    whys = [
        read(data, tmp_path / "t.bin", rank=r, ranks=ranks, rows=0)[1]
        for r in range(ranks)
    ]
    found = [why for why in whys if why]
    assert found
    assert all(
        f"token {at} is 300; the vocabulary has 300 (ids 0 to 299)" in why
        for why in found
    )


@pytest.mark.parametrize(
    "first, n", [(0, 3), (0, 12), (5, 4), (9, 5), (21, 5), (4, 11), (0, 0)]
)
def test_only_the_tokens_that_are_used_are_looked_at(
    data: Path, tmp_path: Path, first: int, n: int
) -> None:
    """Only tokens of used samples are checked, of 12 samples with 5 tokens each: sample i uses
    tokens 5i .. 5i+5."""
    used = {
        t
        for s in range(first, first + n)
        for t in range(s % 12 * T, s % 12 * T + T + 1)
    }
    for at in range(64):
        tokens = tokens_of(64)
        tokens[at] = 60000
        (tmp_path / "t.bin").write_bytes(tokens.tobytes())
        why = read(data, tmp_path / "t.bin", first=first, n=n, rows=0)[1]
        assert (why != "") == (at in used), at


def test_reading_checks_again(data: Path, tmp_path: Path) -> None:
    """A file that changes after the check brings no wrong id into a kernel."""
    tokens = tokens_of(61)
    tokens[33] = 999
    (tmp_path / "t.bin").write_bytes(tokens.tobytes())
    assert "token 33 is 999" in read(data, tmp_path / "t.bin", n=1, rows=10)[1]


@pytest.mark.slow
def test_mutants(tmp_path: Path) -> None:
    """Deterministic mutants never crash the reader, in at most five seconds; some pass, most do
    not."""
    fuzzer = build("fuzz/data.c")
    done = run(fuzzer, tmp_path, 20000, 5)
    tried, accepted = (int(x) for x in done.stdout.split()[1::2])
    assert tried >= 2000 and tried // 20 < accepted < tried * 19 // 20, done.stdout
