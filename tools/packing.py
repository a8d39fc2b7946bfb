"""packing.py -- puts whole documents into samples of one length, by best fit, longest first.

A document longer than a sample is cut, and each part counts as a document. The rest of a sample is
padding. Neither padding nor the first token of a part is a target.

Invariants
 1. The samples depend only on the lengths of the documents and of a sample.
 2. Samples come in the order of their longest parts, and parts of a sample in that of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zg.output import naming

AT_ONCE = 1 << 20  # tokens written at once

Span = tuple[int, int]  # tokens [start, end) of the file


@dataclass(frozen=True)
class Packed:
    """Counts of a file that was packed."""

    samples: int
    filled: int  # tokens that are not padding
    cut: int  # documents longer than a sample

    def text(self, size: int) -> str:
        share = self.filled / (self.samples * size)
        told = f"{self.samples:,} samples of {size:,} tokens, {share:.1%} filled"
        if self.cut:
            told += f"; {self.cut:,} documents are longer than a sample and were cut"
        return told


def parts(ends: Sequence[int], size: int) -> tuple[list[Span], int]:
    """Return the parts of documents that end at `ends`, and the number of documents cut."""
    found, start, cut = [], 0, 0
    for end in ends:
        cut += end - start > size
        found += [(at, min(at + size, end)) for at in range(start, end, size)]
        start = end
    return found, cut


def samples(spans: Sequence[Span], size: int) -> list[list[int]]:
    """Return the numbers of the spans in each sample.

    A span goes into the sample with the least room that is enough. `open_` has bit r set if a
    sample with r tokens of room exists.
    """
    lengths = [end - start for start, end in spans]
    made: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    open_ = 0
    for number in sorted(range(len(spans)), key=lambda n: (-lengths[n], n)):
        length = lengths[number]
        fits = open_ >> length
        if fits:
            room = length + (fits & -fits).bit_length() - 1
            sample = with_room[room].pop()
            if not with_room[room]:
                open_ ^= 1 << room
        else:
            room, sample = size, len(made)
            made.append([])
        made[sample].append(number)
        room -= length
        if room:
            with_room.setdefault(room, []).append(sample)
            open_ |= 1 << room
    made.sort(key=lambda numbers: numbers[0])  # the longest is the first
    return [sorted(numbers) for numbers in made]


def filled(
    made: Sequence[Sequence[int]],
    spans: Sequence[Span],
    size: int,
    source: NDArray[Any],
    pad: int,
    first: int | None,
) -> Iterator[NDArray[Any]]:
    """Yield arrays of whole samples, then a last token. first: value of the first token of a part;
    None: its own."""
    rows = max(AT_ONCE // size, 1)
    for at in range(0, len(made), rows):
        some = made[at : at + rows]
        block = np.full((len(some), size), pad, source.dtype)
        for row, numbers in zip(block, some, strict=True):
            to = 0
            for start, end in (spans[n] for n in numbers):
                row[to : to + end - start] = source[start:end]
                if first is not None:
                    row[to] = first
                to += end - start
        yield block.ravel()
    yield np.array([pad], source.dtype)


def pack(
    tokens: Path,
    labels: Path,
    ends: Sequence[int],
    size: int,
    pad: int,
    ignore: int,
    dtype: str,
) -> Packed:
    """Rewrite a file of tokens and one of labels, whose documents end at `ends`."""
    spans, cut = parts(ends, size)
    made = samples(spans, size)
    for path, padding, first in ((tokens, pad, None), (labels, ignore, ignore)):
        stream = path.with_suffix(".stream")
        path.rename(stream)
        source = np.memmap(stream, np.dtype(dtype).newbyteorder("<"), "r")
        with naming(path), open(path, "wb", buffering=0) as file:
            for block in filled(made, spans, size, source, padding, first):
                left = memoryview(block.tobytes())
                while left:
                    left = left[file.write(left) :]
        del source
        stream.unlink()
    return Packed(len(made), sum(end - start for start, end in spans), cut)
