"""plans.py -- plans for the tests of the generator: every model spec, spread in a few ways.

The ways cover each stage, one rank and several, pieces, prefetch, one queue, accumulation, both
types.
"""

import functools
import pathlib

import pytest
from zg.plan.plan import Plan
from zg.read import spec
from zg.search import search

from tests.lib.covering import covering

SPECS = pathlib.Path(__file__).resolve().parents[2] / "model_specs"
NAMES = sorted(path.stem for path in SPECS.glob("*.yaml"))
WAYS = {
    "as it stands": (),
    "stage 0, 2 ranks": ("zero.stage=0", "cluster.ranks=2"),
    "stage 0, 1 rank": ("zero.stage=0", "cluster.ranks=1"),
    "stage 1, 3 micro-batches per rank": (
        "zero.stage=1",
        "cluster.ranks=4",
        "train.global_batch=12",
        "train.micro_batch=1",
    ),
    "stage 1, 4 micro-batches per rank": (
        "zero.stage=1",
        "cluster.ranks=4",
        "train.global_batch=16",
        "train.micro_batch=1",
    ),
    "stage 2 in bf16, pieces": (
        "zero.stage=2",
        "train.precision=bf16",
        "zero.reduce_bucket_size=PIECE",
    ),
    "stage 3, all kept": (
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=1000000000000",
        "zero.stage3_max_live_parameters=1000000000000",
        "zero.allgather_bucket_size=4000000000",
        "zero.reduce_bucket_size=4000000000",
    ),
    "stage 3, none kept, far ahead": (
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=0",
        "zero.stage3_prefetch_bucket_size=1000000000",
        "zero.allgather_bucket_size=PIECE",
    ),
    "stage 3, nothing ahead, fold": (
        "zero.stage=3",
        "zero.stage3_prefetch_bucket_size=0",
        "train.sum=fold",
    ),
    "stage 3, units stay": (
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=0",
        "zero.stage3_max_reuse_distance=STAY",
    ),
    "stage 3, all recomputed": ("zero.stage=3", "train.recompute=full"),
    "stage 3, NCCL sums, pieces in bf16": (
        "zero.stage=3",
        "train.reduction=fast",
        "targets=[sm_90]",
        "train.precision=bf16",
        "zero.reduce_bucket_size=PIECE",
    ),
    "stage 1, NCCL sums own micro-batches": (
        "zero.stage=1",
        "cluster.ranks=4",
        "train.global_batch=16",
        "train.micro_batch=1",
        "train.reduction=fast",
        "targets=[sm_80, sm_90]",
    ),
    "stage 2, the optimizer on the host": (
        "zero.stage=2",
        "zero.offload_optimizer.device=cpu",
        "zero.sub_group_size=PIECE",
    ),
    "stage 3, a part of the optimizer on the host": (
        "zero.stage=3",
        "zero.offload_optimizer.device=cpu",
        "zero.offload_optimizer.ratio=0.4",
        "zero.offload_param.device=cpu",
        "train.precision=bf16",
        "zero.sub_group_size=TILE",
        "zero.stage3_param_persistence_threshold=0",
    ),
    "stage 3, all on the host": (
        "zero.stage=3",
        "zero.offload_optimizer.device=cpu",
        "zero.offload_param.device=cpu",
        "train.precision=bf16",
        "zero.stage3_param_persistence_threshold=0",
    ),
    "stage 3, three micro-batches through a unit": (
        "zero.stage=3",
        "train.accumulate=layers",
        "cluster.ranks=4",
        "train.global_batch=12",
        "train.micro_batch=1",
        "zero.allgather_bucket_size=PIECE",
    ),
    "stage 3, four micro-batches through a unit": (
        "zero.stage=3",
        "train.accumulate=layers",
        "cluster.ranks=4",
        "train.global_batch=16",
        "train.micro_batch=1",
        "train.precision=bf16",
        "train.recompute=full",
    ),
    "stage 3, all in a file": (
        "zero.stage=3",
        "zero.offload_optimizer.device=nvme",
        "zero.offload_param.device=nvme",
        "zero.offload_optimizer.nvme_path=/tmp",
        "train.precision=bf16",
    ),
    "stage 3, attention is frozen": (
        "zero.stage=3",
        "train.precision=bf16",
        "zero.stage3_param_persistence_threshold=0",
        'train.optimizer.groups=[{match: ["*attn*"], frozen: true}]',
    ),
    "stage 3, one queue, bf16": (
        "zero.stage=3",
        "zero.overlap_comm=false",
        "train.precision=bf16",
    ),
}


# every spec in every way
EACH = pytest.mark.parametrize(
    "name,way",
    covering(NAMES, [*WAYS], budget=len(NAMES) * len(WAYS) // 3),
)


def keys(name: str, way: str) -> tuple[str, ...]:
    """Return a way's settings. Pieces are small enough to split some unit, tiles to split some
    shard, and some units stay whole."""
    size = "20000" if "tiny" in name else "5000000" if name == "demo" else "1000000000"
    tile = "5000" if "tiny" in name else size
    stay = "60000" if "tiny" in name else "1000000000"
    return tuple(
        key.replace("PIECE", size).replace("TILE", tile).replace("STAY", stay)
        for key in WAYS[way]
    )


@functools.cache
def planned(name: str, *settings: str) -> Plan:
    """Return the plan of a spec of model_specs, or of a path, with `key=value` settings."""
    path = SPECS / f"{name}.yaml" if name in NAMES else pathlib.Path(name)
    return search.find(spec.load(str(path), settings)).plan


def below(p: Plan) -> bool:
    """Return whether sums of gradients lie in the host arena."""
    sums = {s.cls for s in p.stores if s.what == "sum"}
    return any(c.arena == "host" for c in p.classes if c.name in sums)
