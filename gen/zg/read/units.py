"""units.py -- reads the model's units in order, and the patterns that match its tensors.

shapes.py reads the content of a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from ..facts.families import FAMILIES
from . import whole
from .keyplace import KeyPlace
from .keytypes import ALL_LINEAR, DIM, ELEMS, LAYERS
from .node import Mistakes, Names, Node, dotted, meant
from .schema import (
    ADAPTERS,
    Data,
    Lora,
    LoraGroup,
    Model,
    ModelKeys,
    OpKeys,
    ParamGroup,
    SpecKeys,
    Train,
    Unit,
    UnitKeys,
)
from .shapes import Walk, ends
from .whole import short

KINDS = ("embedding", "blocks", "head")


def _unit(walk: Walk, at: KeyPlace, keys: UnitKeys) -> Unit:
    C = walk.model.width
    walk.prefix, walk.repeat = "", 1
    if keys.embedding is not None:
        return Unit(
            "embedding",
            1,
            "",
            (walk.embedding(at / "embedding", keys.embedding),),
        )
    if keys.head is not None:
        return _head(walk, at / "head", keys.head)
    walk.prefix, walk.repeat = f"{keys.name}.", keys.blocks
    x, ops = walk.ops(at / "ops", keys.ops, C)
    if x != C:
        last = at / "ops" / (len(ops) - 1)
        raise last.fail(f"the block's output is {x} wide", f"the model's width, {C}")
    return Unit("blocks", keys.blocks, keys.name, ops)


def _head(walk: Walk, at: KeyPlace, keys: Sequence[OpKeys]) -> Unit:
    V = walk.model.vocab
    last = at / (len(keys) - 1)
    walk.last = last.path
    _, ops = walk.ops(at, keys, walk.model.width)
    end = ops[-1]
    if end.kind != "linear" or end.args["out"] != (V,):
        raise last.fail(
            "the head does not end with a linear to the vocabulary",
            f"a linear with out: {V}, or tied (the loss is added)",
        )
    return Unit("head", 1, "", ops)


def _order(at: KeyPlace, units: Sequence[UnitKeys]) -> None:
    """Require embedding, blocks ..., head, each with only its own keys."""
    kinds = [_kind(at / i, unit) for i, unit in enumerate(units)]
    want = ["embedding", *["blocks"] * max(1, len(kinds) - 2), "head"]
    if kinds == want:
        return
    bad = next(i for i, w in enumerate(want) if i >= len(kinds) or kinds[i] != w)
    there = kinds[bad] if bad < len(kinds) else "nothing"
    raise (at / bad).fail(
        f"is {there} instead of {want[bad]}",
        "one embedding, then one or more blocks, then one head",
    )


def _kind(at: KeyPlace, unit: UnitKeys) -> str:
    found = unit.model_fields_set
    kinds = [k for k in KINDS if k in found]
    if len(kinds) != 1:
        both = f"is {' and '.join(kinds)} in one; the usual cause is a missing '-'"
        raise at.fail(
            both if kinds else "is none of the kinds of unit",
            "one of embedding, blocks, head in each unit",
        )
    kind = kinds[0]
    want = {"blocks", "name", "ops"} if kind == "blocks" else {kind}
    for key in sorted(found ^ want):
        if key in found:
            raise (at / key).fail(
                f"does not belong to {kind}", "name and ops with blocks"
            )
        raise (at / key).fail("is missing", "blocks: LAYERS, name and ops")
    return kind


def _matched(walk: Walk, at: KeyPlace, pattern: str) -> set[str]:
    """Return the tensors that a pattern matches."""
    found = {name for name in walk.tensors if fnmatchcase(name, pattern)}
    if not found:
        near = next(
            (f" ({name} is one)" for name in walk.tensors if pattern in name),
            "",
        )
        raise at.fail(
            f"'{pattern}' matches no tensor{near}",
            "a pattern of tensor names, such as '*.bias'",
        )
    return found


def _grouped(walk: Walk, at: KeyPlace, groups: Sequence[ParamGroup]) -> Iterator[str]:
    """Yield notes about groups that match nothing new."""
    taken: set[str] = set()
    for i, group in enumerate(groups):
        here, mine = at / i / "match", set()
        for j, pattern in enumerate(group.match):
            mine |= _matched(walk, here / j, pattern)
        if mine <= taken:
            where = here.root.at(here.path).where
            yield (
                f"{where}: {dotted(here.path)}: has no effect: earlier groups already match every "
                "tensor that it matches"
            )
        taken |= mine


def _adapted(walk: Walk, at: KeyPlace, logits: Mapping[str, Any]) -> None:
    """Require that every name in train.lora.match belongs to linears and to nothing else. logits:
    the arguments of the linear of the logits."""
    tied, e = logits["tied"], walk.model.embedding
    shared = f"is the head, which shares the weight of {tied}"
    others = dict.fromkeys(("lm_head", "embed_out") if tied else (), shared)
    for name in (e.tokens, e.positions):
        if name:
            others[name] = "is an embedding"
    names = sorted({*map(short, walk.linears)})
    every = [] if _no_all(walk.linears) else [ALL_LINEAR]
    known = ", or ".join([", ".join(names), *every])
    for i, word in enumerate(walk.match):
        wrong = _wrong(word, walk.linears, others)
        if wrong:
            hint = meant(word, [*every, *names], 0.82)
            raise (at / i).fail(f"'{word}' {wrong}", known, hint)


def _sized(walk: Walk, at: KeyPlace, groups: Sequence[LoraGroup]) -> None:
    """Require that every name in a group of adapters belongs to linears with adapters, and that a
    group sets something."""
    names = sorted({*map(short, walk.adapted)})
    known = ", ".join(names)
    taken: set[str] = set()
    for i, group in enumerate(groups):
        if group.rank is None and group.alpha is None:
            raise (at / i).fail("sets nothing", "rank, alpha, or both")
        mine = {name for name in walk.adapted if ends(name, group.match)}
        for j, word in enumerate(group.match):
            if any(ends(name, [word]) for name in mine):
                continue
            layer = any(part.isdigit() for part in word.split("."))
            why = "; the layers of an entry of blocks have one rank and alpha" * layer
            wrong = f"'{word}' is not the name of linears with adapters{why}"
            plain = any(ends(name, [word]) for name in walk.linears)
            hint = "" if plain else meant(word, names)
            raise (at / i / "match" / j).fail(wrong, known, hint)
        if mine <= taken:
            wrong = "has no effect: earlier groups match all of its linears"
            raise (at / i / "match").fail(
                wrong, "linears that no earlier group matches"
            )
        taken |= mine


def _wrong(word: str, linears: Mapping[str, bool], others: Mapping[str, str]) -> str:
    """Return the error of a word of train.lora.match, '' if it is right. linears: as of Walk;
    others: name -> why it is no linear."""
    if word == ALL_LINEAR:
        return _no_all(linears)
    for name, what in others.items():
        if ends(name, [word]):
            return what
    for name in linears:
        if ends(name, [word]):
            return ""
    return "is not the name of a linear"


def _inner(linears: Mapping[str, bool]) -> set[str]:
    """Return the names for which `all-linear` stands."""
    return {short(name) for name, inner in linears.items() if inner}


def _no_all(linears: Mapping[str, bool]) -> str:
    """Return why `all-linear` has no meaning, '' if it has one."""
    inner = _inner(linears)
    for name, inside in linears.items():
        if not inside and short(name) in inner:
            return f"leaves out {name}, but another linear has this name"
    return "" if inner else "finds no linear but that of the logits"


def named(
    keys: SpecKeys, model: Model | None, linears: Mapping[str, bool]
) -> Lora | None:
    """Return the adapters' settings, with the names for which a word stands, or the family's names
    if there are none. linears: as of Walk."""
    lora = keys.train.lora
    if lora is None:
        return None
    match = lora.match or FAMILIES[keys.model.names].lora
    if ALL_LINEAR in match:
        match = tuple(sorted(_inner(linears) | {*match} - {ALL_LINEAR}))
    words = whole.canonical(lora.whole, model) if model else lora.whole
    return replace(lora, match=match, whole=words)


def alone(lora: Lora | None) -> tuple[ParamGroup, ...]:
    """Return groups that follow the user's: only adapters and whole modules train."""
    if lora is None:
        return ()
    rest = ParamGroup(("*",), frozen=True)
    return ParamGroup((ADAPTERS,)), *whole.patterns(lora), rest


def _kept(walk: Walk, at: KeyPlace, lora: Lora, groups: Sequence[ParamGroup]) -> None:
    """Refuse groups that train anything besides adapters and whole modules."""
    base = [n for n in walk.tensors if not fnmatchcase(n, ADAPTERS)]
    base = [n for n in base if not whole.is_whole(lora, n)]
    for i, group in enumerate(groups):
        for j, pattern in enumerate(() if group.frozen else group.match):
            found = next((n for n in base if fnmatchcase(n, pattern)), None)
            if found:
                raise (at / i / "match" / j).fail(
                    f"'{pattern}' matches {found}, which train.lora freezes",
                    "patterns that match only adapters, such as '*.lora_B.weight', and modules of "
                    "train.lora.whole",
                )


def _positions(at: KeyPlace, units: Sequence[UnitKeys], sequence: int) -> None:
    """Require at least as many positions as a sample has tokens."""
    for i, unit in enumerate(units):
        context = unit.embedding.context if unit.embedding else None
        if context is not None and context < sequence:
            raise (at / i / "embedding" / "context").fail(
                f"{context} positions are fewer than train.sequence {sequence}",
                "context >= train.sequence",
            )


def _sizes(walk: Walk, root: KeyPlace, train: Train) -> None:
    """Require that a micro-batch is not too long for the model."""
    rows = train.micro_batch * train.sequence
    if rows > DIM or rows * walk.made > ELEMS:
        raise (root / "train" / "micro_batch").fail(
            f"{rows} rows (micro_batch x sequence) of {walk.made} elements are too many",
            f"up to {DIM} rows and {ELEMS} elements",
        )


def _documents(at: KeyPlace, data: Data, vocab: int) -> None:
    """Refuse a token `end` that cannot end a document."""
    if data.packed and data.end is None:
        raise (at / "documents").fail("mask needs `end`", "with `end: TOKEN`")
    if data.end is None:
        return
    here = at / "end"
    if not data.packed:
        raise here.fail(
            "has no effect unless documents are masked", "with `documents: mask`"
        )
    if data.end >= vocab:
        raise here.fail(
            f"{data.end} is not below model.vocab {vocab}", f"0 to {vocab - 1}"
        )
    if data.end == data.ignore:
        raise here.fail(
            "equals data.ignore, which the model reads as token 0", "another token"
        )


def _grown(at: KeyPlace, m: ModelKeys) -> None:
    """Require fewer rows to grow than there will be, and new rows for their first values."""
    rows, most = m.vocab_from, m.vocab - 1
    if rows is not None and rows > most:
        here = at / "vocab_from"
        raise here.fail(f"{rows} is not below model.vocab {m.vocab}", f"1 to {most}")
    if rows is None and m.vocab_rows != "mean":
        wrong = "has no effect without model.vocab_from, which --vocab of --from sets"
        raise (at / "vocab_rows").fail(f"{m.vocab_rows} {wrong}", "mean")


def _units(walk: Walk, at: KeyPlace, units: Sequence[UnitKeys]) -> list[Unit]:
    """Return all units. Raises SpecError, which lists the mistakes of all of them."""
    _order(at, units)
    layers = [u.blocks or 0 for u in units]
    every = sum(layers)
    if every > LAYERS:
        most = layers.index(max(layers))
        where = at / most / "blocks"
        raise where.fail(f"the model has {every} layers", f"up to {LAYERS}")
    wrong = Mistakes()
    found = [wrong.of(_unit, walk, at / i, u) for i, u in enumerate(units)]
    wrong.end()
    return [unit for unit in found if unit]


def build(
    keys: SpecKeys, file: Node, mistakes: Mistakes
) -> tuple[Model, Names, dict[str, bool]] | None:
    """Return the model of a spec whose keys are valid one by one, notes about groups of its
    tensors, and its linears (as of Walk). None if the model is wrong; `mistakes` has the errors."""
    m, train, root = keys.model, keys.train, KeyPlace(file, ())
    dropouts = train.dropout, train.attention_dropout
    sample = train.sequence, keys.data.packed, train.lora
    walk = Walk(m, *sample, *dropouts, train.sequence_blocks)
    check, model, data = mistakes.check, ("model",), keys.data
    check(("data", *model), _documents, root / "data", data, m.vocab)
    check(model, _grown, root / "model", m)
    at = root / "model" / "units"
    check(("train.sequence", *model), _positions, at, m.units, train.sequence)
    units = check(model, _units, walk, at, m.units)
    if units is None:
        return None
    check(("train.sequence", "train.micro_batch"), _sizes, walk, root, train)
    made = Model(m.vocab, m.width, m.names, tuple(units), m.vocab_from, m.vocab_rows)
    told: list[str] = []
    lora = named(keys, made, walk.linears)
    if lora and train.lora:
        here, words = root / "train" / "lora", train.lora.whole
        check(("train.lora",), _adapted, walk, here / "match", units[-1].ops[-1].args)
        check(("train.lora",), _sized, walk, here / "groups", lora.groups)
        check(("train.lora",), whole.checked, walk, here / "whole", words, made)
        told += whole.notes(here, lora, made)
    patterns = root / "zero" / "replicate"
    for i, pattern in enumerate(keys.zero.replicate):
        check(("zero.replicate",), _matched, walk, patterns / i, pattern)
    at, groups = (
        root / "train" / "optimizer" / "groups",
        train.optimizer.groups,
    )
    reads = ("train.optimizer.groups",)
    if lora:
        check((*reads, "train.lora"), _kept, walk, at, lora, groups)
    told += check(reads, lambda: tuple(_grouped(walk, at, groups))) or ()
    return made, tuple(told), walk.linears
