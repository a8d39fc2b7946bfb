"""test_dsjson.py -- tests the reader of JSON, which follows Python's, and of Hjson as DeepSpeed
reads it; keys have lines, and so have mistakes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zg.read import dsjson

from tests.read.test_dsconfig import read, refusal

plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**30), 10**30),
        st.floats(allow_nan=False),
        st.text(st.characters(exclude_characters="<${"), max_size=8),
    ),
    lambda t: st.one_of(
        st.lists(t, max_size=3),
        st.dictionaries(
            st.text(st.characters(exclude_characters="<${"), max_size=8),
            t,
            max_size=3,
        ),
    ),
    max_leaves=12,
)
objects = st.dictionaries(st.text("abc_", min_size=1, max_size=4), plain, max_size=4)


@settings(max_examples=100)
@given(tree=objects, indent=st.sampled_from([None, 0, 3]), ascii_=st.booleans())
def test_json_is_what_python_reads(
    tree: dict, indent: int | None, ascii_: bool
) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_)
    assert dsjson.parse(text, str).plain() == json.loads(text)


@settings(max_examples=100)
@given(
    tree=objects,
    gap=st.sampled_from([" # c\n", " //{\n", " /* } */ ", "\n\t"]),
)
def test_hjson_is_json_with_gaps(tree: dict, gap: str) -> None:
    """Hjson is JSON with gaps: comments between any two words, surplus commas, and keys without
    quotes."""

    def text(value: object) -> str:
        if isinstance(value, dict):
            return (
                "{"
                + "".join(
                    f"{gap}{word(k)}{gap}:{gap}{text(v)}{gap},{gap}"
                    for k, v in value.items()
                )
                + gap
                + "}"
            )
        if isinstance(value, list):
            return "[" + "".join(f"{gap}{text(v)}{gap},{gap}" for v in value) + "]"
        return json.dumps(value)

    def word(key: str) -> str:
        return key if re.fullmatch("[a-c_]+", key) else json.dumps(key)

    node = dsjson.parse(gap + text(tree) + gap, str)
    assert node.plain() == json.loads(json.dumps(tree))


@settings(max_examples=100)
@given(tree=objects)
def test_every_key_has_its_line(tree: dict) -> None:
    text = json.dumps(tree, indent=1)
    lines = text.split("\n")
    for key, node in dsjson.parse(text, str).value.items():
        assert lines[int(node.where)].startswith(f' "{key}":')


@pytest.mark.parametrize(
    "text",
    [
        '{\n  # a\n  "zero_optimization": // b\n {"stage": /* c\n */ 2,},\n}',
        "{zero_optimization: {stage: 2}}",
        "{'zero_optimization': {'stage': 2}}",
        "zero_optimization: {\n stage: 2\n}\n",
        '"zero_optimization": {"stage": 2}',
        '\ufeff{"zero_optimization":\r\n\t{"stage":\t2\r\n}}',
        '{"zero_optimization": {"stage": "2"}}',
        '{"zero_optimization": {"stage": 2\n "offload_param": {device: none\n}}}',
        '{"zero_optimization": {"stage": 2}} // the end',
        '{"zero_optimization": {"stage": 2}\n "tensorboard": {"output_path": /home/a/b\n job_name: ~/c\n}}',
        "{\"zero_\\u006fptimization\": {\"stage\": 2}, tensorboard: {output_path: '''a\nb'''}}",
    ],
)
def test_hjson_is_read(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text).zero.stage == 2


@pytest.mark.parametrize(
    "text, said",
    [
        ("", r"1: is empty; allowed: an object"),
        ("# a\n", r"1: is empty"),
        ("[]", r"1: is a list; allowed: an object"),
        ("3", r"1: is 3; allowed: an object"),
        (
            '{"zero_optimization": {\n"stage": 3',
            r"1: broken syntax: the file ends before the { of this line",
        ),
        (
            '{"steps_per_print": 1,\n "steps_per_print": 2}',
            r"2: 'steps_per_print' is given twice",
        ),
        ('{"a" 1}', r"1: broken syntax: there is no colon after the key 'a'"),
        ('{"a":\n}', r"2: broken syntax: '}' is not a value"),
        ('{"a": 1 "b": 2}', r"1: .*after 1; allowed: a comma or"),
        (
            '{"a": "x" "b": 2}',
            r"1: broken syntax: '\"' after the end of a value; allowed: a comma or }",
        ),
        ('{"seed":\n 1}', r"1: seed: is not a DeepSpeed key"),
        ('{"a": 1}\n}', r"2: broken syntax: '}' after the end"),
        ('{"a": "b\n"}', r"1: .*no closing quote"),
        (
            '{\n"a": True}',
            r"2: broken syntax: True is Python, not JSON; allowed: true",
        ),
        (
            '{"a": cpu, "b": 1}',
            r"1: broken syntax: .* is not a value; .*\"text\"",
        ),
        ('{"a": 010}', r"1: broken syntax: '010}' is not a value"),
        ('{"a": "\\x"}', r"1: .*an invalid escape \\"),
        (
            "{/* a",
            r"1: broken syntax: this comment has no end",
        ),
        ("{,}", r"1: broken syntax: ',' where a key is expected"),
        ("```json\n{}\n```", r"1: ``` is a Markdown code fence"),
        ("{}\n~~~", r"2: ~~~ is a Markdown code fence"),
        (
            '{"train_batch_size":\n GBSIZE}',
            r"2: 'GBSIZE' is a template placeholder; allowed: the val",
        ),
        ('{"train_batch_size": {{ batch }}}', r"1: '{{' is a template placeholder"),
        ('{"a": ${BATCH}}', r"1: '\$\{' is a template placeholder"),
        ('{"a": $BATCH}', r"1: '\$BATCH' is a template placeho"),
        (
            '{"wandb": {"team":\n"<your team>"}}',
            r"2: '<your team>' is a template placeholder",
        ),
        ('{"<key>": 1}', r"1: '<key>' is a template placeholder"),
        ("{% if x %}", r"1: '{%' is a template placeholder"),
        (
            '{"gradient_clipping": NaN}',
            r"1: gradient_clipping: is nan; allowed: a number from 0",
        ),
        (
            '{"gradient_clipping": -Infinity}',
            r"1: gradient_clipping: is -inf; allowed: a number from 0",
        ),
        (
            '{"gradient_clipping": ' + "9" * 5000 + "}",
            r"1: gradient_clipping: is inf; allowed",
        ),
        ('{"a":' * 3000, r"1: is nested too deeply"),
        ('{"seed": [' + "0," * 30_000 + "]}", r"1: is nested"),
    ],
)
def test_broken_text(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(tmp_path, text)
    assert re.match(rf"ds.json:{said}", message), message
