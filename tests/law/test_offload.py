"""test_offload.py -- tests the optimizer on the host: its kernels, memory, skipped steps and
refusals.

tests/law/test_law.py tests that the bits are those of an optimizer on the device.
"""

import ctypes
import pathlib
import re
from dataclasses import replace

import numpy as np
import pytest
from zg.check import check
from zg.predict import cost
from zg.read import spec
from zg.search import search
from zg.write import explain

from tests.lib import law, mutants, trainer, zk
from tests.lib.plans import below, planned

PARAMS = "zero.offload_param.device=cpu"
OFFLOAD = ("zero.offload_optimizer.device=cpu", "zero.sub_group_size=5000")


# ---- kernels


def test_a_host_kernel_is_its_twin() -> None:
    """A kernel gives the same result by both of its names, after zk_host_open and before
    zk_host_close."""
    zk.library("gcc")
    lib, why = (
        ctypes.CDLL(str(trainer.ROOT / zk.LIBRARY["gcc"])),
        ctypes.c_char_p(),
    )
    lib.zk_open.restype = lib.zk_host_open.restype = ctypes.c_void_p
    plain = ctypes.c_void_p(
        lib.zk_open(None, None, None, zk.BF16, 0, 1, ctypes.byref(why))
    )
    host = ctypes.c_void_p(lib.zk_host_open(zk.BF16, 0, 2, ctypes.byref(why)))
    x = np.random.RandomState(1).randn(5000).astype(np.float32)
    y, z = np.zeros((2, 5000), np.uint16)

    def pointer(a):
        return a.ctypes.data_as(ctypes.c_void_p)

    lib.zk_round(plain, None, pointer(y), pointer(x), ctypes.c_int64(5000))
    lib.zk_host_round(host, None, pointer(z), pointer(x), ctypes.c_int64(5000))
    assert y.any() and (y == z).all()
    lib.zk_close(plain)
    lib.zk_host_close(host)


def test_every_host_kernel_is_emitted() -> None:
    source = trainer.generate(
        law.path("gpt"), "zero.stage=2", "train.precision=bf16", *OFFLOAD
    )
    for name in (
        "zk_host_open",
        "zk_host_close",
        "zk_host_update",
        "zk_host_init",
        "zk_host_hash",
        "zk_host_round",
        "zk_host_push",
        "zk_host_count",
        "zk_host_square_sum",
    ):
        assert re.search(rf"\b{name}\(", source), name
    for name in (
        "zk_update",
        "zk_init",
        "zk_hash",
        "zk_count",
        "zk_square_sum",
    ):
        assert f"{name}(" not in source, name


def test_the_copy_of_a_tile_is_whole() -> None:
    """The bf16 parameters that go to the device include the zeros between tensors of a tile, which
    `update` skips: kernels read rows that pad a vocabulary."""
    p = planned("gpt-tiny", "zero.stage=2", "train.precision=bf16", *OFFLOAD)
    made = [
        [(c.kernel, *map(str, c.args)) for c in f.calls]
        for f in p.fns
        if f.name.startswith("update.")
    ]
    for update, copy in made:
        assert update[:4] == ("zk_host_update", "hctl+0", "recipe", "null")
        assert copy == ("zk_host_round", "w+0", "p+0", "n")


# ---- memory


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("stage,ranks", [(1, 2), (2, 1), (3, 4)])
def test_states_move_to_the_host_to_the_byte(
    stage: int, ranks: int, precision: str
) -> None:
    """States and sums of gradients move to the host to the byte. Sums stay if a rank's own
    micro-batches are summed first. The device gets slots for pieces of reduced gradients
    instead."""
    keys = (
        f"zero.stage={stage}",
        f"cluster.ranks={ranks}",
        f"train.precision={precision}",
        "train.global_batch=8",
    )
    here, there = (
        planned("gpt-tiny", *keys),
        planned("gpt-tiny", *keys, *OFFLOAD),
    )
    gone, new = (
        ("master", "m", "v", *["sum"] * (stage > 1)),
        ["part"] * (stage > 1 and ranks > 1),
    )
    states = [c for c in here.classes if c.name.split(".")[0] in gone]
    parts = [
        c.slots * c.stride
        for c in there.classes
        if c.arena == "device" and c.name in new
    ]
    assert here.arena("cpu") - there.arena("cpu") == sum(
        c.slots * c.stride for c in states
    ) - sum(parts)
    # 4 slots of 4096 elements of f32
    assert parts == [4 * 4096 * 4] * len(new)
    for f in there.flats:
        sizes = dict.fromkeys(gone, f.shard * 4 * f.count)
        if "sum" in sizes:
            sizes["sum"] *= f.nodes
        assert {
            c.name: c.slots * c.stride
            for c in there.classes
            if c.name.endswith(f".{f.name}")
            and c.arena == "host"
            and c.targets == "all"
        } == {f"{s}.{f.name}": n for s, n in sizes.items()}
    assert dict(cost.memory(there))["the host arena"] == there.hosted


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_parameters_move_to_the_host_to_the_byte(ranks: int, precision: str) -> None:
    """Parameters move to the host to the byte, except persistent ones; the device keeps slots for
    one unit ahead. In f32 the parameters are the masters."""
    keys = (
        "zero.stage=3",
        f"cluster.ranks={ranks}",
        f"train.precision={precision}",
        "train.global_batch=8",
        *OFFLOAD,
    )
    here, there = (
        planned("gpt-tiny", *keys),
        planned("gpt-tiny", *keys, PARAMS),
    )

    def size(p, name):
        return sum(
            c.slots * c.stride for c in p.classes if c.name.split(".")[0] == name
        )

    moved = sum(
        c.slots * c.stride
        for c in there.classes
        if c.name.startswith("param.") and c.arena == "host"
    )
    assert moved > size(there, "staging") > 0
    assert here.arena("cpu") - there.arena("cpu") == moved - size(there, "staging")
    gone = size(here, "master") - size(there, "master")
    assert gone == (moved if precision == "f32" else 0)
    assert there.hosted - here.hosted == moved - gone


@pytest.mark.parametrize("ahead", ["0", "auto", "1000000000"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize(
    "keys",
    [
        (PARAMS,),
        (PARAMS, "zero.stage3_max_reuse_distance=1000000000"),
        (*OFFLOAD, PARAMS),
        (
            *OFFLOAD,
            "zero.offload_param.device=nvme",
            "zero.offload_param.nvme_path=/tmp",
        ),
    ],
)
def test_every_place_of_parameters_on_their_way_is_used(
    keys: tuple[str, ...], name: str, ahead: str
) -> None:
    """Steps use every slot that parameters pass through. A Llama's embedding is fetched once per
    micro-batch, whatever the prefetch."""
    p = planned(
        name,
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=0",
        *keys,
        f"zero.stage3_prefetch_bucket_size={ahead}",
    )
    there = {
        (c.name, n)
        for c in p.classes
        for n in range(c.slots)
        if c.name.split(".")[0] in ("staging", "fetched", "ring")
    }
    assert {"staging.embed", "staging.block", "ring.block"} <= {
        name for name, _ in there
    }
    assert there <= {
        (r.cls, r.index) for s in p.sections for x in s.steps for r in x.outs
    }


@pytest.mark.parametrize(
    "keys",
    [
        ("zero.stage=2",),
        ("zero.stage=2", "cluster.ranks=1"),
        ("zero.stage=1", "train.sum=fold"),
        (
            "zero.stage=3",
            PARAMS,
            "train.precision=bf16",
            "zero.offload_optimizer.device=nvme",
            "zero.offload_optimizer.nvme_path=/tmp",
        ),
    ],
)
def test_no_more_buffers_than_turns(keys: tuple[str, ...]) -> None:
    """Tiles and pieces take turns in buffer_count slots, or have a slot each; nothing else
    changes."""

    def asked(n, *more):
        return planned(
            "gpt-tiny",
            *OFFLOAD[:1],
            *keys,
            *more,
            f"zero.offload_optimizer.buffer_count={n}",
        )

    def slots(p):
        return {
            c.name: c.slots
            for c in p.classes
            if c.name.split(".")[0] in ("down", "part", "up", "tile")
        }

    many = slots(asked(64))
    assert many and max(many.values()) < 64
    used = {
        (r.cls, r.index)
        for s in asked(64).sections
        for x in s.steps
        for r in (*x.ins, *x.outs)
    }
    assert all((name, n - 1) in used for name, n in many.items())
    assert (
        asked(63).classes == asked(64).classes
        and asked(63).sections == asked(64).sections
    )
    assert max(slots(asked(2)).values()) == 2
    assert asked(64).hosted > asked(2).hosted


@pytest.mark.parametrize(
    "keys,said",
    [
        (
            ("zero.stage=1",),
            "own micro-batches are summed first; zero.stage 2",
        ),
        (
            ("zero.stage=2", "cluster.ranks=3", "train.global_batch=12"),
            "the sum of a micro-batch over 3 ranks is not a node",
        ),
    ],
)
def test_sums_that_stay(keys: tuple[str, ...], said: str) -> None:
    """A note says why sums of gradients stay on the device; with one micro-batch per step there is
    no reason."""
    path = str(law.path("gpt"))
    made = search.find(
        spec.load(
            path,
            (*OFFLOAD, "train.global_batch=8", "train.micro_batch=1", *keys),
        )
    )
    assert not below(made.plan) and [said in note for note in made.notes] == [True]
    ranks = made.plan.head.ranks
    alone = search.find(
        spec.load(
            path,
            (
                *OFFLOAD,
                "train.micro_batch=1",
                *keys,
                f"train.global_batch={ranks}",
            ),
        )
    )
    assert below(alone.plan) and not alone.notes


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_four_times_the_device(tmp_path: pathlib.Path, ranks: int) -> None:
    """A model whose states are at least four times a rank's arena trains to the same bits."""
    path = law.changed("gpt", tmp_path, 12, {})
    keys = (
        "zero.stage=3",
        f"cluster.ranks={ranks}",
        "train.precision=bf16",
        "train.recompute=full",
        "train.micro_batch=1",
        "train.global_batch=4",
    )
    small = (
        "zero.offload_optimizer.device=cpu",
        PARAMS,
        "zero.sub_group_size=8192",
        "zero.reduce_bucket_size=16384",
        "zero.offload_optimizer.buffer_count=2",
        "zero.stage3_param_persistence_threshold=0",
    )
    p = search.find(spec.load(str(path), (*keys, *small))).plan
    states = sum(
        c.slots * c.stride
        for c in p.classes
        if c.name.split(".")[0] in ("param", "master", "m", "v", "sum")
    )
    params = sum(c.slots * c.stride for c in p.classes if c.name.startswith("param."))
    (nodes,) = {f.nodes for f in p.flats}
    # Bytes per parameter
    assert states == params // 2 * (2 + 3 * 4 + 4 * nodes)
    assert states >= 4 * p.arena("cpu")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 4 * 5 * 40))
    found = [
        law.run(
            trainer.build(trainer.generate(path, *keys, *more)),
            "--data",
            tmp_path / "tokens",
            "--steps",
            4,
            "--queue",
            queue,
            log=tmp_path / "log",
        )
        for more, queue in (
            ((), "eager"),
            (small, "eager"),
            (small, "shuffled:2"),
        )
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_parameters_alone_move_to_the_byte(ranks: int, precision: str) -> None:
    """Parameters alone move to the host to the byte. The optimizer stays on the device, so f32 has
    separate masters, too."""
    keys = (
        "zero.stage=3",
        f"cluster.ranks={ranks}",
        f"train.precision={precision}",
        "train.global_batch=8",
    )
    here, there = (
        planned("gpt-tiny", *keys),
        planned("gpt-tiny", *keys, PARAMS),
    )

    def size(p, name):
        return sum(
            c.slots * c.stride for c in p.classes if c.name.split(".")[0] == name
        )

    moved = there.hosted
    assert moved > size(there, "staging") > 0 and not there.offload
    assert {
        c.name for c in there.classes if c.arena == "host" and c.targets == "all"
    } == {"param.embed", "param.block"}
    more = size(there, "master") - size(here, "master")
    assert more == (moved if precision == "f32" else 0)
    assert here.arena("cpu") - there.arena("cpu") == moved - more - size(
        there, "staging"
    )


# ---- activations: k slots of each class stay, 3 of units' inputs and 2 of blocks' saved values


@pytest.mark.parametrize("again", law.AGAIN)
def test_activations_move_to_the_byte(tmp_path: pathlib.Path, again: str) -> None:
    path = str(law.changed("gpt", tmp_path, 7, {}))
    keys = (
        "zero.stage=3",
        "train.micro_batch=1",
        "train.global_batch=4",
        f"train.recompute={again}",
    )
    here, there = (
        search.find(spec.load(path, (*keys, f"train.offload_activations={yes}"))).plan
        for yes in ("false", "true")
    )
    kept = {c.name: c for c in here.classes if c.name in ("x", "save.block")}
    assert len(kept) == 1 + (again != "full")
    moved = 0
    for name, c in kept.items():
        near, far = there.cls(f"near.{name}"), there.cls(f"far.{name}")
        assert near.stride == far.stride == c.stride and near.slots == (
            3 if name == "x" else 2
        )
        assert near.slots + far.slots == c.slots == (8 if name == "x" else 7)
        moved += far.slots * far.stride
    assert here.arena("cpu") - there.arena("cpu") == there.hosted == moved > 0


def test_few_activations_stay() -> None:
    """Nothing moves if the slots that stay could hold all activations."""
    made = [
        planned("llama-tiny", f"train.offload_activations={yes}")
        for yes in ("false", "true")
    ]
    assert made[0] == made[1]


@pytest.mark.slow
@pytest.mark.parametrize("again", ["none", "full"])
def test_activations_on_the_host_leave_the_bits(
    tmp_path: pathlib.Path, again: str
) -> None:
    """Activations on the host leave the bits of seven blocks, with parameters and optimizer there
    or not, and validations between."""
    path = law.changed("gpt", tmp_path, 7, {})
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 8 * 5 * 40, holes=True))
    trainer.write_tokens(tmp_path / "val", law.tokens(256, 9 * 40 + 1, holes=True))
    keys = (
        "train.precision=bf16",
        "train.micro_batch=1",
        "train.global_batch=8",
        f"train.recompute={again}",
    )
    there = ("train.offload_activations=true",)
    ways = {
        (): "eager",
        ("cluster.ranks=1", *there): "shuffled:1",
        (
            "zero.stage=3",
            "cluster.ranks=4",
            "zero.overlap_comm=false",
            *there,
        ): "late",
        (
            "zero.stage=3",
            "cluster.ranks=2",
            *OFFLOAD,
            PARAMS,
            *there,
        ): "shuffled:2",
    }
    found = [
        law.run(
            trainer.build(trainer.generate(path, *keys, *way)),
            "--data",
            tmp_path / "tokens",
            "--val",
            tmp_path / "val",
            "--val-every",
            2,
            "--steps",
            4,
            "--queue",
            queue,
            log=tmp_path / "log",
        )
        for way, queue in ways.items()
    ]
    assert all(x == found[0] for x in found) and found[0].val


def test_activations_of_all_micro_batches_are_refused() -> None:
    with pytest.raises(
        spec.SpecError, match="train.offload_activations: train.accumulate layers"
    ):
        planned(
            "gpt-tiny",
            "zero.stage=3",
            "train.accumulate=layers",
            "train.offload_activations=true",
        )


# ---- a skipped step changes nothing, in bf16 either


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_skipped_steps(tmp_path: pathlib.Path, precision: str) -> None:
    """The third of five steps has no target at all and is skipped."""
    keys = (
        "zero.stage=3",
        "cluster.ranks=2",
        f"train.precision={precision}",
        "train.global_batch=4",
        "train.micro_batch=1",
    )
    T = spec.load(str(law.path("gpt"))).train.sequence
    stream = law.tokens(256, 5 * 4 * T + 1)
    stream[2 * 4 * T : 3 * 4 * T + 1] = law.HOLE
    trainer.write_tokens(tmp_path / "tokens", stream)
    found = {}
    for name, more in (
        ("device", ()),
        ("host", OFFLOAD),
        ("all", (*OFFLOAD, PARAMS)),
        ("params", (PARAMS,)),
    ):
        made = trainer.build(trainer.generate(law.path("gpt"), *keys, *more))
        found[name] = law.run(
            made,
            "--data",
            tmp_path / "tokens",
            "--steps",
            5,
            "--queue",
            "shuffled:1",
            log=tmp_path / "log",
        )
    assert found["device"] == found["host"] == found["all"] == found["params"]
    assert ['"loss": null' in line for line in found["host"].steps] == [
        0,
        0,
        1,
        0,
        0,
    ]
    assert ['"skipped": 1' in line for line in found["host"].steps] == [
        0,
        0,
        1,
        0,
        0,
    ]


# ---- refusals


@pytest.mark.parametrize(
    "keys,said",
    [
        (("zero.stage=0",), "every rank updates all parameters"),
        (
            ("zero.stage=1", "zero.offload_optimizer.device=disk"),
            "none or cpu",
        ),
        (
            ("zero.stage=1", "zero.offload_optimizer.buffer_count=0"),
            "an integer from 1 to 64",
        ),
        (
            ("zero.stage=1", "zero.offload_optimizer.buffers=2"),
            "did you mean buffer_count",
        ),
    ],
)
def test_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(spec.SpecError, match="zero.offload_optimizer") as e:
        planned("gpt-tiny", *OFFLOAD, *keys)
    assert said in str(e.value)


def test_parameters_of_all_ranks_are_refused() -> None:
    with pytest.raises(spec.SpecError, match="zero.offload_param") as e:
        planned("gpt-tiny", PARAMS, "zero.stage=2", *OFFLOAD)
    assert "at stage 2 parameters are not sharded" in str(e.value)


def test_too_small_a_tile_is_refused() -> None:
    with pytest.raises(spec.SpecError, match="zero.sub_group_size: splits a shard"):
        planned("gpt2-124m", "zero.stage=1", OFFLOAD[0], "zero.sub_group_size=1024")


# ---- the checker


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_copy_of_another_size_is_refused(precision: str) -> None:
    p = planned("gpt-tiny", "zero.stage=3", f"train.precision={precision}", *OFFLOAD)
    check.check(p)
    made = [m for m in mutants.mutants(p) if " copy " in m.what and "bytes=" in m.what]
    assert len(made) > 100
    assert [m.what for m in made if not mutants.refused(m.plan)] == []


def test_elements_in_two_tiles_are_refused() -> None:
    """A plan that updates elements of the embedding's last tile once more, after the tile went to
    the device, is refused."""
    p = planned("gpt-tiny", "zero.stage=1", *OFFLOAD)
    section, unit = p.section("update"), "embed[0]"
    steps = [
        n for n, s in enumerate(section.steps) if s.unit == unit and s.queue != "main"
    ]
    down, host, up = (
        steps[-4:-1] if section.steps[steps[-1]].op == "gather" else steps[-3:]
    )

    def moved(r):
        return replace(r, at=r.at + 4096) if r.cls != "down" else r

    less = {"bytes": -4096, "n": -1024, "at": 1024}
    again = [
        replace(
            s,
            ins=tuple(map(moved, s.ins)),
            outs=tuple(map(moved, s.outs)),
            ints=tuple(replace(i, value=i.value + less.get(i.name, 0)) for i in s.ints),
        )
        for s in (section.steps[down], section.steps[host])
    ]
    with pytest.raises(
        check.CheckError,
        match="holds p of .* as step 1 left .*, not .* as step 0",
    ):
        check.check(
            mutants.changed(
                p,
                section,
                [*section.steps[: up + 1], *again, *section.steps[up + 1 :]],
            )
        )


def test_every_queue_is_explained() -> None:
    said = explain.explain(planned("gpt-tiny", "zero.stage=3", *OFFLOAD))
    tiles = [
        s
        for s in planned("gpt-tiny", "zero.stage=3", *OFFLOAD).section("update").steps
        if s.queue == "host"
    ]
    assert re.search(rf"update +x1 .* host {len(tiles)} ", said)
