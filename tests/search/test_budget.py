"""test_budget.py -- tests train.memory_budget: the choice fits, is the cheapest that does, and
gives the plan of a spec with the same keys."""

import itertools
import re
from dataclasses import replace

import pytest
from zg.facts import reserve
from zg.read import spec
from zg.read.keytypes import RECOMPUTE
from zg.search import budget, fits, knobs, search

from tests.lib import trainer
from tests.lib.plans import planned


def loaded(name: str, *keys: str) -> spec.Spec:
    return spec.load(f"{trainer.ROOT}/model_specs/{name}.yaml", keys)


STAY = tuple(
    f"{key}={off}"
    for key, off in (
        ("train.offload_activations", "false"),
        ("zero.offload_optimizer.device", "none"),
        ("zero.offload_param.device", "none"),
    )
)
MOVES = {s.key: s for s in knobs.KNOBS if s.moves}


def found(name: str, *keys: str) -> tuple[budget.Choice, ...]:
    return budget.choices(loaded(name, *keys))


@pytest.mark.parametrize(
    "name,keys",
    [
        ("gpt-tiny", ()),
        ("gpt-tiny", ("zero.stage=3", "cluster.ranks=2", "targets=[cpu]")),
        (
            "qwen3-tiny",
            ("targets=[cpu]", "train.precision=bf16", "zero.stage=2"),
        ),
        ("qwen3-tiny", ("zero.stage=3", "train.accumulate=layers")),
        ("gpt-tiny", ("zero.stage=3", "train.offload_activations=true")),
        ("llama3-8b", STAY),
        ("gpt2-1558m", ("zero.stage=1", STAY[0])),
    ],
)
def test_arenas_are_those_of_the_plans(name: str, keys: tuple[str, ...]) -> None:
    """The arenas in the table are the plans' to the byte, on the target with the largest one, and
    on the host."""
    every = found(name, *keys)
    assert len(every) > 3
    for c in every:
        p = planned(name, *keys, *c.keys)
        assert c.device == max(
            p.arena(t) + reserve.bytes_of(t, p.head.ranks) for t in p.head.targets
        )
        assert c.host == (p.host if len(p.head.targets) > 1 else p.hosted)


@pytest.mark.parametrize("keys", [(), STAY])
def test_more_is_dearer(keys: tuple[str, ...]) -> None:
    """Choices go from no change to the least memory, each with less memory and more time than the
    one before."""
    every = found("llama3-8b", *keys)
    assert every[0].words == every[0].moved == () and every[0].cost == 0
    assert every[-1].words == RECOMPUTE and len(every[-1].moved) == (0 if keys else 3)
    for a, b in itertools.pairwise(every):
        assert a.cost <= b.cost and a.device > b.device
    least = planned("llama3-8b", *keys, *every[-1].keys)
    assert every[-1].device == reserve.most(least)


@pytest.mark.slow
def test_what_the_spec_says_stays() -> None:
    """No choice moves states to the host that a key keeps away, or back if a key puts them
    there."""
    assert len(MOVES) == len(STAY)
    for off in STAY:
        move = MOVES[off.partition("=")[0]]
        others = [c.moved for c in found("gpt-tiny", "zero.stage=3", off)]
        assert any(others) and not any(move in moved for moved in others)
        for c in found("gpt-tiny", "zero.stage=3", move.text):
            assert move not in c.moved and move.text not in c.keys
            assert (
                loaded("gpt-tiny", "zero.stage=3", move.text, *c.keys).train
                == c.spec.train
            )


def test_only_what_there_is_moves() -> None:
    """Choices move only states that exist: at stage 0 no optimizer states, below 3 no parameters,
    and no activations if all micro-batches go through a unit together."""

    def moved(*keys):
        return {m.moves for c in found("gpt-tiny", *keys) for m in c.moved}

    assert moved("zero.stage=0") == {"activations"}
    assert moved("zero.stage=2") == {"activations", "optimizer"}
    assert moved("zero.stage=3") == {"activations", "optimizer", "parameters"}
    assert moved("zero.stage=3", "train.accumulate=layers") == {
        "optimizer",
        "parameters",
    }


def test_the_host_has_an_end() -> None:
    """Choices that exceed the host's memory are left out."""
    every = found("gpt-tiny", "zero.stage=3")
    most = max(c.host for c in every)
    fewer = found("gpt-tiny", "zero.stage=3", f"cluster.memory.host={most - 1}")
    assert 1 < len(fewer) and all(c.host < most for c in fewer)
    assert {c.keys for c in every if c.host < most} <= {c.keys for c in fewer}


@pytest.mark.parametrize(
    "memory,device", [("host", ["cpu"]), ("file", ["nvme", "/tmp"])]
)
def test_a_memory_that_holds_no_choice(memory: str, device: list[str]) -> None:
    """A refused budget names the least that works, which then does."""
    said = zip(("device", "nvme_path"), device, strict=False)
    keys = (
        "targets=[cpu]",
        "zero.stage=1",
        "train.memory_budget=1GiB",
        *(f"zero.offload_optimizer.{key}={value}" for key, value in said),
    )
    wrong = f"cluster.memory.{memory}: no plan's {memory} arena fits in 4,096 bytes"
    with pytest.raises(spec.SpecError, match=wrong) as e:
        search.find(loaded("gpt-tiny", *keys, f"cluster.memory.{memory}=4096"))
    least = int(re.search(r"allowed: at least (\d+)$", str(e.value))[1])
    p = search.find(loaded("gpt-tiny", *keys, f"cluster.memory.{memory}={least}")).plan
    assert fits.needs(p)[memory] == least


def test_the_cluster_has_an_end_below_the_budget() -> None:
    """The choice fits both bounds: the lower one, of the cluster, moves the optimizer to the
    host."""
    cluster = "cluster.memory={device: 3500MiB}"
    assert (
        search.find(loaded("gpt2-124m", "train.memory_budget=12GiB", cluster)).plan
        == search.find(loaded("gpt2-124m", "train.memory_budget=3500MiB")).plan
    )


@pytest.mark.slow
def test_no_choice_is_tried_twice() -> None:
    """Ways to fit the cluster's memory use keys that a budget does not choose, so no choice is
    tried twice."""
    keys = "zero.stage=2", "cluster.ranks=2", "cluster.memory.host=1GiB"
    both = loaded("gpt-tiny", *keys, STAY[0], "train.memory_budget=2GiB")
    tried = {s.text for s in knobs.helpful(both)}
    assert {"zero.stage=3", "train.offload_activations=true"} < tried
    assert not tried & {
        "train.recompute=full",
        *(MOVES[off.partition("=")[0]].text for off in STAY[1:]),
    }
    least = budget.choices(both)[-1].device
    device = f"cluster.memory.device={least - 1}"
    way = "train.offload_activations=true"
    with pytest.raises(
        spec.SpecError, match=f"needs {least:,} bytes .* allowed: {way}"
    ):
        search.find(
            loaded("gpt-tiny", *keys, STAY[0], "train.memory_budget=2GiB", device)
        )
    assert search.find(
        loaded("gpt-tiny", *keys, way, "train.memory_budget=2GiB", device)
    )


def test_what_no_choice_mends_is_said() -> None:
    key = 'train.optimizer.groups=[{match: ["*"], frozen: true}]'
    with pytest.raises(spec.SpecError) as e:
        search.find(loaded("gpt-tiny", key, "zero.stage=3", "train.memory_budget=1GiB"))
    with pytest.raises(spec.SpecError) as alone:
        search.find(loaded("gpt-tiny", key, "zero.stage=3"))
    assert str(e.value) == str(alone.value)


def test_a_budget_with_a_bound_on_parameters_that_no_plan_keeps() -> None:
    """A budget with a bound on parameters that no plan keeps chooses as with the least bound that
    works."""
    bound = "zero.stage3_max_live_parameters"
    keys = ("zero.stage=3", "train.memory_budget=2GiB")
    built = search.find(loaded("gpt-tiny", *keys, f"{bound}=1000"))
    least = f"{bound}={built.plan.head.bound}"
    (said,) = set(built.notes) - set(
        search.find(loaded("gpt-tiny", *keys, least)).notes
    )
    assert said.startswith(f"{bound}: 1,000 elements are too few for any plan")
    few, enough = (
        [
            (c.keys, c.device, c.host, c.cost)
            for c in budget.choices(loaded("gpt-tiny", *keys, key))
        ]
        for key in (f"{bound}=1000", least)
    )
    assert few == enough and len(few) > 1


def test_what_a_slow_link_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes as long as its copies on a slow link, and hides them on a fast one."""

    def cost(link: float) -> float:
        monkeypatch.setitem(
            budget.PEAKS, "cpu", replace(budget.PEAKS["cpu"], link=link)
        )
        return next(
            c.cost
            for c in found(
                "gpt2-124m", "targets=[cpu]", "train.recompute=full", *STAY[1:]
            )
            if c.moved
        )

    assert 0 < cost(1e12) == cost(1e10) < 0.05
    assert (1 + cost(1e5)) / (1 + cost(2e5)) == pytest.approx(2, rel=0.01)


def test_only_what_moves_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of an update on the host is that of its memory traffic: gradients, masters and
    moments of trainable flats, without the part of each shard that stays on the device."""
    monkeypatch.setitem(budget.PEAKS, "cpu", replace(budget.PEAKS["cpu"], host=1e-9))

    def seconds(*keys: str) -> float:
        s = loaded(
            "llama-tiny",
            "targets=[cpu]",
            "zero.stage=1",
            "train.global_batch=4",
            "zero.offload_optimizer.device=cpu",
            "train.accumulate=layers",
            *keys,
        )
        p = search.find(s).plan
        ways = {section.name: budget._way(section) for section in p.step}
        return budget._step(s, p, ways, "cpu", 0, 0) * 1e-9

    p = planned("llama-tiny", "zero.stage=1")

    def size(*names):
        return sum(f.count * f.shard for f in p.flats if f.name in names)

    assert seconds() == pytest.approx(28 * size("embed", "block", "head"))
    frozen = 'train.optimizer.groups=[{match: ["model.layers.*"], frozen: true}]'
    assert seconds(frozen) == pytest.approx(28 * size("embed", "head"))
    assert seconds("zero.offload_optimizer.ratio=0.25") < seconds() * 0.3


def test_all_again_costs_less_than_a_forward() -> None:
    """Full recomputation costs less than a forward, a third of a step: the last product of each
    block is not repeated. On a CPU products take longer than their bytes, so flops decide."""
    keys = ("targets=[cpu]", "train.sequence=4096", *STAY)
    last = found("llama3-8b", *keys)[-1]
    fns = {
        f.name: f.flops for f in planned("llama3-8b", *keys, "train.recompute=full").fns
    }
    again = 32 * (fns["bwd.block"] - 2 * fns["fwd.block"])
    once = 3 * 32 * fns["fwd.block"] + fns["train.head"]
    assert last.cost == pytest.approx(again / once, rel=0.1)
    assert 0.2 < last.cost < 1 / 3


@pytest.mark.parametrize(
    "name",
    [
        "gpt-tiny",
        pytest.param("qwen3-tiny", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_the_cheapest_that_fits(name: str) -> None:
    """A budget equal to a choice's bytes chooses it, and a byte less chooses the next one, with the
    plan of its keys. Below the least the refusal names a budget that works."""
    every = found(name)
    for n, c in enumerate(every):
        built = search.find(loaded(name, f"train.memory_budget={c.device}"))
        assert built.plan == planned(name, *c.keys)
        assert (
            f"* {100 * c.cost:>7.2f}%{c.device:>22,}{c.host:>22,}  {c.away}; {c.name}\n"
            in built.choices
        )
        assert built.choices.count("\n") == len(every) + 2
        assert any(
            f"chose {' '.join(c.keys)}, {c.device:,} bytes" in note
            for note in built.notes
        )
        if n + 1 < len(every):
            less = search.find(loaded(name, f"train.memory_budget={c.device - 1}"))
            assert less.plan == planned(name, *every[n + 1].keys)
    with pytest.raises(
        spec.SpecError, match="^--set: train.memory_budget: no plan fits in "
    ) as e:
        search.find(loaded(name, f"train.memory_budget={every[-1].device - 1}"))
    least = re.search(
        r"allowed: at least (\d+)( \(\d+\.\d\d GiB\))?(, about .* of it outside the arena)?"
        "(; or, with different bits, |$)",
        str(e.value),
    )[1]
    assert search.find(loaded(name, f"train.memory_budget={least}")).plan == planned(
        name, *every[-1].keys
    )


@pytest.mark.parametrize(
    "targets,where",
    [
        ("[cpu]", ""),
        ("[sm_90]", ""),
        ("[cpu, sm_90]", " on target sm_90, which needs the most"),
    ],
)
def test_a_budget_says_for_which_target_it_is_meant(targets: str, where: str) -> None:
    """The note, the table and the refusal of a budget name its target and the bytes beside the
    arena."""
    keys = ("zero.stage=3", f"targets={targets}")
    built = search.find(loaded("gpt-tiny", *keys, "train.memory_budget=2GiB"))
    device = reserve.most(built.plan)
    assert f"{device:,} bytes{where}, by estimate" in built.notes[-1]
    assert f"device memory{where}, host memory" in built.choices
    with pytest.raises(spec.SpecError) as e:
        search.find(loaded("gpt-tiny", *keys, "train.memory_budget=1MB"))
    beside = reserve.bytes_of("sm_90", 2)
    tail = f", about {fits.size(beside)} of it outside the arena" * ("sm_90" in targets)
    begin = f": no plan fits in 1,000,000 bytes{where}; "
    assert re.search(
        rf"{begin}.*at least \d+( \(\d+\.\d\d GiB\))?{re.escape(tail)}$", str(e.value)
    )


def test_a_budget_that_another_rule_of_sums_holds() -> None:
    """A budget that only another rule of sums can hold is refused, because the rule belongs to the
    recipe. The refusal names the rule."""
    keys = (
        "targets=[cpu]",
        "zero.stage=3",
        "train.micro_batch=1",
        "train.global_batch=512",
        "zero.offload_optimizer.device=none",
    )
    least = found("gpt-tiny", *keys)[-1].device
    with pytest.raises(spec.SpecError) as e:
        search.find(loaded("gpt-tiny", *keys, f"train.memory_budget={least - 1}"))
    assert str(e.value).endswith(
        f"at least {least}; or, with different bits, train.sum=fold, which takes less memory "
        "for sums of gradients"
    )
    search.find(
        loaded(
            "gpt-tiny",
            *keys,
            f"train.memory_budget={least - 1}",
            "train.sum=fold",
        )
    )


def test_what_is_named_is_always_made_again() -> None:
    every = found("gpt-tiny", "train.recompute=[attention]")
    assert every[0].words == ("attention",) and all(
        "attention" in c.words for c in every
    )
    assert len(every) > 1


@pytest.mark.parametrize(
    "text,size",
    [
        ("8GiB", 8 * 2**30),
        ("500MB", 5 * 10**8),
        ("1.5TB", 15 * 10**11),
        ('"80 GiB"', 80 * 2**30),
        ("123456789", 123456789),
        ("7kB", 7000),
        ("0.5KiB", 512),
        ("12B", 12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert loaded("gpt-tiny", f"train.memory_budget={text}").train.memory_budget == size


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "8 G", "8gib", "GiB", "1.5", "1e9.", "true", "[1]", "0.1B"],
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(
        spec.SpecError, match="train.memory_budget: .* is not a size; allowed"
    ):
        loaded("gpt-tiny", f"train.memory_budget={text}")


@pytest.mark.parametrize(
    "key",
    [
        "train.memory_budget=24",
        "cluster.memory.host=24;train.memory_budget=1GiB",
    ],
)
def test_a_size_without_a_unit(key: str) -> None:
    keys = "zero.stage=1", "zero.offload_optimizer.device=cpu", *key.split(";")
    with pytest.raises(
        spec.SpecError,
        match=f"{key.split('=')[0]}: no plan.* fits in 24 bytes"
        ".*; did you mean 24GiB\\? allowed: at least [0-9]+",
    ):
        search.find(loaded("gpt-tiny", *keys))
