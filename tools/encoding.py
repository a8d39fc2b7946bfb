"""encoding.py -- encodes pieces by a tokenizer: bytes, Hugging Face's, or a BPE trained here.

A document is the tokenizer's prefix of a text (such as a beginning-of-text token), the text's
tokens, and `end`. A conversation is its template's text, and `end`, which is no target.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from chat import PROBE, Span, Template, rendered, spans_of
from checkpoint import Bad
from documents import LINES, Layout, Piece, hashes, loaded
from pretrained import (
    Pretrained,
    Source,
    library,
    nothing,
    pretrained,
    vocabulary,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
USED = ("default", "tool_use")  # templates: without tools and with them
# Candidates if no file names one
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>")
NEVER = (sys.maxsize, sys.maxsize)

Ids = list[int]


class Bytes:
    """Encoding with one token per byte."""

    def __init__(self, text: str) -> None:
        self.ids = list(text.encode())
        self.text = text

    @property
    def offsets(self) -> list[Span]:
        return [
            (at, at + 1) for at, letter in enumerate(self.text) for _ in letter.encode()
        ]


@dataclass
class Recipe:
    """Settings that turn pieces into tokens; all that a process needs."""

    layout: Layout = field(default_factory=lambda: Layout("text"))
    file: str | None = None  # content of tokenizer.json; None for bytes
    vocab: int = 256
    end: int | None = None
    around: tuple[Ids, Ids] = field(default_factory=lambda: ([], []))
    templates: dict[str, Source] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    now: datetime = field(default_factory=datetime.now)
    pack: int = 0  # tokens of a sample that documents are packed into; 0: a stream
    below: int = 0  # hash bound of validation documents
    cut: int | None = None  # byte of the only text at which validation starts

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab <= 65535 else "uint32"

    @property
    def ignore(self) -> int | None:
        """The label of a token that is no target; None if every token is one."""
        if self.layout.kind == "text" and not self.pack:
            return None
        return int(np.iinfo(self.dtype).max)

    def val(self, numbers: Sequence[int]) -> list[bool]:
        """Return whether each document belongs to validation, by their numbers."""
        each = np.array(numbers, np.uint64)
        if self.cut is not None:
            return [bool(x) for x in each > 0]
        return [bool(x) for x in hashes(each) < np.uint64(self.below)]

    @property
    def sha256(self) -> str | None:
        if self.file is None:
            return None
        return hashlib.sha256(self.file.encode()).hexdigest()


@dataclass
class Part:
    """Tokens of some pieces for one split."""

    tokens: bytes
    labels: bytes
    ends: list[int]  # number of tokens up to the end of each document


@dataclass
class Gathered:
    """A part that is being collected."""

    tokens: Ids = field(default_factory=list)
    labels: Ids = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, piece: Piece, tokens: Ids, labels: Ids) -> None:
        self.tokens += tokens
        self.labels += labels
        if piece.last and tokens:
            self.ends.append(len(self.tokens))

    def part(self, dtype: str) -> Part:
        little = np.dtype(dtype).newbyteorder("<")
        tokens = np.array(self.tokens, little)
        labels = np.array(self.labels, little)
        return Part(tokens.tobytes(), labels.tobytes(), self.ends)


@dataclass
class Done:
    parts: tuple[Part, Part]
    bytes: int
    empty: int


# ---- tokenizers


def around(tokenizer: Tokenizer) -> tuple[Ids, Ids]:
    """Return the tokens that a tokenizer puts before and after a text, found by encoding a
    sample."""
    own = {x.content for x in tokenizer.get_added_tokens_decoder().values()}
    texts = ("a", *(x for x in tokenizer.get_vocab() if x not in own))
    bare: Ids = []
    for text in texts:
        bare = tokenizer.encode(text, add_special_tokens=False).ids
        if bare:
            break
    whole = tokenizer.encode(text).ids
    for at in range(len(whole)):
        behind = at + len(bare)
        if whole[at:behind] == bare:
            return whole[:at], whole[behind:]
    return [], []


def recipe(known: Pretrained, where: Path) -> Recipe:
    """Return the recipe of a tokenizer. A text ends with `eos_token`, or with a token of a usual
    name."""
    tokenizer = library(known.text, where)
    own = known.names.get("eos_token")
    names = [own] if own else ENDS
    ends = map(tokenizer.token_to_id, names)
    return Recipe(
        file=known.text,
        vocab=vocabulary(tokenizer),
        end=next((x for x in ends if x is not None), None),
        around=around(tokenizer),
        templates=known.templates,
        variables=known.names,
        notes=known.notes,
    )


def read(name: str) -> Recipe:
    """Return the recipe of `bytes`, a tokenizer.json, or a folder with one."""
    if name == "bytes":
        return Recipe()
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists() and path.is_dir():
        raise nothing(path)
    return recipe(pretrained(file), file)


def trained(texts: Iterator[str], size: int) -> Recipe:
    """Train a byte-level BPE of `size` tokens; the first one ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    text = tokenizer.to_str(pretty=True) + "\n"
    return recipe(Pretrained(text), Path("tokenizer.json"))


# ---- pieces to texts


def decoded(piece: Piece, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as e:
        line = piece.line + text.count(b"\n", 0, e.start)
        raise Bad(
            f"{piece.where}:{line}: not UTF-8; convert it with `iconv -t UTF-8`"
        ) from None


def record(piece: Piece, layout: Layout) -> dict[str, Any]:
    """Return a record, which must have all fields of the layout."""
    found = piece.record
    if isinstance(found, bytes):
        found = loaded(piece.where, found)
    if not isinstance(found, dict):
        raise Bad(f"{piece.where}: {LINES}")
    for name in layout.fields:
        if found.get(name) is None:
            raise Bad(f"{piece.where}: no field {name}, which the first record has")
    return found


def text_in(piece: Piece, layout: Layout) -> str:
    if not layout.fields:
        return decoded(piece, piece.record)
    (name,) = layout.fields
    found = record(piece, layout)[name]
    if not isinstance(found, str):
        raise Bad(f"{piece.where}: {name} is not text")
    return sound(piece, found)


def sound(piece: Piece, text: str) -> str:
    """Refuse half a surrogate pair, which JSON may contain."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Bad(f"{piece.where}: half a UTF-16 surrogate pair is not text") from None
    return text


# ---- texts to tokens


class Encoder:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.tokenizer: Tokenizer | None = None
        if recipe.file is not None:
            self.tokenizer = library(recipe.file, "tokenizer.json")
        self.templates: dict[str, Template] = {}
        if recipe.layout.kind != "text":
            there = recipe.templates
            if there and "default" not in there:
                raise Bad(
                    f"chat templates: none is named default; the names are: {', '.join(there)}"
                )
            self.templates = {
                name: Template(source.text, recipe.variables, recipe.now, source.where)
                for name, source in recipe.templates.items()
                if name in USED
            }
        if self.tokenizer:
            # `around` has its tokens; with it, offsets might omit spaces
            self.tokenizer.post_processor = None

    def ids(self, text: str) -> Ids:
        if self.tokenizer is None:
            return list(text.encode())
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def splits(self, before: bytes, after: bytes) -> bool:
        """Return whether a text may be cut between two parts. Their outer ends may be incomplete
        letters."""
        a, b = (x.decode(errors="ignore") for x in (before, after))
        return self.ids(a + b) == self.ids(a) + self.ids(b)

    def separator(self) -> int | None:
        """Return the token that ends a document: the first of the usual ones that templates write
        at most at the end. None if there is none."""
        assert self.tokenizer
        inner: set[int] = set()
        for template in self.templates.values():
            try:
                text, _ = spans_of(template.render(PROBE, None))
            except Bad:  # it requires other conversations
                return None
            inner |= {*self.ids(text)[:-1]}
        names = [self.recipe.variables.get("eos_token"), *ENDS]
        names.append(self.recipe.variables.get("pad_token"))
        found = map(self.tokenizer.token_to_id, filter(None, names))
        return next((x for x in found if x is not None and x not in inner), None)

    def notes(self) -> list[str]:
        """Return notes about templates whose answers have no end."""
        return [
            f"{x.where}: writes nothing behind an answer that is learned (no end of turn): a model"
            " does not learn from it where to stop"
            for x in self.templates.values()
            if x.ends() is False
        ]

    def encodings(self, texts: Sequence[str], spans: bool) -> Sequence[Any]:
        if self.tokenizer is None:
            return [Bytes(text) for text in texts]
        batch = self.tokenizer.encode_batch_fast
        if spans:
            batch = self.tokenizer.encode_batch
        return batch(texts, add_special_tokens=False)

    def closed(self, ids: Ids) -> Ids:
        """Return the tokens to append to a document with these ids."""
        end = self.recipe.end
        return [] if end is None or ids[-1:] == [end] else [end]

    def texts(self, pieces: Sequence[Piece]) -> Iterator[tuple[Ids, Ids]]:
        """Yield tokens and labels of each piece; every token is a target."""
        labelled = self.recipe.ignore is not None
        texts = [text_in(piece, self.recipe.layout) for piece in pieces]
        before, behind = self.recipe.around
        last = behind + self.closed(behind)
        found = self.encodings(texts, False)
        for piece, each in zip(pieces, found, strict=True):
            ids = each.ids
            if ids or not piece.first:
                head = before if piece.first else []
                tail = last if piece.last else []
                ids = [*head, *ids, *tail]
            yield ids, ids if labelled else []

    def conversation(self, piece: Piece) -> tuple[str, list[Span]]:
        fields = self.recipe.layout.fields
        values = record(piece, self.recipe.layout)
        try:
            text, spans = rendered(self.templates, values, fields)
        except Bad as e:
            raise Bad(f"{piece.where}: {e}") from None
        return sound(piece, text), spans

    def learned(self, ids: Ids, offsets: Sequence[Span], spans: Sequence[Span]) -> Ids:
        """Return labels. A token with a character in a span is a target."""
        ignore = self.recipe.ignore
        assert ignore is not None
        labels = [ignore] * len(ids)
        left = iter(spans)
        start, end = next(left)
        for at, (a, b) in enumerate(offsets):
            while a >= end:
                start, end = next(left, NEVER)
            if b > start:
                labels[at] = ids[at]
        return labels

    def conversations(self, pieces: Sequence[Piece]) -> Iterator[tuple[Ids, Ids]]:
        """Yield tokens and labels of each piece."""
        chats = [self.conversation(piece) for piece in pieces]
        texts = [text for text, _ in chats]
        found = self.encodings(texts, True)
        before, behind = self.recipe.around
        ignore = self.recipe.ignore
        assert ignore is not None
        for (_, spans), each in zip(chats, found, strict=True):
            ids = each.ids
            labels = self.learned(ids, each.offsets, spans)
            if self.templates:
                end = self.closed(ids)
                yield ids + end, labels + [ignore] * len(end)
            else:
                tail = behind + self.closed(behind)
                blank = [ignore] * len(before)
                yield before + ids + tail, blank + labels + tail

    def encode(self, pieces: Sequence[Piece]) -> Done:
        how = self.conversations
        if self.recipe.layout.kind == "text":
            how = self.texts
        parts = (Gathered(), Gathered())
        val = self.recipe.val([piece.number for piece in pieces])
        read = empty = 0
        for piece, which, made in zip(pieces, val, how(pieces), strict=True):
            tokens, labels = made
            parts[which].add(piece, tokens, labels)
            read += piece.bytes
            if piece.last and not tokens:
                empty += 1
        train, validation = (x.part(self.recipe.dtype) for x in parts)
        return Done((train, validation), read, empty)
