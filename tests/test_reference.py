"""test_reference.py -- the trained program against PyTorch's float64 numbers (tests/reference):
loss, every gradient, and 20 AdamW steps, through weights in and weights out."""
import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

import oracle
import trainer
from reference import known
from zg import spec as reader

FAMILIES = ['gpt', 'llama', 'qwen3']
CASES = ['plain', 'ignored']
HOLE = 65535           # what a uint16 file of tokens holds where there is none

# One AdamW step from zero moments, without decay and clipping, moves a weight by
# lr * g / (|g| + eps): with eps = 1 and lr = 512 the saved weights show g. A weight's own rounding
# (2^-24 of at most 1.25 + 512 |g|) then disturbs g by less than 1.5e-10 + 2^-24 |g|.
RATE = 512.0
SHOW = [f'train.optimizer.lr={RATE}', 'train.optimizer.eps=1.0', 'train.optimizer.weight_decay=0.0',
        'train.optimizer.clip=0.0', 'train.schedule.type=constant', 'train.schedule.warmup=0',
        'train.schedule.min_lr=0.0']

# float32 gradients. An element is a sum over 264 or 320 tokens of products that went through about
# 30 chains of at most 240 roundings of 2^-24 each: random signs give sqrt(30 * 240) * 2^-24 = 5e-6
# of the largest element (a third of that is what there is); all signs alike would give 4e-4.
GRADIENT = 5e-6
LOSS = 2e-7            # a mean over tokens of losses that are 30 roundings of 2^-24 of 6 or so off


def setting(name: str) -> tuple[pathlib.Path, oracle.Arrays, np.ndarray, dict[str, np.ndarray]]:
    """path of a tiny spec, initial weights, tokens and reference"""
    path = trainer.ROOT / 'model_specs' / f'{name}-tiny.yaml'
    spec = reader.load(str(path))
    params = {tensor: known.weight(tensor, shape, known.is_norm_weight(tensor))
              for tensor, shape in oracle.shapes(spec).items()}
    with np.load(trainer.ROOT / 'tests' / 'reference' / f'{name}.npz') as file:
        return path, params, known.stream(name, spec.train.sequence, spec.model.vocab), dict(file)


def losses(folder: pathlib.Path) -> np.ndarray:
    lines = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    return np.array([line['loss'] for line in lines if 'step' in line and 'loss' in line])


def off(found: np.ndarray, expected: np.ndarray) -> float:
    """largest difference over largest element"""
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', FAMILIES)
def test_gradients(tmp_path: pathlib.Path, name: str, case: str) -> None:
    path, params, tokens, ref = setting(name)
    if case == 'ignored':
        tokens = np.where(tokens == known.HOLE, HOLE, tokens)
    after = trainer.train(path, tmp_path, params, tokens, 1, 'data.ignore=65535', *SHOW)
    assert after.keys() == params.keys()
    assert off(losses(tmp_path), ref[f'{case}/loss']) <= LOSS
    for tensor, p in params.items():
        u = (p - np.float64(after[tensor])) / RATE
        error = off(known.digest(tensor, u / (1 - np.abs(u))), ref[f'{case}/grad/{tensor}'])
        assert error <= GRADIENT, f'{tensor}: off by {error:.3g} of the largest element'


def with_errors(rng: np.random.Generator) -> Callable:
    """Gradients with errors as float32 makes them: up to GRADIENT of the largest element in the
    row. What is exactly zero (the row of a token that never came) stays so."""
    def disturb(g: np.ndarray) -> np.ndarray:
        row = np.abs(g).max(-1, keepdims=True) * (g != 0)
        return g + GRADIENT * row * rng.uniform(-1, 1, g.shape)

    def gradients(*args) -> tuple[float, int, oracle.Arrays]:
        loss, valid, grads = oracle.gradients(*args)
        return loss, valid, {name: disturb(g) for name, g in grads.items()}
    return gradients


def without_key_bias(name: str, x: np.ndarray) -> np.ndarray:
    """A key's bias moves all scores of a row alike: its gradient is zero but for rounding, and Adam
    makes steps of any size up to lr of that. The program is free to put it anywhere."""
    return np.delete(x, np.s_[x.size // 3:x.size // 3 * 2]) if name.endswith('c_attn.bias') else x


@pytest.mark.parametrize('name', FAMILIES)
def test_twenty_steps(tmp_path: pathlib.Path, name: str) -> None:
    """Adam divides by the gradient's size, so that errors in small gradients count as much as in
    large ones: the bound is what errors like those of float32 do to the float64 evaluator's run."""
    path, params, tokens, ref = setting(name)
    after = trainer.train(path, tmp_path, params, tokens, known.STEPS)
    spec, rng = reader.load(str(path)), np.random.Generator(np.random.Philox(3))
    exact, _, _ = oracle.train(spec, params, tokens, known.STEPS)
    shaken, _, _ = oracle.train(spec, params, tokens, known.STEPS, gradients=with_errors(rng))
    assert off(losses(tmp_path), ref['losses']) <= LOSS
    for tensor, x in exact.items():
        found, expected, other = (without_key_bias(tensor, known.digest(tensor, y))
                                  for y in (after[tensor], x, shaken[tensor]))
        reference = without_key_bias(tensor, ref[f'last/{tensor}'])
        moved = np.abs(without_key_bias(tensor, known.digest(tensor, x - params[tensor]))).max()
        # twice one drawing of the errors; a step rounds a weight twice (decay, move)
        rounded = 2 * known.STEPS * 2.0 ** -24 * np.abs(expected).max()
        bound = 2 * np.abs(other - expected).max() + rounded
        assert bound <= 0.01 * moved, f'{tensor}: the bound {bound:.3g} says nothing'
        error = np.abs(found - reference).max()
        assert error <= bound, f'{tensor}: off by {error:.3g}, bound {bound:.3g}'
