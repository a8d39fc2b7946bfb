"""test_states.py -- tests train.c's table of states: it has all that a run keeps from step to step,
at the plan's places, each element once."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping

import pytest
from zg.facts import ops
from zg.plan.plan import Plan
from zg.predict import cost
from zg.write import emit, explain, view

from tests.lib import zk
from tests.lib.plans import planned

HOST = "zero.offload_optimizer.device=cpu"
NVME = (
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=/tmp",
)
BF16 = "train.precision=bf16"
WAYS = {
    "whole": ("zero.stage=0",),
    "whole in bf16": ("zero.stage=0", BF16),
    "updated by owners": ("zero.stage=1", BF16),
    "shards": ("zero.stage=3", "train.precision=f16"),
    "one rank": ("zero.stage=2", "cluster.ranks=1", BF16),
    "no masters": ("zero.stage=3", BF16, "train.optimizer.masters=false"),
    "narrow moments": ("zero.stage=3", BF16, "train.optimizer.moments=bf16"),
    "one moment": ("zero.stage=3", "train.optimizer={type: Lion, lr: 0.001}"),
    "no moment": ("zero.stage=2", "train.optimizer={type: SGD, lr: 0.01}"),
    "host": ("zero.stage=2", HOST, BF16),
    "host and device": (
        "zero.stage=3",
        HOST,
        "zero.offload_optimizer.ratio=0.5",
    ),
    "all elsewhere, in part": (
        "zero.stage=3",
        *NVME,
        BF16,
        "zero.offload_optimizer.ratio=0.3",
        "zero.offload_param.device=nvme",
    ),
    "parameters alone elsewhere": (
        "zero.stage=3",
        "zero.offload_param.device=cpu",
    ),
    "a flat is frozen": (
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=0",
        'train.optimizer.groups=[{match: [wte.weight, "wpe.*"], frozen: true}]',
    ),
}
ROW = re.compile(
    r'\{"(?P<what>\w+)", (?P<at>CTL\(0\) \+ \S+ \w+\)|[^,]+), (?P<stride>[^,]+), '
    r"(?P<shard>[^,]+), (?P<first>[^,]+), "
    r"(?P<n>\S+), (?P<flat>\S+), (?P<count>\S+), (?P<over>\S+), (?P<queue>\w+), "
    r"(?P<type>\w+), (?P<hash>\w+)\},"
)
ARENAS = {"ZR_MAIN": "device", "ZR_HOST": "host", "ZR_STORE": "file"}
WIDTHS = {"ZR_F32": 4, "ZR_BF16": 2, "ZR_F16": 2, "ZR_I64": 8, "ZR_F64": 8}


@dataclasses.dataclass(frozen=True)
class Row:
    what: str
    arena: str
    flat: int
    first: int
    n: int
    shard: int
    whole: bool
    width: int
    hash: str
    # [begin, end) of each instance in the arena
    places: tuple[tuple[int, int], ...]

    def pieces(self, ranks: int) -> list[tuple[int, int]]:
        """Return the [begin, end) of its part of every shard."""
        step, size = self.shard * self.width, self.n * self.width
        return [
            (begin + r * step, begin + r * step + size)
            for begin, _ in self.places
            for r in range(ranks if self.whole else 1)
        ]


Values = Mapping[str, tuple[int, int]]


def values(text: str) -> Values:
    """Return the values of names in a train.c: for a class the place of slot 0 and its bytes, for
    an enumerator its number."""
    classes = re.findall(r"#define (\w+)\(i\) +SLOT\((\d+), (\d+), i\)", text)
    numbers = re.findall(r"^    (\w+) = (\d+),", text, re.M)
    return {name: (int(at), int(size)) for name, at, size in classes} | {
        name: (int(n), 0) for name, n in numbers
    }


def number(text: str, known: Values) -> int:
    """Return the value of an expression, a sum of products."""

    def factor(word: str) -> int:
        found = re.fullmatch(
            r"(?:(SIZE|offsetof|INT64_C)\()?([^()]+)(?:\(0\))?\)?", word
        )
        how, name = found[1], found[2]
        if how == "offsetof":
            return getattr(zk.Ctl, name.split()[-1]).offset
        if how == "SIZE":
            return known[name][1]
        return int(name) if re.fullmatch(r"-?\d+", name) else known[name][0]

    return sum(math.prod(map(factor, term.split(" * "))) for term in text.split(" + "))


def rows(p: Plan) -> list[Row]:
    text = emit.train(view.view(p, cost.summary(p), explain.memory_line(p), False))
    table = re.search(r"zr_state states\[\] = \{\n(.*?)\n\};", text, re.S)[1]
    known, out = values(text), []
    for line in re.split(r"(?<=\},)\n", table):
        found = ROW.fullmatch(" ".join(line.split()))
        at, stride, shard, first, n = (
            number(found[name], known)
            for name in ("at", "stride", "shard", "first", "n")
        )
        whole, width = found["over"] == "-1", WIDTHS[found["type"]]
        size = (n + shard * (p.head.ranks - 1) * whole) * width
        places = tuple(
            (at + i * stride, at + i * stride + size)
            for i in range(number(found["count"], known))
        )
        out.append(
            Row(
                found["what"],
                ARENAS[found["queue"]],
                number(found["flat"], known),
                first,
                n,
                shard,
                whole,
                width,
                found["hash"],
                places,
            )
        )
    return out


@pytest.mark.parametrize("way", WAYS)
def test_every_state_has_its_elements_once(way: str) -> None:
    """The table has masters of every flat, moments of trainable flats, and the step's constants,
    each element once."""
    p = planned("gpt-tiny", *WAYS[way])
    found = rows(p)
    rule = p.recipe.optimizer
    names = [ops.saved(rule, state) for state in ops.OPTIMIZERS[rule]]
    for number, f in enumerate(p.flats):
        trains = any(t.flat == f.name and not t.frozen for t in p.tensors)
        mine = [row for row in found if row.flat == number]
        kept = {row.what for row in mine} - {"params"}
        assert kept == {"master", *names * trains}
        for what in kept:
            end = 0
            for row in (row for row in mine if row.what == what):
                assert (row.first, row.shard, len(row.places)) == (
                    end,
                    f.shard,
                    f.count,
                )
                end += row.n
            assert end == f.shard
        assert all((row.hash != "NULL") == (row.what == "master") for row in mine)
        copies = [row for row in mine if row.what == "params"]
        (params,) = p.stored("params", f.name)
        own = p.stored("master", f.name) if params.whole else ()
        assert all(row.whole for row in copies)
        assert [(row.first, row.n) for row in copies] == [(s.first, s.n) for s in own]
    control = [row for row in found if row.flat < 0]
    assert [row.what for row in control] == list(ops.CONTROL)
    assert all((row.n, row.width) == (1, 8) for row in control)


@pytest.mark.parametrize("way", WAYS)
def test_every_state_lies_where_the_plan_has_it(way: str) -> None:
    """Every state lies in its class and its own place, with its stored width, and is whole if no
    group splits it."""
    p = planned("gpt-tiny", *WAYS[way])
    taken = []
    for row in rows(p):
        if row.flat < 0:
            ctl = p.cls("ctl")
            ((begin, end),) = row.places
            assert row.arena == ctl.arena
            assert ctl.at <= begin < end <= ctl.at + ops.CTL
            taken.append((row.arena, begin, end))
            continue
        taken += [(row.arena, *piece) for piece in row.pieces(p.head.ranks)]
        what = {ops.saved(p.recipe.optimizer, s): s for s in ops.STATES}
        what["params"] = "params"
        name = p.flats[row.flat].name
        own = [s for s in p.stored(what[row.what], name) if s.first == row.first]
        (s,) = own or p.stored("params", name)
        c = p.cls(s.cls)
        skipped = 0 if own else row.first * row.width
        assert (row.arena, row.width) == (c.arena, ops.BYTES[s.dtype])
        assert row.whole == (not s.over)
        for i, (begin, end) in enumerate(row.places):
            assert (
                begin == c.at + i * c.stride + skipped
                and end <= c.at + (i + 1) * c.stride
            )
    taken.sort()
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(taken))


def test_the_table_is_as_long_for_many_ranks() -> None:
    few, many = (
        rows(
            planned(
                "gpt-tiny",
                "zero.stage=3",
                f"cluster.ranks={n}",
                f"train.global_batch={4 * n}",
            )
        )
        for n in (2, 8)
    )
    assert len(few) == len(many)
