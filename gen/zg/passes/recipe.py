"""recipe.py -- turns a spec's optimizer and schedule into the plan's Recipe.

A schedule is a list of phases over the steps that were applied, counted from 1. A new schedule
needs a function here and a row in kinds.py. DeepSpeed's schedules follow its
runtime/lr_schedules.py: its scheduler steps after the optimizer and starts at -1, so our step n is
its iteration n - 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..plan.plan import Phase, Scaler
from ..plan.recipe import Recipe
from ..read.spec import LrSchedule, Optimizer, Spec


def rule(o: Optimizer) -> str:
    """Return the row of the optimizer table."""
    if o.type == "SGD" and o.momentum:
        return "Nesterov" if o.nesterov else "Momentum"
    return o.type


# ---- phases


def _line(
    until: int,
    origin: int,
    span: int,
    begin: float,
    end: float,
    stairs: int = 0,
) -> Phase:
    return Phase(
        until=until,
        origin=origin,
        span=span,
        curve="line",
        stairs=stairs,
        begin=begin,
        end=end,
    )


def _constant_phase(x: float, until: int = 0) -> Phase:
    return _line(until, 0, 1, x, x)


def _nonempty(phases: Iterable[Phase]) -> tuple[Phase, ...]:
    """Return the phases that contain a step."""
    out: list[Phase] = []
    for phase in phases:
        if phase.until == 0 or phase.until > (out[-1].until if out else 1):
            out.append(phase)
    return tuple(out)


# ---- rates


def _warm_up(o: Optimizer, s: LrSchedule) -> list[Phase]:
    """Rise from 0 to lr over `warmup` steps."""
    return [_line(s.warmup, 0, s.warmup, 0.0, o.lr)] if s.warmup else []


def _constant(o: Optimizer, s: LrSchedule) -> list[Phase]:
    return [*_warm_up(o, s), _constant_phase(o.lr)]


def _falling(o: Optimizer, s: LrSchedule) -> list[Phase]:
    """Fall from lr after the warm-up to min_lr at `steps`, along a line, a cosine, or one cosine
    after the other (transformers' cosine_with_restarts)."""
    curve = {"linear": "line", "cosine_with_restarts": "restarts"}.get(s.type, s.type)
    fall = Phase(
        until=s.steps,
        origin=s.warmup,
        span=s.steps - s.warmup,
        curve=curve,
        stairs=s.cycles or 0,
        begin=o.lr,
        end=s.min_lr,
    )
    return [*_warm_up(o, s), fall, _constant_phase(s.min_lr)]


def _wsd(o: Optimizer, s: LrSchedule) -> list[Phase]:
    """Hold lr after the warm-up, then fall to min_lr over the last `decay` steps."""
    begin = s.steps - s.decay
    held = [_constant_phase(o.lr, begin)] if begin else []
    return [
        *_warm_up(o, s),
        *held,
        _line(s.steps, begin, s.decay, o.lr, s.min_lr),
        _constant_phase(s.min_lr),
    ]


def _ramp(s: LrSchedule, first: float, low: float, high: float) -> list[Phase]:
    """Warm up as DeepSpeed does. The first step comes before its scheduler has stepped."""
    N = max(2, s.warmup_num_steps)
    up = Phase(
        until=N + 2,
        origin=1,
        span=N,
        curve="log",
        stairs=0,
        begin=low,
        end=high,
    )
    return [
        _constant_phase(first, 2),
        up if s.warmup_type == "log" else _line(N + 2, 2, N, low, high),
    ]


def _warmup(o: Optimizer, s: LrSchedule) -> list[Phase]:
    """DeepSpeed's WarmupLR and WarmupDecayLR."""
    low, high = (
        s.warmup_min_lr,
        o.lr if s.warmup_max_lr is None else s.warmup_max_lr,
    )
    ramp = _ramp(s, low, low, high)
    if s.type == "WarmupLR":
        return [*ramp, _constant_phase(high)]
    T = s.total_num_steps
    return [
        *ramp,
        _line(T + 2, T + 2, max(2, s.warmup_num_steps) - T, low, high),
        _constant_phase(low),
    ]


def _warmup_cosine(o: Optimizer, s: LrSchedule) -> list[Phase]:
    """DeepSpeed's WarmupCosineLR."""
    N, T, low = (
        max(2, s.warmup_num_steps),
        s.total_num_steps,
        o.lr * s.cos_min_ratio,
    )
    return [
        *_ramp(s, 0.0, o.lr * s.warmup_min_ratio, o.lr),
        Phase(
            until=T + 1,
            origin=N + 1,
            span=T - N,
            curve="cosine",
            stairs=0,
            begin=o.lr,
            end=low,
        ),
        _constant_phase(low),
    ]


def _cycle(s: LrSchedule, begin: float, end: float) -> list[Phase]:
    """Go from begin to end and back."""
    up, stairs = s.cycle_first_step_size, s.cycle_first_stair_count
    down = up if s.cycle_second_step_size is None else s.cycle_second_step_size
    more = stairs if s.cycle_second_stair_count is None else s.cycle_second_stair_count
    past = up + down + 1
    return [
        _line(up + 2, 1, up, begin, end, stairs),
        _line(past + 1, past, -down, begin, end, more),
    ]


def _one_cycle(o: Optimizer, s: LrSchedule) -> list[Phase]:
    """DeepSpeed's OneCycle."""
    cycle = _cycle(s, s.cycle_min_lr, s.cycle_max_lr)
    decays = s.decay_step_size and s.decay_lr_rate
    tail = (
        Phase(
            until=0,
            origin=cycle[1].origin,
            span=s.decay_step_size,
            curve="inverse",
            stairs=0,
            begin=s.cycle_min_lr,
            end=s.decay_lr_rate,
        )
        if decays
        else _constant_phase(s.cycle_min_lr)
    )
    return [*cycle, tail]


_RATES: Mapping[str, Callable[[Optimizer, LrSchedule], list[Phase]]] = {
    "constant": _constant,
    "linear": _falling,
    "cosine": _falling,
    "cosine_with_restarts": _falling,
    "wsd": _wsd,
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
}


def _scaler(spec: Spec) -> tuple[Scaler, ...]:
    """Return the loss scaler of f16, () for other precisions."""
    s = spec.train.loss_scale
    if spec.train.precision != "f16":
        return ()
    return (
        Scaler(
            s.scale or 2.0**s.initial_scale_power,
            s.min,
            0 if s.scale else s.window,
            s.hysteresis,
            int(s.consecutive_hysteresis),
        ),
    )


def made(spec: Spec) -> Recipe:
    """Return the recipe of a spec. Numbers that the optimizer does not use are 0, an unused eps is
    1. SGD's momentum is beta1. If a cycle includes the momentum, DeepSpeed sets beta2 to 0.99 and
    starts with the least beta1."""
    o, s = spec.train.optimizer, spec.train.schedule
    beta1, beta2 = o.betas or (o.momentum or 0.0, 0.0)
    momentum = [_constant_phase(beta1)]
    if s.cycle_momentum and o.betas:
        low, high, beta2 = s.cycle_min_mom, s.cycle_max_mom, 0.99
        momentum = [
            _constant_phase(low, 2),
            *_cycle(s, high, low),
            _constant_phase(high),
        ]
    return Recipe(
        optimizer=rule(o),
        moments=o.moments,
        rate=_nonempty(_RATES[s.type](o, s)),
        momentum=_nonempty(momentum),
        beta2=beta2,
        eps=o.eps or 1.0,
        clip=o.clip,
        scaler=_scaler(spec),
        skips=spec.train.max_skips,
    )
