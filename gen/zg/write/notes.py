"""notes.py -- warns of costs of a plan that a user may want to avoid, though nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ..plan.plan import Plan
from ..predict import cost
from .explain import size, typed

MANY = 4  # largest multiple of the papers' bytes of one micro-batch
MUCH = 2**30  # bytes of sums that need no note


def notes(p: Plan, others: Callable[[], Sequence[tuple[str, Plan]]]) -> Iterator[str]:
    """Yield the notes of a plan. others: makes the same plan with other rules of summation."""
    yield from _wire(p)
    yield from _sums(p, others)


def _wire(p: Plan) -> Iterator[str]:
    got = cost.training_wire(p).bytes - cost.exchanged(p)
    ideal = cost.ideal(p)
    if got <= MANY * ideal:
        return
    layers = p.head.zero == 3 and p.section("micro_batch").repeat > 1
    once = (
        "train.accumulate=layers gathers each layer once for all micro-batches, but keeps all "
        "their activations; "
    )
    yield (
        f"wire: a rank receives {got:,} bytes in a step of {p.head.micro_batches} "
        f"micro-batches, {got / ideal:.0f} times the {cost.paper(p)}P (W-1)/W of one "
        f"micro-batch in the ZeRO papers; {once * layers}a larger train.micro_batch makes fewer "
        "micro-batches, but changes the bits"
    )


def _sums(p: Plan, others: Callable[[], Sequence[tuple[str, Plan]]]) -> Iterator[str]:
    held = cost.sums(p)
    if held <= MUCH:
        return
    sums = [(cost.sums(made), rule) for rule, made in others()]
    least, rule = min(sums, default=(held, ""))
    if held - least > MUCH:
        yield (
            f"train.sum: sums of gradients take {size(held)} bytes per rank with "
            f"train.sum={typed(p)}; {rule} takes {size(least)}, but changes the bits"
        )
