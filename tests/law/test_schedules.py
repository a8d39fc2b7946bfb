"""test_schedules.py -- tests rates and momenta step by step: against closed forms in Python's own
floats (those of DeepSpeed's runtime/lr_schedules.py for its types), with skipped steps, and with
schedules that the checker refuses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from zg.check import check
from zg.passes import recipe
from zg.plan import plan
from zg.read import spec as reader
from zg.search import search

from tests.lib import zk
from tests.lib.trainer import ROOT

U = 2.0**-24
LR = 1e-3


def planned(schedule: str, optimizer: str = "{type: AdamW, lr: 1e-3}") -> plan.Recipe:
    return recipe.made(
        reader.load(
            f"{ROOT}/model_specs/gpt-tiny.yaml",
            [f"train.schedule={schedule}", f"train.optimizer={optimizer}"],
        )
    )


@functools.cache
def base() -> plan.Plan:
    return search.find(reader.load(f"{ROOT}/model_specs/gpt-tiny.yaml")).plan


def played(
    k: zk.Kernels, r: plan.Recipe, steps: int
) -> tuple[list[float], list[float]]:
    """Return lr and beta1 of steps that are all applied."""
    made = zk.Recipe(
        rate=zk.phases(r.rate),
        momentum=zk.phases(r.momentum),
        beta2=r.beta2,
        rows=1,
    )
    ctl, sums, rates, betas = zk.Ctl(), np.zeros(zk.SUMS, np.int64), [], []
    for step in range(1, steps + 1):
        k.zk_begin(ctl, sums, made)
        assert ctl.step == step and not sums.any()
        sums[zk.VALID] = 1
        k.zk_factor(ctl, sums, made)
        rates.append(ctl.lr)
        betas.append(ctl.beta1)
    return rates, betas


# ---- ours


def ours(
    kind: str,
    warmup: int,
    steps: int = 100,
    low: float = 1e-4,
    decay: int = 30,
) -> Callable:
    def rate(n: int) -> float:
        if n < warmup:
            return LR * n / warmup
        begin = {"wsd": steps - decay, "constant": math.inf}.get(kind, warmup)
        x = min(1.0, (n - begin) / (steps - begin)) if n >= begin else 0.0
        x = (1 - math.cos(math.pi * x)) / 2 if kind == "cosine" else x
        return LR + (low - LR) * x

    return rate


# ---- transformers' and PyTorch's


def with_restarts(warmup: int, steps: int, cycles: int, low: float = 0.0) -> Callable:
    """Return get_cosine_with_hard_restarts_schedule_with_warmup of transformers, between low and
    LR."""

    def rate(n: int) -> float:
        if n < warmup:
            return LR * n / max(1, warmup)
        progress = (n - warmup) / max(1, steps - warmup)
        if progress >= 1.0:
            return low
        share = 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0)))
        return low + (LR - low) * max(0.0, share)

    return rate


def warm_restarts(period: int, low: float) -> Callable:
    """Return CosineAnnealingWarmRestarts(T_0=period, eta_min=low) of PyTorch."""
    return lambda n: (
        low + (LR - low) * (1 + math.cos(math.pi * (n % period) / period)) / 2
    )


# ---- DeepSpeed's, by its iteration b = n - 2


def gamma(b: int, N: int, kind: str) -> float:
    return math.log(b + 1) / math.log(N) if kind == "log" else b / N


def warmup(n: int, low: float, high: float, N: int, kind: str, total: int = 0) -> float:
    b = n - 2
    if b < 0:
        return low
    if b < N:
        return low + (high - low) * gamma(b, N, kind)
    return low + (high - low) * (
        max(0.0, (total - b) / max(1.0, total - N)) if total else 1.0
    )


def warmup_cosine(
    n: int, total: int, N: int, kind: str, low: float, end: float
) -> float:
    b = n - 2
    if b < 0:
        return 0.0
    if b < N:
        return LR * (low + gamma(b, N, kind) * (1 - low))
    x = min(1.0, (b - N + 1) / max(1, total - N))
    return LR * max(0.0, end + (1 - end) * (1 + math.cos(math.pi * x)) / 2)


def cycle(n: int, up: int, down: int, stairs: tuple[int, int] = (0, 0)) -> float:
    """Return the share of the way from the bottom."""
    it, total = n - 1, up + down
    it = it % total
    first = it <= up
    count = stairs[not first]
    place = it / up if first else (total - it) / down
    if count:
        size = up if first else down
        return (it if first else total - it) * count // size / count
    return place


def one_cycle(
    n: int,
    low: float,
    high: float,
    up: int,
    down: int,
    stairs: tuple[int, int] = (0, 0),
    size: int = 0,
    decay: float = 0.0,
) -> float:
    past = n - 2 - (up + down) + 1
    if past <= 0:
        return low + (high - low) * cycle(n, up, down, stairs)
    return low / (1 + decay * past / size) if size and decay else low


DEEPSPEED = {
    "{type: WarmupLR, warmup_max_lr: 0.002, warmup_num_steps: 20}": lambda n: warmup(
        n, 0, 0.002, 20, "log"
    ),
    "{type: WarmupLR, warmup_min_lr: 1e-5, warmup_num_steps: 20, warmup_type: linear}": lambda n: (
        warmup(n, 1e-5, LR, 20, "linear")
    ),
    "{type: WarmupLR, warmup_num_steps: 1}": lambda n: warmup(n, 0, LR, 2, "log"),
    "{type: WarmupDecayLR, total_num_steps: 150, warmup_num_steps: 30}": lambda n: (
        warmup(n, 0, 0.001, 30, "log", 150)
    ),
    "{type: WarmupDecayLR, total_num_steps: 150, warmup_num_steps: 30, warmup_type: linear, "
    "warmup_min_lr: 1e-4, warmup_max_lr: 3e-3}": lambda n: warmup(
        n, 1e-4, 3e-3, 30, "linear", 150
    ),
    "{type: WarmupCosineLR, total_num_steps: 150, warmup_num_steps: 30}": lambda n: (
        warmup_cosine(n, 150, 30, "log", 0, 1e-4)
    ),
    "{type: WarmupCosineLR, total_num_steps: 101, warmup_num_steps: 7, warmup_type: linear, "
    "warmup_min_ratio: 0.1, cos_min_ratio: 0.2}": lambda n: warmup_cosine(
        n, 101, 7, "linear", 0.1, 0.2
    ),
    "{type: OneCycle, cycle_min_lr: 1e-4, cycle_max_lr: 1e-2, cycle_first_step_size: 40}": lambda n: (
        one_cycle(n, 1e-4, 1e-2, 40, 40)
    ),
    "{type: OneCycle, cycle_min_lr: 1e-4, cycle_max_lr: 1e-2, cycle_first_step_size: 40, "
    "cycle_second_step_size: 71, decay_step_size: 9, decay_lr_rate: 0.5}": lambda n: (
        one_cycle(n, 1e-4, 1e-2, 40, 71, (0, 0), 9, 0.5)
    ),
    "{type: OneCycle, cycle_min_lr: 1e-4, cycle_max_lr: 1e-2, cycle_first_step_size: 40, "
    "cycle_second_step_size: 0}": lambda n: (
        one_cycle(n, 1e-4, 1e-2, 40, 0)
        if n > 41
        else 1e-4 + (1e-2 - 1e-4) * (n - 1) / 40
    ),
    "{type: OneCycle, cycle_min_lr: 1e-4, cycle_max_lr: 1e-2, cycle_first_step_size: 40, "
    "cycle_second_step_size: 71, cycle_first_stair_count: 5, cycle_second_stair_count: 3}": lambda n: (
        one_cycle(n, 1e-4, 1e-2, 40, 71, (5, 3))
    ),
}
OURS = {
    f"{{type: {kind}, warmup: {w}, steps: 100, min_lr: 1e-4"
    f"{', decay: 30' if kind == 'wsd' else ''}}}": ours(kind, w)
    for kind in ("constant", "linear", "cosine", "wsd")
    for w in (0, 1, 10, 70)
}
# Schedules whose restarts the float formula meets; see the test of those that it misses.
RESTARTS = {
    f"{{type: cosine_with_restarts, warmup: {w}, steps: {steps}, cycles: {c}, min_lr: {low}}}": (
        with_restarts(w, steps, c, low)
    )
    for w, steps, c, low in (
        (0, 100, 1, 0.0),
        (0, 128, 4, 1e-4),
        (10, 100, 3, 0.0),
        (10, 260, 7, 1e-5),
    )
}
OURS |= RESTARTS


@pytest.mark.parametrize("schedule", [*OURS, *DEEPSPEED])
def test_closed_forms(target: str, schedule: str) -> None:
    """Rates of 300 steps match the closed form. A rate is rounded once to f32. In f64 before that
    it is off by a few roundings of the largest rate, because of cancellation at the end of a
    decay."""
    r, rate = planned(schedule), {**OURS, **DEEPSPEED}[schedule]
    rates, betas = played(zk.Kernels(target), r, 300)
    want = np.array([rate(n) for n in range(1, 301)])
    assert np.all(np.abs(rates - want) <= U * want + 2.0**-48 * want.max())
    assert "OneCycle" in schedule or set(betas) == {0.9}
    assert (
        len(set(rates)) > 4
        or "constant" in schedule
        or "stair" in schedule
        or "num_steps: 1}" in schedule
    )


def test_restarts_are_at_whole_shares_of_the_steps(target: str) -> None:
    """Each cosine starts at lr, also where the float formula of transformers misses a restart by a
    rounding. With a cycle of T_0 steps the rates are those of PyTorch's
    CosineAnnealingWarmRestarts."""
    k, span, cycles = zk.Kernels(target), 98, 49
    kind = "{type: cosine_with_restarts, steps: %d, cycles: %d, min_lr: %g}"
    rates, _ = played(k, planned(kind % (span, cycles, 0.0)), span)
    theirs = with_restarts(0, span, cycles)
    first = np.float32(LR)
    assert {rates[n - 1] for n in range(2, span, 2)} == {first}
    missed = [n for n in range(2, span, 2) if theirs(n) < LR / 2]
    assert missed
    for period, count in ((30, 5), (64, 3)):
        rates, _ = played(
            k, planned(kind % (period * count, count, 1e-4)), period * count
        )
        want = [warm_restarts(period, 1e-4)(n) for n in range(1, period * count)]
        assert np.all(np.abs(rates[:-1] - np.array(want)) <= U * LR + 2.0**-48 * LR)


def test_llm_c_is_a_step_behind(target: str) -> None:
    """After the warm-up llm.c's get_learning_rate (llmc/schedulers.h) is a step behind, because it
    counts from 0."""
    warmup, steps, low = 5, 40, LR / 10

    def theirs(step: int) -> float:
        if step < warmup:
            return LR * (step + 1) / warmup
        ratio = (step - warmup) / (steps - warmup)
        return low + 0.5 * (1 + math.cos(math.pi * ratio)) * (LR - low)

    schedule = f"{{type: cosine, warmup: {warmup}, steps: {steps}, min_lr: {low}}}"
    rates, _ = played(zk.Kernels(target), planned(schedule), steps)
    want = [theirs(n - 1 if n < warmup else n) for n in range(1, steps + 1)]
    assert np.allclose(rates, want, rtol=2 * U, atol=0)
    assert not math.isclose(rates[warmup], theirs(warmup), rel_tol=1e-4)


def test_momentum_in_a_cycle(target: str) -> None:
    """Momentum follows DeepSpeed's cycle: the first step has the least, and beta2 becomes 0.99."""
    cycled = (
        "{type: OneCycle, cycle_min_lr: 1e-4, cycle_max_lr: 1e-2, cycle_first_step_size: 40, "
        "cycle_min_mom: 0.75, cycle_max_mom: 0.95}"
    )
    r = planned(cycled)
    _, betas = played(zk.Kernels(target), r, 120)
    want = [
        0.75,
        *(0.95 - (0.95 - 0.75) * cycle(n, 40, 40) for n in range(2, 82)),
        *[0.95] * 39,
    ]
    assert np.allclose(betas, want, rtol=1e-15, atol=0) and r.beta2 == 0.99
    assert betas[40] == 0.75 and betas[-1] == 0.95
    still = planned(cycled.replace("}", ", cycle_momentum: false}"))
    assert (still.momentum, still.beta2) == ((zk.held(0.9),), 0.999)
    assert planned(cycled, "{type: SGD, lr: 1, momentum: 0.8}").momentum == (
        zk.held(0.8),
    )


@pytest.mark.slow
def test_the_same_bits_everywhere() -> None:
    kernels = [
        zk.Kernels(isa, zk.F32, 1, cc)
        for isa, cc, threads in zk.variants()
        if threads == 1
    ]
    zk.need(zk.EMULATED)
    for schedule in [*OURS, *DEEPSPEED]:
        r = planned(schedule)
        found = {
            np.array(played(k, r, 200)).tobytes()
            for k in (*kernels, zk.Kernels(zk.EMULATED))
        }
        assert len(found) == 1


def test_a_skipped_step_is_no_step_of_the_schedule(target: str) -> None:
    k, r = zk.Kernels(target), planned("{type: linear, warmup: 4, steps: 20}")
    made = zk.Recipe(rate=zk.phases(r.rate), momentum=zk.phases(r.momentum), rows=1)
    ctl, rates = zk.Ctl(), []
    for valid in (1, 0, 0, 1, 1, 0, 1, 1):
        sums = np.zeros(zk.SUMS, np.int64)
        k.zk_begin(ctl, sums, made)
        rates.append(ctl.lr)
        sums[zk.VALID] = valid
        k.zk_factor(ctl, sums, made)
    exact, _ = played(k, r, 5)
    assert rates == [exact[n] for n in (0, 1, 1, 1, 2, 3, 3, 4)]
    assert (ctl.step, ctl.applied) == (8, 5)


# ---- refusals of the checker

PHASES = planned(
    "{type: WarmupDecayLR, total_num_steps: 50, warmup_num_steps: 10}"
).rate


def test_every_schedule_is_proven() -> None:
    for schedule in (*OURS, *DEEPSPEED):
        check.check(replace(base(), recipe=planned(schedule)))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: (),
        lambda x: x[:-1],
        lambda x: x + x[-1:],
        lambda x: x[::-1],
        lambda x: x * 2,
        lambda x: (replace(x[0], until=1), *x[1:]),
        lambda x: (replace(x[0], span=0), *x[1:]),
        lambda x: (x[0], replace(x[1], origin=2), *x[2:]),
        lambda x: (x[0], replace(x[1], span=1), *x[2:]),
        lambda x: (x[0], replace(x[1], until=13), *x[2:]),
        lambda x: (x[0], replace(x[1], curve="bow"), *x[2:]),
        lambda x: (*x[:2], replace(x[2], span=-x[2].span), x[3]),
        lambda x: (*x[:2], replace(x[2], origin=53), x[3]),
        lambda x: (*x[:3], replace(x[3], end=1.0)),
        lambda x: (*x[:3], replace(x[3], begin=-1.0, end=-1.0)),
    ],
)
def test_a_broken_schedule_is_refused(change: Callable) -> None:
    broken = replace(base(), recipe=replace(base().recipe, rate=change(PHASES)))
    with pytest.raises(check.CheckError, match="schedule of rate"):
        check.check(broken)


@pytest.mark.parametrize(
    "change",
    [{"stairs": 0}, {"stairs": -2}, {"span": -90}, {"span": 2**62}, {"until": 102}],
)
def test_a_broken_restart_is_refused(change: dict[str, int]) -> None:
    first, fall, last = planned(
        "{type: cosine_with_restarts, warmup: 10, steps: 100, cycles: 3}"
    ).rate
    broken = replace(base().recipe, rate=(first, replace(fall, **change), last))
    with pytest.raises(check.CheckError, match="schedule of rate"):
        check.check(replace(base(), recipe=broken))


def test_keys_that_constant_has_no_use_for_are_said() -> None:
    path = str(ROOT / "model_specs/gpt-tiny.yaml")

    def said(*keys):
        return reader.load(path, [f"train.schedule{key}" for key in keys]).notes

    assert [note.partition(": ")[2] for note in said(".type=constant")] == [
        f"train.schedule.{key}: has no effect: a constant schedule stays at lr"
        for key in ("steps", "min_lr")
    ]
    assert said() == said("={type: constant, warmup: 2}") == said("={}") == ()
