"""recipe.py -- the numbers that a plan has from its spec alone: the optimizer and its schedules,
and what calls and tensors must have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A piece of a schedule: up to the step before `until` (0: for ever) a value goes from `begin`
    to `end` as x = (step - origin) / span does from 0 to 1, along a curve (line | cosine | log |
    inverse: begin / (1 + end * x)), in so many stairs. In text, its fields between colons."""

    until: int
    origin: int
    span: int
    curve: str
    stairs: int
    begin: float
    end: float

    def __str__(self) -> str:
        return (
            f"{self.until}:{self.origin}:{self.span}:{self.curve}:{self.stairs}:"
            f"{self.begin!r}:{self.end!r}"
        )

    @classmethod
    def read(cls, text: str) -> Phase:
        until, origin, span, curve, stairs, begin, end = text.split(":")
        return cls(
            int(until),
            int(origin),
            int(span),
            curve,
            int(stairs),
            float(begin),
            float(end),
        )


@dataclass(frozen=True)
class Scaler:
    """zk_scaler's fields. In text, between colons."""

    first: float
    least: float
    window: int
    hysteresis: int
    consecutive: int

    def __str__(self) -> str:
        return (
            f"{self.first!r}:{self.least!r}:{self.window}:{self.hysteresis}:"
            f"{self.consecutive}"
        )

    @classmethod
    def read(cls, text: str) -> Scaler:
        first, least, *whole = text.split(":")
        return cls(float(first), float(least), *map(int, whole))


@dataclass(frozen=True)
class Recipe:
    """The optimizer, by its name in the op table, and zk_recipe's fields. moments: f32 | bf16, how
    they are stored; momentum: of beta1; scaler: of gradients, one or none. skips: after so many
    skipped steps in a row, but for those that lower a scale, a run ends."""

    optimizer: str
    moments: str
    rate: tuple[Phase, ...]
    momentum: tuple[Phase, ...]
    beta2: float
    eps: float
    clip: float
    scaler: tuple[Scaler, ...]
    skips: int


@dataclass(frozen=True)
class Turn:
    """What a rotary table is made from: the head's size, theta, and the numbers of a scaling
    (facts/rope.py) or nothing. In text, between colons."""

    head: int
    theta: float
    scaling: tuple[float, ...] = ()

    def __str__(self) -> str:
        return ":".join(
            [str(self.head), *map(repr, (self.theta, *self.scaling))]
        )

    @classmethod
    def read(cls, text: str) -> Turn:
        head, theta, *scaling = text.split(":")
        return cls(int(head), float(theta), tuple(map(float, scaling)))


@dataclass(frozen=True)
class Stated:
    """What a spec says of `count` units from the `first` on, in order of forward, 0 the embedding.
    In each of them `what` has these values: an operand, in the calls forward that take it, in their
    order; or a number of tensors, in the order in which calls take these first."""

    what: str
    first: int
    count: int
    values: tuple[int | float | Turn, ...]

    @property
    def end(self) -> int:
        return self.first + self.count


OF_TENSORS = ("mean", "std", "rate", "decay", "frozen")
