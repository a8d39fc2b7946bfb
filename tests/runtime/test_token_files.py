"""test_token_files.py -- tests how a token file declares its content: meta.json, headers,
Megatron's index, --tokens; labels; and refusals."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.lib.files import build
from tests.lib.program import run as run_program
from tests.runtime.test_data import IGNORE, T, header, read

VOCAB = 200000
BIG = 2**32 - 1
N = 64
Meta = dict[str, object]


@pytest.fixture(scope="session")
def data() -> Path:
    return build("runtime/data.c")


def tokens(kind: str = "<u4", n: int = N) -> np.ndarray:
    most = 60000 if kind == "<u2" else VOCAB
    return np.random.default_rng(5).integers(0, most, n).astype(kind)


def taken(
    data: Path, file: Path, found: np.ndarray, hole: int = -1, **more: int
) -> None:
    """Assert that the reader gives these tokens, 12 samples of 5. hole: never a target, and read as
    0."""
    wide = found.astype(np.int64)
    got, why = read(data, file, vocab=VOCAB, rows=12, **more)
    assert got is not None, why
    assert (got[:, 0].ravel() == np.where(wide == hole, 0, wide)[:60]).all()
    targets = np.where(wide == hole, -1, wide)[1:61]
    assert (got[:, 1].ravel() == targets).all()


def refused(data: Path, file: Path, words: str, **more: int) -> None:
    got, why = read(data, file, vocab=VOCAB, **more)
    assert got is None and words in why, why


# ---- headers


def llmq(
    count: int,
    *,
    version: int = 2,
    width: int = 4,
    masks: int = 0,
) -> bytes:
    head = struct.pack("<5i", version, width, count, VOCAB, masks)
    return b"BIN.TOK\n" + head + bytes(1024 - 28)


LLAMA3 = header(N, 20240801, 7)


@pytest.mark.slow
@pytest.mark.parametrize("head", [LLAMA3, llmq(N)])
def test_tokens_of_four_bytes(data: Path, tmp_path: Path, head: bytes) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(head + tokens().tobytes())
    taken(data, file, tokens())
    taken(data, file, tokens(), width=2)  # the file declares its type


def mask_file(file: Path, masked: list[int], n: int = N) -> None:
    bits = np.ones(n, bool)
    bits[masked] = False
    mask = np.packbits(bits, bitorder="little").tobytes()
    file.write_bytes(llmq(n, masks=1) + tokens(n=n).tobytes() + mask)


@pytest.mark.parametrize("n", [61, 63, 64])
def test_what_a_mask_hides_is_no_target(data: Path, tmp_path: Path, n: int) -> None:
    masked = [0, 1, 7, 8, 9, 30, 55, 60]
    mask_file(tmp_path / "t.bin", masked, n)
    wide = tokens(n=n).astype(np.int64)
    got, why = read(data, tmp_path / "t.bin", vocab=VOCAB, rows=12)
    assert got is not None, why
    assert (got[:, 0].ravel() == wide[:60]).all()
    wide[masked] = -1
    assert (got[:, 1].ravel() == wide[1:61]).all()


def test_a_mask_of_more_than_one_read(data: Path, tmp_path: Path) -> None:
    n, t = 20001, 10000
    masked = list(range(0, n, 3))
    mask_file(tmp_path / "t.bin", masked, n)
    got, why = read(data, tmp_path / "t.bin", vocab=VOCAB, t=t, rows=2)
    assert got is not None, why
    wide = tokens(n=n).astype(np.int64)
    wide[masked] = -1
    assert (got[:, 1].ravel() == wide[1:]).all()


@pytest.mark.parametrize(
    "content, words",
    [
        (header(N, 20240801, 1) + bytes(256), "version 1 in llm.c's header"),
        (header(N, 20240801, 7) + bytes(255), "64 tokens of 4 bytes"),
        (header(-1, 20240801, 7) + bytes(256), "says -1 tokens"),
        (header(2**31 - 1, 20240801, 7) + bytes(256), "2147483647 tokens"),
        (llmq(N)[:1000], "only 1000 of the 1024 bytes of llm.q's header"),
        (llmq(N, version=3) + bytes(256), "version 3 in llm.q's header"),
        (llmq(N, width=2) + bytes(128), "2 bytes a token in llm.q's"),
        (llmq(N, masks=1) + bytes(256), "does not match the 1280 bytes"),
        (llmq(N, masks=1) + bytes(263), "does not match the 1287 bytes"),
        (llmq(N) + bytes(264), "does not match the 1288 bytes"),
        (llmq(-1, masks=1) + bytes(264), "says -1 tokens"),
    ],
)
def test_bad_headers_are_told(
    data: Path, tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "t.bin").write_bytes(content)
    refused(data, tmp_path / "t.bin", words)


# ---- --tokens, and the token that stands for no target


def test_the_user_may_say_it(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(tokens().tobytes())
    taken(data, file, tokens(), width=4)
    file.write_bytes(tokens().tobytes() + b"ab")
    refused(data, file, "258 bytes, not a multiple of 4", width=4)


@pytest.mark.parametrize(
    "kind, vocab, ignore, hole",
    [
        ("<u2", 300, IGNORE, 65535),  # a spec's value that has no effect
        ("<u4", 300, IGNORE, BIG),
        ("<u2", 70000, -1, None),
        ("<u4", 70000, -1, BIG),
        ("<u4", 70000, 65535, 65535),  # and one that has
        ("<u4", 70000, 5, 5),
        ("<u4", 300, 2**31, 2**31),
        ("<u4", 300, -1, None),
        ("<u2", 300, -1, None),
    ],
)
def test_the_greatest_number_of_the_type_is_no_target(
    data: Path,
    tmp_path: Path,
    kind: str,
    vocab: int,
    ignore: int,
    hole: int | None,
) -> None:
    file = tmp_path / "t.bin"
    width = int(kind[-1])
    found = np.array([7, 8, 9, 1, 2, 3], kind)
    greatest = BIG if width == 4 else 65535
    for at in {greatest, hole} - {None}:
        found[2] = at
        file.write_bytes(found.tobytes())
        form = {"vocab": vocab, "ignore": ignore, "width": width}
        got, why = read(data, file, **form)
        if at == hole:
            assert got is not None, why
            assert got[0].tolist() == [[7, 8, 0, 1, 2], [8, -1, 1, 2, 3]]
        elif at < vocab:
            assert got is not None and got[0, 1, 1] == at
        else:
            assert got is None and f"token 2 is {at}" in why


# ---- Megatron


def index(
    lengths: list[int],
    width: int = 2,
    *,
    code: int | None = None,
    version: int = 1,
    entries: int = 2,
    shift: int = 0,
    cut: int = 0,
    count: int | None = None,
) -> bytes:
    code = {2: 8, 4: 4}[width] if code is None else code
    n = len(lengths) if count is None else count
    offsets = [width * sum(lengths[:i]) + shift for i in range(len(lengths))]
    made = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, n, entries)
    made += struct.pack(f"<{len(lengths)}i", *lengths)
    made += struct.pack(f"<{len(lengths)}q", *offsets)
    made += struct.pack("<2q", 0, len(lengths))
    return made[: len(made) - cut]


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
@pytest.mark.parametrize("lengths", [[64], [10, 0, 50, 4], [1] * 64])
def test_sequences_of_megatron_are_one_stream(
    data: Path, tmp_path: Path, kind: str, lengths: list[int]
) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(tokens(kind).tobytes())
    file.with_suffix(".idx").write_bytes(index(lengths, int(kind[-1])))
    taken(data, file, tokens(kind))


def test_modes_behind_an_index_are_passed(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(tokens("<u2").tobytes())
    file.with_suffix(".idx").write_bytes(index([60, 4]) + bytes(2))
    taken(data, file, tokens("<u2"))


@pytest.mark.parametrize(
    "made, words",
    [
        (index([64], version=2), "t.idx: version 2; only 1 is known"),
        (index([64], code=5), "tokens of type 5; supported: 8 (uint16) or 4"),
        (index([64], code=1), "tokens of type 1"),
        (index([64], cut=9), "1 sequences and 2 entries, too many or none"),
        (index([64], count=0), "0 sequences"),
        (index([64], count=2**63), "9223372036854775808 sequences"),
        (index([64], count=2**64 // 12), "1537228672809129301 sequences"),
        (index([64], entries=2**61), "2305843009213693952 entries"),
        (index([63]), "lie from byte 0 to 0 + 2 * 63 of the .bin, which has"),
        (index([60, 5]), "lie from byte 0 to 120 + 2 * 5 of the .bin"),
        (index([64, -1]), "+ 2 * -1 of the .bin"),
        (index([64], shift=2), "lie from byte 2"),
        (index([32], 4), ""),
    ],
)
def test_an_index_that_does_not_fit_is_told(
    data: Path, tmp_path: Path, made: bytes, words: str
) -> None:
    """An index that does not fit is reported, except for the last: half as many tokens of twice the
    size fit."""
    file = tmp_path / "t.bin"
    file.write_bytes(tokens("<u2").tobytes())
    file.with_suffix(".idx").write_bytes(made)
    if words:
        refused(data, file, words)
    else:
        refused(data, file, "token 0 is ", ignore=0)


def test_another_index_counts_for_nothing(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(tokens("<u2").tobytes())
    for content in b"", b"MMIDIDX\0", bytes(100):
        file.with_suffix(".idx").write_bytes(content)
        taken(data, file, tokens("<u2"))


@pytest.mark.parametrize(
    "code, words",
    [
        (8, "an old index (TNTIDX), which is not supported; without it, and with"),
        (8, "--tokens uint16"),
        (4, "--tokens uint32"),
        (5, "of tokens of type 5; supported: 8 (uint16) or 4 (int32)"),
        (2**40 + 8, f"of type {2**40 + 8};"),
    ],
)
@pytest.mark.parametrize("width", [0, 2, 4])
def test_an_index_of_the_old_kind_is_told(
    data: Path, tmp_path: Path, code: int, words: str, width: int
) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(tokens("<u2").tobytes())
    made = b"TNTIDX\0\0" + struct.pack("<5Q", 1, code, 2, 1, 1) + bytes(99)
    file.with_suffix(".idx").write_bytes(made)
    refused(data, file, f"{tmp_path}/t.idx: an old index (TNTIDX)", width=width)
    refused(data, file, words, width=width)


def test_the_index_itself_holds_no_tokens(data: Path, tmp_path: Path) -> None:
    (tmp_path / "t.idx").write_bytes(index([64]))
    refused(data, tmp_path / "t.idx", "use the .bin beside it")


# ---- meta.json


def meta(**more: object) -> Meta:
    said: Meta = {"tokens": N, "documents": 3, "labels": None}
    return {
        "format": 1,
        "vocab": 150000,
        "dtype": "uint32",
        "end": 2,
        "ignore": None,
        "tokenizer": {"kind": "bytes", "sha256": None},
        "files": {"train.bin": said, "val.bin": said},
    } | more


def named(**more: object) -> Meta:
    return meta(files={"train.bin": {"tokens": N, "labels": None} | more})


def folder(into: Path, said: object, kind: str = "<u4") -> Path:
    text = said if isinstance(said, str) else json.dumps(said)
    (into / "meta.json").write_text(text)
    (into / "train.bin").write_bytes(tokens(kind).tobytes())
    return into / "train.bin"


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_meta_json_tells_the_type(data: Path, tmp_path: Path, kind: str) -> None:
    file = folder(tmp_path, meta(dtype=f"uint{8 * int(kind[-1])}"), kind)
    taken(data, file, tokens(kind))
    taken(data, file, tokens(kind), width=6 - int(kind[-1]))


def test_meta_json_comes_before_a_header(data: Path, tmp_path: Path) -> None:
    file = folder(tmp_path, meta(files={"train.bin": {"tokens": 512 + N}}))
    head = header(2 * N, 20240520)
    file.write_bytes(head + bytes(1024) + tokens().tobytes())
    refused(data, file, "token 0 is 20240520; the vocabulary")


def test_one_that_does_not_name_the_file_is_absent(data: Path, tmp_path: Path) -> None:
    for said in (
        meta(files={"val.bin": {}}),
        meta(files=[1]),
        {"files": None},
        {"format": "x", "vocab": {}, "dtype": 3},
    ):
        file = folder(tmp_path, said, "<u2")
        taken(data, file, tokens("<u2"))


@pytest.mark.parametrize(
    "said",
    [
        "",
        "[]",
        "{} x",
        "no JSON",
        '{"name": "a table", "rows": [1, 2',
        '{"a": ' + "[" * 70 + "]" * 70 + "}",
        " " * (1 << 20) + "{}",
    ],
)
def test_what_has_no_key_of_ours_is_absent(
    data: Path, tmp_path: Path, said: str
) -> None:
    taken(data, folder(tmp_path, said, "<u2"), tokens("<u2"))


def test_a_folder_of_that_name_is_absent(data: Path, tmp_path: Path) -> None:
    file = folder(tmp_path, "", "<u2")
    (tmp_path / "meta.json").unlink()
    (tmp_path / "meta.json").mkdir()
    taken(data, file, tokens("<u2"))


@pytest.mark.parametrize(
    "said, words",
    [
        (meta(format=2), "meta.json: format: must be 1"),
        (meta(format=None), "format: must be 1"),
        (meta(sequence=6), "samples of 6 tokens, but train.sequence is 5"),
        (meta(dtype="int32"), 'dtype: must be "uint16" or "uint32"'),
        (meta(dtype=None), "dtype: must be"),
        (meta(vocab=VOCAB + 1), "200001 tokens, but the model's has 200000: set model.voc"),
        (meta(dtype="uint16"), "64 tokens of 2 bytes, which does not match"),
        (named(tokens=N - 1), "63 tokens of 4 bytes"),
        (named(tokens=None), "tokens: must be an integer"),
        (named(tokens=2**62), "4611686018427387904 tokens"),
        (named(labels="l"), "ignore: required with labels of uint32: 429496"),
        (meta(ignore=BIG, files={"train.bin": {"tokens": N, "labels": "l"}}),
         "l: No such file"),
        (meta(ignore=BIG, files={"train.bin": {"tokens": N, "labels": "a/b"}}),
         "a/b is outside its folder"),
        ('{"format": 1', "meta.json: byte 12: expected a comma or the end"),
        ('{"files": {}} x', "byte 14: unexpected text after the end"),
        ('{"vocab": ' + "[" * 70 + "]" * 70 + "}", "nested too deeply"),
    ],
)  # fmt: skip
def test_a_bad_meta_json_is_told(
    data: Path, tmp_path: Path, said: object, words: str
) -> None:
    refused(data, folder(tmp_path, said), words)


# ---- labels


def labelled(into: Path, labels: np.ndarray, kind: str = "<u4", **more: object) -> Path:
    width = int(kind[-1])
    said = meta(
        dtype=f"uint{8 * width}",
        ignore=BIG if width == 4 else 65535,
        files={"train.bin": {"tokens": N, "labels": "train.labels.bin"}},
    )
    (into / "train.labels.bin").write_bytes(labels.tobytes())
    return folder(into, said | more, kind)


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_labels_leave_targets_out_and_no_input(
    data: Path, tmp_path: Path, kind: str
) -> None:
    left_out = [0, 1, 5, 6, 30, 60]
    labels = tokens(kind)
    labels[left_out] = np.iinfo(kind).max
    got, why = read(data, labelled(tmp_path, labels, kind), vocab=VOCAB, rows=12)
    assert got is not None, why
    wide = tokens(kind).astype(np.int64)
    assert (got[:, 0].ravel() == wide[:60]).all()
    wide[left_out] = -1
    assert (got[:, 1].ravel() == wide[1:61]).all()


def test_the_specs_ignore_holds_beside_labels(data: Path, tmp_path: Path) -> None:
    pad = int(tokens()[3])
    file = labelled(tmp_path, tokens())
    got, why = read(data, file, vocab=VOCAB, ignore=pad)
    assert got is not None, why
    assert got[0, 0, 3] == 0 and got[0, 1, 2] == -1


@pytest.mark.parametrize(
    "labels, more, words",
    [
        (tokens()[:-1], {}, "train.labels.bin: 252 bytes; it must have as many"),
        (np.append(tokens(), 1), {}, "as many as the tokens, 256"),
        (
            tokens() + np.uint32(1),
            {},
            "train.labels.bin: the label of token 0 is",
        ),
        (tokens(), {"ignore": None}, "ignore: required with labels"),
        (tokens(), {"ignore": 65535}, "ignore: required with labels"),
    ],
)
def test_bad_labels_are_told(
    data: Path, tmp_path: Path, labels: np.ndarray, more: Meta, words: str
) -> None:
    refused(data, labelled(tmp_path, labels, **more), words)


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_the_ignore_index_of_pytorch_is_told(
    data: Path, tmp_path: Path, kind: str
) -> None:
    labels = tokens(kind)
    labels[3] = (-100) % 2 ** (8 * int(kind[-1]))
    file = labelled(tmp_path, labels, kind)
    refused(data, file, "(it is PyTorch's -100; replace it with that number)")


@pytest.mark.parametrize("kind", ["<u2", "<u4"])
def test_labels_are_checked_at_the_start(data: Path, tmp_path: Path, kind: str) -> None:
    """Labels are checked at the start, also if every number of the type is a token."""
    labels = tokens(kind)
    labels[40] ^= 1
    file = labelled(tmp_path, labels, kind)
    _, why = read(data, file, vocab=VOCAB, n=1 << 40, rows=0)
    assert "the label of token 40 is" in why
    assert read(data, file, vocab=VOCAB, n=7, rows=7)[0] is not None


def test_labels_are_a_regular_file(data: Path, tmp_path: Path) -> None:
    file = labelled(tmp_path, tokens())
    (tmp_path / "train.labels.bin").unlink()
    (tmp_path / "train.labels.bin").mkdir()
    refused(data, file, "train.labels.bin: not a regular file")


def test_samples_wrap_in_any_type(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.bin"
    file.write_bytes(LLAMA3 + tokens().tobytes())
    got, _ = read(data, file, vocab=VOCAB, first=11, rows=2)
    assert got is not None and (got[1, 0] == tokens()[:T]).all()


# ---- the program


@pytest.mark.parametrize(
    "option", ["--data", "--val", "--prompt-tokens", "the folder's"]
)
def test_int64_is_refused_wherever_tokens_are_read(
    program: Path, tmp_path: Path, option: str
) -> None:
    """int64 is refused wherever tokens are read, because each second 32-bit word would be token
    0."""
    file = tmp_path / "train.bin"
    file.write_bytes((tokens("<i8") % 64).tobytes())
    given = {"--data": "--steps=1", "--val": "--steps=0"}
    if option in given:
        words = [option, file, given[option], "--tokens=uint32"]
    elif option == "--prompt-tokens":
        words = [option, file, "--steps=0", "--sample=1"]
    else:
        words = ["--data", tmp_path, "--steps=1", "--tokens=uint32"]
    done = run_program(program, *words, RANKS=2)
    assert done.code == 2 and done.out == ""
    assert f"{file}: looks like int64 (every second 32-bit word" in done.err
    assert "--tokens uint32" not in done.err
