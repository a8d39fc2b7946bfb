"""documents.py -- reads documents from files of text, JSONL or Parquet, in pieces of bounded size.

Invariants
 1. Pieces depend only on the files, and on where a tokenizer allows a cut.
 2. A piece of a text is about PIECE bytes, extended to the next place to cut; a record is a piece.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import checkpoint
import numpy as np
from chat import ALPACA, BESIDE
from checkpoint import Bad
from numpy.typing import NDArray
from zg.output import naming

PIECE = 1 << 18  # bytes
# Bytes in which a cut is searched, context on both sides, and attempts
TAIL, CONTEXT, TRIES = 1 << 16, 256, 16
ROWS = 256  # rows of Parquet at a time
# Ends of lines, first those not followed by a blank line, then any.
LINE_ENDS = re.compile(rb"(?<=\S)\r?\n(?=\S)"), re.compile(rb"\n(?=\S)")

# Fields of a record, unless --field names another; the first that are all there count.
WAYS = (
    ("messages",),
    ("conversations",),
    ALPACA,
    ("text",),
    ("prompt", "completion"),
)
FIELDS = tuple(name for way in WAYS for name in way)

GZIP = b"\x1f\x8b\x08"
# Signatures of other files with their offsets (as in runtime/zr_foreign.c), the kind of file, and a
# hint.
FOREIGN = (
    (b"\x28\xb5\x2f\xfd", 0, "compressed by zstd: `zstd -d` makes it text"),
    (b"\xfd7zXZ\0", 0, "compressed by xz: `xz -d` makes it text"),
    (b"1AY&SY", 4, "compressed by bzip2: `bzip2 -d` makes it text"),
    (b"PK\x03\x04", 0, "a zip archive: `unzip` makes files of it"),
    (b"PAR1", 0, "Parquet: `./run data parquet` reads it"),
    (
        b"version https://git-lfs",
        0,
        "a pointer of Git LFS: `git lfs pull` gets the file",
    ),
    (b"\xff\xfe", 0, "UTF-16: `iconv -f UTF-16 -t UTF-8` makes UTF-8 of it"),
    (b"\xfe\xff", 0, "UTF-16: `iconv -f UTF-16 -t UTF-8` makes UTF-8 of it"),
)

Splits = Callable[[bytes, bytes], bool]
Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Piece:
    """A piece of a document; most documents are one piece. record: bytes of a text, a line of JSON,
    or a row."""

    where: str
    number: int  # the document's number
    record: Any
    bytes: int  # bytes of the file
    line: int = 1  # first line of a piece of text
    first: bool = True
    last: bool = True


@dataclass(frozen=True)
class Layout:
    """Layout of a document: `text`, `messages`, or `prompt` with a completion or an output, and its
    fields (none for a text file)."""

    kind: str
    fields: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a record that are read."""
        return self.fields if self.kind == "text" else (*self.fields, *BESIDE)


# ---- files


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file of text, decompressed if it is gzip."""
    with naming(path), open(path, "rb") as file:
        head = file.read(24)
        file.seek(0)
        for magic, at, what in FOREIGN:
            if head.startswith(magic, at):
                raise Bad(f"{path}: is {what}")
        if not head.startswith(GZIP):
            yield file
            return
        try:
            with gzip.open(file) as unpacked:
                yield cast(BinaryIO, unpacked)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise Bad(f"{path}: damaged gzip: {e}") from None


def size_of(path: Path) -> int:
    """Return the bytes of a file's text, after decompression."""
    size = checkpoint.size_of(path)
    with open(path, "rb") as file:
        if not file.read(3).startswith(GZIP):
            return size
        return unpacked(path, size, os.fstat(file.fileno()).st_mtime_ns)


@cache
def unpacked(path: Path, size: int, changed: int) -> int:
    """Return the bytes of decompressed text, cached by the file's size and time."""
    with reading(path) as file:
        return sum(len(x) for x in iter(lambda: file.read(PIECE), b""))


# ---- text


def place(buffer: bytearray, since: int, splits: Splits) -> int:
    """Return the last place after `since` and near the end where the tokenizer allows a cut; 0 if
    there is none. It compares CONTEXT bytes on both sides."""
    since = max(since, len(buffer) - TAIL)
    stop = len(buffer) - CONTEXT + 1
    for line_end in LINE_ENDS:
        ends = [x.end() for x in line_end.finditer(buffer, since, stop)]
        for at in islice(reversed(ends), TRIES):
            start = max(0, at - CONTEXT)
            before = bytes(buffer[start:at])
            after = bytes(buffer[at : at + CONTEXT])
            if splits(before, after):
                return at
    return 0


def pieces(
    path: Path, start: int, stop: int, number: int, splits: Splits
) -> Iterator[Piece]:
    """Yield the pieces of bytes [start, stop), which are one document."""
    where = str(path)
    line, first = 1, True
    rest = bytearray()
    with reading(path) as file:
        file.seek(start)
        while start < stop:
            left = stop - start
            block = file.read(min(PIECE, left))
            if not block:
                raise Bad(f"{path}: became shorter while being read")
            if b"\0" in block:
                raise Bad(f"{path}: is not text: it has a zero byte")
            start += len(block)
            since = max(0, len(rest) - CONTEXT)
            rest += block
            at = place(rest, since, splits) if start < stop else 0
            if at:
                part = bytes(rest[:at])
                yield Piece(where, number, part, at, line, first, False)
                line += part.count(b"\n")
                first = False
                del rest[:at]
    yield Piece(where, number, bytes(rest), len(rest), line, first)


def line_start(path: Path, at: int) -> int:
    """Return the start of the first line after byte `at`, or the end of the file."""
    with reading(path) as file:
        file.seek(at)
        file.readline()
        return file.tell()


def texts(files: Sequence[Path], splits: Splits, cut: int | None) -> Iterator[Piece]:
    """Yield pieces of texts. A file is a document; with `cut` the only file is two, split at that
    byte."""
    if cut is not None:
        (path,) = files
        yield from pieces(path, 0, cut, 0, splits)
        yield from pieces(path, cut, size_of(path), 1, splits)
        return
    for number, path in enumerate(files):
        yield from pieces(path, 0, size_of(path), number, splits)


# ---- records


def lines(files: Sequence[Path]) -> Iterator[Piece]:
    """Yield the lines of files. A line is a document, unless it is blank."""
    number = 0
    for path in files:
        with reading(path) as file:
            for line, text in enumerate(file, 1):
                if text.strip():
                    yield Piece(f"{path}:{line}", number, text, len(text))
                    number += 1


def parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise Bad(f"{path}: not a Parquet file: {e}") from None


def rows(files: Sequence[Path], fields: Sequence[str]) -> Iterator[Piece]:
    """Yield the rows of files. A row is a document with the given fields."""
    import pyarrow

    number = 0
    for path in files:
        file = parquet(path)
        there = file.schema_arrow.names
        columns = [x for x in there if x in fields]
        share = size_of(path) // max(file.metadata.num_rows, 1)
        row = 0
        try:
            for batch in file.iter_batches(ROWS, columns=columns):
                for record in batch.to_pylist():
                    row += 1
                    where = f"{path}: row {row}"
                    yield Piece(where, number, record, share)
                    number += 1
        except (
            pyarrow.ArrowException,
            OSError,
            ValueError,
            OverflowError,
        ) as e:
            raise Bad(f"{path}: damaged after row {row}: {e}") from None


LINES = (
    "not an object: a record is {...} in a line; `jq -c .[]` makes lines of an array"
)


def loaded(where: str, line: bytes) -> Any:
    """Parse a line of JSON."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as e:
        raise Bad(f"{where}: byte {e.start + 1} is not UTF-8") from None
    except RecursionError:
        raise Bad(f"{where}: JSON is nested too deeply") from None
    except ValueError as e:
        raise Bad(f"{where}: not JSON: {e}") from None


def layout(piece: Piece, field: str | None) -> Layout:
    """Return the layout of the first record, which the others must share."""
    record = piece.record
    if isinstance(record, bytes):
        array = record.strip() == b"["
        record = [] if array else loaded(piece.where, record)
    if not isinstance(record, dict):
        raise Bad(f"{piece.where}: {LINES}")
    for way in [(field,)] if field else WAYS:
        if record.keys() >= {*way}:
            chat = isinstance(record[way[0]], list)
            kind = "prompt" if len(way) > 1 else "messages" if chat else "text"
            return Layout(kind, way)
    wanted = field or (
        "text, messages, conversations, instruction and output, or prompt and completion"
    )
    there = ", ".join(map(str, record)) or "nothing"
    raise Bad(
        f"{piece.where}: no field {wanted}; the fields are: {there}; rename one, or use --field"
    )


def opened(
    kind: str,
    files: Sequence[Path],
    fields: Sequence[str],
    splits: Splits,
    cut: int | None,
) -> Iterator[Piece]:
    if kind == "text":
        return texts(files, splits, cut)
    return lines(files) if kind == "jsonl" else rows(files, fields)


def first(kind: str, files: Sequence[Path], field: str | None) -> Layout:
    """Return the layout of all files, by the first record. Every file must have content."""
    for path in files:
        if not size_of(path):
            raise Bad(f"{path}: empty")
    if kind == "text":
        return Layout("text")
    if kind == "jsonl":
        found = next(lines(files), None)
    else:
        known = parquet(files[0]).schema_arrow.names
        asked = [name for name in known if name in ([field] if field else FIELDS)]
        found = next(rows(files, asked or known), None)
    if found is None:
        raise Bad(f"{files[0]}: no record")
    layout_ = layout(found, field)
    for path in files if kind == "parquet" else ():
        lacking = {*layout_.fields} - {*parquet(path).schema_arrow.names}
        if lacking:
            raise Bad(f"{path}: no column {', '.join(sorted(lacking))}")
    return layout_


# ---- choice of validation documents


def hashes(numbers: NDArray[Any]) -> Hashes:
    """Return splitmix64 of document numbers, with a fixed initial state."""
    x = numbers.astype(np.uint64) + np.uint64(0x7A65726F)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def count(kind: str, files: Sequence[Path]) -> int:
    """Return the number of documents."""
    if kind == "text":
        return len(files)
    if kind == "jsonl":
        return sum(1 for _ in lines(files))
    return sum(parquet(path).metadata.num_rows for path in files)


def bound(wanted: int, of: int) -> int:
    """Return the bound below which the hashes of `wanted` among `of` documents lie."""
    least: Hashes = np.empty(0, np.uint64)
    for at in range(0, of, PIECE):
        more = hashes(np.arange(at, min(at + PIECE, of)))
        least = np.sort(np.concatenate([least, more]))[:wanted]
    return int(least[-1]) + 1
