"""test_bad_weights.py -- files of weights that must be refused, each with a line that says why."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
from files import Bench, build, layout, raw_file, run, weights_of
from safetensors.numpy import save_file

ONE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
TWO = {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}


def text(value: object) -> bytes:
    return json.dumps(value).encode()


def a_file(dtype: str, shape: list, place: list[int], size: int) -> bytes:
    """A file of `size` bytes of data whose header has one tensor."""
    return raw_file(
        {"a": {"dtype": dtype, "shape": shape, "data_offsets": place}},
        bytes(size),
    )


@pytest.fixture(scope="session")
def tool() -> Path:
    return build("runtime/weights.c")


@pytest.mark.slow
def test_tensors_that_do_not_fit(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(2))
    weights = weights_of(bench.program)
    (tmp_path / "in").mkdir()

    def why(name: str, w: np.ndarray | None) -> str:
        changed = {k: v for k, v in weights.items() if k != name} | (
            {} if w is None else {name: w}
        )
        save_file(changed, tmp_path / "in/model.safetensors")
        return bench.refused()

    said = why("h.2.mlp.c_fc.weight", None)
    assert (
        "tensor h.2.mlp.c_fc.weight is missing; this program's model, small, needs it with shape [5, 7]"
        in said
    )
    for shape in (7, 5), (35,), (1, 5, 7), (5, 8), ():
        said = why("h.3.mlp.c_fc.weight", np.zeros(shape, np.float32))
        assert (
            f"tensor h.3.mlp.c_fc.weight has shape {list(shape)}; this program's model, small, needs [5, 7]"
            in said
        )
    said = why("wpe.weight", np.zeros((6, 5)))
    assert "tensor wpe.weight is F64; F32, BF16 and F16 can be read" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "0 bytes are no safetensors file"),
        (b"1234567", "7 bytes are no safetensors file"),
        (bytes(8), "a header of 0 bytes"),
        (b"\xff" * 100, "a header of 18446744073709551615 bytes"),
        (
            struct.pack("<Q", 100_000_001) + b"{}",
            "a header of 100000001 bytes",
        ),
        (
            struct.pack("<Q", 300) + b"{}",
            "truncated: a header of 300 bytes in a file of 10",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "no safetensors file",
        ),
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
        (
            raw_file({"a": {"dtype": "F32", "shape": [1]}}),
            "shape or data_offsets is missing",
        ),
        (a_file("F31", [1], [0, 4], 4), "unknown dtype F31"),
        (a_file("F32", [1] * 9, [0, 4], 4), "more than 8 dimensions"),
        (a_file("F32", [-1], [0, 4], 4), "a whole number is needed"),
        (a_file("F32", [1.0], [0, 4], 4), "a whole number is needed"),
        (a_file("F32", [2**63], [0, 4], 4), "beyond 2^63"),
        (a_file("F32", [2**32, 2**31], [0, 4], 4), "do not make F32"),
        (a_file("F4", [3], [0, 1], 1), "do not make F4 [3]"),
        (
            a_file("F32", [2], [0, 4], 4),
            "tensor a: 4 bytes of data do not make F32 [2]",
        ),
        (a_file("F32", [1], [4, 0], 4), "are no [begin, end]"),
        (a_file("F32", [1], [0, 4, 8], 4), "are no [begin, end]"),
        (a_file("F32", [1], [4, 8], 8), "its data begin at 4"),
        (
            a_file("F32", [1], [0, 4], 0),
            "4 bytes of data, the file has 0 (truncated?)",
        ),
        (
            a_file("F32", [1], [0, 4], 5),
            "describes 4 bytes of data, the file has 5\n",
        ),
        (
            raw_file({"a": ONE, "b": ONE}, b"1"),
            "its data begin at 0, the tensor before ends at 1",
        ),
        (
            raw_file(b'{"a":%b,"a":%b}' % (text(ONE), text(TWO)), b"12"),
            "tensor a twice",
        ),
        (raw_file(b'{"a":{"dtype":"U8","dtype":"U8"}}'), "dtype twice"),
        (raw_file(b'{"__metadata__":{"a":1}}'), "a string is needed"),
        (
            raw_file(b'{"a":{"x":' + b"[" * 100 + b"]" * 100 + b"}}"),
            "nested too deeply",
        ),
        (
            raw_file(b'{"a":{"x":' + b"[" * 10_000_000 + b"}}"),
            "nested too deeply",
        ),
        (
            raw_file({"\x1b[31mred\u202e": {"dtype": "F32"}}),
            "tensor ?[31mred???:",
        ),
    ],
    ids=map(str, range(40)),
)
def test_bad_files_are_named(
    tool: Path, tmp_path: Path, content: bytes, words: str
) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.safetensors").write_bytes(content)
    said = bench.refused()
    assert words in said and "in/model.safetensors" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "index, words",
    [
        ("", "an object is needed"),
        ("{}", "one weight_map is needed, it has 0"),
        (
            '{"weight_map": {}, "weight_map": {}}',
            "one weight_map is needed, it has 2",
        ),
        ('{"weight_map": ["a"]}', "an object is needed"),
        ('{"weight_map": {"a": 1}}', "a string is needed"),
        (
            '{"weight_map": {"a": "one.safetensors"}',
            "a comma or an end is needed",
        ),
        (
            '{"weight_map": {"a": "two.safetensors"}}',
            "two.safetensors: No such file",
        ),
        (
            '{"weight_map": {"a": "../in/one.safetensors"}}',
            "no name of a file",
        ),
        ('{"weight_map": {"a": ""}}', "no name of a file"),
        ('{"weight_map": {"a": ".."}}', "not a regular file"),
        (
            '{"weight_map": {"a": "one.safetensors", "b": "copy.safetensors"}}',
            "tensor a twice",
        ),
        (
            '{"weight_map": {"a": "one.safetensors"}}',
            "tensor h.0.attn.c_attn.weight is missing",
        ),
        ('{"weight_map": {}}', "tensor h.0.attn.c_attn.weight is missing"),
    ],
)
def test_bad_indices_are_named(
    tool: Path, tmp_path: Path, index: str, words: str
) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "in").mkdir()
    for name in "one", "copy":
        save_file(
            {"a": np.zeros(3, np.float32)}, tmp_path / f"in/{name}.safetensors"
        )
    (tmp_path / "in/model.safetensors.index.json").write_text(index)
    assert words in bench.refused()


def test_directories_without_weights(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    assert "in: No such file or directory" in bench.refused()
    (tmp_path / "in").mkdir()
    assert (
        "neither model.safetensors nor model.safetensors.index.json"
        in bench.refused()
    )
    os.mkfifo(tmp_path / "in/model.safetensors")
    assert "not a regular file" in bench.refused()
    os.unlink(tmp_path / "in/model.safetensors")
    os.symlink("model.safetensors", tmp_path / "in/model.safetensors")
    assert "model.safetensors: Too many levels" in bench.refused()
    assert "Not a directory" in bench.refused("program")


@pytest.mark.slow
def test_every_truncation_is_seen(tool: Path, tmp_path: Path) -> None:
    bench = Bench(tool, tmp_path, layout(1))
    (tmp_path / "in").mkdir()
    save_file(weights_of(bench.program), tmp_path / "in/whole")
    content = (tmp_path / "in/whole").read_bytes()
    for n in {*range(0, len(content), 97), len(content) - 1, 8, 9}:
        (tmp_path / "in/model.safetensors").write_bytes(content[:n])
        assert bench.refused()


def test_nothing_is_accepted_that_the_library_refuses(
    tool: Path, tmp_path: Path
) -> None:
    """400 mutants of a header: where we say ok, the library must not object."""
    rng = random.Random(1)
    good = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "\u00e4": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "__metadata__": {"k": "v"},
    }
    words = [
        "0",
        "1",
        "-",
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        '"',
        "\\",
        " ",
        "\n",
        "\u00e4",
        "\\u00e4",
        "1e2",
        "null",
        "[0]",
        '"x":1,',
        '"x":{"y":[]},',
        "F16",
        "\x7f",
        "24",
        '"shape":[],',
    ]
    texts = [json.dumps(good, ensure_ascii=False)]
    while len(texts) < 400:
        text = texts[0]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at = rng.randrange(len(text))
            word = rng.choice((rng.choice(words), ""))
            text = text[:at] + word + text[at + rng.choice((0, 1, 1, 3)) :]
        texts.append(text)
    files = [raw_file(text.encode(), bytes(range(32))) for text in texts]
    dirs = [tmp_path / str(k) for k in range(400)]
    for where, file in zip(dirs, files, strict=True):
        where.mkdir()
        (where / "model.safetensors").write_bytes(file)
    (tmp_path / "program").write_text(layout(1).text())
    said = run(tool, tmp_path / "program", "table", *dirs).stdout.splitlines()
    accepted = [k for k in range(400) if said[k] == "ok"]
    assert said[0] == "ok" and 20 < len(accepted) < 380
    for k in accepted:
        safetensors.deserialize(files[k])


@pytest.mark.slow
def test_mutants(tmp_path: Path) -> None:
    """Mutants of headers, indices and whole files, eight seconds at most; none crashes."""
    fuzzer = build("fuzz/weights.c")
    done = run(fuzzer, tmp_path, 40000, 8)
    tried, accepted = (int(x) for x in done.stdout.split()[1::2])
    assert tried >= 4000 and tried // 100 < accepted < tried // 2, done.stdout
