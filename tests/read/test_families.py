"""test_families.py -- tests that a family of models is a row of facts/families.py, and that no
other file knows it."""

from dataclasses import replace

import pytest
from zg.check import check
from zg.facts.families import FAMILIES, Family
from zg.plan.plan import Plan
from zg.plan.text import print_plan
from zg.read import spec
from zg.search import search

from tests.lib.plans import SPECS

WAYS = [(), ("zero.stage=1", "train.precision=bf16")]


def planned(*keys: str) -> Plan:
    p = search.find(spec.load(str(SPECS / "qwen3-tiny.yaml"), keys)).plan
    check.check(p)
    return p


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces llama's row."""

    def put(**columns: object) -> None:
        monkeypatch.setitem(FAMILIES, "llama", replace(FAMILIES["llama"], **columns))

    return put


@pytest.mark.parametrize("keys", WAYS)
def test_other_names(third, keys: tuple[str, ...]) -> None:
    """Another row changes nothing but names."""
    want = print_plan(planned(*keys))
    new = {
        "q_proj": "query",
        "k_proj": "key_of",
        "v_proj": "value",
        "o_proj": "dense",
        "q_norm": "query_norm",
        "k_norm": "key_norm",
    }
    assert all(f"self_attn.{name}" in want for name in new)
    third(
        qkv=("query", "key_of", "value"),
        out="dense",
        norms=("query_norm", "key_norm"),
    )
    joined = {"q_k_v_proj": "query_key_of_value"}  # of one linear
    for old, name in (joined | new).items():
        want = want.replace(old, name)
    assert print_plan(planned(*keys)) == want


@pytest.mark.parametrize("keys", WAYS)
def test_one_tensor_of_q_k_and_v(third, keys: tuple[str, ...]) -> None:
    """A family with one tensor of q, k and v has the layout of three side by side."""
    three = planned(*keys)
    third(qkv=("qkv_proj",))
    one = planned(*keys)
    assert (one.flats, one.classes, one.step) == (
        three.flats,
        three.classes,
        three.step,
    )
    changed = [
        (a, b)
        for a, b in zip(three.tensors, one.tensors, strict=True)
        if a.parts != b.parts
    ]
    assert len(three.tensors) == len(one.tensors) and changed
    for a, b in changed:
        assert b.name.endswith("qkv_proj.weight") and len(a.parts) == 3
        assert b.parts == (f"{b.name}={a.shape[0]}",)
        assert replace(a, name="", parts=()) == replace(b, name="", parts=())


@pytest.mark.parametrize("row", FAMILIES.values(), ids=FAMILIES)
def test_what_lies_side_by_side_has_rows(row: Family) -> None:
    """Linears stored as one tensor are rows [out,in]: with [in,out] they would be columns, and a
    tensor cannot be split by columns."""
    assert len(row.qkv) == 1 or len(row.qkv) == 3 and row.out_in
