"""test_emulated.py -- tests the program for GPUs on a CPU: it trains like the CPU's program, obeys
the bitwise law, and no access of any queue races with another's (tests/emulation/race.cpp checks
all of them in every run here)."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

from tests.lib import law, plans, trainer
from tests.lib.covering import covering
from tests.lib.patience import LIMIT

BIG = 500_000_000  # elements: more than any unit has
FAMILIES = law.FAMILIES

# Choices of a row: how work is spread, and in which order the emulation runs it. `queue` other than
# eager fills dead slots with NaN; `order` is ZR_EMULATE.
WAYS = {
    "family": FAMILIES,
    "stage": [0, 1, 2, 3],
    "ranks": [1, 2, 4],
    "reduce": [5000, BIG],
    "gather": [3000, BIG],
    "small": [0, 100],
    "prefetch": [0, "auto", BIG],
    "overlap": [True, False],
    "graph": [True, False],
    "queue": ["eager", "late"],
    "again": law.AGAIN,
    "reuse": [0, 30000, BIG],
    "order": ["eager", "late", "shuffled:1", "shuffled:2", "shuffled:3"],
    "accumulate": ["micro_batches", "layers"],
}
OFFLOADED = {
    "family": FAMILIES,
    "stage": [1, 2, 3],
    "ranks": [1, 2],
    "values": [False, True],
    "offload": ["none", "cpu", "nvme"],
    "params": ["none", "cpu", "nvme"],
    "tile": [5000, BIG],
    "turns": [1, 4],
    "ratio": [1, 0.3],
    "reduce": [BIG],
    "gather": [BIG],
    "small": [100],
    "prefetch": ["auto"],
    "overlap": [True, False],
    "graph": [True, False],
    "queue": ["eager", "late"],
    "again": ["none"],
    "order": ["late", "shuffled:1", "shuffled:2"],
}
PLAIN = {
    "stage": 0,
    "ranks": 1,
    "reduce": BIG,
    "gather": BIG,
    "small": 0,
    "prefetch": "auto",
    "overlap": False,
    "graph": False,
    "queue": "eager",
    "again": "none",
    "reuse": 0,
    "order": "eager",
}
STEPS = 2


def run(
    folder: pathlib.Path,
    way: law.Way,
    steps: int,
    *options: object,
    kind: trainer.Kind,
    recipe: tuple[str, ...] = (),
    **settings: str,
) -> law.Result:
    graph = [] if way["graph"] or kind is not trainer.EMULATED else ["--no-graph"]
    source = trainer.generate(law.path(str(way["family"])), *recipe, *law.keys(way))
    return law.run(
        trainer.build(source, kind),
        "--data",
        folder / "tokens",
        "--val",
        folder / "val",
        "--steps",
        steps,
        "--queue",
        way["queue"],
        *graph,
        *options,
        log=folder / "log",
        ZR_EMULATE=way["order"],
        **settings,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("emulated")
    trainer.write_tokens(made / "tokens", law.tokens(256, 21 * 8 * 40, holes=True))
    trainer.write_tokens(made / "val", law.tokens(256, 3 * 40 + 1, holes=True))
    return made


def recipe(precision: str, leaves: int = 4) -> tuple[str, ...]:
    return (
        f"train.precision={precision}",
        "train.micro_batch=1",
        f"train.global_batch={leaves}",
    )


# ---- the law within the target: the same micro-batches, spread in several ways

HALVES = {"precision": ["f32", "bf16"]}
GROUPS = [
    *((family, precision) for family in FAMILIES for precision in ("f32", "bf16")),
    ("gpt", "f16"),
]
BY_TURNS = [GROUPS[n] for n in (0, 3, 4, 6)]  # each family once, each type


@pytest.mark.slow
@pytest.mark.parametrize("family,precision", BY_TURNS)
def test_one_hash(folder: pathlib.Path, family: str, precision: str) -> None:
    """A part of the rows has one hash. The types share the rows, so any two choices meet, also the
    type and each other choice; f16 has every second row of bf16."""
    all_rows = (
        *law.covering(WAYS | HALVES, 1),
        *law.covering(OFFLOADED | HALVES, 2),
    )
    type_ = "f32" if precision == "f32" else "bf16"
    rows = [row for row in all_rows if row["precision"] == type_]
    if precision == "f16":
        rows = rows[::2]
    one_hash(folder, family, recipe(precision), rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family,precision", GROUPS)
def test_one_hash_of_all_rows(
    folder: pathlib.Path, family: str, precision: str
) -> None:
    """All rows have one hash for each type."""
    one_hash(
        folder,
        family,
        recipe(precision, leaves=8),
        [*law.covering(WAYS, 1), *law.covering(OFFLOADED, 2)],
    )


def one_hash(
    folder: pathlib.Path,
    family: str,
    recipe: tuple[str, ...],
    rows: list[dict],
) -> None:
    mine = [
        {"family": family, **PLAIN},
        *(row for row in rows if row["family"] == family),
    ]
    assert len(mine) > 1
    found = {
        str(row): run(folder, row, STEPS, kind=trainer.EMULATED, recipe=recipe)
        for row in mine
    }
    (name, first), *rest = found.items()
    off = [f"{other}\n    {x.weights}" for other, x in rest if x != first]
    assert not off, f"{len(off)} differ from\n{name}: {first.weights}\n" + "\n".join(
        off
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", ["80", "90", "100", "103"])
def test_every_column_obeys_the_law(folder: pathlib.Path, device: str) -> None:
    """Each device obeys the law with its own column of the launch tables; a B300 (103) takes that
    of sm_100."""
    ways = (
        {"family": "llama", **PLAIN},
        {
            "family": "llama",
            **PLAIN,
            "stage": 3,
            "ranks": 2,
            "graph": True,
            "order": "late",
            "gather": 3000,
            "queue": "late",
        },
    )
    found = {
        run(
            folder,
            way,
            STEPS,
            kind=trainer.EMULATED,
            recipe=recipe("bf16", leaves=4),
            ZR_EMULATE_CC=device,
        )
        for way in ways
    }
    assert len(found) == 1


@pytest.mark.slow
def test_a_device_that_the_plan_does_not_list(folder: pathlib.Path) -> None:
    program = trainer.build(
        trainer.generate(law.path("gpt"), "targets=[cpu, sm_90]"),
        trainer.EMULATED,
    )
    listed, done = (
        subprocess.run(
            [program, "--steps", "0"],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=os.environ | {"ZR_EMULATE_CC": device},
        )
        for device in ("90", "80")
    )
    assert listed.returncode == 0
    assert (
        done.returncode == 3
        and "this is sm_80, but the program is made for cpu, sm_90" in done.stderr
    )


@pytest.mark.slow
def test_the_recipe_changes_the_hash(folder: pathlib.Path) -> None:
    """Changes of the recipe change the hash (controls)."""
    way = {"family": "gpt", **PLAIN}
    hashes = {
        run(
            folder,
            way,
            2,
            kind=trainer.EMULATED,
            recipe=(*recipe("f32"), *more),
        ).weights
        for more in (
            (),
            ("train.sum=fold",),
            ("train.seed=2",),
            ("train.micro_batch=2",),
        )
    }
    assert len(hashes) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "every",
    [False, pytest.param(True, marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
def test_each_rule_of_sums_has_one_hash(folder: pathlib.Path, every: bool) -> None:
    """Each rule of sums has one hash of its own. 16 gradients are four blocks of four, one on each
    of four ranks."""
    two = [{}, {"stage": 3, "ranks": 2, "order": "late"}]
    four = [
        {"stage": 1, "ranks": 4, "graph": True},
        {
            "stage": 2,
            "ranks": 4,
            "offload": "cpu",
            "overlap": True,
            "order": "shuffled:1",
        },
    ]
    less = two + four if every else two
    rules = {"tree": less, "fold": less, "{block: 4}": two + four}
    found = {}
    for rule, rows in rules.items():
        more = (
            *recipe("f32")[:-1],
            "train.global_batch=16",
            f"train.sum={rule}",
        )
        found[rule] = {
            run(
                folder,
                {"family": "gpt", **PLAIN, **row},
                1,
                kind=trainer.EMULATED,
                recipe=more,
            ).weights
            for row in rows
        }
    assert [len(hashes) for hashes in found.values()] == [1, 1, 1], found
    assert len(set.union(*found.values())) == 3, found


# ---- groups of ranks

LOCAL, SHARD, OWN = {"local": 2}, {"shard": 2}, {"states": "shard"}
LATE = {"order": "late", "queue": "late"}
GRIDS = [
    ({"ranks": 4, **LATE}, (LOCAL,)),
    ({"ranks": 4, "graph": True}, (SHARD,)),
    (
        {"ranks": 4, "overlap": True, "order": "shuffled:1"},
        (LOCAL, SHARD, OWN),
    ),
]
MORE_GRIDS = [
    ({"ranks": 4, "reduce": 5000, "graph": True}, (LOCAL, SHARD)),
    ({"ranks": 4, "gather": 3000, "overlap": True, **LATE}, (SHARD, OWN)),
    ({"ranks": 4, "small": 100, "order": "shuffled:2"}, (LOCAL,)),
    ({"ranks": 4, "accumulate": "layers", "overlap": True}, (LOCAL, SHARD)),
    ({"ranks": 4, "again": "full", "prefetch": 0}, (LOCAL, SHARD)),
    ({"ranks": 4, "offload": "cpu", **LATE}, (LOCAL, SHARD)),
    ({"ranks": 4}, ("zero.hpz_partition_size=2",)),
    ({"ranks": 4, "overlap": True}, ("zero.mics_shard_size=2", LOCAL, OWN)),
    ({"ranks": 4, "stage": 0, "overlap": True}, (LOCAL,)),
    ({"ranks": 4, "stage": 1, "graph": True}, (LOCAL,)),
    ({"ranks": 4, "stage": 2, **LATE}, (LOCAL, SHARD, OWN)),
    ({"ranks": 8, "overlap": True}, ({"local": 4}, SHARD)),
    ({"ranks": 8, **LATE}, (LOCAL, {"shard": 4}, OWN)),
    ({"ranks": 8, "small": 100}, (LOCAL,)),
]


def in_grids(
    folder: pathlib.Path,
    family: str,
    recipe: tuple[str, ...],
    rows: list[tuple[dict, tuple[dict | str, ...]]],
) -> None:
    """Assert that grids have the hash of one group, and that runs count bytes by group as plans
    do."""
    found = {}
    for row, grid in [({"ranks": 4}, ()), *rows]:
        way = {"family": family, **PLAIN, "stage": 3, **row}
        for more in (more for more in grid if isinstance(more, dict)):
            way |= more
        keys = [key for key in grid if isinstance(key, str)]
        made = (*recipe, *keys, *law.keys(way))
        p = plans.planned(str(law.path(family)), *made)
        assert bool(grid) == bool(p.axes)
        found[f"{row} {grid}"] = run(
            folder, way, STEPS, kind=trainer.EMULATED, recipe=(*recipe, *keys)
        )
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(GRIDS)))
def test_a_grid_of_ranks(folder: pathlib.Path, row: int) -> None:
    family, precision = [("gpt", "f32"), ("llama", "bf16"), ("gpt", "f16")][row]
    in_grids(folder, family, recipe(precision, leaves=8), [GRIDS[row]])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family,precision", GROUPS)
def test_all_grids_of_ranks(folder: pathlib.Path, family: str, precision: str) -> None:
    in_grids(folder, family, recipe(precision, leaves=16), [*GRIDS, *MORE_GRIDS])


def in_four(
    folder: pathlib.Path,
    was: str = "",
    becomes: str = "",
    *options: str,
    **settings: str,
) -> subprocess.CompletedProcess[str]:
    """Run a step of two hosts of two ranks, with one change to the program."""
    way = {"family": "gpt", **PLAIN, "stage": 3, "ranks": 4, "overlap": True}
    made, found = re.subn(
        was or "$^",
        becomes,
        trainer.generate(
            law.path("gpt"), *recipe("f32"), *law.keys(way), "cluster.local=2"
        ),
    )
    assert found == bool(was)
    return subprocess.run(
        [
            trainer.build(made, trainer.EMULATED),
            *("--data", folder / "tokens", "--steps", "1"),
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=os.environ | settings,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "was,becomes,code,said",
    [
        (
            r"\.far = (\d+)",
            r".far = 1\1",
            8,
            "bytes received from other hosts",
        ),
        (
            r"\[GROUP_HOSTS\] = 1 << ZR_GATHER",
            "[GROUP_HOSTS] = 1 << ZR_MAIN",
            4,
            "group hosts has no collectives on queue gather; regenerate the program",
        ),
    ],
)
def test_what_a_program_says_of_groups_is_checked(
    folder: pathlib.Path, was: str, becomes: str, code: int, said: str
) -> None:
    done = in_four(folder, was, becomes)
    assert done.returncode == code and said in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings,said",
    [
        (
            {"ZR_EMULATE_NCCL_ERROR": "9"},
            r"rank \d: step 1: an? [\w -]+, group \w+: NCCL: remote process exited",
        ),
        (
            {"ZR_EMULATE_CUT": "9"},
            r"rank \d: step 1(, queue \w+|: an? [\w -]+), group \w+: NCCL: remote process exited",
        ),
    ],
)
def test_an_error_names_its_group(
    folder: pathlib.Path, settings: dict[str, str], said: str
) -> None:
    """An error names its group, in a rank's own thread as in its watchdog's."""
    done = in_four(folder, "", "", "--no-graph", **settings)
    assert done.returncode == 7 and re.search(said, done.stderr), done.stderr


# ---- a piece on the wire beside the sum of the piece before

BESIDE = {
    "family": "gpt",
    **PLAIN,
    "stage": 3,
    "ranks": 2,
    "reduce": 5000,
    "overlap": True,
}


@pytest.mark.slow
def test_pieces_that_come_beside_sums(folder: pathlib.Path) -> None:
    """Pieces summed beside transfers have the bits of whole gradients on one queue."""
    rows = [
        {},
        {"order": "late", "queue": "late", "graph": True},
        {"stage": 0, "graph": True},
        {"reduce": BIG, "order": "shuffled:1"},
        {"overlap": False, "reduce": BIG},
    ]
    found = {
        run(
            folder,
            {**BESIDE, **row},
            STEPS,
            kind=trainer.EMULATED,
            recipe=recipe("f32", leaves=4),
        )
        for row in rows
    }
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait,without",
    [
        (
            r"zr_before\(z, ZR_REDUCE, ZR_SUM, (FULL_INBOX.*)\);",
            r"zr_record(z, ZR_REDUCE, \1);",
        ),
        (r"(zr_waits?\(z, ZR_REDUCE,.* )FREE_INBOX", r"\1FULL_INBOX"),
    ],
    ids=["before it has come", "into a full slot"],
)
def test_a_missing_wait_of_the_inbox_is_a_race(
    folder: pathlib.Path,
    wait: str,
    without: str,
) -> None:
    made, found = re.subn(
        wait,
        without,
        trainer.generate(law.path("gpt"), *recipe("f32"), *law.keys(BESIDE)),
    )
    done = subprocess.run(
        [
            trainer.build(made, trainer.EMULATED),
            "--data",
            folder / "tokens",
            "--steps",
            "1",
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert found > 1 and done.returncode and "race at byte" in done.stderr, done.stderr


# ---- reductions that NCCL sums

FAST = "train.reduction=fast", "targets=[sm_90]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        {"stage": 3, "ranks": 2, "reduce": 5000},
        {"stage": 2, "ranks": 2},
        {"stage": 1, "ranks": 2},
    ],
)
def test_nccl_sums_two_ranks_exactly(folder: pathlib.Path, way: law.Way) -> None:
    """NCCL's sum of two f32 numbers is exact up to one rounding, so it is the tree's first node. In
    bf16 it is rounded to bf16, and the tree's is not."""
    way = {"family": "gpt", **PLAIN, **way, "graph": True}
    exact, fast = (
        run(
            folder,
            way,
            2,
            kind=trainer.EMULATED,
            recipe=(*recipe("f32"), *more),
        )
        for more in ((), FAST)
    )
    assert exact == fast
    if way["stage"] == 2:
        exact, fast = (
            run(
                folder,
                way,
                2,
                kind=trainer.EMULATED,
                recipe=(*recipe("bf16"), *more),
            )
            for more in ((), FAST)
        )
        assert exact.weights != fast.weights
        assert abs(losses(exact) - losses(fast)).max() < 2**-8 * losses(exact)[0]


@pytest.mark.slow
def test_nccls_sums_repeat(folder: pathlib.Path) -> None:
    """NCCL's sums over four ranks have other bits than the tree's, but the same in every run,
    whatever the order of work."""
    way = {"family": "gpt", **PLAIN, "stage": 3, "ranks": 4}
    ways = [
        way,
        {**way, "graph": True},
        {**way, "order": "late", "queue": "late"},
        {**way, "order": "shuffled:1", "overlap": True},
    ]
    fast = {
        run(folder, w, 2, kind=trainer.EMULATED, recipe=(*recipe("f32"), *FAST)).weights
        for w in ways
    }
    exact = run(folder, way, 2, kind=trainer.EMULATED, recipe=recipe("f32"))
    assert len(fast) == 1 and fast != {exact.weights}


# ---- against the CPU's program


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_initial_weights_are_the_cpus(folder: pathlib.Path, family: str) -> None:
    way = {"family": family, **PLAIN, "stage": 3, "ranks": 2}
    assert (
        run(folder, way, 0, kind=trainer.EMULATED).weights
        == run(folder, way, 0, kind=trainer.GCC).weights
    )


def losses(result: law.Result) -> np.ndarray:
    return np.array([json.loads(line)["loss"] for line in result.steps])


# Both programs do the same arithmetic and differ only in the order of sums: of a norm's row, of
# attention's keys, of a softmax. In f32 such a sum of n <= 256 terms is off by at most n * 2^-24
# and far less on average, and a loss is a mean over hundreds of tokens that are off to either side:
# 2^-20 of it in the first step. In bf16 a sum that is off may fall to the other side of a rounding,
# 2^-8 of one activation; in f16 that is 2^-11, with bounds lower by as much. Later the weights
# differ, too, where a gradient is as small as its error: Adam moves those by up to lr in either
# direction.
OFF = {
    "f32": (2**-20, 2**-16),
    "bf16": (2**-14, 2**-10),
    "f16": (2**-17, 2**-13),
}
# Ways that are far apart.
THREE: tuple[law.Way, ...] = (
    {"stage": 3, "ranks": 2, "graph": True, "queue": "late"},
    {"order": "late", "again": "full"},
    {"stage": 3, "ranks": 4, "accumulate": "layers"},
)


def assert_near(ours: np.ndarray, cpus: np.ndarray, precision: str) -> None:
    """Assert that the losses of a GPU's steps differ from a CPU's by no more than OFF."""
    first, later = OFF[precision]
    off = abs(ours - cpus) / cpus
    assert off[0] <= first and off.max() <= later, off


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,precision",
    covering(FAMILIES, [*OFF]),
)
def test_losses_are_the_cpus(folder: pathlib.Path, family: str, precision: str) -> None:
    way = {
        "family": family,
        **PLAIN,
        "stage": 3,
        "ranks": 2,
        "graph": True,
        "queue": "late",
    }
    quick = *recipe(precision, leaves=8), "train.schedule.warmup=1"
    ours = losses(run(folder, way, 8, kind=trainer.EMULATED, recipe=quick))
    cpus = losses(run(folder, way, 8, kind=trainer.GCC, recipe=quick))
    assert len(ours) == 8 and cpus[-1] < cpus[0] - 0.05, cpus
    assert_near(ours, cpus, precision)


@pytest.mark.slow
@pytest.mark.parametrize("family,precision", [("llama", "bf16"), ("qwen3", "f16")])
def test_mlps_in_chunks_are_the_cpus(
    folder: pathlib.Path, family: str, precision: str
) -> None:
    """Three ways have one hash with MLPs in chunks of tokens, and a CPU's losses."""
    keys = *recipe(precision, leaves=4), "train.sequence=64", "train.mlp_chunk=32"
    ways = [{"family": family, **PLAIN, **way} for way in THREE]
    ours = {run(folder, way, 3, kind=trainer.EMULATED, recipe=keys) for way in ways}
    assert len(ours) == 1
    cpus = losses(run(folder, ways[0], 3, kind=trainer.GCC, recipe=keys))
    assert_near(losses(*ours), cpus, precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision,more",
    [
        ("bf16", ()),
        ("f32", ("train.loss_mean=micro_batch",)),
        ("bf16", ("train.attention_dropout=0.2",)),
        ("bf16", ("model.units[1].blocks=4",)),
    ],
)
def test_samples_in_blocks_are_the_cpus(
    folder: pathlib.Path, precision: str, more: tuple[str, ...]
) -> None:
    """Samples that ranks share in several ways have one hash, and a CPU's losses. With four layers
    some values wait on the host."""
    blocks = "train.sequence_blocks=4", "train.sum={block: 16}"
    keys = *recipe(precision), *blocks, *more
    spread = (
        {"order": "late", "again": "full"},
        {"stage": 3, "ranks": 4, "context": 4, "queue": "late"},
        {"stage": 3, "ranks": 4, "context": 2, "order": "late", "values": True},
        {"stage": 2, "ranks": 2, "context": 2, "graph": True},
        {"stage": 2, "ranks": 2, "queue": "late", "values": True},
    )
    ways = [{"family": "llama", **PLAIN, **way} for way in spread]
    ours = {run(folder, way, 3, kind=trainer.EMULATED, recipe=keys) for way in ways}
    assert len(ours) == 1
    cpus = losses(run(folder, ways[0], 3, kind=trainer.GCC, recipe=keys))
    assert_near(losses(*ours), cpus, precision)


@pytest.mark.slow
@pytest.mark.parametrize("family,precision", [("gpt", "bf16"), ("qwen3", "f32")])
def test_documents_are_the_cpus(
    folder: pathlib.Path, family: str, precision: str
) -> None:
    """Three ways have one hash. The losses are a CPU's, and differ from those of joined
    documents."""
    keys = recipe(precision, leaves=4)
    ways = [{"family": family, **PLAIN, **way} for way in THREE]

    def found(kind: trainer.Kind, way: dict, *more: str) -> law.Result:
        return run(folder, way, 3, kind=kind, recipe=(*keys, *more))

    ours = {found(trainer.EMULATED, way, *law.PACKED) for way in ways}
    assert len(ours) == 1
    cpus = losses(found(trainer.GCC, ways[0], *law.PACKED))
    assert_near(losses(*ours), cpus, precision)
    joined = losses(found(trainer.GCC, ways[0]))
    assert abs(joined[0] - cpus[0]) > 2 * OFF[precision][0] * cpus[0]


@pytest.mark.slow
def test_weights_go_from_one_to_the_other(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    way = {"family": "gpt", **PLAIN, "stage": 3, "ranks": 2}
    saved = run(folder, way, 3, "--save", tmp_path / "cpu", kind=trainer.GCC)
    loaded = run(
        folder,
        way,
        0,
        "--load",
        tmp_path / "cpu",
        "--save",
        tmp_path / "gpu",
        kind=trainer.EMULATED,
    )
    back = run(folder, way, 0, "--load", tmp_path / "gpu", kind=trainer.GCC)
    assert saved.weights == loaded.weights == back.weights
