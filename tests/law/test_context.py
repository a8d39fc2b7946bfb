"""test_context.py -- tests samples that are cut into blocks, which ranks share: one hash over all
ways to spread the blocks, and other bits for another number of blocks."""

import pathlib

import numpy as np
import pytest

from tests.law.test_law import ANY_STAGE, BIG, OFFLOADED, PLAIN, UNEVEN, agree, bench
from tests.lib import law

BLOCKS, SAMPLES, STEPS = 8, 8, 5
ATTENTION = "model.units[1].ops[0].residual[1].attention"
# 8 heads that 8 ranks can share, of 2 key-value heads
HEADS = f"{ATTENTION}.heads=8", f"{ATTENTION}.head_dim=8"
CUT = f"train.sequence_blocks={BLOCKS}", "train.sum={block: 64}", *HEADS
RANKS = {"ranks": [1, 2, 4, 8], "context": [1, 2, 4, 8], "family": ["qwen3", "llama"]}


def fits(way: dict) -> bool:
    """Return whether ranks can share samples in this way."""
    N, W, stage = way["context"], way["ranks"], way["stage"]
    if W % N or not law.fits(way):
        return False
    layers = way["accumulate"] == "layers"
    if N == 1 < W and stage > 1 and not layers and SAMPLES > W:
        return False
    if way.get("values") and N < BLOCKS:
        return False
    if 1 < N < min(BLOCKS, W) and not stage:
        return False
    return not any(0 < way[key] < W and way[key] % N for key in ("local", "shard"))


WAYS = law.covering(ANY_STAGE | RANKS, 1, fits) + law.covering(
    OFFLOADED | RANKS, 2, fits
)
# A few ways that are far apart.
FEW = (
    {"ranks": 1},
    {"ranks": 8, "context": 8, "stage": 3, "overlap": True, "again": "full"},
    {"ranks": 4, "context": 2, "stage": 2, "queue": "shuffled:1", "reduce": 5000},
    {"ranks": 8, "context": 4, "stage": 3, "local": 4, "unmap": 1, "prefetch": BIG},
    {"ranks": 2, "context": 2, "stage": 0, "queue": "late"},
    {"ranks": 8, "context": 2, "stage": 3, "shard": 4, "accumulate": "layers"},
    {"ranks": 2, "stage": 1, "threads": 3},
)
MORE = {
    "f32": (),
    "bf16": ("train.precision=bf16",),
    "f16": ("train.precision=f16",),
    "documents": ("data.documents=mask", "data.end=1"),
    "dropout": ("train.dropout=0.1",),
    "two samples": ("train.micro_batch=2",),
    "adapters": ("train.lora={rank: 4, alpha: 4, match: all-linear}",),
    "a quantized base": (
        "train.lora={rank: 4, alpha: 4, match: all-linear, base: int8}",
    ),
    "chunks of the MLP": ("train.mlp_chunk=1",),
}


def recipe(precision: str, *more: str) -> list[str]:
    sizes = f"train.global_batch={SAMPLES}", f"train.precision={precision}"
    return [*UNEVEN, *sizes, *CUT, *more]


def stream() -> np.ndarray:
    return law.tokens(256, 40 * SAMPLES * STEPS + 1, holes=True)


def one_hash(
    folder: pathlib.Path, family: str, ways: list[dict], keys: list[str]
) -> None:
    weights = law.uneven(family, folder, *HEADS)
    b = bench(folder, stream(), weights, STEPS)
    plain = {"family": family, "context": 1, "accumulate": "micro_batches", **PLAIN}
    made = [{**plain, **way} for way in ({}, *ways)]
    agree({str(way): b.run(way, *keys) for way in made})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_one_hash(tmp_path: pathlib.Path, family: str, precision: str) -> None:
    """Every other way of the covering arrays has one hash with one rank."""
    turn = precision == "bf16"
    some = [way for way in WAYS if way["family"] == family]
    one_hash(tmp_path, family, some[turn::4], recipe(precision))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_one_hash_of_all_ways(
    tmp_path: pathlib.Path, family: str, precision: str
) -> None:
    some = [way for way in WAYS if way["family"] == family]
    one_hash(tmp_path, family, some, recipe(precision))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_one_hash_with_everything_else(tmp_path: pathlib.Path, kind: str) -> None:
    one_hash(tmp_path, "llama", FEW, recipe("f32", *MORE[kind]))
