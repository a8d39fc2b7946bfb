"""whole.py -- reads train.lora.whole: modules that LoRA trains whole beside its adapters, as PEFT's
modules_to_save does.

A name means the modules that it ends, as in train.lora.match. PEFT compares names without regard to
their dots, so a name that would mean more modules there is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from ..facts.families import FAMILIES
from .keyplace import KeyPlace
from .node import Names, dotted, meant
from .schema import ADAPTERS, Lora, Model, ParamGroup
from .shapes import Walk, ends

PARTS = ("weight", "bias")  # tensors of a module
# model.vocab_rows, in the words of a note
ROWS = {"mean": "the mean of the others", "init": "their initial values"}


def short(name: str) -> str:
    """Return the last part of a module's name."""
    return name.rpartition(".")[2]


def tied(model: Model) -> Names:
    """Return the names of a tied embedding and of the head that shares its weight, none if the
    head has its own."""
    embedding = model.units[-1].ops[-1].args["tied"]
    return (embedding, FAMILIES[model.names].head) if embedding else ()


def canonical(words: Names, model: Model) -> Names:
    """Return the names in order. Either name of a tied weight stands for both."""
    both = tied(model)
    rest = {w for w in words if not any(ends(name, [w]) for name in both)}
    more = {*map(short, both)} if len(rest) < len({*words}) else set()
    return tuple(sorted(rest | more))


def patterns(lora: Lora) -> tuple[ParamGroup, ...]:
    """Return the group of the tensors that are trained whole, if there are any."""
    leads = ("", "*.")
    every = (
        f"{lead}{w}.{part}" for w in lora.whole for lead in leads for part in PARTS
    )
    return (ParamGroup(tuple(every)),) if lora.whole else ()


def is_whole(lora: Lora, tensor: str) -> bool:
    """Return whether a tensor is trained whole."""
    return ends(tensor.rpartition(".")[0], lora.whole)


def checked(walk: Walk, at: KeyPlace, words: Sequence[str], model: Model) -> None:
    """Require that every name means modules without adapters, here and in PEFT alike."""
    every = _modules(walk)
    linears = [name for name, inner in walk.linears.items() if inner]
    free = [name for name in every if _layered(name) not in linears]
    known = sorted({_named(name, every) for name in (*free, *tied(model))})
    for i, word in enumerate(words):
        mine = [name for name in (*every, *tied(model)) if ends(name, [word])]
        wrong = _wrong(word, mine, every)
        if any(name in walk.adapted for name in mine):
            wrong = "has an adapter (train.lora.match)"
        elif any(_layered(name) in linears for name in mine):
            wrong = (
                "is a linear of blocks, which may have an adapter (train.lora.match)"
            )
        if wrong:
            hint = "" if mine else meant(word, known, 0.82)
            raise (at / i).fail(f"'{word}' {wrong}", ", ".join(known), hint)


def _wrong(word: str, mine: Sequence[str], every: Sequence[str]) -> str:
    """Return the error of a name of these modules, '' if it is right."""
    if not mine:
        return "is not the name of a module"
    for name in every:
        if name.endswith(word) and name not in mine:
            return f"is also the end of {name}, which PEFT would train, too"
    return ""


def _modules(walk: Walk) -> list[str]:
    """Return the names of the modules of the base, in order."""
    base = (name for name in walk.tensors if not fnmatchcase(name, ADAPTERS))
    return list(dict.fromkeys(name.rpartition(".")[0] for name in base))


def _layered(name: str) -> str:
    """Return a module's name with {l} for its layer."""
    return ".".join("{l}" if part.isdigit() else part for part in name.split("."))


def _named(name: str, every: Sequence[str]) -> str:
    """Return a module's last part, or its whole name if the last part is the end of others'."""
    mine = [other for other in every if ends(other, [short(name)])]
    return name if _wrong(short(name), [*mine, name], every) else short(name)


def notes(at: KeyPlace, lora: Lora, model: Model) -> Iterator[str]:
    """Yield notes about a tied weight, and about new rows that are frozen. at: place of
    train.lora."""
    where, both = at.root.at(at.path).where, tied(model)
    said = f"{where}: {dotted(at.path)}"
    if any(ends(name, lora.whole) for name in both):
        yield f"{said}.whole: {' and '.join(both)} share one weight, which is trained whole"
    still = [name for name in model.by_token if not is_whole(lora, name)]
    if model.vocab_from and still:
        new = model.vocab - model.vocab_from
        words = ", ".join(dict.fromkeys(short(n.rpartition(".")[0]) for n in still))
        yield (
            f"{said}: the {new} new rows of {', '.join(still)} are frozen at "
            f"{ROWS[model.vocab_rows]}; whole: [{words}] trains them"
        )
