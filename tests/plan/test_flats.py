"""test_flats.py -- tests that trainable and frozen parameters of any unit lie in separate flats.
Gradients and states belong to the trainable flat alone, and a function reads every flat that holds
its parameters. The weights keep their bits however such a model is spread."""

import dataclasses
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from zg.check import check
from zg.plan import plan
from zg.read import spec as reader
from zg.search import search

from tests.lib import law, trainer, zk
from tests.plan import test_frozen, test_slices

NVME = "nvme, nvme_path: /tmp"
ALL = "zero.stage3_param_persistence_threshold=0"
# One recipe spread in several ways: 8 samples a step in micro-batches of 2.
WAYS = {
    "stage 0, one rank": ("zero.stage=0", "cluster.ranks=1"),
    "stage 1, pieces": (
        "zero.stage=1",
        "cluster.ranks=4",
        "zero.reduce_bucket_size=5000",
    ),
    "stage 2, the optimizer on the host": (
        "zero.stage=2",
        "cluster.ranks=2",
        "zero.offload_optimizer.device=cpu",
        "zero.sub_group_size=4096",
    ),
    "stage 3, all gathered, far ahead": (
        "zero.stage=3",
        "cluster.ranks=2",
        ALL,
        "zero.stage3_prefetch_bucket_size=500000",
    ),
    "stage 3, small ones kept, units stay": (
        "zero.stage=3",
        "cluster.ranks=4",
        "zero.stage3_param_persistence_threshold=100",
        "zero.stage3_max_reuse_distance=60000",
    ),
    "stage 3, all micro-batches through a unit": (
        "zero.stage=3",
        "cluster.ranks=2",
        ALL,
        "train.accumulate=layers",
        "train.recompute=full",
    ),
    "stage 3, parameters alone on the host": (
        "zero.stage=3",
        "cluster.ranks=2",
        ALL,
        "zero.offload_param.device=cpu",
    ),
    "stage 3, parameters alone in a file": (
        "zero.stage=3",
        "cluster.ranks=2",
        ALL,
        f"zero.offload_param={{device: {NVME}}}",
    ),
    "stage 3, all in a file but some": (
        "zero.stage=3",
        "cluster.ranks=2",
        f"zero.offload_optimizer={{device: {NVME}}}",
        f"zero.offload_param={{device: {NVME}, max_in_cpu: 30000}}",
        ALL,
    ),
    "stage 3, a part of the optimizer and the parameters on the host": (
        "zero.stage=3",
        "cluster.ranks=2",
        "zero.offload_optimizer={device: cpu, ratio: 0.5}",
        "zero.offload_param.device=cpu",
        "train.offload_activations=true",
        ALL,
    ),
    "stage 3, one queue": (
        "zero.stage=3",
        "cluster.ranks=2",
        "zero.overlap_comm=false",
        ALL,
    ),
}


def planned(name: str, *keys: str) -> plan.Plan:
    p = search.find(
        reader.load(str(trainer.ROOT / "model_specs" / f"{name}.yaml"), keys)
    ).plan
    check.check(p)
    return p


def bytes_of(p: plan.Plan, *what: str) -> int:
    return sum(c.bytes for c in p.classes if c.name.split(".")[0] in what)


# ---- the flats of a plan


@pytest.mark.parametrize(
    "family,frozen,threshold,flats",
    [
        (
            "llama",
            "norms",
            0,
            ["block", "block.frozen", "embed", "head", "head.frozen"],
        ),
        ("llama", "norms", 1000, ["block", "embed", "head", "persistent"]),
        (
            "llama",
            "attention",
            1000,
            ["block", "block.frozen", "embed", "head", "persistent"],
        ),
        (
            "llama",
            "embed blocks",
            1000,
            ["block", "embed", "head", "persistent", "persistent.frozen"],
        ),
        ("llama", "blocks", 0, ["block", "embed", "head"]),
        (
            "gpt",
            "norms",
            0,
            ["block", "block.frozen", "embed", "embed.frozen"],
        ),
        # The head's norm is trainable
        (
            "gpt",
            "embed",
            0,
            ["block", "embed", "embed.frozen"],
        ),
        (
            "gpt",
            "blocks",
            100,
            ["block", "embed", "persistent", "persistent.frozen"],
        ),
    ],
)
def test_names(family: str, frozen: str, threshold: int, flats: list[str]) -> None:
    """A flat that is trainable in part has a second flat for the rest; a flat that is trainable or
    frozen as a whole has none."""
    p = planned(
        f"{family}-tiny",
        "zero.stage=3",
        test_frozen.match(family, frozen),
        f"zero.stage3_param_persistence_threshold={threshold}",
    )
    assert sorted(f.name for f in p.flats) == flats
    for f in p.flats:
        tensors = [t for t in p.tensors if t.flat == f.name]
        assert {t.frozen for t in tensors} == {int(not p.moves(f))}


def test_a_flat_that_trains_in_part_is_refused() -> None:
    """A frozen tensor in a trainable flat is refused, because an update covers the whole flat."""
    p = planned("llama-tiny", "zero.stage=2")
    one = next(t for t in p.tensors if t.flat == "block")
    mixed = tuple(dataclasses.replace(t, frozen=int(t == one)) for t in p.tensors)
    with pytest.raises(check.CheckError, match="flat block trains in part"):
        check.check(dataclasses.replace(p, tensors=mixed))


# ---- memory


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_norms_alone_take_the_memory_of_norms(stage: int) -> None:
    """Training the 64 block norms of Llama 3 8B alone on 8 ranks, 4096 elements each, takes the
    memory of these norms. A unit's two norms fill shards of 2048 elements; at stage 3 all are
    persistent, in shards of 32768."""
    p = planned(
        "llama3-8b",
        f"zero.stage={stage}",
        "cluster.ranks=8",
        "targets=[cpu]",
        'train.optimizer.groups=[{match: ["*layers*norm*"]}, {match: ["*"], frozen: true}]',
    )
    kept = [f for f in p.flats if p.moves(f)]
    count, shard = (1, 64 * 4096 // 8) if stage == 3 else (32, 2048)
    assert [(f.count, f.shard) for f in kept] == [(count, shard)]
    # Shards whose states each rank has
    ranks = {0: 8, 1: 1, 2: 1, 3: 1}[stage]
    assert bytes_of(p, "m") == bytes_of(p, "v") == count * shard * ranks * 4
    assert bytes_of(p, "sum") == count * shard * ranks * 4 * kept[0].nodes
    assert bytes_of(p, "grad") == (1 if stage == 3 else 2) * shard * 8 * 2
    assert bytes_of(p, "master") == count * shard * ranks * 4
    assert not bytes_of(p, "pending", "acc")


# ---- bits

CASES = [
    ("gpt", "norms", "bf16"),
    ("llama", "matrices", "f32"),
    ("gpt", "embed", "f32"),
    ("llama", "norms", "bf16"),
    ("qwen3", "embed attention", "bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,frozen,precision",
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (n > 1))
        for n, case in enumerate(CASES)
    ],
)
def test_the_law(
    tmp_path: pathlib.Path, family: str, frozen: str, precision: str
) -> None:
    """Losses, norms, weights and validation losses are the same in every way."""
    data = tmp_path / "tokens"
    trainer.write_tokens(data, law.tokens(256, 40 * 8 * 4 + 1, holes=True))
    found = {}
    for way, keys in WAYS.items():
        made = trainer.generate(
            law.path(family),
            test_frozen.match(family, frozen),
            *keys,
            f"train.precision={precision}",
            "train.global_batch=8",
            "train.micro_batch=2",
        )
        found[way] = law.run(
            trainer.build(made),
            "--data",
            data,
            "--val",
            data,
            "--steps",
            3,
            "--queue",
            "shuffled:3",
            log=tmp_path / "log",
        )
    first = found["stage 0, one rank"]
    assert [way for way, result in found.items() if result != first] == []


@pytest.mark.parametrize("way", ["the least bound", "all on the host"])
def test_a_block_in_slices(tmp_path: pathlib.Path, way: str) -> None:
    """The law holds with parts of a block that are frozen in part, and with a sliced linear that is
    frozen as a whole."""
    data = tmp_path / "tokens"
    trainer.write_tokens(data, law.tokens(128, 24 * 4 * test_slices.STEPS + 1))
    groups = (
        'train.optimizer.groups=[{match: ["*q_proj*", "*k_proj*", "*v_proj*", "*norm*", '
        '"*up_proj.weight", "*gate_proj.weight"], frozen: true}]'
    )
    keys = (
        groups,
        "zero.stage3_max_live_parameters=40000",
        ALL,
        *test_slices.WAYS[way][1:],
    )
    names = {f.name for f in test_slices.planned(*keys).flats}
    assert {f"{name}.frozen" for name in names} & names
    assert test_slices.run(data, *keys) == test_slices.run(data, groups)


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_what_is_frozen_is_stored_as_it_is_read(
    tmp_path: pathlib.Path, precision: str
) -> None:
    """Frozen floats of a file become the nearest values of the stored type, ties to even, wherever
    they lie, and are then saved and loaded to the bit."""
    keys = (
        test_frozen.match("llama", "matrices"),
        f"train.precision={precision}",
        "train.global_batch=8",
        "train.micro_batch=2",
    )
    ways = [
        WAYS[way]
        for way in (
            "stage 0, one rank",
            "stage 3, parameters alone on the host",
            "stage 3, all in a file but some",
        )
    ]
    made = [
        trainer.build(trainer.generate(law.path("llama"), *keys, *way)) for way in ways
    ]
    trainer.sh(made[0], "--steps", 0, "--save", tmp_path / "first")
    given = load_file(tmp_path / "first" / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    bits = law.mixed(given[name].size, 5) >> np.uint64(32)
    tried = bits.astype(np.uint32).view(np.float32).reshape(given[name].shape)
    # Half of the values with few more bits, to include ties
    half = given[name].size // 2
    near = (bits & np.uint64(0x83FFF000) | np.uint64(0x30000000)).astype(np.uint32)
    tried.flat[half:] = near.view(np.float32)[half:]
    limit = 65520 if precision == "f16" else 3.3961775e38  # rounds to infinity
    tried[~(np.abs(tried) < limit)] = 0
    save_file({**given, name: tried}, tmp_path / "first" / "model.safetensors")
    with np.errstate(over="ignore"):
        want = {**given, name: zk.rounded(tried, precision)}
    hashes = set()
    for binary in made:
        for folder, to in (("first", "second"), ("second", "third")):
            hashes.add(
                law.run(
                    binary,
                    "--steps",
                    0,
                    "--load",
                    tmp_path / folder,
                    "--save",
                    tmp_path / to,
                    log=tmp_path / "log",
                ).weights
            )
            saved = load_file(tmp_path / to / "model.safetensors")
            assert {
                n for n, x in saved.items() if x.tobytes() != want[n].tobytes()
            } == set()
    assert len(hashes) == 1
