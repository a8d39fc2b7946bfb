"""test_slices.py -- tests bounds on gathered elements below the largest block: the block runs in
parts, its largest linears run in slices of their output, and the weights keep their bits.

tests/data/sliced.yaml has a block of 61440 elements: gate and up have 32768, down 16384, q, k and v
8192; biases are persistent.
"""

import itertools
import pathlib
import re

import numpy as np
import pytest
from zg.check import check
from zg.passes import slices
from zg.plan.plan import Plan
from zg.read import spec
from zg.search import search
from zg.write import explain

from tests.check import test_mutants
from tests.lib import law, mutants, program, trainer

SPEC = trainer.ROOT / "tests" / "data" / "sliced.yaml"
STEPS = 3
# F32, two ranks: 8192 are persistent, embedding and head have 8192.
LEAST = 16384
# Ways to spread a recipe, with a bound that cuts the block. Slices depend on ranks and type.
WAYS = {
    "the least bound": (f"zero.stage3_max_live_parameters={LEAST}",),
    "room to gather ahead": ("zero.stage3_max_live_parameters=36000",),
    "far ahead": (
        "zero.stage3_max_live_parameters=50000",
        "zero.stage3_prefetch_bucket_size=30000",
    ),
    "one rank": ("zero.stage3_max_live_parameters=17000", "cluster.ranks=1"),
    "four ranks": ("zero.stage3_max_live_parameters=24576", "cluster.ranks=4"),
    "pieces": (
        "zero.stage3_max_live_parameters=25000",
        "zero.allgather_bucket_size=3000",
        "zero.reduce_bucket_size=5000",
    ),
    "one queue": (
        "zero.stage3_max_live_parameters=25000",
        "zero.overlap_comm=false",
    ),
    "all recomputed": (
        "zero.stage3_max_live_parameters=33000",
        "train.recompute=full",
    ),
    "what would stay": (
        "zero.stage3_max_live_parameters=25000",
        "train.recompute=full",
        "zero.stage3_max_reuse_distance=1000000",
    ),
    "linears recomputed": (
        "zero.stage3_max_live_parameters=25000",
        "train.recompute=[linear, swiglu]",
    ),
    "all on the host": (
        "zero.stage3_max_live_parameters=33000",
        "train.recompute=full",
        "zero.offload_optimizer.device=cpu",
        "zero.offload_param.device=cpu",
        "train.offload_activations=true",
        "zero.sub_group_size=5000",
    ),
    "parameters alone on the host": (
        "zero.stage3_max_live_parameters=25000",
        "zero.offload_param.device=cpu",
    ),
    "all in a file": (
        "zero.stage3_max_live_parameters=25000",
        "zero.offload_param.device=nvme",
        "zero.offload_optimizer.device=nvme",
        "zero.offload_optimizer.nvme_path=/tmp",
    ),
    "biases gathered": (
        "zero.stage3_max_live_parameters=25000",
        "zero.stage3_param_persistence_threshold=0",
    ),
}


def planned(*keys: str) -> Plan:
    return search.find(spec.load(str(SPEC), keys)).plan


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("slices") / "tokens"
    trainer.write_tokens(path, law.tokens(128, 24 * 4 * STEPS + 1))
    return path


def run(
    data: pathlib.Path,
    *keys: str,
    kind: trainer.Kind = trainer.GCC,
    queue: str = "eager",
    order: str = "eager",
) -> law.Result:
    made = trainer.build(trainer.generate(SPEC, *keys), kind)
    return law.run(
        made,
        "--data",
        data,
        "--val",
        data,
        "--steps",
        STEPS,
        "--queue",
        queue,
        log=data.parent / "log",
        ZR_EMULATE=order,
    )


# ---- bits

ROWS = [
    *(("f32", way) for way in WAYS),
    ("bf16", "far ahead"),
    ("bf16", "one rank"),
    ("bf16", "all recomputed"),
    ("bf16", "all on the host"),
    ("f16", "room to gather ahead"),
]
QUICK = [("f32", "the least bound"), ("bf16", "all recomputed")]


@pytest.mark.parametrize(
    "precision,way",
    [
        pytest.param(*row, marks=[] if row in QUICK else pytest.mark.slow)
        for row in ROWS
    ],
)
def test_weights_and_losses_are_the_wholes(
    data: pathlib.Path, precision: str, way: str
) -> None:
    whole = run(data, f"train.precision={precision}", "zero.stage=0", "cluster.ranks=1")
    keys = f"train.precision={precision}", *WAYS[way]
    assert [f for f in planned(*keys).flats if f.name == "block_1"], "nothing is cut"
    for queue in ("late", "shuffled:7"):
        assert run(data, *keys, queue=queue) == whole


@pytest.mark.slow
@pytest.mark.parametrize("family", law.FAMILIES)
def test_families_are_cut(tmp_path: pathlib.Path, family: str) -> None:
    """Other families are cut, too: GPT's weights [in,out] have no slices, but its blocks have
    parts; one head is tied."""
    trainer.write_tokens(
        tmp_path / "tokens", law.tokens(256, 40 * 8 * STEPS + 1, holes=True)
    )
    found = []
    for bound in (10**6, 25000):
        source = trainer.generate(
            law.path(family),
            f"zero.stage3_max_live_parameters={bound}",
            "zero.stage3_param_persistence_threshold=0",
            "zero.stage=3",
            "train.recompute=full",
        )
        assert ("fwd_block_1" in source) == (bound == 25000)
        found.append(
            law.run(
                trainer.build(source),
                "--data",
                tmp_path / "tokens",
                "--steps",
                STEPS,
                log=tmp_path / "log",
            )
        )
    assert found[0] == found[1]


def test_groups_and_frozen_tensors(data: pathlib.Path) -> None:
    """A sliced tensor with its own rate and a frozen one keep the bits of the whole model."""
    groups = (
        'train.optimizer.groups=[{match: ["*.down_proj.weight"], lr_factor: 0.1}, '
        '{match: ["*.gate_proj.weight", "*.up_proj.weight"], frozen: true}]'
    )
    assert run(data, groups, WAYS["the least bound"][0]) == run(data, groups)


def test_weights_come_and_go(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A file of weights has whole tensors: slices save the same file as the whole model, except for
    the plan's hash, and either loads the other's."""
    keys = {"whole": ("cluster.ranks=1",), "slices": WAYS["the least bound"]}
    made = {name: trainer.build(trainer.generate(SPEC, *k)) for name, k in keys.items()}
    saved, hashes = {}, set()
    for name, binary in made.items():
        folder = tmp_path / name
        assert (
            program.run(binary, "--data", data, "--steps", 2, "--save", folder).code
            == 0
        )
        saved[name] = (folder / "model.safetensors").read_bytes()
        tail = len(saved[name]) - 8 - int.from_bytes(saved[name][:8], "little")
        saved[name] = saved[name][-tail:]
    assert saved["whole"] == saved["slices"]
    for name, other in itertools.permutations(made):
        done = program.run(
            made[name],
            "--data",
            data,
            "--steps",
            1,
            "--load",
            tmp_path / other,
            "--hash",
        )
        hashes.add(done.line("weights "))
    assert len(hashes) == 1


# ---- memory


def test_a_slot_is_as_small_as_said() -> None:
    whole, cut = planned(), planned(f"zero.stage3_max_live_parameters={LEAST}")

    def gathered(p):
        return sum(c.slots * c.stride for c in p.classes if c.name.startswith("ring."))

    assert whole.head.live > 61440 and cut.head.live == LEAST
    assert gathered(whole) >= 4 * 2 * 61440
    # slots of 8192 for slices, for q, k and v, for embedding and head, and for o's 4096
    assert gathered(cut) == 4 * 8192
    assert cut.arena("cpu") < whole.arena("cpu") - 4 * 61440
    assert re.search(r"ring\.embed +1 +32,768", explain.memory(cut))


def test_parts_of_unlike_sizes_share_slots() -> None:
    """Parts of unlike sizes share slots; slots of each size would need as much as the whole
    block."""

    def gathered(bound):
        return {
            c.name: (c.slots, c.stride // 2)
            for c in search.find(
                spec.load(
                    f"{trainer.ROOT}/model_specs/llama3-405b.yaml",
                    (f"zero.stage3_max_live_parameters={bound}",),
                )
            ).plan.classes
            if c.name.startswith("ring.")
        }

    assert gathered(6 * 10**9)["ring.block"] == (1, 3187671040)
    assert gathered(3 * 10**9) == {
        "ring.embed": (1, 2113929216),
        "ring.block_0": (1, 2315255808),
    }


@pytest.mark.parametrize("way", WAYS)
def test_the_bound_holds(way: str) -> None:
    p = planned(*WAYS[way])
    check.check(p)  # counts the elements gathered at once, step by step
    assert p.head.live <= p.head.bound


def test_tiles_of_parts_have_slots_in_other_turns_than_at_the_start() -> None:
    """An update takes tiles unit by unit and the start takes them flat by flat, and the plan
    passes."""
    check.check(
        planned(
            *WAYS["all in a file"],
            "zero.stage3_param_persistence_threshold=0",
            "zero.offload_optimizer.buffer_count=16",
            "cluster.ranks=2",
        )
    )


def test_slices_are_as_few_as_can_be() -> None:
    def made(bound):
        return {
            t.name.split(".")[-2]: t.flat_step
            for t in planned(f"zero.stage3_max_live_parameters={bound}").tensors
            if t.flat_step > 1
        }

    assert made(8192 + 61440) == {}
    assert made(8192 + 61439) == {}  # 32768, and units that fit beside them
    assert made(8192 + 32767) == {"up_proj": 2}
    assert made(8192 + 16383) == {"up_proj": 4, "down_proj": 2}
    assert made(LEAST) == {"up_proj": 4, "down_proj": 2}


@pytest.mark.parametrize("bound", [1, LEAST - 1])
def test_a_bound_below_what_cannot_be_cut_is_the_least_that_holds_it(
    bound: int,
) -> None:
    """A bound below the largest unit that cannot be cut, here embedding and head, is raised to it.
    DeepSpeed gathers such units, too, whatever its bound."""
    least = search.find(
        spec.load(str(SPEC), (f"zero.stage3_max_live_parameters={LEAST}",))
    )
    found = search.find(
        spec.load(str(SPEC), (f"zero.stage3_max_live_parameters={bound}",))
    )
    assert found.plan == least.plan and found.plan.head.bound == LEAST
    (said,) = set(found.notes) - set(least.notes)
    assert said == (
        f"zero.stage3_max_live_parameters: {bound:,} elements are too few for any plan: the bound is "
        f"{LEAST:,}, the least possible"
    )


def test_all_micro_batches_through_a_unit_cut_no_block() -> None:
    layers = ("train.accumulate=layers", "train.global_batch=8")
    found = search.find(
        spec.load(str(SPEC), ("zero.stage3_max_live_parameters=20000", *layers))
    )
    (said,) = found.notes
    assert said.endswith("; with train.accumulate layers no block is split")
    whole = search.find(
        spec.load(str(SPEC), ("zero.stage3_max_live_parameters=0", *layers))
    )
    assert whole.plan == found.plan


def test_notes_say_what_is_cut() -> None:
    def notes(*keys):
        return search.find(
            spec.load(str(SPEC), (WAYS["the least bound"][0], *keys))
        ).notes

    assert (
        "block is gathered in 4 parts, of which " in notes()[0]
        and "mlp.down_proj.weight in 2 slices" in notes()[0]
    )
    assert "slices are a part of the recipe" in notes()[1]
    assert len(notes("targets=[cpu]")) == 1


# ---- the emulated GPU


EVERY = pytest.mark.parametrize(
    "every",
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)


@EVERY
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_one_hash_on_the_emulated_gpu(
    data: pathlib.Path, precision: str, every: bool
) -> None:
    """Plans with the same slices have one hash on an emulated GPU, where slices are part of the
    recipe."""
    first = (
        "zero.stage3_max_live_parameters=24576",
        f"train.precision={precision}",
    )
    ways = [
        (),
        ("train.recompute=full",),
        ("zero.overlap_comm=false",),
        ("zero.offload_optimizer.device=cpu", "zero.offload_param.device=cpu"),
    ]
    orders = ("eager", "late", "shuffled:1")
    rows = {((), order) for order in orders} | set(
        itertools.product(ways, orders) if every else zip(ways[1:], orders, strict=True)
    )
    found = {
        run(data, *first, *way, kind=trainer.EMULATED, order=order)
        for way, order in sorted(rows)
    }
    assert len(found) == 1


@pytest.mark.slow
def test_losses_on_the_emulated_gpu_are_the_cpus(data: pathlib.Path) -> None:
    """Losses on an emulated GPU are the CPU's within 2^-20; test_emulated.py has the reason."""
    ours, cpus = (
        np.array(
            [
                float(re.search(r'"loss": ([\d.]+)', line)[1])
                for line in run(data, *WAYS["the least bound"], kind=kind).steps
            ]
        )
        for kind in (trainer.EMULATED, trainer.GCC)
    )
    assert abs(ours[0] / cpus[0] - 1) < 2**-20 and (abs(ours / cpus - 1) < 2**-16).all()


# ---- the checker

SMALL = ("../tests/data/sliced", "train.global_batch=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    ["f32", pytest.param("bf16", marks=pytest.mark.exhaustive)],
)
def test_mutants_of_calls(precision: str, data: pathlib.Path) -> None:
    p = test_mutants.planned(
        *SMALL,
        f"train.precision={precision}",
        "zero.stage3_max_live_parameters=24576",
    )
    test_mutants.judge_calls(p, mutants.of_calls(p), data)


def test_slices_that_do_not_fill_their_shards_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slices that leave gaps in their shards, of 1024 elements on two ranks, are refused: a
    tensor's elements must be consecutive."""
    whole = slices._slices
    monkeypatch.setattr(
        slices,
        "_slices",
        lambda *args: 32 if whole(*args) == 4 else whole(*args),
    )
    p = planned(f"zero.stage3_max_live_parameters={LEAST}")
    assert any(t.flat_step == 32 for t in p.tensors)
    with pytest.raises(check.CheckError, match="instances have no place in block_"):
        check.check(p)


@pytest.mark.slow
def test_mutants_of_tables() -> None:
    p = test_mutants.planned(*SMALL, "zero.stage3_max_live_parameters=24576")
    assert [m.what for m in mutants.of_tables(p) if not mutants.refused(m.plan)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        (),
        ("train.precision=bf16", "train.recompute=full"),
        ("zero.offload_param.device=cpu",),
    ],
    ids=["", "recomputed", "on the host"],
)
@test_mutants.OF
def test_mutants_of_steps(
    keys: tuple[str, ...], of: test_mutants.Choice, data: pathlib.Path
) -> None:
    p = test_mutants.planned(*SMALL, "zero.stage3_max_live_parameters=33000", *keys)
    test_mutants.judge(p, of(mutants.mutants(p)), data)
