"""chunks.py -- number of chunks of tokens in which the head and the loss process a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping

from ..facts import ops
from ..read.spec import Spec

CHUNK, CHUNKS, VALUES = 256, 8, 8


def rounds(spec: Spec, dims: Mapping[str, int], elems: int, bias: bool) -> int:
    """Return the number of chunks for the head. It depends on the shape and the precision alone.

    Auto takes the fewest chunks whose logits are at most VALUES activations of the model's width: a
    block's backward needs as much anyway. There are at most CHUNKS chunks of at least CHUNK tokens,
    each a multiple of the terms of a sum. Chunks need an f32 sum of a gradient of `elems` elements,
    so they must save more logits than that takes.
    """
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
