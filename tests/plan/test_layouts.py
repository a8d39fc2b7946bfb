"""test_layouts.py -- tests layouts with hosts, and with ranks that share parameters and states: the
levels of sums, the group that shares each state, and the cost on the wire and in memory.

The formulas are those of the papers (ZeRO 2020, MiCS 2022, ZeRO++ 2023, PyTorch FSDP 2023). A
gather from `hi` owners to `lo` brings each rank P (1/lo - 1/hi) elements, and the part from beyond
a host comes from other hosts.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zg.check import check
from zg.plan.plan import STEP, Plan
from zg.plan.text import parse, print_plan
from zg.predict import cost
from zg.read import spec as reader
from zg.read.spec import Spec, SpecError
from zg.search import search

from tests.lib import law
from tests.plan.test_wire import SUMS, units

BIG = 500_000_000  # elements: more than any unit has


@dataclass(frozen=True)
class Layout:
    """A layout with its expected plan. ranks, local and shard: the keys; order: the levels of a
    sum, innermost first; over: the groups of params, of masters and moments, and of sums; `-`: each
    rank has all."""

    ranks: int
    local: int
    shard: int
    states: str
    stage: int
    own: int  # micro-batches of a rank
    accumulate: str
    precision: str
    order: str
    over: str
    note: str = ""
    more: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return (
            f"cluster.ranks={self.ranks}",
            f"cluster.local={self.local}",
            f"zero.shard_size={self.shard}",
            f"zero.states={self.states}",
            f"zero.stage={self.stage}",
            f"train.accumulate={self.accumulate}",
            f"train.precision={self.precision}",
            f"train.global_batch={self.ranks * self.own}",
            "train.micro_batch=1",
            *self.more.split(),
        )

    def __str__(self) -> str:
        words = self.ranks, self.local, self.shard, self.states, self.stage
        more = self.own, self.accumulate, self.precision, self.more
        return "-".join(map(str, (*words, *more)))


EACH, UNITS = "micro_batches", "layers"
NO_NODE = "a tree of {} leaves has no node of the {} micro-batches of {} ranks"
HOST = (
    "cluster.local: a tree of 16 leaves has no node of 6, so a host's gradients are not summed "
    "before they leave it: each rank gets 6 pieces from other hosts instead of 1"
)
# fmt: off
LAYOUTS = [Layout(*row) for row in (
    # ZeRO-3, flat and in two levels
    (8, 0, 0, "all", 3, 4, EACH, "f32", "ranks", "all all all"),
    (8, 8, 0, "all", 3, 4, EACH, "bf16", "ranks", "all all all"),
    (8, 1, 0, "all", 3, 2, EACH, "f32", "ranks", "all all all"),
    (8, 4, 0, "all", 3, 4, EACH, "bf16", "local,hosts,step", "owners owners owners"),
    (8, 4, 0, "all", 3, 2, UNITS, "f32", "step,local,hosts", "owners owners owners"),
    # HFSDP and hpZ: a host shares parameters, all ranks share states
    (8, 4, 4, "all", 3, 4, EACH, "bf16", "shard,step,replica", "shard owners shard"),
    (8, 4, 4, "all", 3, 4, UNITS, "bf16", "step,shard,replica", "shard owners owners"),
    (8, 2, 4, "all", 3, 4, EACH, "f32", "local,hosts,step,replica", "shard owners shard"),
    (8, 4, 2, "all", 3, 2, EACH, "bf16", "shard,step,replica,hosts", "shard owners shard"),
    (8, 8, 2, "all", 3, 2, EACH, "f32", "shard,step,replica", "shard owners shard"),
    # HSDP and MiCS: each set of ranks has all states
    (8, 4, 4, "shard", 3, 4, EACH, "bf16", "shard,step,replica", "shard shard shard"),
    (8, 4, 4, "shard", 3, 4, UNITS, "f32", "step,shard,replica", "shard shard shard"),
    (8, 2, 4, "shard", 3, 4, EACH, "bf16", "local,hosts,step,replica", "shard shard shard"),
    (8, 4, 2, "shard", 3, 2, EACH, "f32", "shard,step,replica,hosts", "shard shard shard"),
    (8, 8, 2, "shard", 3, 1, EACH, "bf16", "owners,step", "shard shard shard"),
    (4, 1, 2, "shard", 3, 1, EACH, "f32", "owners,step", "shard shard shard"),
    # other stages
    (8, 4, 0, "all", 0, 1, EACH, "bf16", "local,hosts,step", "- - -"),
    (8, 4, 0, "all", 0, 4, EACH, "f32", "step,local,hosts", "- - -"),
    (8, 4, 0, "all", 1, 4, EACH, "bf16", "step,local,hosts", "- owners -"),
    (8, 4, 4, "shard", 1, 4, EACH, "bf16", "shard,step,replica", "- shard shard"),
    (8, 4, 0, "all", 2, 4, EACH, "bf16", "local,hosts,step", "- owners owners"),
    (8, 4, 4, "all", 2, 4, EACH, "f32", "local,hosts,step", "- owners owners",
     "zero.shard_size: has no effect"),
    (8, 4, 4, "shard", 2, 4, EACH, "bf16", "shard,step,replica", "- shard shard"),
    # a host of 6 ranks: all-gathers in levels, a flat sum
    (12, 6, 0, "all", 3, 2, EACH, "f32", "owners,step", "owners owners owners", HOST),
    (12, 6, 6, "shard", 3, 1, EACH, "bf16", "owners,step", "shard shard shard", HOST),
    (12, 6, 2, "all", 3, 4, EACH, "f32", "shard,step,replica_hosts", "shard owners shard",
     "no node of 24, so a host's gradients are not summed before they leave it: each rank gets 3 "
     "pieces from other hosts instead of 1"),
    # the tree has no node of a set's micro-batches, so replicas exchange gradients in every micro-batch
    (8, 4, 4, "all", 3, 3, EACH, "f32", "shard,replica,step", "shard owners owners",
     NO_NODE.format(16, 3, 4) + ", so replicas exchange gradients in every micro-batch"),
    (8, 4, 4, "all", 3, 8, EACH, "bf16", "shard,replica,step", "shard owners owners",
     NO_NODE.format(16, 8, 4) + ", so replicas exchange gradients in every micro-batch; train.sum={block: 32} has it",
     "train.sum.block=16"),
    (8, 4, 4, "shard", 3, 4, EACH, "bf16", "owners,step", "shard shard shard",
     NO_NODE.format(1, 4, 4) + ", so replicas exchange gradients in every micro-batch; train.sum={block: 16} has it",
     "train.sum=fold"),
)]
# fmt: on


@dataclass
class Received:
    """Bytes that a rank receives, and the part of them from other hosts."""

    local: int  # ranks of a host
    all: int = 0
    far: int = 0

    def brought(self, whole: int, lo: int, hi: int, width: int) -> None:
        """Add an all-gather of a flat of `whole` elements from `hi` owners to `lo`."""
        size, host = whole * width, self.local
        self.all += size // lo - size // hi
        self.far += size // max(lo, host) - size // max(hi, host)

    def summed(self, whole: int, lo: int, hi: int, width: int) -> None:
        """Add a level of a sum: a piece from each of its ranks."""
        piece, inside = whole * width // hi, max(1, min(self.local, hi) // lo)
        self.all += (hi // lo - 1) * piece
        self.far += (hi // lo - inside) * piece


def received(x: Layout, spec: Spec, p: Plan) -> Received:
    W, A, width = x.ranks, x.own, 4 if x.precision == "f32" else 2
    shared = x.shard or W
    states = shared if x.states == "shard" else W
    out = Received(x.local or W)
    for u in units(spec):
        whole = W * u.shard
        times, lo, each = A, 1, width  # gradients are rounded once, sums never
        for level in p.head.order.levels:
            if level == STEP:
                times, each = 1, 4 if A > 1 else each
            else:
                hi = lo * p.group(level).ranks
                for _ in range(times):
                    out.summed(whole, lo, hi, each)
                lo, each = hi, 4
        assert lo == W
        out.brought(whole, states if x.stage else 1, W, 4)  # sums
        kept = shared if x.stage == 3 and u.uses else 1
        if x.stage and kept < states:  # new parameters from their owners
            out.brought(whole, kept, states, width)
        for _ in range(u.uses * (A if x.accumulate == EACH else 1)):
            if x.stage == 3:
                out.brought(whole, 1, shared, width)
    out.all += (W - 1) * SUMS  # of losses and norms
    out.far += (W - out.local) * SUMS
    return out


def stored(x: Layout, spec: Spec, p: Plan) -> int:
    """Return the bytes of a rank's parameters, masters, moments and sums, including pending
    ones."""
    width = 4 if x.precision == "f32" else 2
    ranks = {"-": 1, "shard": x.shard, "owners": x.ranks, "all": x.ranks}
    params, states, sums = (ranks[word] for word in x.over.split())
    before = math.prod(
        p.group(level).ranks
        for level in itertools.takewhile(
            lambda level: level != STEP, p.head.order.levels
        )
    )
    ever = 0  # OR of all counts of gradients
    for leaves in range(before, before * x.own, before):
        ever |= leaves % spec.block | (spec.block if leaves >= spec.block else 0)
    nodes = max(1, ever.bit_count())
    if p.head.order.levels[0] == STEP and sums > 1:
        nodes = 1  # the others are in class `pending`
    size = 0
    for u in units(spec):
        whole = x.ranks * u.shard
        size += whole // (params if u.uses or x.stage < 3 else 1) * width
        size += whole // states * (2 + (width < 4)) * 4
        size += whole // sums * 4 * nodes
    return size


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("x", LAYOUTS, ids=str)
def test_a_layout(x: Layout, family: str) -> None:
    """A layout has the expected levels, groups, bytes and notes."""
    some = "zero.stage3_param_persistence_threshold=100"
    spec = reader.load(str(law.path(family)), (*x.keys, some))
    found = search.find(spec)
    p = found.plan
    check.check(p)
    assert str(p.head.order) == x.order
    params, states, sums = (w.replace("-", "") for w in x.over.split())
    over = {"params": params, "sum": sums}
    for s in p.stores:
        whole = s.what == "params" and s.flat == "persistent"
        assert s.over == ("" if whole else over.get(s.what, states)), s
    want, told = received(x, spec, p), cost.training_wire(p)
    assert (told.bytes, told.far) == (want.all, want.far)
    kept = {s.cls for s in p.stores}
    assert stored(x, spec, p) == sum(c.bytes for c in p.classes if c.name in kept)
    said = [
        note for note in found.notes if re.search("train.sum|cluster|shard_size", note)
    ]
    assert any(x.note in note for note in said) if x.note else not said


# ---- any layout

KEYS: dict[str, Sequence] = {
    "zero.stage": (0, 1, 2, 3, 3, 3),
    "zero.states": ("all", "shard"),
    "train.precision": ("f32", "bf16", "f16"),
    "train.accumulate": (EACH, UNITS),
    "train.sum": (
        "tree",
        "fold",
        *(f"{{block: {2**n}}}" for n in range(1, 6)),
    ),
    "train.recompute": ("none", "full"),
    "zero.reduce_bucket_size": (30000, BIG),
    "zero.allgather_bucket_size": (30000, BIG),
    "zero.overlap_comm": ("true", "false"),
    "zero.stage3_param_persistence_threshold": (0, 100, BIG),
    "zero.stage3_prefetch_bucket_size": (0, 20000, BIG),
    "zero.stage3_max_live_parameters": (70000, BIG),
    "zero.stage3_max_reuse_distance": (0, 30000, BIG),
    "zero.offload_optimizer.device": ("none", "none", "cpu"),
    "zero.offload_optimizer.ratio": (0.5, 1.0),
    "zero.offload_param.device": ("none", "none", "cpu"),
    "targets": ("[cpu]", "[cpu, sm_90]"),
}


@st.composite
def layouts(draw: st.DrawFn, most: int) -> tuple[str, ...]:
    """Draw keys of a layout; few draws have hosts and sets that do not divide their ranks."""
    ranks, own = draw(st.integers(1, most)), draw(st.integers(1, 9))
    sizes = [n for n in range(ranks + 1) if not n or ranks % n == 0]
    size = st.sampled_from([*sizes, 5])
    keys = {key: draw(st.sampled_from(some)) for key, some in KEYS.items()}
    return (
        f"cluster.ranks={ranks}",
        f"cluster.local={draw(size)}",
        f"zero.shard_size={draw(size)}",
        f"train.global_batch={ranks * own}",
        "train.micro_batch=1",
        *(f"{key}={value}" for key, value in keys.items()),
    )


def proven(keys: tuple[str, ...]) -> bool:
    """Return whether there is a plan. The checker must prove it and its text parse back; otherwise
    a key must be refused with its allowed values."""
    try:
        p = search.find(reader.load(str(law.path("gpt")), keys)).plan
    except SpecError as e:
        refused = r"--set: (cluster|zero)\.\w+(\.device)?: .+; .*allowed: ."
        for line in str(e).splitlines():
            assert re.match(refused, line), line
        return False
    check.check(p)
    assert parse(print_plan(p)) == p and cost.summary(p)
    return True


@pytest.mark.slow
def test_any_layout() -> None:
    """Layouts of up to 24 ranks are planned or refused; at least a quarter have a plan."""
    found = []

    @settings(max_examples=150)
    @given(layouts(24))
    def one(keys: tuple[str, ...]) -> None:
        found.append(proven(keys))

    one()
    assert sum(found) > len(found) // 4


@pytest.mark.exhaustive
@settings(max_examples=4000)
@given(layouts(64))
def test_any_layout_of_more_ranks(keys: tuple[str, ...]) -> None:
    proven(keys)
