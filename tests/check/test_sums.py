"""test_sums.py -- tests that the checker knows the type of gradient sums: the stored type if a step
has one gradient, else f32, and read as it is."""

from dataclasses import replace

import pytest
from zg.check import check
from zg.check.order import CheckError
from zg.facts.kernels import KERNELS
from zg.plan.operand import array
from zg.plan.plan import Fn, Plan

from tests.lib.plans import planned

ONE = "cluster.ranks=1", "train.global_batch=2"
HOST = "zero.offload_optimizer.device=cpu", "zero.sub_group_size=20000"
READERS = "zk_square_sum", "zk_update", "zk_host_square_sum", "zk_host_update"
PLANS = {
    "the only gradient": (*ONE, "zero.stage=3"),
    "without masters": (*ONE, "train.optimizer.masters=false"),
    "two micro-batches": ("cluster.ranks=1", "train.global_batch=4"),
    "two ranks": ("cluster.ranks=2", "train.global_batch=4", "zero.stage=2"),
    "on the host": (*ONE, *HOST, "zero.stage=2"),
    "on both": (*ONE, *HOST, "zero.stage=2", "zero.offload_optimizer.ratio=0.5"),
}
NARROW = ("the only gradient", "without masters")


def stored(p: Plan, dtype: str) -> Plan:
    sums = (replace(s, dtype=dtype) if s.what == "sum" else s for s in p.stores)
    return replace(p, stores=tuple(sums))


def read(p: Plan, full: int, *kernels: str) -> Plan:
    """Return a plan whose calls of some kernels take sums for f32, or for the stored type."""
    fns = []
    for f in p.fns:
        calls = (
            replace(c, args=(*c.args[:-1], full)) if c.kernel in kernels else c
            for c in f.calls
        )
        fns.append(replace(f, calls=tuple(calls)))
    return replace(p, fns=tuple(fns))


@pytest.mark.parametrize("name", PLANS)
def test_a_sum_is_read_as_it_is(name: str) -> None:
    p = planned("gpt-tiny", "train.precision=bf16", "train.micro_batch=2", *PLANS[name])
    check.check(p)
    is_ = "bf16" if name in NARROW else "f32"
    assert {s.dtype for s in p.stores if s.what == "sum"} == {is_}
    other, full = ("f32", 1) if name in NARROW else ("bf16", 0)
    lies = [stored(p, other), read(p, full, *READERS), read(p, 2, *READERS)]
    lies += [read(p, full, *READERS[n::2]) for n in range(2)]
    lies.append(read(stored(p, other), full, *READERS))
    for lie in lies:
        with pytest.raises(CheckError):
            check.check(lie)


def test_pieces_of_unequal_size_are_refused() -> None:
    """Three gradients added first, and then pushed with another one, are another tree, even if the
    call counts four."""
    p = planned(
        "llama-tiny",
        "train.sequence_blocks=4",
        "cluster.ranks=2",
        "zero.stage=2",
        "train.global_batch=4",
        "train.micro_batch=1",
    )
    check.check(p)
    own = next(f for f in p.fns if f.name == "own.block")
    (push,), at = own.calls, KERNELS["zk_push"].at

    def adds(name: str, pieces: int, count: int) -> Fn:
        args = list(push.args)
        given = {"src": array(own.ins[:pieces]), "count": count, "total": count}
        for key, value in given.items():
            args[at[key]] = value
        ins = own.ins[:pieces]
        return replace(
            own, name=name, ins=ins, calls=(replace(push, args=tuple(args)),)
        )

    part = p.section("micro_batch")
    step = next(s for s in part.steps if s.op == own.name)
    kept = [replace(r, last=False) for r in step.ins]
    first = replace(step, op="own.three", ins=tuple(kept[1:]), outs=(kept[1],), recs=())
    for count in (2, 4):
        fns = adds("own.three", 3, 3), adds("own.two", 2, count)
        then = replace(step, op="own.two", ins=tuple(kept[:2]), waits=())
        steps = [x for s in part.steps for x in ([first, then] if s == step else [s])]
        sections = tuple(
            replace(x, steps=tuple(steps)) if x == part else x for x in p.sections
        )
        with pytest.raises(CheckError, match="adds the sum of 3 micro-batches"):
            check.check(replace(p, fns=(*p.fns, *fns), sections=sections))
