"""test_chat.py -- tests conversations as tokens and labels: the text that a template renders, and
the parts of it that are learned."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import chat
import pytest
from checkpoint import Bad
from tokenizers import AddedToken, Tokenizer, processors

from tests.tools.test_data_tool import (  # noqa: F401 -- a fixture
    BPE,
    contents,
    jsonl,
    made,
    meta,
    near,
    saved,
    table,
    tokens,
)

NOW = datetime(2024, 7, 26)
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
# Like Qwen3's: messages after the last question keep their reasoning, earlier ones have none.
THINKS = """{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- set reason = '' %}
        {%- if '</think>' in content %}
            {%- set reason = content.split('</think>')[0].split('<think>')[-1].strip() %}
            {%- set content = content.split('</think>')[-1].strip() %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reason) %}
            {{- '<think>\\n' + reason + '\\n</think>\\n\\n' }}
        {%- endif %}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MARKED = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""
# Like Llama 2's: no prompt for generation, a token of its own around each pair.
PAIRS = """{% for message in messages %}
{% if message.role == 'user' %}
{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}
{{ ' ' + message.content + ' ' + eos_token }}
{%- else %}{{ raise_exception('no ' + message.role) }}
{% endif %}
{% endfor %}"""
TALK = [
    ("user", "Hi!"),
    ("assistant", "Hello."),
    ("user", "漢 é?"),
    ("assistant", "So 漢."),
]


def messages(*talk: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in talk]


def template(source: str) -> chat.Template:
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    return chat.Template(source, variables, NOW)


def learned(source: str, *talk: tuple[str, str]) -> tuple[str, list[str]]:
    text, spans = template(source).conversation(messages(*talk), None)
    return text, [text[a:b] for a, b in spans]


# ---- rendered text, and its learned parts


def test_turns_behind_what_asks_for_them() -> None:
    text, turns = learned(CHATML, ("system", "Be."), *TALK)
    assert turns == ["Hello.<|im_end|>\n", "So 漢.<|im_end|>\n"]
    assert text == (
        "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n漢 é?<|im_end|>\n"
        "<|im_start|>assistant\nSo 漢.<|im_end|>\n"
    )


def test_marks_of_a_template_are_what_is_learned() -> None:
    text, turns = learned(MARKED, *TALK)
    assert turns == ["Hello.<|im_end|>", "So 漢.<|im_end|>"]
    assert text == learned(CHATML, *TALK)[0]


def test_reasoning_that_only_the_last_turn_has() -> None:
    """Earlier turns are learned as the whole conversation has them, without the reasoning that only
    the last one has."""
    think = "<think>\n\n</think>\n\n"
    _, turns = learned(THINKS, *TALK)
    assert turns == ["Hello.<|im_end|>\n", think + "So 漢.<|im_end|>\n"]
    first = ("assistant", "<think>\nwhy\n</think>\n\nHello.")
    text, turns = learned(THINKS, TALK[0], first, *TALK[2:])
    assert turns == ["Hello.<|im_end|>\n", think + "So 漢.<|im_end|>\n"]
    assert "why" not in text
    assert learned(THINKS, TALK[0], first)[1] == [
        "<think>\nwhy\n</think>\n\nHello.<|im_end|>\n"
    ]


def test_a_template_that_asks_for_nothing() -> None:
    text, turns = learned(PAIRS, *TALK)
    assert turns == [" Hello. </s>", " So 漢. </s>"]
    assert text == (
        "<s>[INST] Hi! [/INST] Hello. </s><s>[INST] 漢 é? [/INST] So 漢. </s>"
    )


def test_a_turn_that_changes_when_more_follows_is_refused() -> None:
    for source in (
        "{% for m in messages %}{{ m.content }}{{ loop.revindex }};{% endfor %}",
        "{{ messages | length }}{% for m in messages %}{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m.content if loop.last else 'x' }};{% endfor %}",
        "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' }};{% endfor %}",
    ):
        with pytest.raises(Bad, match="message 2: .*generation"):
            learned(source, *TALK)


def test_what_transformers_gives_a_template() -> None:
    """A template gets the features of transformers: trim_blocks, lstrip_blocks, loop controls,
    tojson as plain JSON, the date, tools."""
    source = """  {% for tool in tools %}
    {% if loop.index > 1 %}{% break %}{% endif %}
{{ tool | tojson }}{{ tool | tojson(indent=1) }}
{% endfor %}
{{ strftime_now('%d %b %Y') }}{{ eos_token }}"""
    told = template(source).render([], {"tools": [{"a": "<é>'"}, 2]})
    assert told == '{"a": "<é>\'"}{\n "a": "<é>\'"\n}\n26 Jul 2024</s>'


@pytest.mark.parametrize(
    "source,told",
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ raise_exception('only pairs') }}", "only pairs"),
        ("{{ 1 / 0 }}", "zero"),
        ("{{ messages[0].content.x.y }}", "no attribute"),
    ],
)
def test_what_a_template_may_not_do(source: str, told: str) -> None:
    with pytest.raises(Bad, match=f"the chat template fails: .*{told}"):
        learned(source, *TALK)


def test_a_template_that_is_none() -> None:
    with pytest.raises(Bad, match="chat template:2: "):
        template("\n{% if %}")
    deep = "{% for a in b %}" * 30 + "{% endfor %}" * 30
    with pytest.raises(Bad, match="chat template: invalid template: too many"):
        template(deep)


def test_a_template_that_writes_no_text() -> None:
    with pytest.raises(Bad, match="half a UTF-16 surrogate pair"):
        learned("{{ '\\ud800' }}" + CHATML, *TALK)


# ---- tokens and labels


def tokenizer() -> Tokenizer:
    found = Tokenizer.from_str(BPE.to_str())
    names = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")
    found.add_special_tokens([AddedToken(x, special=True) for x in names])
    found.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<s> $A",
                special_tokens=[("<s>", found.token_to_id("<s>"))],
            ),
        ]
    )
    return found


def folder(
    where: Path, source: str | None, eos: str = "<|im_end|>"
) -> tuple[Tokenizer, Path]:
    made_ = tokenizer()
    config = {"eos_token": {"content": eos}, "bos_token": "<s>"}
    if source is not None:
        config["chat_template"] = source
    return made_, saved(made_, where / "tok", **config)


def parts(path: Path) -> list[tuple[bool, list[int]]]:
    """Return runs of tokens that are targets, and of tokens that are not."""
    ids, labels = tokens(path), tokens(path, "train.labels.bin")
    assert len(ids) == len(labels)
    found: list[tuple[bool, list[int]]] = []
    for token, label in zip(ids, labels, strict=True):
        assert label in (token, 65535)
        if not found or found[-1][0] != (label == token):
            found.append((label == token, []))
        found[-1][1].append(token)
    return found


def text_of(
    made_: Tokenizer, runs: Sequence[tuple[bool, list[int]]]
) -> list[tuple[bool, str]]:
    return [
        (target, made_.decode(ids, skip_special_tokens=False)) for target, ids in runs
    ]


SPACES = [("user", "  a "), ("assistant", " \n\n  b  \n"), *TALK[:2]]


@pytest.mark.parametrize("source", [CHATML, MARKED, THINKS, PAIRS])
def test_labels_leave_out_what_is_not_learned(
    source: str,
    near: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The learned tokens are the text of each turn, white space too, and the tokens are those of
    the whole text."""
    eos = "</s>" if source == PAIRS else "<|im_end|>"
    made_, where = folder(tmp_path, source, eos)
    talks = [TALK, SPACES]
    file = jsonl(tmp_path / "a", [{"messages": messages(*x)} for x in talks])
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    assert made("jsonl", file, *how) == 0
    end = made_.token_to_id("<|endoftext|>")
    assert meta(tmp_path / "out")["end"] == end
    assert meta(tmp_path / "out")["ignore"] == 65535
    files = meta(tmp_path / "out")["files"]["train.bin"]
    assert files["labels"] == "train.labels.bin" and files["documents"] == 2
    ids, turns = [], []
    variables = {"bos_token": "<s>", "eos_token": eos}
    for talk in talks:
        text, spans = chat.Template(source, variables, NOW).conversation(
            messages(*talk), None
        )
        ids += made_.encode(text, add_special_tokens=False).ids + [end]
        turns += [text[a:b] for a, b in spans]
    assert tokens(tmp_path / "out") == ids
    runs = text_of(made_, parts(tmp_path / "out"))
    assert [text for target, text in runs if target] == turns


@pytest.mark.parametrize(
    "more,eos,end",
    [
        ("", "<|im_end|>", "<|endoftext|>"),
        ("</s>", "</s>", "</s>"),
        ("</s>\\n", "</s>", "<|endoftext|>"),
        ("<|endoftext|></s>.", "<|im_end|>", None),
    ],
)
def test_what_ends_a_document_stands_nowhere_else(
    more: str,
    eos: str,
    end: str | None,
    near: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A document ends with one end token, also if the template writes it itself, and has no
    other."""
    source = CHATML + "{% if not add_generation_prompt %}{{ '@' }}{% endif %}"
    made_, where = folder(tmp_path, source.replace("@", more), eos)
    file = jsonl(tmp_path / "a", [{"messages": messages(*TALK[:2])}])
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    assert made("jsonl", file, *how) == 0
    number = end and made_.token_to_id(end)
    assert meta(tmp_path / "out")["end"] == number
    ids = tokens(tmp_path / "out")
    assert ids.count(number) == (end is not None)
    assert end is None or ids[-1] == number


def test_prompt_and_completion(near: None, tmp_path: Path) -> None:  # noqa: F811
    """A text prompt and completion are a turn each, and turns of a prompt's list are not learned.
    Without a template they follow each other between the tokenizer's own tokens and the end."""
    record = {"prompt": "Hi!", "completion": "Hello."}
    lists = {
        "prompt": messages(*TALK[:3]),
        "completion": messages(TALK[3]),
    }
    file = jsonl(tmp_path / "a", [record, lists])
    for source in (
        CHATML,
        MARKED + "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}",
    ):
        made_, where = folder(tmp_path, source)
        how = ("--tokenizer", where, "-o", tmp_path / "out")
        assert made("jsonl", file, *how) == 0
        runs = text_of(made_, parts(tmp_path / "out"))
        assert [text for target, text in runs if target] == [
            "Hello.<|im_end|>\n",
            "So 漢.<|im_end|>\n",
        ]
    (tmp_path / "b").mkdir()
    made_, where = folder(tmp_path / "b", None)
    one = jsonl(tmp_path / "c", [record])
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    assert made("jsonl", one, *how) == 0
    runs = text_of(made_, parts(tmp_path / "out"))
    assert runs == [(False, "<s>Hi!"), (True, "Hello.<|im_end|>")]
    assert made("jsonl", one, "-o", tmp_path / "out") == 0
    assert parts(tmp_path / "out") == [
        (False, list(b"Hi!")),
        (True, list(b"Hello.")),
    ]


def test_a_token_of_both_is_learned(
    near: None,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A token that belongs to both parts is learned, and so are spaces at the end, which the
    tokenizer's offsets leave out."""
    made_, where = folder(tmp_path, None)
    record = {"prompt": "And t", "completion": "he end  "}
    file = jsonl(tmp_path / "a", [record])
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    assert made("jsonl", file, *how) == 0
    assert text_of(made_, parts(tmp_path / "out")) == [
        (False, "<s>And"),
        (True, " the end  <|im_end|>"),
    ]


def test_chats_of_parquet_are_as_of_jsonl(near: None, tmp_path: Path) -> None:  # noqa: F811
    """Chats of Parquet give the same as JSONL: keys that only some messages have are absent from
    the others."""
    source = "{% for m in messages %}{{ m.role }}{% if m.name is defined %}{{ m.name }}{% endif %}: {{ m.content }};{% endfor %}"
    _, where = folder(tmp_path, source)
    talk = messages(*TALK)
    talk[0]["name"] = "Ann"
    a = jsonl(tmp_path / "a", [{"chat": talk}] * 3)
    b = table(tmp_path / "b", chat=[talk] * 3)
    for kind, file in (("jsonl", a), ("parquet", b)):
        how = ("--field", "chat", "--tokenizer", where, "-o")
        assert made(kind, file, *how, tmp_path / kind) == 0
    assert tokens(tmp_path / "jsonl") == tokens(tmp_path / "parquet")
    assert parts(tmp_path / "jsonl") == parts(tmp_path / "parquet")


def test_where_a_template_is_found(near: None, tmp_path: Path) -> None:  # noqa: F811
    """The template is that of chat_template.jinja, else the string, else `default` of several."""
    file = jsonl(tmp_path / "a", [{"messages": messages(*TALK[:2])}])
    several = [
        {"name": "default", "template": CHATML},
        {"name": "x", "template": ""},
    ]
    made_, where = folder(tmp_path, None)
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    config = {"eos_token": "<|im_end|>", "chat_template": several}
    (where / "tokenizer_config.json").write_text(json.dumps(config))
    assert made("jsonl", file, *how) == 0
    runs = text_of(made_, parts(tmp_path / "out"))
    assert runs[1] == (True, "Hello.<|im_end|>\n")
    (where / "chat_template.jinja").write_text(MARKED)
    assert made("jsonl", file, *how) == 0
    runs = text_of(made_, parts(tmp_path / "out"))
    assert runs[1] == (True, "Hello.<|im_end|>")


# ---- choice of learned messages


def chosen(source: str, *more: dict) -> list[str]:
    """Return the learned text of TALK, with these keys added to its messages."""
    talk = [x | y for x, y in zip(messages(*TALK), more, strict=True)]
    text, spans = template(source).conversation(chat.checked(talk), None)
    return [text[a:b] for a, b in spans]


@pytest.mark.parametrize("source", [CHATML, MARKED])
@pytest.mark.parametrize(
    "key,no,yes",
    [
        ("weight", 0, 1),
        ("weight", 0.0, 1.0),
        ("train", False, True),
        ("training", False, True),
        ("loss", False, True),
        ("masked", True, False),
    ],
)
def test_a_message_that_is_not_to_be_learned(
    source: str, key: str, no: object, yes: object
) -> None:
    end = "<|im_end|>" if source == MARKED else "<|im_end|>\n"
    first, last = "Hello." + end, "So 漢." + end
    for a, b, wanted in (
        ({key: no}, {}, [last]),
        ({}, {key: no}, [first]),
        ({key: no}, {key: yes}, [last]),
        ({key: yes}, {key: yes}, [first, last]),
        ({key: None}, {"weight": 0, "train": False}, [first]),
    ):
        assert chosen(source, {}, a, {key: no}, b) == wanted


def test_a_turn_that_is_not_learned_may_change_when_more_follows() -> None:
    source = "{% for m in messages %}{{ m.content }}{{ '!' if m.role == 'assistant' and loop.last }};{% endfor %}"
    with pytest.raises(Bad, match="message 2: .*generation"):
        chosen(source, {}, {}, {}, {})
    assert chosen(source, {}, {"weight": 0}, {}, {}) == ["So 漢.!;"]


@pytest.mark.parametrize(
    "at,keys,told",
    [
        (0, {"weight": 1}, "message 1: weight: only messages of the assistant"),
        (0, {"train": True}, "message 1: train: only messages of the assistant"),
        (1, {"weight": 0.5}, "message 2: weight is 0.5; allowed: 0 or 1"),
        (1, {"weight": "0"}, "message 2: weight is 0; allowed: 0 or 1"),
        (1, {"train": "no"}, "message 2: train is no"),
        (1, {"weight": 1, "train": False}, "message 2: train contradicts"),
        (1, {"train_detail": [{"train": False}]}, "message 2: train_detail"),
    ],
)
def test_what_is_learned_must_be_clear(at: int, keys: dict, told: str) -> None:
    more: list[dict] = [{}] * 4
    more[at] = keys
    with pytest.raises(Bad, match=told):
        chosen(CHATML, *more)


def test_marks_that_are_not_one_a_message_leave_none_out() -> None:
    source = MARKED.replace("message.content +", "'Yes' +")
    twice = MARKED + "{% generation %}x{% endgeneration %}"
    for wrong in (source, twice):
        assert len(chosen(wrong, {}, {}, {}, {})) >= 2
        with pytest.raises(Bad, match="weight.*one {% generation %} block for each"):
            chosen(wrong, {}, {"weight": 0}, {}, {})


# ---- the end of a turn

BARE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    "source,ends",
    [
        (CHATML, True),
        (THINKS, True),
        (MARKED, True),
        (PAIRS, True),
        (BARE, False),
        (BARE.replace("{% endfor %}", "\n{% endfor %}"), False),
        (
            MARKED.replace("message.content + '<|im_end|>'", "message.content"),
            False,
        ),
        ("{{ raise_exception('no') }}", None),
        (
            "{% if messages[2] %}{{ raise_exception('one') }}{% endif %}" + CHATML,
            True,
        ),
        (
            "{% if messages[2] %}{{ raise_exception('one') }}{% endif %}" + BARE,
            False,
        ),
    ],
)
def test_whether_an_answer_has_an_end(source: str, ends: bool | None) -> None:
    assert template(source).ends() is ends


@pytest.mark.parametrize("source", [BARE, CHATML])
def test_a_template_without_an_end_of_turn_is_told(
    source: str,
    near: None,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A template without an end of turn is reported with its file. The suggested settings still
    mask conversations from each other."""
    _, where = folder(tmp_path, None)
    (where / "chat_template.jinja").write_text(source)
    file = jsonl(tmp_path / "a", [{"messages": messages(*TALK)}])
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    assert made("jsonl", file, *how) == 0
    said = capfd.readouterr().out
    told = f"{where}/chat_template.jinja: writes nothing behind an answer"
    assert (told in said) == (source == BARE)
    end = meta(tmp_path / "out")["end"]
    assert f"--set data.documents=mask --set data.end={end}" in said


# ---- records in other formats


def test_records_of_sharegpt(near: None, tmp_path: Path) -> None:  # noqa: F811
    """ShareGPT's records are read under their own name or another, with their keys for learned
    parts."""
    _, where = folder(tmp_path, CHATML)
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    talk = [("system", "Be."), *TALK]
    theirs: list[dict] = [
        {"from": names[role], "value": content} for role, content in talk
    ]
    ours: list[dict] = messages(*talk)
    for x in (theirs, ours):
        x[2]["weight"] = 0
    a = jsonl(tmp_path / "a", [{"conversations": theirs}])
    b = jsonl(tmp_path / "b", [{"messages": ours}])
    c = table(tmp_path / "c", chat=[theirs])
    for kind, file, *more in (
        ("jsonl", a),
        ("jsonl", b),
        ("parquet", c, "--field", "chat"),
    ):
        out = tmp_path / f"out{file.name}"
        how = ("--tokenizer", where, "-o", out)
        assert made(kind, file, *more, *how) == 0
    for name in "ac":
        assert parts(tmp_path / f"out{name}") == parts(tmp_path / "outb")


def test_records_of_alpaca(near: None, tmp_path: Path) -> None:  # noqa: F811
    """Alpaca's instruction and input are the user's turn; without a template they are put into
    Stanford's prompt. A `text` beside them, the same again, does not count."""
    plain_ = {"instruction": "Add 1.", "input": "", "output": "Done."}
    more = {"instruction": "Add 1.", "input": "41", "output": "42", "text": "all"}
    file = jsonl(tmp_path / "a", [more, plain_])
    made_, where = folder(tmp_path, CHATML)
    out = tmp_path / "out"
    assert made("jsonl", file, "--tokenizer", where, "-o", out) == 0
    turns = ("user", "Add 1.\n41"), ("user", "Add 1.")
    pairs = [
        {"prompt": x, "completion": y}
        for (_, x), y in zip(turns, ("42", "Done."), strict=True)
    ]
    twin = jsonl(tmp_path / "b", pairs)
    assert made("jsonl", twin, "--tokenizer", where, "-o", tmp_path / "twin") == 0
    assert contents(out) == contents(tmp_path / "twin")

    (tmp_path / "bare").mkdir()
    made_, where = folder(tmp_path / "bare", None)
    assert made("jsonl", file, "--tokenizer", where, "-o", out) == 0
    shown = text_of(made_, parts(out))
    asked, said = shown[0][1], shown[1][1]
    assert said == "42<|im_end|>" and shown[1][0]
    assert asked.endswith(
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd 1.\n\n### Input:\n41\n\n### Response:\n"
    )
    assert shown[2][1].endswith(
        "request.\n\n### Instruction:\nAdd 1.\n\n### Response:\n"
    )


USER, SAID = messages(*TALK[:2])
ASKED = {"instruction": "a", "output": "b"}
BOTH = {"messages": [USER, SAID]}
PAIR = {"prompt": "a", "completion": "b"}


@pytest.mark.parametrize(
    "record,told",
    [
        (BOTH | {"system": "Be."}, "system is not supported: make it the first"),
        (BOTH | {"functions": [{}]}, "functions is not supported: `tools`"),
        (BOTH | {"images": ["x"]}, "images is not supported: only text"),
        (BOTH | {"assistant_masks": [0, 1]}, "assistant_masks is not supported"),
        (BOTH | {"completion_mask": [0, 1]}, "completion_mask is not supported"),
        (BOTH | {"weight": 0}, "weight is 0: such a record"),
        (BOTH | {"weight": 2}, "weight is 2: a record"),
        (PAIR | {"label": False}, "label is False: such a record"),
        (BOTH | {"tools": 3}, "tools: must be a list of objects"),
        (BOTH | {"tools": [3]}, "tools: must be a list of objects"),
        (BOTH | {"tools": "["}, "tools: not JSON"),
        (
            BOTH | {"chat_template_kwargs": 3},
            "chat_template_kwargs: must be an object",
        ),
        (
            BOTH | {"chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs: must be an object without messages",
        ),
        (
            {"prompt": [USER], "completion": [{**SAID, "weight": 0}]},
            "message 1: a completion is trained on",
        ),
        (
            {"prompt": [USER, {**SAID, "weight": 1}], "completion": [SAID]},
            "message 2: a completion is trained on and a prompt is not",
        ),
        (ASKED | {"input": 3}, "input: must be a text"),
        (ASKED | {"history": [["a", "b"]]}, "history is not supported: make its turns"),
        ({"messages": [{"from": "bing", "value": "x"}]}, "from: bing; allowed: human"),
        ({"messages": [{"from": "gpt"}]}, "value: must be the text of a message"),
        (
            {"messages": [USER, {"role": "gpt", "content": "x"}]},
            "no message of the assistant, so nothing to train on; the roles are: user, gpt",
        ),
        (
            {"messages": [USER, {**SAID, "weight": 0}]},
            "there is nothing to train on",
        ),
        *(
            (
                {"messages": [USER, {**SAID, key: [{"a": 1}]}]},
                f"{key}: chat template does not read it",
            )
            for key in ("tool_calls", "function_call", "refusal", "reasoning")
        ),
        (
            {"messages": [USER, {**SAID, "content": [{"text": "x"}]}]},
            "content: chat template expects text, but this is a list",
        ),
        (
            {"messages": [USER, {**SAID, "content": {"text": "x"}}]},
            "content: chat template expects text, but this is an object",
        ),
    ],
)
def test_keys_that_change_what_is_learned(record: dict, told: str) -> None:
    """Keys that change the learned parts are refused; other additional keys are accepted."""
    source = CHATML.replace("message.content", "message.content | string")
    if "from" in str(record):
        source = CHATML
    pairs = {"prompt": ["prompt", "completion"], "instruction": [*chat.ALPACA]}
    kind = next((x for x in pairs if x in record), "messages")
    fields = pairs.get(kind, [kind])
    templates = {"default": template(source)}
    with pytest.raises(Bad, match=re.escape(told)):
        chat.rendered(templates, record, fields)
    good = {"prompt": PAIR, "instruction": ASKED, "messages": BOTH}[kind]
    more = {"weight": 1, "label": True, "images": [], "id": 3, "system": None}
    chat.rendered(templates, good | more, fields)


def test_keys_beside_messages_are_read_of_parquet(
    near: None,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    _, where = folder(tmp_path, CHATML)
    how = ("--tokenizer", where, "-o", tmp_path / "out")
    file = table(tmp_path / "a", messages=[[USER, SAID]], system=["Be."])
    assert made("parquet", file, *how) == 2
    assert "a: row 1: system is not supported" in capfd.readouterr().err


@pytest.mark.parametrize(
    "record,told",
    [
        ({"messages": [USER]}, "a:2: no message of the assistant"),
        ({"messages": []}, "a:2: not a list of messages"),
        ({"messages": "x"}, "a:2: not a list of messages"),
        ({"messages": [USER, "x"]}, "a:2: a message is no"),
        ({"messages": [{"content": "x"}]}, "a:2: a message is no"),
        (
            {"messages": [USER, {"role": "assistant"}]},
            "a:2: the chat template fails",
        ),
        ({"messages": [USER, {**SAID, "content": "\ufdd0"}]}, "a:2: U\\+FDD0"),
        ({"messages": [USER, {**SAID, "content": "\ud800"}]}, "a:2: half a"),
        ({"text": "x"}, "a:2: no field messages"),
    ],
)
def test_a_chat_that_is_wrong_is_named(
    record: dict,
    told: str,
    near: None,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    jsonl(Path("a"), [{"messages": [USER, SAID]}, record])
    folder(tmp_path, CHATML)
    assert made("jsonl", "a", "--tokenizer", "tok", "-o", "out") == 2

    assert re.match(f"run data: {told}", capfd.readouterr().err)
    assert not Path("out").exists()


def test_chats_need_a_template(
    near: None,  # noqa: F811
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = jsonl(tmp_path / "a", [{"messages": messages(*TALK)}])
    for how in ((), ("--train-bpe", 300)):
        assert made("jsonl", file, *how, "-o", tmp_path / "out") == 2
    said = capfd.readouterr().err
    assert "a:1: the tokenizer has no chat template" in said
    assert "--train-bpe: needs texts" in said
