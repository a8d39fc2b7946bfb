"""keyplace.py -- locations of keys in a spec's file, for errors about them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from ..facts import kinds
from .node import Mistakes, Node, Path, SpecError, dotted
from .schema import TYPES, LrSchedule, Optimizer, Scaling


def fail(root: Node, path: Path, wrong: str, allowed: str, hint: str = "") -> SpecError:
    """Return the error of a key, located at its nearest parent in the file."""
    return SpecError(
        f"{root.at(path).where}: {dotted(path)}: {wrong}; {hint}allowed: {allowed}"
    )


@dataclass(frozen=True)
class KeyPlace:
    """Location of a key; place / "name" is that of a key below it."""

    root: Node
    path: Path

    def __truediv__(self, key: str | int) -> KeyPlace:
        return KeyPlace(self.root, (*self.path, key))

    def fail(self, wrong: str, allowed: str, hint: str = "") -> SpecError:
        return fail(self.root, self.path, wrong, allowed, hint)


Section = TypeVar("Section", Optimizer, LrSchedule, Scaling)


def typed(found: Section, at: KeyPlace) -> Section:
    """Return a section with the defaults of its type.

    Raises SpecError for a missing key and for a key of another type.
    """
    rows = TYPES[type(found)]
    defaults = rows[found.type]
    others = {key for row in rows.values() for key in row} - set(defaults)
    every = [f.name for f in fields(found)]
    mistakes = Mistakes()
    for key in every:
        if key in others and getattr(found, key) is not None:
            own = ", ".join(k for k in every if k not in others)
            wrong = f"{found.type} has no {key}"
            mistakes.add((at / key).fail(wrong, own))
    lacking: dict[str, Any] = {
        key: x for key, x in defaults.items() if getattr(found, key) is None
    }
    for key, usual in lacking.items():
        if usual is kinds.NEEDED:
            wrong = f"is missing; {found.type} requires it"
            mistakes.add((at / key).fail(wrong, "a value for it"))
    mistakes.end()
    return replace(found, **lacking)
