"""chunks.py -- in how many chunks of tokens the head and the loss go through a micro-batch."""
from __future__ import annotations

from typing import Mapping

from ..facts import ops
from ..read.spec import Spec

CHUNK, CHUNKS, VALUES = 256, 8, 8


def rounds(spec: Spec, dims: Mapping[str, int], tied: bool, bias: bool) -> int:
    """In how many chunks the head goes through a grain's tokens. Auto: in the fewest with which
    logits are no more than VALUES values of the model's width, as a block's backward holds anyway;
    at most CHUNKS of at least CHUNK tokens; and only where logits are saved more than the f32 sum
    of the weight's gradient takes that chunks need. Of the shape and the precision alone."""
    M, R, real = dims["M"], dims["R"], ops.BYTES[spec.train.precision]
    if spec.train.head_chunk:
        return M // spec.train.head_chunk
    tried = [n for n in range(1, CHUNKS + 1) if M % n == 0 and (n == 1 or M // n >= CHUNK)]
    n = next((n for n in tried if R <= n * VALUES * dims["C"]), tried[-1])
    saved = (M - M // n) * R * real
    cost = 0 if tied or real == 4 else 4 * R * dims["C"]
    return n if saved > cost and not bias else 1
