"""test_data_tool.py -- tests the command ./run data: token files against the tokenizers library and
numpy on the same documents."""

from __future__ import annotations

import ast
import bz2
import gzip
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import data
import documents
import encoding
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.lib import trainer
from tests.lib.patience import LIMIT

KJV = trainer.ROOT / "tests" / "data" / "kjv.txt"
TEXT = KJV.read_text()
VERSES = TEXT.splitlines()
END = "<|endoftext|>"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WAYS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
}


def bpe(way: str = "gpt2", size: int = 400) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=way == "metaspace"))
    made.pre_tokenizer = WAYS[way]
    made.decoder = decoders.ByteLevel()
    if way == "llama3":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet() + ["\n", " "]
    made.train_from_iterator(
        VERSES[:200],
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[END],
            initial_alphabet=alphabet,
            show_progress=False,
            max_token_length=8,
        ),
    )
    return made


BPE = bpe()


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tool without other processes."""

    def encoded(recipe, pieces, processes):
        yield from map(encoding.Encoder(recipe).encode, data.tasks(pieces))

    monkeypatch.setattr(data, "encoded", encoded)


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut texts into pieces of 64 bytes."""
    monkeypatch.setattr(documents, "PIECE", 64)
    monkeypatch.setattr(data, "PIECE", 64)
    monkeypatch.setattr(documents, "CONTEXT", 16)


def made(*words: object, processes: int = 1) -> int:
    return data.main([str(x) for x in words], processes)


def command(
    *words: object, prepare: Callable[[], None] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, trainer.ROOT / "tools/data.py", *map(str, words)],
        preexec_fn=prepare,
        env={**os.environ, "PYTHONPATH": f"{trainer.ROOT}/gen", **env},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def meta(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


def tokens(folder: Path, name: str = "train.bin") -> list[int]:
    width = {"uint16": "<u2", "uint32": "<u4"}[meta(folder)["dtype"]]
    return np.fromfile(folder / name, width).tolist()


def contents(folder: Path) -> dict[str, bytes]:
    return {x.name: x.read_bytes() for x in folder.iterdir()}


def jsonl(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(x) + "\n" for x in records))
    return path


def saved(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """Write a folder like Hugging Face's."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def splitmix(number: int) -> int:
    """Return SplitMix64 of a number (Steele, Lea and Flood, 2014), with unbounded integers."""
    mask = 2**64 - 1
    x = (number + 0x7A65726F) * 0x9E3779B97F4A7C15 & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


# ---- tokens


def test_bytes_are_the_texts(near: None, tmp_path: Path) -> None:
    assert made("text", KJV, "-o", tmp_path / "out") == 0
    assert tokens(tmp_path / "out") == list(KJV.read_bytes())
    assert meta(tmp_path / "out") == {
        "format": 1,
        "vocab": 256,
        "dtype": "uint16",
        "end": None,
        "ignore": None,
        "tokenizer": {"kind": "bytes", "sha256": None},
        "files": {
            "train.bin": {
                "tokens": KJV.stat().st_size,
                "documents": 1,
                "labels": None,
            }
        },
    }
    assert {*contents(tmp_path / "out")} == {"train.bin", "meta.json"}


def test_a_cut_is_looked_at_from_both_sides() -> None:
    """A text is not cut at a line's end near the end of the bytes read: an incomplete letter after
    it proves nothing."""
    text = bytearray(b"words\n" * 9 + b"\xc3")

    def splits(before: bytes, after: bytes) -> bool:
        return len(after) < documents.CONTEXT

    assert documents.place(text, 0, splits) == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("before", ["", "<bos>"])
def test_texts_in_pieces_are_as_in_one(
    way: str,
    before: str,
    near: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A text in pieces has the tokens of the whole, also after a token that the tokenizer puts
    first. A tokenizer that treats the beginning of a text differently gets it whole."""
    small(monkeypatch)
    tokenizer = bpe(way)
    if before:
        tokenizer.add_special_tokens([before])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{before} $A",
            special_tokens=[(before, tokenizer.token_to_id(before))],
        )
    where = saved(tokenizer, tmp_path / "tok", eos_token=END)
    end = [tokenizer.token_to_id(END)]
    seen: set[bool] = set()  # whether a piece was the first
    tasks = data.tasks

    def spied(pieces):
        for task in tasks(pieces):
            seen.update(piece.first for piece in task)
            yield task

    monkeypatch.setattr(data, "tasks", spied)

    @settings(
        max_examples=40,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        st.lists(
            st.lists(
                st.sampled_from([*"aZ9é \n\n\n\t\r漢", " the", "'s", "\n" + "b" * 9])
            ),
            min_size=30,
            max_size=60,
        )
    )
    def check(parts: list[list[str]]) -> None:
        text = "x" + "".join("".join(part) for part in parts)
        (tmp_path / "a").write_bytes(text.encode())
        how = ("--tokenizer", where, "-o", tmp_path / "out")
        assert made("text", tmp_path / "a", *how) == 0
        wanted = tokenizer.encode(text).ids
        assert tokens(tmp_path / "out") == wanted + end

    check()
    assert seen == ({True} if way == "metaspace" else {True, False})


@pytest.mark.parametrize(
    "way,end", [("gpt2", "\r\n"), ("llama3", "\r\n"), ("llama3", "\n\n")]
)
def test_lines_that_end_otherwise_are_cut_as_others(
    way: str,
    end: str,
    near: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines that end with CRLF, or are followed by a blank line, are cut like others, and every
    byte is text."""
    small(monkeypatch)
    tokenizer = bpe(way)
    where = saved(tokenizer, tmp_path / "tok", eos_token=END)
    lines = [*VERSES[:20], "", "", *VERSES[20:40], " ", *VERSES[40:50]]
    text = "".join(f"{line}{end}" for line in lines)
    (tmp_path / "a").write_bytes(text.encode())
    cuts: list[bool] = []
    tasks = data.tasks

    def spied(pieces):
        for task in tasks(pieces):
            cuts.extend(piece.first for piece in task)
            yield task

    monkeypatch.setattr(data, "tasks", spied)
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    assert made("text", tmp_path / "a", *how) == 0
    wanted = [*plain(tokenizer, text), tokenizer.token_to_id(END)]
    assert tokens(tmp_path / "out") == wanted
    assert len(cuts) > 20 and cuts.count(True) == 1


@pytest.mark.parametrize("end", ["\r\n", "\n\n", "\r\n \t\r\n\r\n"])
def test_records_of_lines_that_end_otherwise(
    end: str, near: None, tmp_path: Path
) -> None:
    """CRLF and blank lines between records are no part of records, and no documents."""
    records = [json.dumps({"text": f"{v}\r\n"}) for v in VERSES[:30]]
    found = []
    for name, by in (("plain", "\n"), ("other", end)):
        file = tmp_path / f"{name}.jsonl"
        file.write_bytes("".join(x + by for x in records).encode())
        out = tmp_path / name
        assert made("jsonl", file, "--val", 7, "-o", out) == 0
        found.append(contents(out))
    assert found[0] == found[1]
    said = b"".join(
        bytes(tokens(tmp_path / "other", f"{x}.bin")) for x in ("train", "val")
    )
    assert said.count(b"\r\n") == 30


@pytest.mark.slow
def test_what_is_written_is_the_same_by_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "PIECE", 4096)
    file = jsonl(tmp_path / "a", [{"text": verse} for verse in VERSES])
    where = saved(BPE, tmp_path / "tok")
    words = ("--val", "10%", "--tokenizer", where, "-o")
    for n in (1, 3):
        assert made("jsonl", file, *words, tmp_path / f"{n}", processes=n) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "3")
    end = [BPE.token_to_id(END)]
    parts: dict[bool, list[int]] = {False: [], True: []}
    for number, verse in enumerate(VERSES):
        val = splitmix(number) < 2**64 // 10
        parts[val] += plain(BPE, verse) + end
    assert parts[False] == tokens(tmp_path / "1")
    assert parts[True] == tokens(tmp_path / "1", "val.bin")
    counts = meta(tmp_path / "1")["files"].values()
    assert sum(x["documents"] for x in counts) == len(VERSES)


def test_so_many_documents_for_validation(near: None, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a", [{"text": verse} for verse in VERSES])
    assert made("jsonl", file, "--val", 7, "-o", tmp_path / "out") == 0
    found = meta(tmp_path / "out")["files"]["val.bin"]
    chosen = sorted(range(len(VERSES)), key=splitmix)[:7]
    assert found["documents"] == 7
    wanted = "".join(VERSES[at] for at in sorted(chosen)).encode()
    assert tokens(tmp_path / "out", "val.bin") == list(wanted)


def test_the_end_of_one_text_is_for_validation(near: None, tmp_path: Path) -> None:
    """The part for validation begins with the first line after the share."""
    assert made("text", KJV, "--val", "5%", "-o", tmp_path / "out") == 0
    raw = KJV.read_bytes()
    cut = raw.index(b"\n", len(raw) * 95 // 100) + 1
    assert tokens(tmp_path / "out") == list(raw[:cut])
    assert tokens(tmp_path / "out", "val.bin") == list(raw[cut:])


@pytest.mark.parametrize(
    "vocab,dtype", [(65535, "uint16"), (65536, "uint32"), (70001, "uint32")]
)
def test_a_large_vocabulary(vocab: int, dtype: str, near: None, tmp_path: Path) -> None:
    words = {f"w{at}": at for at in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    where = saved(tokenizer, tmp_path / "tok", eos_token="w1")
    (tmp_path / "a").write_text(f"w{vocab - 1} w7")
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    assert made("text", tmp_path / "a", *how) == 0
    assert meta(tmp_path / "out")["vocab"] == vocab
    assert meta(tmp_path / "out")["dtype"] == dtype
    assert tokens(tmp_path / "out") == [vocab - 1, 7, 1]


def test_a_tokenizers_own_truncation_and_padding_are_not_for_training(
    near: None, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_str(BPE.to_str())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=2000)
    where = saved(tokenizer, tmp_path / "tok")
    (tmp_path / "a").write_text(VERSES[0])
    how = ("--tokenizer", where / "tokenizer.json", "-o", tmp_path / "out")
    assert made("text", tmp_path / "a", *how) == 0
    wanted = plain(BPE, VERSES[0]) + [BPE.token_to_id(END)]
    assert tokens(tmp_path / "out") == wanted
    written = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert written == (where / "tokenizer.json").read_bytes()


def test_an_end_that_the_tokenizer_puts_itself_is_not_put_twice(
    near: None, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_str(BPE.to_str())
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, end)]
    )
    where = saved(tokenizer, tmp_path / "tok")
    file = jsonl(tmp_path / "a", [{"text": "one"}, {"text": ""}])
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    assert made("jsonl", file, *how) == 0
    assert tokens(tmp_path / "out") == plain(BPE, "one") + [end]
    assert meta(tmp_path / "out")["files"]["train.bin"]["documents"] == 1


@pytest.mark.slow
def test_a_tokenizer_that_is_trained(tmp_path: Path) -> None:
    """A trained tokenizer is the same with any number of threads, and uses no text for
    validation."""
    records = [{"text": x} for x in VERSES]
    other = [
        {"text": "Q" * 50 if splitmix(at) < 2**64 // 4 else x}
        for at, x in enumerate(VERSES)
    ]
    for threads, records_ in (("1", records), ("3", records), ("2", other)):
        file = jsonl(tmp_path / f"a{threads}", records_)
        words = ["jsonl", file, "--train-bpe", "500", "--val", "25%"]
        env = {"RAYON_NUM_THREADS": threads}
        done = command(*words, "-o", tmp_path / threads, **env)
        assert done.returncode == 0, done.stderr
    found = contents(tmp_path / "1")
    assert found == contents(tmp_path / "3")
    written = found["tokenizer.json"]
    assert (tmp_path / "2" / "tokenizer.json").read_bytes() == written
    tokenizer = Tokenizer.from_str(written.decode())
    assert tokenizer.get_vocab_size() == 500 == meta(tmp_path / "1")["vocab"]
    assert tokenizer.token_to_id(END) == 0 == meta(tmp_path / "1")["end"]
    told = tokenizer.decode(tokens(tmp_path / "1"), skip_special_tokens=False).split(
        END
    )[:-1]
    kept = [x for at, x in enumerate(VERSES) if splitmix(at) >= 2**64 // 4]
    assert told == kept


# ---- compressed files


@pytest.mark.parametrize("val", ["20%", "7"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_gzip_is_as_what_is_in_it(
    kind: str,
    val: str,
    near: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gzip file gives the tokens of its content, whatever its name, and with several members."""
    small(monkeypatch)
    plain = jsonl(tmp_path / "a", [{"text": x} for x in VERSES[:90]])
    if kind == "text":
        plain.write_text("\n".join(VERSES[:90]))
    raw = plain.read_bytes()
    packed = tmp_path / "b"
    packed.write_bytes(gzip.compress(raw[:999]) + gzip.compress(raw[999:]))
    files = 1 if val == "20%" else 9
    for name, file in (("plain", plain), ("packed", packed)):
        how = ("--val", val, "-o", tmp_path / name)
        assert made(kind, *[file] * files, *how) == 0
    assert contents(tmp_path / "plain") == contents(tmp_path / "packed")


def test_gzip_is_unpacked_once_for_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gzip file is unpacked once for its size, and again only if the file changes."""
    opened = []

    def counted(file: object) -> gzip.GzipFile:
        opened.append(file)
        return gzip.GzipFile(fileobj=file)

    monkeypatch.setattr(documents.gzip, "open", counted)
    for count, text in ((1, b"first\n" * 99), (2, b"another\n" * 99)):
        path = tmp_path / "a"
        path.write_bytes(gzip.compress(text))
        for _ in range(3):
            assert documents.size_of(path) == len(text)
        assert len(opened) == count


def test_text_that_begins_as_bzip2_is_text(near: None, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("BZh, he said")
    assert made("text", tmp_path / "a", "-o", tmp_path / "out") == 0


# ---- Parquet


def table(path: Path, **columns: list) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=9)
    return path


def test_parquet_is_as_jsonl(near: None, tmp_path: Path) -> None:
    records = [{"body": x} for x in VERSES]
    a = jsonl(tmp_path / "a", records)
    b = table(tmp_path / "b", other=[0] * len(VERSES), body=VERSES)
    for kind, file in (("jsonl", a), ("parquet", b)):
        how = ("--field", "body", "--val", 5, "-o", tmp_path / kind)
        assert made(kind, file, *how) == 0
    assert contents(tmp_path / "jsonl") == contents(tmp_path / "parquet")


# ---- errors

Tell = Callable[..., tuple[int, str]]


@pytest.fixture
def tell(
    near: None,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Tell]:
    """Yield tell(kind, texts, words): it runs the tool on files a, b of these bytes. Nothing else
    is left afterwards."""
    monkeypatch.chdir(tmp_path)

    def call(kind: str, raws: Sequence[bytes], *words: str) -> tuple[int, str]:
        for name, raw in zip("ab", raws, strict=False):
            Path(name).write_bytes(raw)
        there = sorted(x.name for x in tmp_path.iterdir())
        code = made(kind, *"ab"[: len(raws)], *words, "-o", "out")
        assert sorted(x.name for x in tmp_path.iterdir()) == there
        return code, capfd.readouterr().err

    yield call


GOOD = b'{"text": "x"}\n'
WRONG = [
    ("jsonl", [GOOD + b'\n{"text": \n'], (), "a:3: not JSON"),
    ("jsonl", [b'{"text": "x"}\r\n\r\n{"text": \r\n'], (), "a:3: not JSON"),
    ("jsonl", [b"[" * 10**5], (), "a:1: "),
    ("jsonl", [GOOD + b"[1]\n"], (), "a:2: not an object"),
    ("jsonl", [b"3\n"], (), "a:1: not an object"),
    ("jsonl", [GOOD, b'{"txt": 1}\n'], (), "b:1: no field text"),
    ("jsonl", [b'{"txt": 1}\n'], (), "a:1: no field text, messages"),
    ("jsonl", [GOOD], ("--field", "y"), "a:1: no field y; the fields are: text"),
    ("jsonl", [GOOD + b'{"text": 5}'], (), "a:2: text is not text"),
    ("jsonl", [GOOD + b'{"text": null}'], (), "a:2: no field text"),
    ("jsonl", [GOOD + b'{"text": "\xff"}'], (), "a:2: byte 11 is not UTF-8"),
    ("jsonl", [GOOD + b'{"text": "\\ud800"}'], (), "a:2: half a UTF-16"),
    ("jsonl", [b'{"text": ""}\n'], (), "no document has a token; 1 are empty"),
    ("jsonl", [b"\n \n"], (), "a: no record"),
    ("jsonl", [GOOD * 3], ("--val", "3"), "there are only 3 documents"),
    ("jsonl", [GOOD * 3], ("--val", "0.001%"), "no document is left for val.bin"),
    (
        "jsonl",
        [b'{"question": "x", "answer": "y"}'],
        (),
        "the fields are: question, answer; rename one, or use --field",
    ),
    ("jsonl", [b'[{"text": "x"}]'], (), "`jq -c .[]` makes lines"),
    ("jsonl", [b'[\n{"text": "x"}\n]'], (), "`jq -c .[]` makes lines"),
    ("jsonl", [b"\x28\xb5\x2f\xfdxxx"], (), "a: is compressed by zstd"),
    ("text", [b"\xfd7zXZ\0xxx"], (), "a: is compressed by xz"),
    ("text", [bz2.compress(b"x")], (), "a: is compressed by bzip2"),
    ("text", [b"PK\x03\x04xxx"], (), "a: is a zip archive"),
    ("jsonl", [b"PAR1xxx"], (), "a: is Parquet: `./run data parquet`"),
    ("text", [b"version https://git-lfs.x/v1"], (), "a: is a pointer of Git"),
    ("text", ["x".encode("utf-16")], (), "a: is UTF-16"),
    ("text", [gzip.compress(b"x" * 999)[:-9]], (), "a: damaged gzip"),
    ("jsonl", [gzip.compress(GOOD)[:-9]], (), "a: damaged gzip"),
    ("jsonl", [gzip.compress(GOOD + b"\n3")], (), "a:3: not an object"),
    ("text", [b""], (), "a: empty"),
    ("text", [gzip.compress(b"")], (), "a: empty"),
    ("text", [b"x", b""], (), "b: empty"),
    ("text", [b"x\n" * 9 + b"\xc3\n"], (), "a:10: not UTF-8"),
    ("text", [b"x"], ("--tokenizer", "a"), "a: not a tokenizer"),
    ("text", [b"x"], ("--tokenizer", "."), "tokenizer.json: there is none"),
    ("text", [b"x"], ("--tokenizer", "c"), "c: No such file"),
    ("parquet", [b"x"], (), "a: not a Parquet file"),
]


def test_files_of_others_are_told_by_the_bytes_that_the_program_knows() -> None:
    text = (trainer.ROOT / "runtime/zr_foreign.c").read_text()
    rows = re.findall(r'^    \{("(?:[^"\\]|\\.)*"), (\d+), (\d+),', text, re.M)
    theirs = {
        ((ast.literal_eval(f"b{told}") + b"\0")[: int(n)], int(at))
        for told, n, at in rows
    }
    assert len(rows) == text.count("\n    {") and (b"ustar", 257) in theirs
    ours = {(magic, at) for magic, at, _ in documents.FOREIGN}
    unicode = {(b"\xff\xfe", 0), (b"\xfe\xff", 0)}
    assert ours - unicode | {(documents.GZIP, 0)} <= theirs


@pytest.mark.parametrize("kind,raws,words,told", WRONG)
def test_what_is_wrong_is_named(
    kind: str, raws: list[bytes], words: tuple[str, ...], told: str, tell: Tell
) -> None:
    code, said = tell(kind, raws, *words)
    assert code == 2 and said.startswith("run data: ") and told in said


def test_a_line_behind_the_first_pieces_is_named(
    tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch)
    text = b"some words\n" * 50 + b"\xff\n" + b"more\n" * 50
    assert "a:51: not UTF-8" in tell("text", [text])[1]


def test_a_file_that_is_not_there(tell: Tell) -> None:
    assert made("text", "c", "-o", "out") == 2


def test_a_tokenizer_whose_end_is_none_of_its_tokens(
    tell: Tell, tmp_path: Path
) -> None:
    saved(BPE, tmp_path / "tok", eos_token="</s>")
    code, said = tell("text", [b"x"], "--tokenizer", "tok")
    assert code == 2 and "eos_token </s> is not one" in said


@pytest.mark.parametrize("at,n", [(4, 8), (40, 4000), (-100, 8), (-8, 8)])
def test_damaged_parquet(at: int, n: int, tell: Tell, tmp_path: Path) -> None:
    raw = bytearray(table(tmp_path / "a", text=VERSES).read_bytes())
    for byte in range(at, at + n):
        raw[byte] ^= 0x55
    code, said = tell("parquet", [bytes(raw)])
    assert code == 2 and said.startswith("run data: a: ")


def test_a_column_of_parquet_whose_name_is_no_text(tell: Tell, tmp_path: Path) -> None:
    raw = table(tmp_path / "a", text=VERSES).read_bytes()
    code, said = tell("parquet", [raw.replace(b"text", b"te\xfft")])
    assert code == 2 and said.startswith("run data: a: not a Parquet file")


def test_files_of_parquet_have_the_same_column(tell: Tell, tmp_path: Path) -> None:
    good = table(tmp_path / "a", text=VERSES).read_bytes()
    bad = table(tmp_path / "b", body=VERSES).read_bytes()
    assert "b: no column text" in tell("parquet", [good, bad])[1]


@pytest.mark.parametrize(
    "words",
    [
        ["text", "a"],
        ["csv", "a", "-o", "x"],
        ["text", "a", "-o", "."],
        ["text", "a", "--field", "x", "-o", "x"],
        *(
            ["text", "a", "--train-bpe", x, "-o", "x"]
            for x in ("256", "-1", "10000001", "9" * 20, "9" * 5000, "1e3")
        ),
        *(["text", "a", "--pack", x, "-o", "x"] for x in ("1", "-1", "x", "99999999")),
        ["text", "a", "--train-bpe", "300", "--tokenizer", "a", "-o", "x"],
        *(
            ["text", "a", "--val", x, "-o", "x"]
            for x in ("0", "0%", "100%", "-1", "1%%", "x")
        ),
    ],
)
def test_wrong_words(words: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        data.main(words)
    assert e.value.code == 2


# ---- the folder


def test_only_a_folder_of_its_own_is_replaced(
    near: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for val in ((), ("--val", "5%"), ()):
        assert made("text", KJV, *val, "-o", out) == 0
        assert (out / "val.bin").exists() == bool(val)
    (out / "notes").write_text("mine")
    before = contents(out)
    assert made("text", KJV, "-o", out) == 2
    assert "out: already exists" in capsys.readouterr().err
    assert contents(out) == before
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(out)
    for name in ("file", "empty", "link"):
        assert made("text", KJV, "-o", tmp_path / name) == 2
    there = {x.name for x in tmp_path.iterdir()}
    assert there == {"out", "file", "empty", "link"}


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """A file that cannot grow, as on a full disk, is reported."""
    most = (50_000, resource.RLIM_INFINITY)
    found = command(
        *("text", KJV, "-o", tmp_path / "out"),
        prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, most),
    )
    assert found.returncode == 3, found
    assert "out/train.bin: File too large" in found.stderr
    assert not [*tmp_path.iterdir()]


def processes_of(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(x) for x in path.read_text().split()]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return state.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
@pytest.mark.parametrize("number,code", [(15, 143), (2, 130), (9, -9)])
def test_a_run_that_is_ended(number: int, code: int, tmp_path: Path) -> None:
    """The processes of an ended run end with it, and nothing is left, except after KILL."""
    os.mkfifo(tmp_path / "never")
    script = (
        "import sys, data, documents; documents.size_of = data.size_of = lambda x: 1;"
        "documents.first = lambda *x: documents.Layout('text', ('text',));"
        "import signal; signal.signal(2, data.ended); signal.signal(15, data.ended);"
        "data.main(sys.argv[1:], 2)"
    )
    file = jsonl(tmp_path / "a", [{"text": "x" * 2**20}] * 3)
    run = subprocess.Popen(
        [sys.executable, "-c", script, "jsonl", file, tmp_path / "never"]
        + ["-o", tmp_path / "out"],
        env={
            **os.environ,
            "PYTHONPATH": f"{trainer.ROOT}/gen:{trainer.ROOT}/tools",
        },
    )
    try:
        while len(processes_of(run.pid)) < 3 and run.poll() is None:
            time.sleep(0.02)  # a resource tracker is one of them
        children = processes_of(run.pid)
        os.kill(run.pid, number)
        assert run.wait(30) == code
        deadline = time.monotonic() + 30
        while not all(map(gone, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(map(gone, children)) and len(children) >= 3
    finally:
        run.kill()
    left = {x.name for x in tmp_path.iterdir()} - {"a", "never"}
    assert number == signal.SIGKILL or not left


def test_other_columns_of_parquet_are_not_read(tmp_path: Path) -> None:
    """Other columns of Parquet are not read, such as times with nanoseconds, which Python does not
    have."""
    times = pyarrow.array([1], pyarrow.timestamp("ns"))
    table = pyarrow.table({"date": times, "text": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    found = documents.first("parquet", [tmp_path / "x.parquet"], None)
    assert found == documents.Layout("text", ("text",))


def test_what_comes_around_texts_of_another_alphabet() -> None:
    """The tokens around a text are found though `a` has no token in that alphabet."""
    vocab = {"<s>": 0, "</s>": 1, "你": 2, "好": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    for text, wanted in (
        ("<s> $A", ([0], [])),
        ("$A </s>", ([], [1])),
        ("<s> $A </s>", ([0], [1])),
    ):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=text, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        assert encoding.around(tokenizer) == wanted


@pytest.mark.parametrize("letters,shown", [("utf-8", "näh"), ("ascii", "n?h")])
def test_a_folder_is_told_in_the_terminals_letters(
    tmp_path: Path, letters: str, shown: str
) -> None:
    (tmp_path / "text").write_text("words\n" * 9)
    done = command(
        "text",
        tmp_path / "text",
        "--tokenizer",
        "bytes",
        "-o",
        tmp_path / "näh",
        PYTHONIOENCODING=letters,
    )
    assert done.returncode == 0, done.stderr
    assert f"--data '{tmp_path}/{shown}'" in done.stdout
