"""test_rope.py -- tests frequencies of rotary positions against formulas in floats."""

import numpy as np
import pytest
from zg.facts import rope

from tests.lib import oracle

CONTEXT = 16
SCALINGS = {
    "none": None,
    "linear": {},
    "dynamic": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 4.0, "beta_slow": 0.25, "truncate": False},
    "longrope": {},
}


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 5 * CONTEXT])
@pytest.mark.parametrize("width", [4, 6, 8, 10, 12, 128])
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies(kind: str, width: int, length: int) -> None:
    """They are the formulas' for every width, so no scaling is taken for another one that has as
    many numbers."""
    scaling, theta = SCALINGS[kind], 10000.0
    if scaling is not None:
        scaling = {"type": kind, "factor": 8.0, "original_context": CONTEXT, **scaling}
    if kind == "longrope":
        for n, key in enumerate(("short_factor", "long_factor")):
            scaling[key] = [1.5 + n + i / 4 for i in range(width // 2)]
    found = rope.frequencies(width, theta, rope.fields(scaling, length))
    angles = oracle.rope_angles({"theta": theta, "scaling": scaling}, 2, width, length)
    assert np.allclose(found, angles[1], rtol=1e-12)
    plain = rope.frequencies(width, theta, ())
    same = kind == "none" or kind == "dynamic" and length <= CONTEXT
    assert (found == plain) == same
