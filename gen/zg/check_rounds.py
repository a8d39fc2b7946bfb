"""check_rounds.py -- calls in rounds go through parts of whole values, each once and in order."""
from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .check_kernels import CLASSES
from .plan import Call


@dataclass
class Value:
    """Bytes [lo, hi) of a base, of one type. made: what it is, by the call that made it."""
    lo: int
    hi: int
    type: str
    made: tuple = ()
    used: bool = False


class Rounds:
    """A body, which has the rest: check_fns."""

    def split(self, base: str, at: int, by: int, rounds: int) -> Value | None:
        """The value that calls go through in rounds becomes its parts; None: there is none yet."""
        values = self.held.setdefault(base, [])
        for n, v in enumerate(values):
            if (v.lo, v.hi) == (at, at + by * rounds):
                values[n:n + 1] = [replace(v, lo=at + r * by, hi=at + r * by + by,
                                           made=(*v.made, "part", r, rounds))
                                   for r in range(rounds)]
                return v
        return None

    def join(self, base: str, at: int, by: int, rounds: int, old: Value | None) -> None:
        """Parts become a value: the one that was there, or a new one."""
        values = self.held[base]
        mine = [v for r in range(rounds) for v in values
                if (v.lo, v.hi) == (at + r * by, at + r * by + by)]
        if len(mine) != rounds or len({v.type for v in mine}) > 1:
            self.fail(None, f"{base}+{at} is not whole after {rounds} rounds")
        made = tuple(v.made for v in mine)
        if old and made == tuple((*old.made, "part", r, rounds) for r in range(rounds)):
            made = old.made
        for v in mine:
            values.remove(v)
        values.append(Value(at, at + by * rounds, mine[0].type, made, all(v.used for v in mine)))

    def loop(self, rounds: int, calls: list[Call]) -> None:
        for c in calls:
            if not any(arg == "c" or "+c*" in arg for arg in c.args):
                self.fail(c, f"is called {rounds} times alike")
        moving = {arg: tuple(map(int, re.split(r"\+c\*|\+", arg)[1:]))
                  for c in calls for arg in c.args if "+c*" in arg}
        places = {(arg.partition("+")[0], *two) for arg, two in moving.items()
                  if arg.partition("+")[0] not in CLASSES}
        whole = {place: self.split(*place, rounds) for place in sorted(places)}
        before = len(self.ran)
        for self.round in range(rounds):
            now = {arg: f"{arg.partition('+')[0]}+{at + self.round * by}"
                   for arg, (at, by) in moving.items()} | {"c": str(self.round)}
            for c in calls:
                self.one(replace(c, args=tuple(now.get(a, a) for a in c.args)))
        self.round = 0
        for place, old in whole.items():
            self.join(*place, rounds, old)
        made = {number for _, number, _ in self.ran[before:]}
        for values in self.held.values():                   # what is left is of one round alone
            values[:] = [v for v in values if not v.used or v.made[0] not in made]
