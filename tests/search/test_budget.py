"""test_budget.py -- tests train.memory_budget: the choice fits, is the fastest that does by
predicted time, and gives the plan of a spec with the same keys."""

import itertools
import pathlib
import re

import pytest
import yaml
from zg import build
from zg.build import Built
from zg.facts import reserve
from zg.predict import clock, play
from zg.predict import device as device_file
from zg.read import spec
from zg.read.keytypes import RECOMPUTE
from zg.search import budget, fit, fits, knobs, search

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
MOVES = {
    key: f"{key}={value}"
    for key, value in zip(knobs.OFFLOADING, ("cpu", "cpu", "true"), strict=True)
}
ENOUGH = 1 << 50


def every(name: str, *keys: str) -> list[fit.Row]:
    """Return all choices."""
    return [*budget.search(loaded(name, *keys), ENOUGH).rows.values()]


def found(name: str, *keys: str) -> list[fit.Row]:
    """Return the front of all choices, without a limit."""
    return budget.search(loaded(name, *keys), ENOUGH).best


def moved(row: fit.Row) -> set[str]:
    """Return the settings of a choice that offload something."""
    return {s.text for s in row.way.picked if s.text in MOVES.values()}


def words(row: fit.Row) -> tuple[str, ...]:
    return row.way.spec.train.recompute


def chosen(name: str, *keys: str) -> Built:
    return search.find(loaded(name, *keys))


def device(path: pathlib.Path, **more: object) -> str:
    """Write the file of a processor with other numbers, and return its key."""
    text = (device_file.FOLDER / "cpu.yaml").read_text()
    made = yaml.safe_load(text) | more
    path.write_text(yaml.safe_dump(made))
    return f"cluster.device={path}"


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
    rows = found(name, *keys)
    assert len(rows) > 3
    for row in rows:
        p = planned(name, *keys, *row.way.settings)
        assert row.device == max(
            p.arena(t) + reserve.bytes_of(t, p.head.ranks) for t in p.head.targets
        )
        assert row.needs["host"] == (p.host if len(p.head.targets) > 1 else p.hosted)


@pytest.mark.parametrize("keys", [(), STAY])
def test_less_takes_longer(keys: tuple[str, ...]) -> None:
    """Choices go from the fastest to the least memory, each with less memory than the one before
    and at least its time, within a percent."""
    rows = found("llama3-8b", *keys)
    assert words(rows[0]) == () and words(rows[-1]) == RECOMPUTE
    assert len(moved(rows[-1])) == (0 if keys else 3)
    for a, b in itertools.pairwise(rows):
        assert a.seconds <= 1.01 * b.seconds and a.device > b.device
    least = planned("llama3-8b", *keys, *rows[-1].way.settings)
    assert rows[-1].device == reserve.most(least)


@pytest.mark.slow
def test_what_the_spec_says_stays() -> None:
    """No choice moves states to the host that a key keeps away, or back if a key puts them
    there."""
    assert len(MOVES) == len(STAY)
    for off in STAY:
        key = off.partition("=")[0]
        others = [moved(row) for row in every("gpt-tiny", "zero.stage=3", off)]
        assert any(others) and not any(MOVES[key] in some for some in others)
        for row in every("gpt-tiny", "zero.stage=3", MOVES[key]):
            assert key not in {s.key for s in row.way.picked}


def test_only_what_there_is_moves() -> None:
    """Choices move only states that exist: at stage 0 no optimizer states, below 3 no parameters,
    and no activations if all micro-batches go through a unit together."""

    def some(*keys: str) -> set[str]:
        return {m for row in every("gpt-tiny", *keys) for m in moved(row)}

    optimizer, params, activations = MOVES.values()
    assert some("zero.stage=0") == {activations}
    assert some("zero.stage=2") == {activations, optimizer}
    assert some("zero.stage=3") == {activations, optimizer, params}
    assert some("zero.stage=3", "train.accumulate=layers") == {optimizer, params}


def test_the_host_has_an_end() -> None:
    """Choices that exceed the host's memory are left out."""
    rows = found("gpt-tiny", "zero.stage=3")
    most = max(row.needs["host"] for row in rows)
    fewer = found("gpt-tiny", "zero.stage=3", f"cluster.memory.host={most - 1}")
    assert 1 < len(fewer) and all(row.needs["host"] < most for row in fewer)
    assert fewer[0].seconds >= rows[0].seconds


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
    tried = {*knobs.helpful(both)}
    assert {"zero.stage", "train.offload_activations"} < tried
    assert not tried & {"train.recompute", *knobs.OFFLOADING[:2]}
    least = budget.least(budget.search(both, ENOUGH)).device
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
            (row.way.settings, row.needs, row.seconds)
            for row in found("gpt-tiny", *keys, key)
        ]
        for key in (f"{bound}=1000", least)
    )
    assert few == enough and len(few) > 1


def test_what_a_slow_link_costs(tmp_path: pathlib.Path) -> None:
    """A step takes as long as its copies on a slow link, and hides them on a fast one."""
    keys = ("targets=[cpu]", "train.recompute=full", *STAY[1:])

    def cost(link: float) -> float:
        file = device(tmp_path / "slow.yaml", host={"bandwidth": link})
        here, there = every("gpt2-124m", *keys, file)
        assert not moved(here) and moved(there)
        return there.seconds / here.seconds

    assert 1 <= cost(1e12) < cost(1e10) < 1.05
    assert cost(1e3) / cost(2e3) == pytest.approx(2, rel=0.01)


@pytest.mark.slow
def test_the_device_decides(tmp_path: pathlib.Path) -> None:
    """A slow link leads to recomputation, slow products to copies."""
    keys = ("targets=[cpu]", STAY[1], STAY[2])
    least, *_, most = sorted(row.device for row in every("gpt2-124m", *keys))
    limit = f"train.memory_budget={(least + most) // 2}"
    link = device(tmp_path / "link.yaml", host={"bandwidth": 1e6})
    rate = {"products": [[1.0, 1e8]], "others": [[1.0, 1e10]]}
    product = device(
        tmp_path / "product.yaml", rates=[{"precision": "f32", "cold": rate}]
    )
    again = chosen("gpt2-124m", *keys, limit, link).spec.train
    away = chosen("gpt2-124m", *keys, limit, product).spec.train
    assert again.recompute and not again.offload_activations
    assert away.offload_activations and "linear" not in away.recompute


def test_all_again_costs_less_than_a_forward() -> None:
    """Full recomputation costs less than a forward, a third of a step: the last product of each
    block is not repeated. On a CPU products take longer than their bytes, so flops decide."""
    keys = ("targets=[cpu]", "train.sequence=4096", *STAY)
    rows = every("llama3-8b", *keys)
    last = next(row for row in rows if words(row) == RECOMPUTE)
    first = next(row for row in rows if not words(row))
    fns = {
        f.name: f.flops for f in planned("llama3-8b", *keys, "train.recompute=full").fns
    }
    again = 32 * (fns["bwd.block"] - 2 * fns["fwd.block"])
    once = 3 * 32 * fns["fwd.block"] + fns["train.head"]
    cost = last.seconds / first.seconds - 1
    assert cost == pytest.approx(again / once, rel=0.1)
    assert 0.2 < cost < 1 / 3


FEW = ("train.recompute=[linear,gelu,swiglu,attention]",)


@pytest.mark.parametrize(
    "name,keys",
    [
        ("gpt-tiny", ("targets=[cpu]", "zero.stage=3", *FEW)),
        ("llama-tiny", ("targets=[sm_90]", "zero.stage=1", *FEW)),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (("gpt-tiny", ()), ("qwen3-tiny", ("cluster.ranks=2",)))
        ),
    ],
)
@pytest.mark.slow
def test_the_fastest_that_fits(name: str, keys: tuple[str, ...]) -> None:
    """Every choice has the memory of its plan and nearly the time that playing it gives. The budget
    takes one that is as fast as any that fits, and its time is played."""
    rows, played = every(name, *keys), {}
    for row in rows:
        p = build.build(row.way.spec).plan
        assert fits.needs(p) == row.needs
        played[row.way.words] = play.step(clock.of(row.way.spec, p)).seconds
        assert row.seconds == pytest.approx(played[row.way.words], rel=0.05)
    devices = sorted({row.device for row in rows})
    for limit in (devices[0], devices[len(devices) // 2], devices[-1]):
        row, found = budget.choose(loaded(name, *keys), limit)
        best = min(played[x.way.words] for x in rows if x.device <= limit)
        assert row.device <= limit and not row.guessed
        assert best <= row.seconds == played[row.way.words] <= 1.01 * best
        assert found.best[0] is row


def test_a_byte_decides() -> None:
    """The choice has the plan of its keys; a note and a table name it. A budget of its bytes takes
    it again, a byte less another. Below the least the refusal names a budget that works."""
    keys = ("targets=[cpu]", "zero.stage=3", STAY[2])
    rows = found("gpt-tiny", *keys)
    built = chosen("gpt-tiny", *keys, f"train.memory_budget={rows[-1].device}")
    words = rows[-1].way.words
    assert built.plan == planned("gpt-tiny", *keys, *rows[-1].way.settings)
    assert "* " in built.choices and f"  {words}\n" in built.choices
    note = f"train.memory_budget: chose {words}, {rows[-1].device:,} bytes; predicted "
    assert built.notes[-1].startswith(note)
    for row in rows[:2]:
        less = chosen("gpt-tiny", *keys, f"train.memory_budget={row.device - 1}")
        assert reserve.most(less.plan) < row.device
    wrong = "^--set: train.memory_budget: no plan fits in "
    with pytest.raises(spec.SpecError, match=wrong) as e:
        chosen("gpt-tiny", *keys, f"train.memory_budget={rows[-1].device - 1}")
    least = re.search(r"allowed: at least (\d+)(;|$)", str(e.value))[1]
    assert int(least) == rows[-1].device
    assert chosen("gpt-tiny", *keys, f"train.memory_budget={least}").plan == built.plan


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
    need = reserve.most(built.plan)
    assert f"{need:,} bytes{where}; predicted " in built.notes[-1]
    assert built.choices.startswith(f"train.memory_budget{where}: predicted")
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
    rows = every("gpt-tiny", "train.recompute=[attention]")
    assert all("attention" in words(row) for row in rows)
    assert len({words(row) for row in rows}) > 8


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
