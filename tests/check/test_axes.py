"""test_axes.py -- tests plans whose ranks are a grid: one axis written as two is the same plan, and
a meeting along the wrong axis is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from zg.check import check
from zg.plan.plan import Axis, Group, Plan
from zg.plan.text import parse, print_plan

from tests.check import test_mutants
from tests.lib import mutants

FLAT = [
    name
    for name in test_mutants.PLANS
    if "host" not in name.partition(",")[0]
    and "one " not in name
    and test_mutants.SHARED[-1] not in test_mutants.PLANS[name]
]


def planned(name: str, ranks: int) -> Plan:
    spread = f"cluster.ranks={ranks}", f"train.global_batch={4 * ranks}"
    return test_mutants.planned(
        *test_mutants.PLANS[name], *spread, "train.micro_batch=2"
    )


def grid(p: Plan, near: int, far: int) -> Plan:
    """Return the plan with its ranks as `far` rows of `near` neighbours; group `turned` has all
    ranks in another order."""
    axes = Axis("near", near, 1), Axis("far", far, near)
    rows = Group("rows", near, ("near",))
    turned = Group("turned", near * far, ("near", "far"))
    return replace(p, axes=axes, groups=(*p.groups, rows, turned))


def moved(p: Plan, group: str) -> Plan:
    """Return the plan with every meeting, except those for a step's sums, in another group."""
    sections = tuple(
        replace(
            section,
            steps=tuple(
                replace(s, group=group) if s.group and s.op != "allreduce" else s
                for s in section.steps
            ),
        )
        for section in p.sections
    )
    return replace(p, sections=sections)


@pytest.mark.parametrize("name", FLAT)
def test_one_axis_told_as_two(name: str) -> None:
    """Six ranks pass as 2 x 3 and as 3 x 2. A meeting in another group or order is refused, and so
    are axes of another number of ranks."""
    p = planned(name, 6)
    assert not p.axes
    for near, far in ((2, 3), (3, 2)):
        two = grid(p, near, far)
        check.check(two)
        assert parse(print_plan(two)) == two
    for group in ("rows", "turned", "none"):
        assert mutants.refused(moved(grid(p, 2, 3), group))
    for near, far in ((2, 2), (4, 2), (6, 6), (5, 1)):
        assert mutants.refused(grid(p, near, far))


def test_hosts_end_where_axes_do() -> None:
    """Twelve ranks as 2 x 2 x 3 pass only with hosts that end where axes do: hosts of 3 or 6 ranks
    cut an axis, hosts of 5 do not divide the ranks."""
    name = "three sets of two hosts, states on the host"
    p = test_mutants.planned(*test_mutants.PLANS[name])
    assert [a.size for a in p.axes] == [2, 2, 3] and p.head.local == 2
    for n, passes in (
        (1, True),
        (4, True),
        (3, False),
        (5, False),
        (6, False),
    ):
        told = replace(p, head=replace(p.head, local=n))
        assert bool(mutants.refused(told)) != passes, n


@pytest.mark.parametrize(
    "name",
    [
        "two hosts",
        "hosts share parameters",
        "hosts share states",
        "two hosts, stage 0",
    ],
)
def test_calls_by_rank(name: str) -> None:
    """Every call of the plan's own functions with a part of another size, or of another group, is
    refused."""
    p = test_mutants.planned(*test_mutants.PLANS[name])
    refused = [
        (m.what, mutants.refused(m.plan))
        for m in mutants.of_calls(p)
        if m.what.partition(".")[0] not in check.BODIES
    ]
    assert len(refused) > 150
    assert [what for what, yes in refused if not yes] == []
