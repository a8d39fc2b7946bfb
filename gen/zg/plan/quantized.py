"""quantized.py -- the formats of quantized weights: their size, and the tensors that have one."""

from __future__ import annotations

from dataclasses import dataclass

from .operand import Ints

NUMBERS = {"int8": 1, "nf4": 2}  # numbers of the formats in kernels/zk.h
# Elements of a chunk, whose bytes follow from its elements alone (kernels/quantized.h).
CHUNKS = {"int8": 256, "nf4": 16384}
BLOCK = 64  # elements of an NF4 block
FLOAT = 4  # bytes; a chunk is a multiple


def chunk(format_: str, elems: int) -> int:
    """Return the bytes of a chunk of so many elements."""
    if format_ == "int8":
        return CHUNKS["int8"] + FLOAT
    blocks = -(-elems // BLOCK)
    return BLOCK // 2 * blocks + -(-blocks // FLOAT) * FLOAT + 2 * FLOAT


def size(format_: str, elems: int) -> int:
    """Return the bytes of a tensor of so many elements."""
    whole, rest = divmod(elems, CHUNKS[format_])
    return whole * chunk(format_, CHUNKS[format_]) + (
        chunk(format_, rest) if rest else 0
    )


@dataclass(frozen=True)
class Quantized:
    """Format of a tensor: its columns, and the rows of each of its parts. '' is none. In text
    FORMAT:COLUMNS:ROWS,ROWS..."""

    format: str = ""
    columns: int = 0
    rows: Ints = ()

    def __str__(self) -> str:
        return f"{self.format}:{self.columns}:{','.join(map(str, self.rows))}"

    @classmethod
    def read(cls, text: str) -> Quantized:
        format_, columns, rows = text.split(":")
        if format_ not in NUMBERS:
            raise ValueError(f"{format_} is no format")
        return cls(format_, int(columns), tuple(map(int, rows.split(","))))

    @property
    def elems(self) -> int:
        """Elements of the weight."""
        return self.columns * sum(self.rows)

    def stored(self, width: int) -> Ints:
        """Return the size of each part, in elements of `width` bytes."""
        return tuple(size(self.format, self.columns * n) // width for n in self.rows)

    @property
    def whole(self) -> bool:
        """True if every part but the last fills its chunks, so that the parts follow each other
        like one weight."""
        each = CHUNKS[self.format]
        return not any(self.columns * n % each for n in self.rows[:-1])
