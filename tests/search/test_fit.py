"""test_fit.py -- tests --fit: its front is that of all settings, fits every memory, and is never
slower than the spec; a written spec gives the same plan."""

import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from zg import build
from zg.check import check
from zg.facts import reserve
from zg.plan.text import print_plan
from zg.predict import clock, cost
from zg.predict.seconds import Clock
from zg.read import spec
from zg.search import fit, fits, formulas, knobs

from tests.lib import trainer

# Keys that a small space holds, at the values of gpt-tiny.
HELD = {
    "zero.stage": "3",
    "zero.shard_size": "0",
    "zero.states": "all",
    "zero.offload_optimizer.device": "none",
    "zero.offload_param.device": "none",
    "zero.stage3_prefetch_bucket_size": "auto",
    "zero.allgather_bucket_size": "5e8",
    "zero.reduce_bucket_size": "5e8",
    "zero.stage3_param_persistence_threshold": "100",
    "train.accumulate": "micro_batches",
    "train.recompute": "none",
    "train.offload_activations": "false",
    "train.micro_batch": "1",
    "train.sum": "{block: 16}",
}
GPU = ("targets=[sm_90]", "cluster.ranks=4")
MOVED = "train.offload_activations=true"
FREE = (
    "zero.stage",
    "zero.offload_param.device",
    "train.recompute",
    "train.micro_batch",
    "train.sum",
)


def loaded(name: str, *keys: str) -> spec.Spec:
    return spec.load(f"{trainer.ROOT}/model_specs/{name}.yaml", keys)


def holding(*free: str) -> tuple[str, ...]:
    """Return KEY=VALUE texts that hold all keys but some."""
    return tuple(f"{key}={value}" for key, value in HELD.items() if key not in free)


def every(s: spec.Spec) -> Iterator[spec.Spec]:
    """Yield each legal combination of the searched settings."""
    grouped = itertools.groupby(fit.settings(s), lambda x: x.key)
    for taken in itertools.product(*(list(group) for _, group in grouped)):
        made = s
        for setting in taken:
            made = setting.change(made)
        if knobs.agrees(made):
            yield made


class Whole(fit.Search):
    """A search that plays every plan."""

    def beaten(self, soonest: float, least: int) -> bool:
        return False


def exhaustive(s: spec.Spec, found: fit.Search) -> fit.Search:
    """Return a search that has planned every combination."""
    whole = Whole(s, found.device, found.limits)
    whole.add([s, *every(s)])
    return whole


def levels(rows: list[fit.Row]) -> list[tuple[int, int]]:
    return [(fit._level(row.seconds), row.device) for row in rows]


PLACES = (
    "zero.stage",
    "zero.shard_size",
    "zero.states",
    "zero.offload_optimizer.device",
    "zero.offload_param.device",
)
SIZES = (
    "zero.stage",
    "zero.stage3_prefetch_bucket_size",
    "zero.stage3_param_persistence_threshold",
)
SHARED = ("cluster.context_parallel", "zero.stage", "zero.offload_param.device")
BLOCKS = (
    "model.units[1].ops[0].residual[1].attention.heads=4",
    "model.units[1].ops[0].residual[1].attention.head_dim=20",
    "train.sequence=32",
    "train.sequence_blocks=4",
)
IN_TURN = ("cluster.context_parallel", "train.accumulate", "train.recompute")
# Keys of the spaces of shared samples besides HELD.
MORE = {
    SHARED: (*BLOCKS, "train.accumulate=layers"),
    IN_TURN: (*BLOCKS, "zero.stage=1"),
}
SPACES = {
    "places": PLACES,
    "activations": ("train.recompute", "train.offload_activations"),
    "sizes": SIZES,
    "bits": ("zero.stage", "train.micro_batch", "train.sum"),
    "shared samples": SHARED,
}
LARGE = {
    "samples in turn": IN_TURN,
    "many places": (*PLACES, "train.accumulate"),
    "many activations": (*SPACES["activations"], "train.accumulate"),
    "many sizes": (*SIZES, "zero.reduce_bucket_size"),
}


@pytest.mark.parametrize("limit", [None, 0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize(
    "free",
    [
        *(pytest.param(keys, id=name) for name, keys in SPACES.items()),
        *(
            pytest.param(keys, id=name, marks=pytest.mark.exhaustive)
            for name, keys in LARGE.items()
        ),
    ],
)
@pytest.mark.slow
def test_the_front_is_that_of_all_settings(
    free: tuple[str, ...], limit: float | None
) -> None:
    """The search finds the fastest row, and the front, of all combinations of a small space.
    limit: share of them that a limit of memory lets fit, None without a limit."""
    keys = (*GPU, *holding(*free), *MORE.get(free, ()))
    s = loaded("gpt-tiny", *keys)
    found = fit.find(s)
    if limit is not None:
        every_ = exhaustive(s, found).rows.values()
        some = sorted(row.device for row in every_ if row.same)
        most = some[int(limit * len(some))]
        s = loaded("gpt-tiny", *keys, f"cluster.memory.device={most}")
        found = fit.find(s)
    whole = exhaustive(s, found)
    assert len(whole.rows) > 10
    fitting = [row for row in whole.rows.values() if row.seconds < math.inf]
    needs = [row.device for row in whole.rows.values()]
    least = math.inf if limit is None else most
    assert len(fitting) == sum(need <= least for need in needs)
    assert limit is None or limit > 0.5 or len(fitting) < len(needs)
    assert found.best[0].seconds == whole.best[0].seconds
    assert levels(found.best) == levels(whole.best)
    assert found.planned <= whole.planned


def test_bounds_know_which_ranks_share_samples() -> None:
    """A bound for a number of ranks that share a sample is not another number's."""
    s, other = (
        loaded("gpt-tiny", *GPU, *BLOCKS, f"cluster.context_parallel={n}")
        for n in (2, 4)
    )
    p, device = build.build(s).plan, clock.device_of(s)
    alone = formulas.Formulas(p, device).saved(other)
    both = formulas.Formulas(p, device)
    assert both.saved(s) != alone and both.saved(other) == alone


@pytest.fixture(scope="module")
def free() -> fit.Search:
    """The search of a small space of gpt-tiny without a limit."""
    return fit.find(loaded("gpt-tiny", *GPU, *holding(*FREE)))


def test_no_row_matches_another(free: fit.Search) -> None:
    """Each row needs less memory than those above it and takes longer, but for times that count as
    equal."""
    assert len(free.best) > 3
    for a, b in itertools.pairwise(free.best):
        assert b.device < a.device
        assert b.seconds > a.seconds or fit._level(b.seconds) == fit._level(a.seconds)
    assert free.best[0].seconds == min(r.seconds for r in free.rows.values() if r.same)
    assert all(row.same for row in free.best) and not any(
        row.same for row in free.other
    )


def test_rows_with_other_bits_beat_the_rest(free: fit.Search) -> None:
    """A row with other bits names a key of the recipe, and is faster or smaller than each row with
    the same bits."""
    assert free.other
    for row in free.other:
        assert any(s.key in fit.BITS for s in row.way.picked)
        assert all(row.seconds < x.seconds or row.device < x.device for x in free.best)


@pytest.mark.parametrize(
    "name,keys",
    [
        ("llama-tiny", ("targets=[cpu]", *holding("zero.stage", "train.recompute"))),
        *(
            pytest.param(*row, marks=pytest.mark.exhaustive)
            for row in (
                ("gpt-tiny", GPU),
                ("llama-tiny", ("targets=[cpu]",)),
                ("qwen3-tiny", (*GPU, "cluster.local=2", "zero.mics_shard_size=2")),
                (
                    "gpt-tiny",
                    (*GPU, "train.accumulate=layers", "train.recompute=[gelu,rope]"),
                ),
            )
        ),
    ],
)
def test_a_fit_is_never_slower(name: str, keys: tuple[str, ...]) -> None:
    """The fastest row takes at most the time of the spec as it is, and keys of the command line
    stay."""
    found = fit.find(loaded(name, *keys))
    assert found.best[0].seconds <= found.first.seconds < math.inf
    given = {key.partition("=")[0] for key in keys}
    assert not given & {s.key for row in found.rows.values() for s in row.way.picked}


def test_rows_are_specs(free: fit.Search) -> None:
    """The settings of a row, typed beside the spec, give the plan that the row describes."""
    for row in (*free.best, *free.other):
        again = loaded("gpt-tiny", *GPU, *holding(*FREE), *row.way.settings)
        p = build.build(again).plan
        assert print_plan(p) == print_plan(build.build(row.way.spec).plan)
        assert row.device == reserve.most(p) and row.needs == fits.needs(p)
        check.check(p)


def busy(s: fit.Search, row: fit.Row) -> float:
    """Return the seconds of a step that queue main spends in functions of units."""
    p = build.build(row.way.spec).plan
    section, timed = p.section("micro_batch"), Clock(p, s.device)
    run = (x for x in section.steps if x.kind in ("fwd", "bwd", "train"))
    return section.repeat * sum(map(timed.seconds, run))


def test_formulas_are_below_every_plan(free: fit.Search) -> None:
    """The formulas never claim more memory or time than a plan needs, and come near some of
    them. Times of functions and FLOPs that are computed twice are those of the plan."""
    large = loaded("gpt2-124m", *GPU, *holding("zero.stage", "train.accumulate"))
    away = loaded("gpt-tiny", *GPU, *holding("train.recompute", "train.sum"), MOVED)
    for s in (free, fit.find(large), fit.find(away)):
        for row in s.rows.values():
            f, spec_ = s.formulas, row.way.spec
            assert 0 < f.least(spec_) <= row.device
            assert 0 < f.soonest(spec_) <= row.seconds
            if s is free:
                assert f.soonest(spec_) == pytest.approx(busy(s, row), rel=1e-9)
            if s is free and row.played:
                p = build.build(spec_).plan
                again = cost.again(p) / cost.flops(p)
                assert row.again == pytest.approx(again, rel=1e-9)
    s = fit.find(large)
    beside = s.first.device - build.build(s.spec).plan.arena("sm_90")
    arenas = [
        (s.formulas.least(r.way.spec), r.device - beside) for r in s.rows.values()
    ]
    assert max(least / arena for least, arena in arenas) > 0.6


def test_formulas_know_quantized_weights() -> None:
    """A plan whose base is quantized needs less memory than its parameters would in bf16."""
    keys = ("cluster.ranks=1", "zero.stage=0", "train.global_batch=4")
    lora = "train.lora={rank: 16, alpha: 32, base: nf4}"
    s = loaded("llama3-8b", "targets=[sm_90]", *keys, lora)
    p = build.build(s).plan
    assert s.train.precision == "bf16"
    assert formulas.Formulas(p, clock.device_of(s)).least(s) <= p.arena("sm_90")


@pytest.mark.parametrize("memory", ["device", "host", "file"])
def test_every_memory_has_an_end(memory: str) -> None:
    """Every row fits each memory that has a limit."""
    disk = [
        f"zero.offload_{part}.{key}"
        for part in ("optimizer", "param")
        for key in ("device",)
    ]
    keys = [*GPU, *holding(*PLACES, "train.offload_activations")]
    if memory == "file":
        keys = [k for k in keys if not k.startswith(disk[0])]
        keys += [f"{disk[0]}=nvme", "zero.offload_optimizer.nvme_path=/tmp"]
    found = fit.find(loaded("gpt-tiny", *keys))
    needs = sorted({row.needs[memory] for row in found.rows.values()})
    assert len(needs) > 1
    limit = needs[0]
    small = fit.find(loaded("gpt-tiny", *keys, f"cluster.memory.{memory}={limit}"))
    for row in (*small.best, *small.other):
        assert row.needs[memory] <= limit
        assert not fits.over(small.spec, build.build(row.way.spec).plan)


def test_the_device_has_an_end_without_a_limit() -> None:
    """The memory of the device's file is the limit if a GPU has no other; a CPU has none."""
    on = fit.find(loaded("gpt-tiny", *GPU, *holding("zero.stage")))
    assert on.limits["device"] == on.device.memory == 80_000_000_000
    cpu = fit.find(loaded("gpt-tiny", "targets=[cpu]", *holding("zero.stage")))
    assert cpu.limits == {"device": None, "host": None, "file": None}


def test_fast_reductions_are_refused() -> None:
    """A search that keeps the bits cannot change a layout on which they depend."""
    s = loaded("gpt-tiny", "targets=[sm_90]", "train.reduction=fast")
    with pytest.raises(spec.SpecError, match="train.reduction: with fast reductions"):
        fit.find(s)


def test_nothing_fits() -> None:
    """A limit that nothing fits is refused with the least need of all candidates, which then
    fits."""
    keys = (*GPU, *holding("zero.stage", "train.micro_batch"))

    def refused(limit: int) -> int:
        with pytest.raises(spec.SpecError) as e:
            fit.find(loaded("gpt-tiny", *keys, f"cluster.memory.device={limit}"))
        start = "--set: cluster.memory.device: --fit finds no settings that fit in"
        assert str(e.value).startswith(start)
        bytes_ = re.search(r"allowed: (?:at least|more than) ([\d,]+)", str(e.value))
        return int(bytes_[1].replace(",", ""))

    least = refused(refused(4096) + 1)  # the first by formulas alone
    limit = f"cluster.memory.device={least}"
    assert fit.find(loaded("gpt-tiny", *keys, limit)).best[0].device == least
    with pytest.raises(spec.SpecError):
        fit.find(loaded("gpt-tiny", *keys, f"cluster.memory.device={least - 1}"))


def test_a_budget_is_refused() -> None:
    with pytest.raises(
        spec.SpecError, match="train.memory_budget: makes choices of its own"
    ):
        fit.find(loaded("gpt-tiny", "train.memory_budget=1GiB"))


def zgen(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"{trainer.ROOT}/gen/zgen", *args],
        capture_output=True,
        text=True,
        check=True,
    )


def test_the_command_writes_the_best(tmp_path) -> None:
    """--emit spec writes a spec with the plan of the fit, the table goes to stderr, and with
    --emit explain it ends the report."""
    name = f"{trainer.ROOT}/model_specs/gpt-tiny.yaml"
    free = ("zero.stage", "train.recompute")
    sets = [w for k in (*GPU, *holding(*free)) for w in ("--set", k)]
    best = tmp_path / "best.yaml"
    told = zgen(name, *sets, "--fit", "--emit", "spec", "-o", str(best)).stderr
    found = fit.find(loaded("gpt-tiny", *GPU, *holding(*free)))
    assert told.endswith(fit.table(found))
    written = zgen(str(best), "--emit", "plan").stdout
    assert written == print_plan(build.build(found.best[0].way.spec).plan)
    said = zgen(name, *sets, "--fit", "--emit", "explain")
    assert (
        said.stdout.endswith("\n" + fit.table(found))
        and fit.table(found) not in said.stderr
    )
