"""test_cost.py -- tests the costs that a plan reports against numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from zg.check import check
from zg.facts import reserve
from zg.graph import model
from zg.passes import levels, uses
from zg.plan.plan import Plan
from zg.predict import cost
from zg.read import spec
from zg.search import search
from zg.write import explain

from tests.lib.plans import NAMES, WAYS, keys

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "model_specs"


def planned(name: str, *sets: str) -> Plan:
    return search.find(spec.load(str(SPECS / f"{name}.yaml"), sets)).plan


def test_flops_of_gpt2() -> None:
    """GPT-2 costs 6 flops per parameter and token; attention has 2 products of T/2 keys on average,
    forward and twice backward."""
    p = planned(
        "gpt2-124m",
        "train.global_batch=4",
        "train.sequence=1024",
        "cluster.ranks=2",
        "train.micro_batch=1",
    )
    tokens, layers, width, length = 4 * 1024, 12, 768, 1024
    assert (
        cost.flops(p)
        == 6 * 124_439_808 * tokens + 3 * layers * 2 * 2 * tokens * width * length // 2
    )


def test_flops_of_grouped_queries_count_query_heads() -> None:
    p = planned("qwen3-tiny", "train.global_batch=4", "cluster.ranks=1")
    tokens, heads, size = 4 * 40, 4, 24
    assert (
        cost.flops(p)
        == 6 * p.head.params * tokens + 3 * 2 * 2 * tokens * heads * size * 40
    )


# bytes per element: parameters 4 + 4 in f32, else 2 and masters 4 + 4; sums 4; moments read and
# written
@pytest.mark.parametrize(
    "bytes_,sets",
    [
        (8 + 4 + 16, ()),
        (2 + 8 + 4 + 16, ("train.precision=bf16",)),
        (
            2 + 8 + 4 + 8,
            ("train.precision=bf16", "train.optimizer.moments=bf16"),
        ),
        (8 + 4 + 8, ("train.optimizer={type: Lion, lr: 0.001}",)),
        (8 + 4, ("train.optimizer={type: SGD, lr: 0.01}",)),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_an_update_moves(bytes_: int, sets: tuple[str, ...], ranks: int) -> None:
    p = planned("gpt2-124m", f"cluster.ranks={ranks}", *sets)
    elements = sum(f.count * f.shard for f in p.flats)
    assert 124_439_808 <= ranks * elements < 1.001 * 124_439_808
    assert cost.update(p) == bytes_ * elements
    told = f"bytes of memory that a rank's update reads and writes: {cost.update(p):,}"
    assert told in explain.explain(p)


def test_what_an_update_of_the_only_gradient_moves() -> None:
    keys = "cluster.ranks=1", "train.global_batch=4", "train.micro_batch=4"
    p = planned("gpt2-124m", *keys, "train.precision=bf16")
    assert cost.update(p) == (2 + 8 + 2 + 16) * sum(f.count * f.shard for f in p.flats)


def test_an_update_of_replicas_moves_more() -> None:
    """A rank updates half of all states if sets of two ranks share them, however many sets there
    are."""
    keys = ("cluster.ranks=4", "train.global_batch=8", "zero.shard_size=2")
    p = planned("gpt2-124m", *keys, "zero.stage=3", "zero.states=shard")
    assert cost.update(p) == 2 * 28 * sum(f.count * f.shard for f in p.flats)


def test_what_is_frozen_moves_nothing() -> None:
    whole, lora = (
        planned("gpt2-124m", *sets)
        for sets in ((), ("train.lora={rank: 8, alpha: 16, match: [c_attn]}",))
    )
    assert 0 < cost.update(lora) < cost.update(whole) / 100


@pytest.mark.parametrize("micro_batches", [2, 3, 8])
@pytest.mark.parametrize("again", ["none", "full"])
def test_micro_batches_in_both_orders_cost_the_same_work(
    micro_batches: int, again: str
) -> None:
    """Both orders of micro-batches have the same flops, recomputation and units that stay. By
    layers stage 3 gathers once instead of once per micro-batch."""
    keys = (
        "zero.stage=3",
        "cluster.ranks=2",
        f"train.global_batch={2 * micro_batches}",
        "train.micro_batch=1",
        f"train.recompute={again}",
        "zero.stage3_max_reuse_distance=60000",
    )
    a, b = (
        planned("gpt-tiny", *keys),
        planned("gpt-tiny", *keys, "train.accumulate=layers"),
    )
    for what in (cost.flops, cost.again, cost.staying):
        assert what(a) == what(b)

    def gathers(p):
        return p.section("micro_batch").repeat * sum(
            s.op == "gather" for s in p.section("micro_batch").steps
        )

    assert gathers(a) == micro_batches * gathers(b) > 0
    assert (
        f"all {micro_batches} micro-batches of a step go through a unit"
        in explain.explain(b)
    )
    assert "go through" not in explain.explain(a)


def test_a_unit_may_write_two_leaves_by_itself(tmp_path: Path) -> None:
    """A unit whose function writes two gradients, one of a persistent matrix, has pending sums for
    one gradient at a time."""
    path = tmp_path / "one.yaml"
    path.write_text(
        (SPECS / "gpt-tiny.yaml").read_text().replace("- blocks: 3", "- blocks: 1")
    )
    p = search.find(
        spec.load(
            str(path),
            (
                "zero.stage=3",
                "cluster.ranks=2",
                "train.micro_batch=1",
                "train.global_batch=8",
                "train.accumulate=layers",
                "zero.stage3_param_persistence_threshold=0",
                'zero.replicate=["h.*.attn.c_attn.weight"]',
            ),
        )
    ).plan
    check.check(p)
    writers = [
        s
        for s in p.section("micro_batch").steps
        if {"grad.block", "grad.persistent"} <= {r.cls for r in s.outs}
    ]
    assert len(writers) == p.together == 4 and p.cls("grad.persistent").slots == 4
    assert p.cls("pending").slots == 1


def test_a_plan_has_only_so_many_lines() -> None:
    """The limit of 8192 turns holds 1638 micro-batches of five units, and not one more."""

    def loaded(micro_batches):
        return spec.load(
            str(SPECS / "gpt-tiny.yaml"),
            (
                "train.accumulate=layers",
                "cluster.ranks=1",
                "train.micro_batch=1",
                f"train.global_batch={micro_batches}",
            ),
        )

    most, more = loaded(1638), loaded(1639)
    uses.few(most, model.build(most))
    with pytest.raises(
        spec.SpecError,
        match="train.accumulate: .*up to 1638 micro-batches per rank",
    ):
        uses.few(more, model.build(more))


@pytest.mark.parametrize("micro_batches", [1, 12])
@pytest.mark.parametrize("stage, paper", [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_the_papers_formula_beside_ours(
    stage: int, paper: int, micro_batches: int
) -> None:
    """The papers' bytes are 2P (W-1)/W for stages 0 to 2 and 3P for stage 3 (Rajbhandari et al.
    2020, section 7), compared per micro-batch, so more micro-batches do not look worse."""
    p = planned(
        "gpt-tiny",
        f"zero.stage={stage}",
        "cluster.ranks=4",
        f"train.global_batch={8 * micro_batches}",
    )
    said = re.search(
        rf"papers' {paper}P \(W-1\)/W for a micro-batch, P the bytes of the parameters: "
        r"([\d,]+) bytes; here ([\d.]+) times that",
        explain.explain(p),
    )
    ideal = paper * 149_400 * 4 * 3 / 4
    assert said and int(said[1].replace(",", "")) == ideal
    moved = cost.training_wire(p).bytes / micro_batches
    assert p.head.micro_batches == micro_batches and float(said[2]) == pytest.approx(
        moved / ideal, abs=5e-4
    )
    assert 0.5 < float(said[2]) < 4


def test_the_bound_on_gathered_elements() -> None:
    """The bound reduces prefetch; a bound below one unit becomes the least one that works."""
    free = planned("gpt-tiny", "zero.stage3_prefetch_bucket_size=100000")
    assert free.head.prefetch > 1
    tight = planned(
        "gpt-tiny",
        "zero.stage3_prefetch_bucket_size=100000",
        f"zero.stage3_max_live_parameters={free.head.live - 1}",
    )
    assert tight.head.prefetch < free.head.prefetch and tight.head.live < free.head.live
    one = planned("gpt-tiny", "zero.stage3_max_live_parameters=1")
    least = one.head.live
    assert least == one.head.bound and one == planned(
        "gpt-tiny", f"zero.stage3_max_live_parameters={least}"
    )
    assert one == planned("gpt-tiny", f"zero.stage3_max_live_parameters={least - 1}")


def test_the_checker_counts_gathered_elements_itself() -> None:
    p = planned("gpt-tiny")
    for head in (
        {"live": p.head.live - 1},
        {"live": p.head.live + 1},
        {"bound": p.head.live - 1},
    ):
        with pytest.raises(check.CheckError, match="gathered at once"):
            check.check(replace(p, head=replace(p.head, **head)))


def test_a_tensor_as_large_as_the_threshold_is_kept_whole() -> None:
    """A tensor as large as the threshold is persistent, as in DeepSpeed: the norms of gpt-tiny have
    60 elements."""
    for threshold, flat in ((60, "persistent"), (59, "block")):
        p = planned("gpt-tiny", f"zero.stage3_param_persistence_threshold={threshold}")
        assert {t.flat for t in p.tensors if t.name == "h.{l}.ln_1.weight"} == {flat}


@pytest.mark.parametrize("pattern", ["h.0.*", "h.1.*", "h.[02].*"])
def test_a_pattern_of_some_layers_is_refused(pattern: str) -> None:
    with pytest.raises(
        spec.SpecError,
        match="zero.replicate: matches only a part of h.{l}.ln_1.weight",
    ):
        planned("gpt-tiny", f"zero.replicate=['{pattern}']")
    planned("gpt-tiny", "zero.replicate=['h.[0-2].*']")


def test_too_many_pieces_name_the_least_bucket() -> None:
    keys = (
        "cluster.ranks=8",
        "zero.stage=2",
        "train.global_batch=8",
        "train.micro_batch=1",
    )
    with pytest.raises(
        spec.SpecError, match="zero.reduce_bucket_size: splits a shard"
    ) as e:
        planned("gpt2-1558m", *keys, "zero.reduce_bucket_size=20000")
    least = int(re.search(r"at least (\d+)", str(e.value))[1])
    assert least % (8 * 1024) == 0
    with pytest.raises(
        spec.SpecError,
        match="zero.reduce_bucket_size: splits the shards of all"
        " units into .* allowed: at least 40960",
    ):
        planned("gpt2-124m", *keys, "zero.reduce_bucket_size=1")
    planned("gpt2-124m", *keys, "zero.reduce_bucket_size=40960")


@pytest.mark.parametrize(
    "key", ["zero.reduce_bucket_size", "zero.allgather_bucket_size"]
)
def test_the_least_bucket_of_shards_side_by_side(key: str) -> None:
    """The error names the least bucket that works when a piece covers several shards, because a
    host's ranks share parameters whose states are shared further."""
    keys = (
        "cluster.ranks=16",
        "cluster.local=4",
        "zero.shard_size=4",
        "zero.stage=3",
        "train.global_batch=32",
        "train.micro_batch=1",
    )
    with pytest.raises(spec.SpecError, match=f"{key}: splits") as e:
        planned("gpt2-124m", *keys, f"{key}=1")
    least = int(re.search(r"at least (\d+)", str(e.value))[1])
    planned("gpt2-124m", *keys, f"{key}={least}")
    with pytest.raises(spec.SpecError, match=f"{key}: splits"):
        planned("gpt2-124m", *keys, f"{key}={least - 1}")


def test_bits_of_the_counter() -> None:
    """The closed form of the counter's bits equals counting."""
    for step in (*range(1, 34), 64, 100):
        mask = 0
        for micro_batches in range(1, 130):
            assert levels._counts(micro_batches, step) == mask, (
                micro_batches,
                step,
            )
            mask |= micro_batches * step


def test_a_billion_micro_batches() -> None:
    for rule, mask in (("tree", 2**30 - 2), ("{block: 16}", 30), ("fold", 1)):
        p = planned(
            "gpt-tiny",
            f"train.global_batch={2**30}",
            "train.micro_batch=1",
            "cluster.ranks=2",
            f"train.sum={rule}",
        )
        assert p.head.micro_batches == 2**29 and p.flat("block").mask == mask
        check.check(p)


def test_memory_adds_up() -> None:
    for name in ("gpt-tiny", "llama-tiny", "qwen3-tiny", "gpt2-124m"):
        for stage in range(4):
            p = planned(name, f"zero.stage={stage}")
            arena = sum(
                c.slots * c.stride
                for c in p.classes
                if c.targets == "all" and c.arena == "device"
            )
            assert sum(n for _, n in cost.memory(p)) == p.arena("cpu") == arena


@pytest.mark.parametrize("way", WAYS)
def test_memory_adds_up_whatever_lies_elsewhere(way: str) -> None:
    p = planned("gpt-tiny", *keys("gpt-tiny", way))
    there = {"the host arena", "the file arena"}
    assert sum(n for title, n in cost.memory(p) if title not in there) == p.arena("cpu")


def test_a_gpu_is_mentioned_where_it_is_a_target() -> None:
    assert "GPU" in explain.memory(planned("gpt-tiny"))
    assert "GPU" not in explain.memory(planned("gpt-tiny", "targets=[cpu]"))


# ---- the specs of model_specs/


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_fits_its_targets(name: str) -> None:
    """A spec fits: a rank on a GPU of 80 GB, and all ranks on a host of 8 GB if a CPU is a
    target."""
    p = planned(name)
    for target in p.head.targets:
        if target == "cpu":
            assert p.arena(target) * p.head.ranks <= 8e9
        else:
            assert reserve.device(p, target) <= 80e9


@pytest.mark.parametrize("name", NAMES)
def test_a_spec_sends_little(name: str) -> None:
    """A spec sends at most twice the bytes of the ZeRO papers. P includes the padding of flats
    here: a quarter of gpt-tiny, less than 1 % of the large models."""
    p = planned(name)
    padded = p.head.ranks * sum(f.count * f.shard for f in p.flats)
    assert p.head.params <= padded
    ideal = cost.ideal(p) * padded / p.head.params
    assert 0 < cost.training_wire(p).bytes <= 2 * ideal


def test_the_words_of_an_explanation_are_explained() -> None:
    said = explain.explain(planned("gpt-tiny"))
    for word in ("unit", "leaf", "shard", "flat", "persistent", "W"):
        assert re.search(rf"\b{word}: [a-z]", said), word
