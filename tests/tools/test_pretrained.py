"""test_pretrained.py -- tests folders of tokenizers: their tokens are AutoTokenizer's, or a key is
refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import encoding
import pytest
from checkpoint import Bad
from encoding import Encoder
from tokenizers import Tokenizer

from tests.lib import trainer
from tests.reference import folders
from tests.reference.folders import ADDED, ENDS, FOLDERS, MAP, SETTINGS, own, token
from tests.tools.test_data_tool import jsonl, made, meta, near, tokens  # noqa: F401

FOUND = json.loads((trainer.ROOT / "tests/reference/folders.json").read_text())


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_by_autotokenizer(name: str, tmp_path: Path) -> None:
    """A folder has AutoTokenizer's tokens, also by the tokenizer.json alone that is written beside
    the tokens."""
    recipe = encoding.read(str(folders.written(name, tmp_path)))
    ids = Encoder(recipe).ids(folders.TEXT)
    assert ids == FOUND[name]["ids"] and recipe.around == ([], [])
    assert recipe.variables == FOUND[name]["names"]
    assert recipe.file
    alone = Tokenizer.from_str(recipe.file)
    assert alone.encode(folders.TEXT).ids == ids
    assert recipe.vocab == alone.get_vocab_size()


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("name", [name for name, x in FOUND.items() if x["chats"]])
def test_a_template_is_chosen_as_by_transformers(
    name: str,
    tools: bool,
    near: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The template is chosen like by transformers: tool_use if a record has tools, and a reasoning
    by any of its names."""
    record: dict[str, Any] = {
        "messages": folders.TALK,
        "chat_template_kwargs": {"mode": "short"},
    }
    if tools:
        record["tools"] = json.dumps(folders.TOOLS)
    where = folders.written(name, tmp_path / "tok")
    file = jsonl(tmp_path / "a", [record])
    assert made("jsonl", file, "--tokenizer", where, "-o", tmp_path / "out") == 0
    encoder = Encoder(encoding.read(str(where)))
    end = meta(tmp_path / "out")["end"]
    wanted = encoder.ids(FOUND[name]["chats"][tools])
    assert tokens(tmp_path / "out") == wanted + [end] * (end is not None)


def decoder(key: str, x: object) -> dict:
    return {"added_tokens_decoder": own(258) | {key: x}}


TOOL = token("<tool>", "special")
WRONG: list[tuple[dict[str, Any], str]] = [
    ({SETTINGS: decoder("300", TOOL)}, "added_tokens_decoder: 300: its id is"),
    ({SETTINGS: decoder("258", TOOL)}, "added_tokens_decoder: 258: its id is"),
    ({SETTINGS: decoder("x", TOOL)}, "added_tokens_decoder: x: x is not a token id"),
    ({SETTINGS: decoder("-1", TOOL)}, "added_tokens_decoder: -1: -1 is not a token id"),
    ({SETTINGS: decoder("9" * 99, TOOL)}, "9 is not a token id"),
    ({SETTINGS: decoder("259", "<tool>")}, '259: must be {"content": ...}'),
    ({SETTINGS: decoder("259", {})}, "added_tokens_decoder: 259: must be a string or"),
    (
        {SETTINGS: decoder("259", TOOL | {"lstrip": "no"})},
        "added_tokens_decoder: 259: lstrip: must be true or false",
    ),
    (
        {SETTINGS: decoder("259", {"content": ""})},
        "added_tokens_decoder: 259: its content is empty",
    ),
    ({SETTINGS: {"added_tokens_decoder": []}}, "added_tokens_decoder: must be an obj"),
    ({SETTINGS: {"added_tokens_decoder": None}}, "added_tokens_decoder: must be an o"),
    ({ADDED: {"<tool>": 300}}, "added_tokens.json: <tool>: its id is 300"),
    ({ADDED: {"<tool>": "x"}}, "added_tokens.json: <tool>: x is not a token id"),
    ({ADDED: {"<tool>": 259.5}}, "added_tokens.json: <tool>: 259.5 is not a token id"),
    ({ADDED: {"<tool>": True}}, "added_tokens.json: <tool>: True is not a token id"),
    ({ADDED: []}, "added_tokens.json: not an object"),
    ({MAP: []}, "special_tokens_map.json: not an object"),
    ({MAP: {"eos_token": 3}}, "special_tokens_map.json: eos_token: must be a string"),
    (
        {SETTINGS: {"eos_token": 3}},
        "tokenizer_config.json: eos_token: must be a string",
    ),
    ({SETTINGS: {"eos_token": "</S>"}}, "eos_token </S> is not one"),
    (
        {SETTINGS: {"additional_special_tokens": "<tool>"}},
        "extra_special_tokens: must be a list of tokens",
    ),
    (
        {SETTINGS: {"extra_special_tokens": [3]}},
        "extra_special_tokens: must be a string or",
    ),
    (
        {SETTINGS: {"extra_special_tokens": {"a": 3}}},
        "extra_special_tokens: a: must be a string or",
    ),
    ({SETTINGS: {"add_prefix_space": True}}, "add_prefix_space: is true"),
    ({SETTINGS: {"do_lower_case": False}}, "do_lower_case: is false"),
    ({SETTINGS: {"split_special_tokens": True}}, "split_special_tokens: is"),
    ({SETTINGS: {"fix_mistral_regex": True}}, "fix_mistral_regex: is not"),
    (
        {SETTINGS: {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}},
        "fast_tokenizer_files: only",
    ),
    *(
        ({SETTINGS: {"chat_template": x}}, "chat_template: must be a string, or a list")
        for x in (3, ["x"], [3], [None], [{}], [{"name": "default"}], {"x": 3})
    ),
    ({SETTINGS: {"pad_token": "\ud800"}}, "half a UTF-16 surrogate pair"),
]


@pytest.mark.parametrize("files,told", WRONG)
def test_what_is_wrong_in_a_folder_is_named(
    files: Mapping[str, object], told: str, tmp_path: Path
) -> None:
    folders.written("alone", tmp_path)
    for name, x in files.items():
        (tmp_path / name).write_text(json.dumps(x))
    with pytest.raises(Bad) as e:
        encoding.read(str(tmp_path))
    assert str(e.value).startswith(str(tmp_path)) and told in str(e.value)


@pytest.mark.parametrize("ids", [[256, 257, 300], [256, 258, 257]])
def test_ids_of_tokenizer_json_that_are_not_kept_are_refused(
    ids: list[int], tmp_path: Path
) -> None:
    text = folders.base()
    for each, id_ in zip(text["added_tokens"], ids, strict=True):
        each["id"] = id_
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(Bad, match="added_tokens: .*: its id is"):
        encoding.read(str(tmp_path))


def test_a_token_that_is_put_around_texts_is_there(tmp_path: Path) -> None:
    text = folders.base()
    text["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(Bad, match="post_processor: <s>: is not"):
        encoding.read(str(tmp_path))


def test_templates_without_a_default_are_refused_where_one_is_needed(
    near: None,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folders.written("alone", tmp_path / "tok")
    more = {"chat_template": [{"name": "x", "template": ""}]}
    (tmp_path / "tok" / SETTINGS).write_text(json.dumps(more))
    how = ("--tokenizer", tmp_path / "tok", "-o", tmp_path / "out")
    text = jsonl(tmp_path / "a", [{"text": "x"}])
    assert made("jsonl", text, *how) == 0
    chat = jsonl(tmp_path / "a", [{"messages": folders.TALK}])
    assert made("jsonl", chat, *how) == 2
    assert "none is named default; the names are: x" in capfd.readouterr().err


@pytest.mark.parametrize("file", ["vocab.json", "tokenizer.model"])
def test_other_files_of_a_tokenizer_are_named(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(Bad, match=f"{file} alone is not read.*save_pretr"):
        encoding.read(str(tmp_path))


def notes(tmp_path: Path, files: Mapping[str, object]) -> tuple[str, ...]:
    folders.written("alone", tmp_path)
    for name, x in files.items():
        (tmp_path / name).write_text(json.dumps(x))
    return encoding.read(str(tmp_path)).notes


@pytest.mark.parametrize("inner", [False, True])
def test_more_tokens_than_rows_are_told(inner: bool, tmp_path: Path) -> None:
    new = {SETTINGS: {**ENDS, "pad_token": "[PAD]"}}
    for rows, count in ((259, 2), (260, 1), (512, 1)):
        sizes = {"vocab_size": rows}
        model = {"config.json": {"text_config": sizes} if inner else sizes}
        told = notes(tmp_path, new | model)
        assert "lacks, or has otherwise: [PAD] 259" in told[0]
        assert len(told) == count
    few = notes(tmp_path, new | {"config.json": {"vocab_size": 259}})[1]
    assert "260 tokens, and config.json's model has 259 rows" in few
    assert "--vocab 260" in few


def test_what_tokenizer_json_does_not_put_is_told(tmp_path: Path) -> None:
    asked = {"add_bos_token": True, "add_eos_token": True}
    told = notes(tmp_path, {SETTINGS: ENDS | asked})
    assert ["add_bos_token" in told[0], "add_eos_token" in told[1]] == [1, 1]
    none = dict.fromkeys(asked, False)
    assert notes(tmp_path, {SETTINGS: ENDS | none}) == ()


@pytest.mark.parametrize(
    "key,x",
    [
        ("pad_token", ""),
        ("eos_token", {"content": ""}),
        ("extra_special_tokens", ["", ""]),
    ],
)
def test_an_empty_text_is_no_token(tmp_path: Path, key: str, x: object) -> None:
    told = f"{tmp_path}: {key}: an empty text is no token"
    assert notes(tmp_path, {SETTINGS: ENDS | {key: x}}) == (told,)


def test_a_folder_that_adds_nothing_is_told_nothing(tmp_path: Path) -> None:
    """A folder that adds nothing causes no message, and its tokenizer.json is unchanged."""
    config = {SETTINGS: ENDS | {"added_tokens_decoder": own(258)}}
    assert notes(tmp_path, config) == ()
    text = (tmp_path / "tokenizer.json").read_text()
    assert encoding.read(str(tmp_path)).file == text
