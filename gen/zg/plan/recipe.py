"""recipe.py -- the parts of a plan that come from its spec alone: the optimizer, its schedules, and
the stated numbers of calls and tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One phase of a schedule, up to the step before `until` (0: without end).

    The value goes from `begin` to `end` while x = (step - origin) / span goes from 0 to 1, along a
    curve (line | cosine | log | inverse: begin / (1 + end * x)), in `stairs` steps. Along restarts
    it goes along `stairs` equal cosines, each from begin to end. In text its fields are joined by
    colons.
    """

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
    """The fields of zk_scaler. In text they are joined by colons."""

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
    """The optimizer, by its name in the op table, and the fields of zk_recipe.

    moments: f32 | bf16, their stored type; momentum: schedule of beta1; scaler: loss scaler, one or
    none. skips: a run ends after this number of skipped steps in a row, not counting those that
    lower the loss scale.
    """

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
    """The inputs of a rotary table: the head's size, theta, and the numbers of its scaling
    (facts/rope.py), if any. In text they are joined by colons."""

    head: int
    theta: float
    scaling: tuple[float, ...] = ()

    def __str__(self) -> str:
        return ":".join([str(self.head), *map(repr, (self.theta, *self.scaling))])

    @classmethod
    def read(cls, text: str) -> Turn:
        head, theta, *scaling = text.split(":")
        return cls(int(head), float(theta), tuple(map(float, scaling)))


@dataclass(frozen=True)
class Stated:
    """Numbers that a spec states for `count` units from the `first` on, in order of forward; 0 is
    the embedding.

    Each of these units has `values` for `what`: an operand of its forward calls, in their order; or
    a number of its tensors, in the order in which calls first use them. `heads` that are all 0 are
    left out.
    """

    what: str
    first: int
    count: int
    values: tuple[int | float | Turn, ...]

    @property
    def end(self) -> int:
        return self.first + self.count


OF_TENSORS = ("mean", "std", "rate", "decay", "frozen", "heads")
