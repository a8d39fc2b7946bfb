"""chunks.py -- in how many chunks of tokens the head and the loss go through a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

from ..facts import ops
from ..read.spec import Spec

CHUNK, CHUNKS, VALUES = 256, 8, 8


def rounds(spec: Spec, dims: Mapping[str, int], elems: int, bias: bool) -> int:
    """In how many chunks the head goes through a micro-batch's tokens. Auto: in the fewest with
    which logits are no more than VALUES values of the model's width, as a block's backward holds
    anyway; at most CHUNKS of at least CHUNK tokens, a multiple of the terms of a sum; and only
    where logits are saved more than the f32 sum of a gradient of `elems` takes that chunks need. Of
    the shape and the precision alone."""
    M, R, C = dims["M"], dims["R"], dims["C"]
    asked = spec.train.head_chunk
    if asked:
        return M // asked
    most = min(CHUNKS, max(1, M // CHUNK))
    terms = ops.TERMS[spec.train.precision]
    for n in range(1, most + 1):
        if M % n or n > 1 and M // n % terms:
            continue
        fewest = n
        if R <= n * VALUES * C:
            break
    real = ops.BYTES[spec.train.precision]
    saved = (M - M // fewest) * R * real
    cost = 0 if real == 4 else 4 * elems
    return fewest if saved > cost and not bias else 1
