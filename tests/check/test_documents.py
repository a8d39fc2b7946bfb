"""test_documents.py -- tests that a plan with ends of documents, and no other, passes positions to
every kernel that works on a sample's rows, and that windows are the stated ones."""

import pytest
from zg.check import check
from zg.check.order import CheckError
from zg.plan.text import parse, print_plan
from zg.read import spec
from zg.search import search

from tests.lib import law

WINDOW = "model.units[1].ops[0].residual[1].attention.window=9"


LAYERS = f"{WINDOW.rpartition('=')[0]}=[9, null]"


def text(family: str, *keys: str) -> str:
    return print_plan(search.find(spec.load(str(law.path(family)), keys)).plan)


@pytest.mark.parametrize(
    "family,keys,old,new,said",
    [
        ("gpt", law.PACKED, " end 1", "", "for positions"),
        ("gpt", law.PACKED, " end 1", " end 256", "no token 256 ends"),
        ("llama", law.PACKED, "positions+0", "null", "null"),
        ("llama", law.PACKED, "positions+0", "targets+0", "is not positions"),
        ("llama", law.PACKED, "positions[0]", "targets[0]", "holds"),
        (
            "llama",
            (WINDOW,),
            "null 1 40 4",
            "tokens+0 1 40 4",
            "for positions",
        ),
        ("llama", (WINDOW,), ",40,4,2,16,9", ",40,4,2,16,8", "another shape"),
        ("llama", (WINDOW,), " 9 0.25", " 8 0.25", "shape"),
        ("llama", (WINDOW,), "values 9", "values 8", "window of its calls"),
        ("llama", (LAYERS,), "values 9", "values 8", "window of its calls"),
        ("llama", (LAYERS,), "1 values 40", "1 values 39", "window of its"),
        ("llama", (LAYERS,), "l:9,40 ", "l:40,9 ", "window of its calls"),
        ("llama", (LAYERS,), "l:9,40 ", "l:9,40,40 ", "not of its 2 units"),
        ("llama", (LAYERS,), "l:9,40 0", "9 0", "of another shape"),
        ("llama", (LAYERS,), "l:9,40 0.25", "l:9,40 l:1,2", "no such number"),
        ("llama", (LAYERS,), "flops l:3768192", "flops l:3768193", "flops"),
        (
            "llama",
            (LAYERS,),
            "dp:persistent ints l",
            "dp:persistent ints -",
            "which unit",
        ),
    ],
)
def test_refused(
    family: str, keys: tuple[str, ...], old: str, new: str, said: str
) -> None:
    plan = text(family, *keys)
    check.check(parse(plan))
    assert old in plan
    with pytest.raises(CheckError, match=said):
        check.check(parse(plan.replace(old, new)))


def test_kernels_that_know_no_documents() -> None:
    """The kernels of a plan that joins documents are refused in a plan that separates them."""
    plan = text("llama", "cluster.ranks=1", "zero.stage=0")
    head, rest = plan.split("\n", 2)[1], plan
    with pytest.raises(CheckError, match="positions"):
        check.check(parse(rest.replace(head, f"{head} end 1")))
