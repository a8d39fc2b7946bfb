"""choices.py -- writes and reads files of multiple choice in llm.c's format, for tests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

MAGIC = 20240522


@dataclass(frozen=True)
class Example:
    context: Sequence[int]
    completions: Sequence[Sequence[int]]
    label: int

    def words(self, number: int) -> list[int]:
        found = [65535, 0, number, self.label, len(self.completions)]
        for tokens in (self.context, *self.completions):
            found += [len(tokens), *tokens]
        found[1] = 2 * len(found)
        return found


def packed(words: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(words)}H", *words)


def header(count: int, longest: int, magic: int = MAGIC, version: int = 1):
    return struct.pack("<4i", magic, version, count, longest).ljust(1024, b"\0")


def file(examples: Sequence[Example]) -> bytes:
    each = [packed(x.words(i)) for i, x in enumerate(examples)]
    return header(len(each), max(map(len, each))) + b"".join(each)


def parsed(data: bytes) -> list[Example]:
    """Return the examples of such a file, which must follow llm.c's format exactly."""
    magic, version, count, longest = struct.unpack("<4i", data[:16])
    assert (magic, version) == (MAGIC, 1) and not any(data[16:1024])
    words = struct.unpack(f"<{len(data) // 2 - 512}H", data[1024:])
    found, at, most = [], 0, 0
    while at < len(words):
        begin, size, number, label, many = words[at : at + 5]
        assert begin == 65535 and number == len(found)
        most = max(most, size)
        end = at + size // 2
        at += 5
        lists = []
        for _ in range(many + 1):
            lists.append(words[at + 1 : at + 1 + words[at]])
            at += 1 + words[at]
        assert at == end
        found.append(Example(lists[0], lists[1:], label))
    assert (len(found), most) == (count, longest)
    return found
