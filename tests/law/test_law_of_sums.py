"""test_law_of_sums.py -- tests the bitwise law under each rule of summation: one tree, a fold, and
folded trees of a given size. There are enough gradients for the three to differ."""

import pathlib
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from zg.check import check
from zg.passes import levels
from zg.plan.text import digest
from zg.read import spec as reader
from zg.search import search

from tests.law.test_law import BIG, PLAIN, UNEVEN, agree, bench, stream
from tests.lib import law, mutants

STEPS = 2
RULES = ["tree", "fold", "{block: 16}", "{block: 4}"]
# Ranks for each number of gradients: 64 give 64, 32, 16 and 8 to a rank, 48 give 16 at 3 ranks. A
# rank's own micro-batches come first if the rule's tree has a node of them.
PLACES = {64: [1, 2, 4, 8], 48: [1, 3]}
HOST = {
    "offload": "cpu",
    "tile": 5000,
    "turns": 2,
    "overlap": True,
    "queue": "late",
}
FAR = {
    "offload": "nvme",
    "params": "nvme",
    "tile": 5000,
    "turns": 2,
    "overlap": True,
}


def recipe(leaves: int, rule: str, precision: str = "f32") -> list[str]:
    return [
        *UNEVEN,
        f"train.precision={precision}",
        f"train.global_batch={leaves}",
        f"train.sum={rule}",
    ]


def grid(leaves: int) -> list[dict]:
    return [
        {
            "stage": stage,
            "ranks": ranks,
            "reduce": [BIG, 5000][stage % 2],
            "overlap": ranks > 1,
            "queue": ["eager", "shuffled:1", "late"][(stage + ranks) % 3],
        }
        for ranks in PLACES[leaves]
        for stage in range(4)
    ]


# Ways with offloading, and with micro-batches that go through a unit together. A rank's own
# micro-batches come first at 16 and fewer.
ELSEWHERE = [
    {"stage": 2, "ranks": 4, **HOST},
    {"stage": 2, "ranks": 8, **HOST},
    {"stage": 3, "ranks": 1, **HOST},
    {"stage": 2, "ranks": 2, **HOST, "ratio": 0.5},
    {"stage": 3, "ranks": 2, **FAR},
    {"stage": 3, "ranks": 4, "accumulate": "layers"},
    {"stage": 3, "ranks": 4, "accumulate": "layers", **HOST},
    {
        "stage": 3,
        "ranks": 2,
        "accumulate": "layers",
        "overlap": True,
        "queue": "shuffled:2",
    },
    {"stage": 1, "ranks": 8, "accumulate": "layers"},
]


RECIPES = [
    *((64, "gpt", "f32", rule) for rule in RULES),
    (48, "qwen3", "f32", "{block: 4}"),
    (64, "llama", "bf16", "{block: 16}"),
    (48, "gpt", "bf16", "{block: 16}"),
]


def half(ways: list[dict], which: int) -> list[dict]:
    """Return half of the ways in a chessboard pattern, with a row for each number of ranks."""
    return [way for n, way in enumerate(ways) if (n + n // 4 + which) % 2]


@pytest.mark.slow
@pytest.mark.parametrize("n", range(len(RECIPES)))
def test_one_hash(tmp_path: pathlib.Path, n: int) -> None:
    """Each recipe has one hash over half of the ways, alternating between the halves; blocks of 16
    and of 4 occur with both."""
    one_hash(tmp_path, lambda ways: half(ways, n), *RECIPES[n])


@pytest.mark.exhaustive
@pytest.mark.parametrize("leaves,family,precision,rule", RECIPES)
def test_one_hash_of_all_ways(
    tmp_path: pathlib.Path, leaves: int, family: str, precision: str, rule: str
) -> None:
    one_hash(tmp_path, list, leaves, family, precision, rule)


def one_hash(
    tmp_path: pathlib.Path,
    of: Callable[[list[dict]], list[dict]],
    leaves: int,
    family: str,
    precision: str,
    rule: str,
) -> None:
    b = bench(
        tmp_path,
        stream(family, leaves, STEPS),
        law.uneven(family, tmp_path),
        STEPS,
    )
    ways = grid(leaves) + [way for way in ELSEWHERE if leaves % way["ranks"] == 0]
    agree(
        {
            str(way): b.run(
                {"family": family, **PLAIN, **way},
                *recipe(leaves, rule, precision),
            )
            for way in of(ways)
        }
    )


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES[2:])
def test_one_hash_in_brief(tmp_path: pathlib.Path, rule: str) -> None:
    b = bench(tmp_path, stream("gpt", 64, STEPS), law.uneven("gpt", tmp_path), STEPS)
    ways = [
        {"stage": 0, "ranks": 1},
        {"stage": 1, "ranks": 4},
        {"stage": 1, "ranks": 2},
        {"stage": 3, "ranks": 8},
        *ELSEWHERE[:6],
    ]
    agree(
        {
            str(way): b.run({"family": "gpt", **PLAIN, **way}, *recipe(64, rule))
            for way in ways
        }
    )


@pytest.mark.slow
def test_each_rule_has_its_own_bits(tmp_path: pathlib.Path) -> None:
    """The rules have different bits (a control). Three trees of a block are the first nodes of one
    tree, so they share its bits; four are not."""
    found = {}
    for leaves in (48, 64):
        b = bench(
            tmp_path,
            stream("gpt", leaves, STEPS),
            law.uneven("gpt", tmp_path),
            STEPS,
        )
        for rule in RULES:
            way = {"family": "gpt", **PLAIN, "stage": 3, "ranks": 2}
            found[leaves, rule] = b.run(way, *recipe(leaves, rule)).weights
    assert len({found[64, rule] for rule in RULES}) == 4
    assert len({found[48, rule] for rule in RULES}) == 3
    assert found[48, "tree"] == found[48, "{block: 16}"]


# ---- plans


def plan_of(*keys: str):
    return search.find(
        reader.load(str(law.path("gpt")), ["train.micro_batch=1", *keys])
    ).plan


def test_a_rule_that_is_a_tree_is_the_same_plan() -> None:
    for leaves in (2, 8, 16):
        plans = {
            digest(plan_of(f"train.global_batch={leaves}", f"train.sum={rule}"))
            for rule in ("tree", "{block: 16}", "{block: 1024}")
        }
        assert len(plans) == 1
    assert plan_of("train.sum=fold") == plan_of("train.sum={block: 1}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16, 64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_block_bounds_what_is_pending(ranks: int, stage: int) -> None:
    """Pending sums are at most the levels of a tree of 16 and the folded sum, however many
    gradients there are."""
    for micro_batches in (1, 2, 4, 16, 48, 1024):
        p = plan_of(
            f"train.global_batch={ranks * micro_batches}",
            "train.sum.block=16",
            f"cluster.ranks={ranks}",
            f"zero.stage={stage}",
        )
        check.check(p)
        nodes = {f.nodes for f in p.flats}
        assert max(nodes) <= 5
        own = stage == 1 and 1 < micro_batches <= 16 and ranks > 1
        assert (str(p.head.order) == "local") == (own or ranks == 1)
        if str(p.head.order) == "ranks" and ranks % 16 == 0:
            assert nodes == {1}


def test_pending_nodes_are_those_of_counting() -> None:
    """The masks of pending nodes equal those of a counter that is played gradient by gradient."""
    for block in (1, 2, 16, 64):
        for step in (1, 2, 3, 8, 16, 24):
            mask = 0
            for micro_batches in range(1, 40):
                assert levels.tree_nodes(micro_batches, step, block) == (
                    max(1, bin(mask).count("1")),
                    mask,
                )
                count = micro_batches * step
                mask |= count % block | (block if count >= block else 0)


@pytest.mark.parametrize(
    "keys",
    [
        ("zero.stage=3", "train.global_batch=48"),
        ("zero.stage=1", "train.global_batch=32"),
        ("zero.stage=3", "cluster.ranks=1", "train.global_batch=40"),
        (
            "zero.stage=2",
            "train.global_batch=48",
            "zero.offload_optimizer.device=cpu",
        ),
        ("zero.stage=3", "train.global_batch=32", "train.accumulate=layers"),
    ],
)
def test_another_rule_is_refused(keys: tuple[str, ...]) -> None:
    """A plan with another rule in its head alone or in one call of zk_push is refused, and so is
    one pending sum more or less."""
    p = plan_of("train.sum.block=16", *keys)
    check.check(p)
    assert p.head.block == 16
    for block in (0, 1, 3, 8, 15, 17, 32, 1 << 40):
        assert mutants.refused(replace(p, head=replace(p.head, block=block))), block
    pushes = [
        (fn, n, c)
        for fn in p.fns
        for n, c in enumerate(fn.calls)
        if c.kernel in ("zk_push", "zk_host_push")
    ]
    assert pushes
    for fn, n, call in pushes:
        now = call.args[-1]
        for block in {0, 1, now // 2, now * 2, now + 1} - {now}:
            other = replace(call, args=(*call.args[:-1], block))
            made = replace(fn, calls=(*fn.calls[:n], other, *fn.calls[n + 1 :]))
            assert mutants.refused(
                replace(p, fns=tuple(made if f is fn else f for f in p.fns))
            )
    for f in p.flats:
        for bit in range(8):
            other = replace(f, mask=f.mask ^ 1 << bit)
            assert mutants.refused(
                replace(p, flats=tuple(other if x is f else x for x in p.flats))
            )


@pytest.mark.parametrize(
    "value",
    [
        "tre",
        "16",
        "{block: 3}",
        "{block: 0}",
        "{block: 4, of: 2}",
        "{blocks: 4}",
        "[tree]",
        "{block: 4294967296}",
        "null",
    ],
)
def test_what_is_no_rule(value: str) -> None:
    with pytest.raises(
        reader.SpecError,
        match=re.escape("tree, fold or {block: a power of two up to 1073741824}"),
    ):
        plan_of(f"train.sum={value}")
