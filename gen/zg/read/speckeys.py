"""speckeys.py -- turns a spec's Nodes into keys, and pydantic's errors into our words."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from .node import Mistakes, Node, Path, dotted, meet, near, printable, shown
from .schema import SpecKeys

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
ROUNDS = 8  # rounds of repair, each of which removes the errors of the last one
# Values for required keys that are missing, while other keys are checked.
STAND_INS: dict[Path, Any] = {
    ("model",): {"vocab": 2, "width": 1, "names": "llama", "units": []},
    ("train",): {},
    ("train", "global_batch"): 1,
    ("train", "micro_batch"): 1,
    ("train", "sequence"): 1,
    ("train", "optimizer"): {"lr": 0},
    ("train", "optimizer", "lr"): 0,
}


def _record(kind: object) -> type | None:
    """Return the record inside a type: Annotated[tuple[OpKeys, ...], ...] -> OpKeys."""
    if isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind)):
        return kind
    return next((r for r in map(_record, get_args(kind)) if r), None)


def _mapping(path: Path) -> type:
    """Return the record at a path, or the one that contains it."""
    kind: type = SpecKeys
    for step in path:
        if isinstance(step, str):
            kind = _record(get_type_hints(kind, include_extras=True)[step]) or kind
    return kind


def _keys(path: Path) -> list[str]:
    """Return the keys that the mapping at a path may have."""
    kind = _mapping(path)
    if is_dataclass(kind):
        return [f.name for f in fields(kind)]
    return list(kind.model_fields) if issubclass(kind, BaseModel) else []


def _allowed(path: Path) -> str:
    """Return the allowed values of the key at a path, if its type describes them."""
    hints = get_type_hints(_mapping(path[:-1]), include_extras=True)
    for rule in getattr(hints[str(path[-1])], "__metadata__", ()):
        try:
            rule.func(None)
        except PydanticCustomError as refused:
            return f"allowed: {(refused.context or {})['allowed']}"
    return "a value is required"


def _line(root: Node, error: ErrorDetails) -> str:
    """Return one line for one of pydantic's errors."""
    path = error["loc"]
    kind = error["type"]
    at = f"{root.at(path).where}: {dotted(path)}"
    if kind == "zg":
        return f"{at}: {error['msg']}"
    if kind == "missing":
        return f"{at}: is missing; {_allowed(path)}"
    if kind in UNKNOWN:
        return f"{at}: is not a key here; {_unknown(path)}"
    said = shown(error["input"])
    if kind in ("tuple_type", "list_type"):
        word = error["input"]
        hint = f"did you mean [{printable(word)}]? " if isinstance(word, str) else ""
        return f"{at}: is {said}; {hint}allowed: a list"
    known = ", ".join(_keys(path))
    allowed = f"a mapping with the keys {known}" if known else "{}"
    return f"{at}: is {said}; allowed: {allowed}"


def _likely(path: Path) -> list[Path]:
    """Return the keys that an unknown key may mean: a similar or longer one here, the same word
    elsewhere."""
    word = str(path[-1])
    same = [p for p in _paths() if p[-1] == word]
    keys = _keys(path[:-1])
    here = near(word, keys, 0.8 if same else 0.6)
    for key in keys:
        if not here and key.startswith(f"{word}_"):
            here = key
    if here:
        return [(*path[:-1], here), *same]
    return same


def _meant(path: Path) -> str:
    """Return a hint at the key that an unknown one may mean; '' if there is none."""
    here = path[:-1]
    key, colon, value = str(path[-1]).partition(":")
    if colon and key in _keys(here):
        spaced = shown(f"{key}: {value}")
        return f"did you mean {spaced}? a space after the colon is needed; "
    words = []
    for p in _likely(path):
        words.append(str(p[-1]) if p[:-1] == here else dotted(p))
    return f"did you mean {' or '.join(words)}? " if words else ""


def _unknown(path: Path) -> str:
    known = ", ".join(_keys(path[:-1])) or "none"
    return f"{_meant(path)}allowed: {known}"


@cache
def _paths() -> tuple[Path, ...]:
    """Return the path of every key outside lists."""
    found: list[Path] = []
    ahead: list[Path] = [()]
    while ahead:
        path = ahead.pop(0)
        here = [(*path, key) for key in _keys(path)]
        found += here
        ahead += [
            p for p in here if not _in_list(p) and _mapping(p) is not _mapping(path)
        ]
    return tuple(found)


def _in_list(path: Path) -> bool:
    hints = get_type_hints(_mapping(path[:-1]), include_extras=True)
    return "tuple[" in str(hints[str(path[-1])])


# ---- a spec with errors


def _holder(plain: dict[Any, Any], path: Path) -> dict[Any, Any]:
    """Return the mapping that contains a key, or an empty one."""
    held: Any = plain
    for step in path[:-1]:
        held = held.get(step) if isinstance(held, dict) else None
    return held if isinstance(held, dict) else {}


def _mend(plain: dict[str, Any], error: ErrorDetails) -> set[Path]:
    """Remove a wrong key, or add a missing one. Return the paths whose values are then unknown. A
    wrong item removes its list, and a wrong key of the model removes the model."""
    path = tuple(error["loc"])
    if path[0] == "model":
        plain["model"] = STAND_INS[path[:1]]
        return {path[:1]}
    last = [n for n, step in enumerate(path) if isinstance(step, int)]
    path, kind = path[: last[0]] if last else path, error["type"]
    if last or kind not in ("missing", *UNKNOWN):
        _holder(plain, path).pop(path[-1], None)
        return {path}
    if kind in UNKNOWN:
        _holder(plain, path).pop(path[-1], None)
        return {*_likely(path)} or {path[:-1] or path}
    if path in STAND_INS:
        _holder(plain, path)[path[-1]] = deepcopy(STAND_INS[path])
        return {path}
    _holder(plain, path[:-1]).pop(path[-2], None)
    return {path[:-1]}


def read(root: Node, mistakes: Mistakes) -> SpecKeys | None:
    """Return the keys of a spec, or None if there are too many errors. Wrong keys get stand-ins and
    are listed in mistakes.bad."""
    plain: Any = root.plain()
    gone = {*mistakes.bad}  # keys that are bad because of an earlier error
    for n in range(ROUNDS):
        try:
            return SpecKeys.model_validate(plain)
        except ValidationError as e:
            errors = sorted(
                e.errors(include_url=False),
                key=lambda error: error["type"] == "missing",
            )
        if not n:
            mistakes.lines += [
                _line(root, error)
                for error in errors
                if error["type"] != "missing"
                or not any(meet(error["loc"], b) for b in gone)
            ]
        for error in errors:
            mistakes.bad |= _mend(plain, error)
    return None
