"""test_limits.py -- tests specs beyond a plan's limits: they are refused at once with the least or
largest allowed value, which then works; and plans within the limits take seconds."""

import pathlib
import re

import pytest
from zg.check import check
from zg.read import spec
from zg.read.node import SpecError
from zg.search import search

from tests.lib import count, trainer

SPECS = trainer.ROOT / "model_specs"
ON_HOST = (
    "zero.stage=3",
    "zero.offload_optimizer.device=cpu",
    "zero.offload_param.device=cpu",
)
LINES = 2_000_000  # three times the longest; under a second


def refused(name: str, *sets: str) -> str:
    """Return the error, which comes after at most LINES executed lines."""

    def load():
        with pytest.raises(SpecError) as e:
            search.find(spec.load(str(SPECS / f"{name}.yaml"), sets))
        said.append(str(e.value))

    said: list[str] = []
    took = count.lines(load)
    print(f"{took} lines")
    assert took < LINES
    return said[0]


@pytest.mark.parametrize(
    "name,key,value,sets,said",
    [
        (
            "llama3-405b",
            "train.head_chunk",
            1,
            ("train.precision=f16",),
            r"1 cuts the 8192 tokens of a micro-batch into 8192 chunks, more than 1024; "
            r"allowed: auto, or at least (8)$",
        ),
        (
            "gpt-tiny",
            "train.head_chunk",
            2,
            ("train.micro_batch=68", "train.global_batch=136"),
            r"2 cuts the 2244 tokens of a micro-batch into 1122 chunks, more than 1024; "
            r"allowed: auto, or at least (3)$",
        ),
        (
            "llama3-405b",
            "zero.sub_group_size",
            1,
            (*ON_HOST, "cluster.ranks=8"),
            r"splits a shard of \d+ elements into \d+ pieces, more than 1024; allowed: at least (\d+)$",
        ),
        (
            "llama3-405b",
            "zero.sub_group_size",
            4_194_304,
            (*ON_HOST, "cluster.ranks=1"),
            r"splits the shards of all units into 96\d+ pieces, more than 12288; allowed: at least (\d+)$",
        ),
        (
            "llama3-8b",
            "zero.reduce_bucket_size",
            1,
            ("cluster.ranks=64",),
            r"splits a shard of 8208384 elements into 8016 pieces, more than 1024; allowed: at least (\d+)$",
        ),
        (
            "llama3-8b",
            "zero.allgather_bucket_size",
            600_000,
            (),
            r"splits the shards of all units into 1\d+ pieces, more than 12288; allowed: at least (\d+)$",
        ),
        (
            "llama-tiny",
            "model.units[1].blocks",
            2049,
            (),
            r"2049 is out of range; allowed: .* to (2048)$",
        ),
        (
            "gpt-tiny",
            "train.micro_batch",
            70_000,
            ("train.global_batch=140000",),
            r"is too large: the CUDA grid of attention_fwd.0 has 70000 blocks in z on sm_80; allowed: up to (65535), or targets: \[cpu\]$",
        ),
    ],
)
def test_too_many(
    name: str, key: str, value: int, sets: tuple[str, ...], said: str
) -> None:
    """The value that a refusal allows is accepted, except if other keys do not fit it."""
    found = re.search(
        f"{re.escape(key)}: {said}", refused(name, *sets, f"{key}={value}")
    )
    assert found
    if found[1] and key not in ("model.units[1].blocks", "train.micro_batch"):
        spec.load(str(SPECS / f"{name}.yaml"), (*sets, f"{key}={found[1]}"))


@pytest.mark.parametrize("key", ["reduce", "allgather"])
def test_the_least_bucket_is_the_least(key: str) -> None:
    """The least bucket of 8B on 256 ranks is accepted, and a piece smaller by a block is not."""
    name = f"zero.{key}_bucket_size"
    least = int(refused("llama3-8b", f"{name}=1").rpartition(" ")[2])
    assert refused("llama3-8b", f"{name}={least - 1}").endswith(f"at least {least}")
    search.find(spec.load(str(SPECS / "llama3-8b.yaml"), [f"{name}={least}"]))


def test_trees_that_a_gpu_does_not_hold() -> None:
    """The gradients of more than 4096 ranks are refused as one tree on a GPU; blocks of at most
    half as many are allowed."""
    many = (
        "train.micro_batch=2",
        "cluster.ranks=4097",
        "train.global_batch=8194",
    )
    for rule in ("tree", "{block: 4096}"):
        said = refused("gpt-tiny", *many, f"train.sum={rule}")
        assert (
            "train.sum: the gradients of 4097 ranks are too many for one tree on sm_80"
            in said
        )
        assert "allowed: {block: 2048} or a smaller block" in said
    fits = [
        (*many, "train.sum={block: 2048}"),
        (*many, "train.sum=fold"),
        (*many, "train.sum=tree", "targets=[cpu]"),
        (
            "train.micro_batch=2",
            "cluster.ranks=4096",
            "train.global_batch=8192",
            "train.sum=tree",
        ),
    ]
    for sets in fits:
        search.find(spec.load(str(SPECS / "gpt-tiny.yaml"), sets))


def test_a_vocabulary_that_no_gpu_holds() -> None:
    """A launch that needs more shared memory than a block has is refused with both numbers; a CPU
    takes it."""
    huge = "model.vocab=100000000"
    said = refused("gpt-tiny", huge)
    needs, most = re.search(
        r"targets: the model is too large for sm_80: embed_bwd\.0 needs (\d+) bytes of shared "
        r"memory per block, of at most (\d+); allowed: only cpu, or fewer heads or a smaller",
        said,
    ).groups()
    assert int(needs) > int(most)
    path = str(SPECS / "gpt-tiny.yaml")
    search.find(spec.load(path, (huge, "targets=[cpu]")))


@pytest.mark.slow
def test_parts_of_blocks() -> None:
    """A bound that cuts blocks into more than 4096 parts becomes the least possible not."""
    key = "zero.stage3_max_live_parameters"
    sets = (
        "model.width=1024",
        "model.units[1].ops[1].residual[3].linear.out=1024",
        "model.units[1].blocks=300",
        "zero.stage3_param_persistence_threshold=0",
    )
    path = str(SPECS / "llama-tiny.yaml")
    found = search.find(spec.load(path, (*sets, f"{key}=400000")))
    bound = found.plan.head.bound
    assert any(
        note.startswith(
            f"{key}: 400,000 elements are too few for any plan: the bound is"
        )
        for note in found.notes
    )
    least = search.find(spec.load(path, (*sets, f"{key}={bound}")))
    below = search.find(spec.load(path, (*sets, f"{key}={bound - 1}")))
    assert found.plan == below.plan == least.plan
    assert not any("the bound is" in note for note in least.notes)


def test_layers_of_all_units(tmp_path: pathlib.Path) -> None:
    text = (SPECS / "llama-tiny.yaml").read_text()
    block = re.search(r"  - blocks: 2\n(?:   .*\n)+", text)[0]
    other = block.replace("model.layers", "model.more").replace(
        "blocks: 2", "blocks: 1000"
    )
    (tmp_path / "spec.yaml").write_text(text.replace(block, block + other))
    path = str(tmp_path / "spec.yaml")
    spec.load(path)
    with pytest.raises(
        SpecError,
        match=r"model.units\[1\].blocks: the model has 3000 layers; allowed: up to 2048",
    ):
        spec.load(path, ["model.units[1].blocks=2000"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,sets,key,value",
    [
        (
            "llama3-405b",
            (*ON_HOST, "cluster.ranks=8"),
            "model.units[1].blocks",
            8,
        ),
        (
            "llama3-405b",
            ("train.memory_budget=100GiB",),
            "model.units[1].blocks",
            16,
        ),
        ("llama-tiny", ("zero.stage=3",), "model.units[1].blocks", 256),
        ("gpt2-124m", ("train.head_chunk=2",), "train.sequence", 64),
    ],
)
def test_work_grows_as_a_plan_does(
    name: str, sets: tuple[str, ...], key: str, value: int
) -> None:
    """A plan twice as large takes about twice as many lines to make and check. Work that grows with
    the square of its steps, of which the largest have 90,000, would take four times as many, and
    hours there."""

    def made(value):
        found = search.find(
            spec.load(str(SPECS / f"{name}.yaml"), (*sets, f"{key}={value}"))
        )
        check.check(found.plan)

    once = count.lines(lambda: made(value))
    twice = count.lines(lambda: made(2 * value))
    print(f"{once} lines, {twice}")
    assert twice < 2.1 * once
