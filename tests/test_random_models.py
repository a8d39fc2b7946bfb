"""test_random_models.py -- programs of drawn models, three steps each, against the evaluator of
oracle.py."""
import pathlib
import tempfile

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import drawn
import oracle
import trainer
from reference import known
from zg import spec as reader

STEPS = 3

# float32 gradients are within 2e-5 of a tensor's largest element (twice the bound that the tiny
# models of test_reference.py keep, and twice for shapes that this short rows make less tame). With
# eps = lr an update's slope in the gradient is at most 1, so three steps add up to 3 such errors;
# and each rounds the weight, of at most 1.3, by 2^-24.
GRADIENT = 2e-5
ROUNDED = STEPS * 2.0 ** -24


@st.composite
def spread(draw) -> drawn.Mapping:
    """a drawn spec and how its work is spread"""
    mapping = draw(drawn.specs())
    train = mapping['train']
    grains = train['global_batch'] // train['micro_batch']
    mapping['cluster'] = {'ranks': draw(st.sampled_from([w for w in (1, 2, 4) if grains % w == 0]))}
    mapping['zero'] = {'stage': draw(st.integers(0, 3))}
    return mapping


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(mapping=spread())
def test_three_steps(mapping: drawn.Mapping) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / 'spec.yaml').write_text(yaml.safe_dump(mapping))
        spec = reader.load(str(folder / 'spec.yaml'))
        params = {tensor: known.weight(tensor, shape, known.is_norm_weight(tensor))
                  for tensor, shape in oracle.shapes(spec).items()}
        tokens = known.stream('drawn', spec.train.sequence, spec.model.vocab)
        found = trainer.train(folder / 'spec.yaml', folder, params, tokens, STEPS)
        largest = {tensor: 0.0 for tensor in params}

        def watch(grads: oracle.Arrays) -> oracle.Arrays:
            largest.update({n: max(largest[n], np.abs(g).max()) for n, g in grads.items()})
            return grads
        expected, _, _ = oracle.train(spec, params, tokens, STEPS, disturb=watch)
    assert found.keys() == expected.keys()
    for tensor, x in expected.items():
        error = np.abs(found[tensor] - x).max()
        bound = STEPS * GRADIENT * largest[tensor] + ROUNDED * max(np.abs(x).max(), 0.25)
        assert error <= bound, f'{tensor}: off by {error:.3g}, bound {bound:.3g}'
