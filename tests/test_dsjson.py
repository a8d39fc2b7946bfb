"""test_dsjson.py -- JSON is read as Python reads it, Hjson as JSON with gaps, and keys have lines."""
from __future__ import annotations

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from zg import dsjson

plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-10 ** 30, 10 ** 30), st.floats(allow_nan=False),
              st.text(st.characters(exclude_characters="<${"), max_size=8)),
    lambda t: st.one_of(st.lists(t, max_size=3), st.dictionaries(
        st.text(st.characters(exclude_characters="<${"), max_size=8), t, max_size=3)), max_leaves=12)
objects = st.dictionaries(st.text("abc_", min_size=1, max_size=4), plain, max_size=4)


@settings(max_examples=100)
@given(tree=objects, indent=st.sampled_from([None, 0, 3]), ascii_=st.booleans())
def test_json_is_what_python_reads(tree: dict, indent: int | None, ascii_: bool) -> None:
    text = json.dumps(tree, indent=indent, ensure_ascii=ascii_)
    assert dsjson.parse(text, str).plain() == json.loads(text)


@settings(max_examples=100)
@given(tree=objects, gap=st.sampled_from([" # c\n", " //{\n", " /* } */ ", "\n\t"]))
def test_hjson_is_json_with_gaps(tree: dict, gap: str) -> None:
    """Comments wherever there may be a blank, commas left over, and keys without quotes."""
    def text(value: object) -> str:
        if isinstance(value, dict):
            return "{" + "".join(f"{gap}{word(k)}{gap}:{gap}{text(v)}{gap},{gap}"
                                 for k, v in value.items()) + gap + "}"
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
