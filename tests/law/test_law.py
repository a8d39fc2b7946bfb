"""test_law.py -- tests the bitwise law: weights after N steps do not depend on how the work was
spread.

Runs have one hash, one log and one validation loss over ZeRO stages, ranks, accumulation, buckets,
persistence, prefetch, reuse, overlap, recompute, queue orders, threads, kernel objects, hosts and
ranks that share parameters and states. Controls must have others. Gradients span over six decades,
so sums in another order round differently.
"""

import dataclasses
import functools
import itertools
import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from zg.read import spec as reader
from zg.search import search

from tests.check import test_mutants
from tests.lib import law, mutants, oracle, program, trainer, zk
from tests.lib.covering import covering

BIG = 500_000_000  # elements: more than any unit has

# Choices of each set of rows. 24 micro-batches give 24, 12, 8, 6, 4 and 3 to a rank: local sums
# come first at 1, 3 and 6 ranks. 8 micro-batches give 8, 4, 2 and 1: local sums come first with any
# number of ranks above 1.
ACCUMULATE = ["micro_batches", "layers"]
LAYOUT = {
    "local": [0, 1, 2, 4],
    "shard": [0, 2, 4],
    "states": ["all", "shard"],
}
ANY_STAGE = {
    "family": law.FAMILIES,
    "stage": [0, 1, 2, 3],
    "ranks": [1, 2, 3, 4, 6, 8],
    **LAYOUT,
    "reduce": [5000, 14000, BIG],
    "gather": [3000, 9000, BIG],
    "small": [0, 100],
    "prefetch": ["auto", BIG],
    "overlap": [True, False],
    "flat": [False, True],
    "queue": ["eager", "late", "shuffled:1", "shuffled:2"],
    "threads": [1, 2, 3],
    "unmap": [0, 1],
    "every": [0, 7],
    "again": law.AGAIN,
    "reuse": [0, BIG],
    "accumulate": ACCUMULATE,
}
STAGE_3 = {
    "family": law.FAMILIES,
    "stage": [3],
    "ranks": [2, 3, 6, 8],
    **LAYOUT,
    "kept": ["", "norms", "a matrix"],
    "reduce": [5000, 14000],
    "gather": [3000, 9000, BIG],
    "small": [0, 100, 10**5, 10**9],
    "prefetch": [0, "auto", BIG],
    "overlap": [True, False],
    "flat": [False, True],
    "queue": ["eager", "late", "shuffled:3", "shuffled:4"],
    "threads": [1, 2],
    "unmap": [0, 1],
    "every": [0],
    "again": law.AGAIN,
    "reuse": [0, 30000, BIG],
    "accumulate": ACCUMULATE,
}
OFFLOADED = {
    "family": law.FAMILIES,
    "stage": [1, 2, 3],
    "ranks": [1, 2, 3, 4, 8],
    **LAYOUT,
    "offload": ["none", "cpu", "nvme"],
    "params": ["none", "cpu", "nvme"],
    "values": [False, True],
    "tile": [1024, 5000, BIG],
    "turns": [1, 2, 4],
    "ratio": [1, 0.5, 0.1],
    "reduce": [5000, BIG],
    "gather": [3000, BIG],
    "small": [0, 100],
    "prefetch": [0, "auto", BIG],
    "overlap": [True, False],
    "flat": [False, True],
    "queue": ["eager", "late", "shuffled:5", "shuffled:6"],
    "threads": [1, 3],
    "unmap": [0, 1],
    "every": [0, 7],
    "again": law.AGAIN,
    "accumulate": ACCUMULATE,
}
PLAIN = {
    "stage": 0,
    "ranks": 1,
    "reduce": BIG,
    "gather": BIG,
    "small": 0,
    "prefetch": "auto",
    "overlap": False,
    "flat": False,
    "queue": "eager",
    "threads": 1,
    "unmap": 0,
    "every": 0,
    "again": "none",
    "reuse": 0,
}

# Steps small enough to keep the weights' sizes far apart.
UNEVEN = [
    "train.optimizer.lr=1e-5",
    "train.optimizer.eps=1e-12",
    "train.schedule.type=constant",
    "train.schedule.warmup=5",
    "train.schedule.min_lr=0.0",
    "train.micro_batch=1",
]


# Steps for each number of micro-batches: with 8 steps the validation of every seventh is one of
# them.
ENOUGH = {24: 6, 8: 8}
# Types, and objects of kernels.
KINDS = (
    "f32",
    "f32 avx2",
    "bf16",
    "bf16 avx2",
)


@functools.cache
def ways(micro_batches: int, *kinds: str) -> list[dict]:
    if micro_batches == 24:
        return (
            law.covering(ANY_STAGE | {"kind": kinds}, 1, law.fits)
            + law.covering(STAGE_3 | {"kind": kinds}, 2, law.fits)
            + law.covering(OFFLOADED | {"kind": kinds}, 4, law.fits)
        )
    powers = {"ranks": [1, 2, 4, 8], "kind": kinds}
    return law.covering(ANY_STAGE | powers, 1, law.fits)


def recipe(precision: str, micro_batches: int) -> list[str]:
    return [
        *UNEVEN,
        f"train.precision={precision}",
        f"train.global_batch={micro_batches}",
    ]


def stream(family: str, micro_batches: int, steps: int = law.STEPS) -> np.ndarray:
    T = reader.load(str(law.path(family))).train.sequence
    return law.tokens(256, T * micro_batches * steps + 1, holes=True)


@dataclasses.dataclass(frozen=True)
class Bench:
    """A folder with the files of a recipe's runs."""

    folder: pathlib.Path
    weights: pathlib.Path | None
    steps: int

    def run(
        self, way: dict, *recipe: str, spec: pathlib.Path | None = None
    ) -> law.Result:
        source = trainer.generate(
            spec or law.path(way["family"]),
            *recipe,
            *law.keys(way),
            flat=way["flat"],
        )
        options = ["--load", self.weights] if self.weights else []
        options += ["--val-every", way["every"]] if way["every"] else []
        isa = way.get("kind", "").partition(" ")[2]
        kind = trainer.TILES if isa == "amx" else trainer.GCC
        return law.run(
            trainer.build(source, kind),
            "--data",
            self.folder / "tokens",
            "--val",
            self.folder / "val",
            "--steps",
            self.steps,
            "--queue",
            way["queue"],
            "--threads",
            way["threads"],
            *options,
            log=self.folder / "log",
            ZR_UNMAP_PEERS=way["unmap"],
            **({"ZK_ISA": isa} if isa else {}),
        )


def bench(
    folder: pathlib.Path,
    stream: np.ndarray,
    weights: pathlib.Path | None = None,
    steps: int = law.STEPS,
    vocab: int = 256,
    sequence: int = 40,
) -> Bench:
    """Write data for runs. Validation has 11 samples and a rest, so it ends in the middle of a
    round of ranks."""
    trainer.write_tokens(folder / "tokens", stream)
    trainer.write_tokens(
        folder / "val", law.tokens(vocab, 12 * sequence - 3, holes=True)
    )
    return Bench(folder, weights, steps)


def agree(results: dict[str, law.Result]) -> None:
    """Assert that all results equal the first; name those that do not."""
    (name, first), *rest = results.items()
    off = [
        f"{other}\n    gave {found.weights}, {differing(first, found)}"
        for other, found in rest
        if found != first
    ]
    assert not off, (
        f"{len(off)} of {len(results)} differ from\n{name}: {first.weights}\n"
        + "\n".join(off)
    )


def differing(a: law.Result, b: law.Result) -> str:
    for line, other in zip(a.steps, b.steps, strict=False):
        if line != other:
            return f"{other} instead of {line}"
    return (
        f"validation {b.val} instead of {a.val}"
        if a.val != b.val
        else "in the last update"
    )


# ---- the law

GROUPS = [
    (family, precision, micro_batches)
    for micro_batches in (24, 8)
    for family in law.FAMILIES
    for precision in ("f32", "bf16")
]
# A chessboard: each family in both types, each type with one number of micro-batches.
BY_TURNS = [GROUPS[n] for n in (0, 3, 4, 7, 8, 11)]


@pytest.mark.slow
@pytest.mark.parametrize("family,precision,micro_batches", BY_TURNS)
def test_one_hash(
    tmp_path: pathlib.Path, family: str, precision: str, micro_batches: int
) -> None:
    """A part of the ways has one hash. The types share the ways, so any two choices meet, also the
    type and each other choice."""
    one_hash(tmp_path, family, precision, micro_batches, *KINDS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family,precision,micro_batches", GROUPS)
def test_one_hash_of_all_ways(
    tmp_path: pathlib.Path,
    family: str,
    precision: str,
    micro_batches: int,
) -> None:
    """All ways have one hash for each type."""
    one_hash(
        tmp_path,
        family,
        precision,
        micro_batches,
        *(x for x in KINDS if precision in x),
    )


def one_hash(
    folder: pathlib.Path,
    family: str,
    precision: str,
    micro_batches: int,
    *kinds: str,
) -> None:
    steps = ENOUGH[micro_batches]
    b = bench(
        folder,
        stream(family, micro_batches, steps),
        law.uneven(family, folder),
        steps,
    )
    mine = [
        way
        for way in ways(micro_batches, *kinds)
        if way["family"] == family and precision in way["kind"]
    ]
    results = {
        str(way): b.run(way, *recipe(precision, micro_batches))
        for way in ({"family": family, **PLAIN}, *mine)
    }
    assert len(results) > 1
    agree(results)
    first = next(iter(results.values()))
    log = [json.loads(line) for line in first.steps]
    assert len(log) == steps and all(np.isfinite(line["loss"]) for line in log)
    # clipped: every update depends on the norm of all gradients
    assert all(line["norm"] > 1 and not line["skipped"] for line in log)
    assert len({line["valid"] for line in log}) >= 5 and first.val


# A few ways that are far apart; together they use every feature once.
IN_BRIEF = (
    {},
    {
        "stage": 1,
        "ranks": 2,
        "reduce": 5000,
        "queue": "shuffled:1",
        "overlap": True,
        "again": law.AGAIN[1],
    },
    {
        "stage": 3,
        "ranks": 4,
        "queue": "late",
        "overlap": True,
        "threads": 2,
        "unmap": 1,
        "again": "full",
    },
    {
        "stage": 2,
        "ranks": 2,
        "offload": "cpu",
        "tile": 5000,
        "turns": 2,
        "queue": "late",
        "overlap": True,
    },
    {
        "stage": 3,
        "ranks": 2,
        "offload": "nvme",
        "params": "nvme",
        "tile": 5000,
        "turns": 2,
        "queue": "shuffled:6",
        "overlap": True,
    },
    {
        "stage": 3,
        "ranks": 2,
        "offload": "cpu",
        "params": "cpu",
        "queue": "shuffled:4",
        "overlap": True,
        "values": True,
    },
    {
        "stage": 3,
        "ranks": 2,
        "offload": "cpu",
        "params": "cpu",
        "ratio": 0.5,
        "tile": 5000,
        "queue": "shuffled:1",
        "overlap": True,
        "accumulate": "layers",
    },
    {
        "stage": 3,
        "ranks": 8,
        "prefetch": BIG,
        "queue": "shuffled:2",
        "overlap": True,
    },
    {
        "stage": 3,
        "ranks": 2,
        "accumulate": "layers",
        "queue": "shuffled:5",
        "overlap": True,
    },
    {
        "stage": 3,
        "ranks": 4,
        "reuse": BIG,
        "queue": "shuffled:3",
        "overlap": True,
    },
    {
        "stage": 3,
        "ranks": 8,
        "local": 2,
        "shard": 4,
        "reduce": 5000,
        "queue": "shuffled:4",
        "overlap": True,
    },
    {
        "stage": 3,
        "ranks": 8,
        "local": 4,
        "shard": 2,
        "states": "shard",
        "gather": 3000,
        "queue": "late",
        "overlap": True,
    },
    {
        "stage": 2,
        "ranks": 4,
        "local": 2,
        "accumulate": "layers",
        "queue": "shuffled:7",
        "overlap": True,
        "unmap": 1,
    },
)


@pytest.mark.parametrize(
    "family,precision,more",
    [
        ("gpt", "f32", ()),
        ("llama", "bf16", ()),
        pytest.param("gpt", "bf16", law.PACKED, marks=pytest.mark.slow),
        pytest.param("qwen3", "bf16", law.OPS, marks=pytest.mark.slow),
        pytest.param(
            "qwen3",
            "f32",
            (
                *law.PACKED,
                "model.units[1].ops[0].residual[1].attention.window=9",
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            "f32",
            ("model.units[1].ops[0].residual[1].attention.window=[null, 9]",),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_hash_in_brief(
    tmp_path: pathlib.Path, family: str, precision: str, more: tuple[str, ...]
) -> None:
    """A few ways far apart have one hash over five steps: the quick form of the test above."""
    b = bench(tmp_path, stream(family, 8, 5), law.uneven(family, tmp_path), 5)
    some = [{"family": family, **PLAIN, **way} for way in IN_BRIEF]
    keys = *recipe(precision, 8), *more
    agree({str(way): b.run(way, *keys) for way in some})


@pytest.mark.parametrize(
    "family,more",
    [
        *((family, ()) for family in law.FAMILIES),
        ("gpt", ("train.precision=bf16",)),
        (
            "llama",
            ("train.precision=bf16", "train.optimizer.moments=bf16"),
        ),
        (
            "qwen3",
            ("train.precision=f16", "train.loss_scale={initial_scale_power: 3}"),
        ),
        (
            "llama",
            (
                "train.precision=bf16",
                "train.lora={rank: 4, alpha: 4, match: all-linear}",
            ),
        ),
    ],
)
def test_a_step_of_one_leaf(
    tmp_path: pathlib.Path, family: str, more: tuple[str, ...]
) -> None:
    """The only gradient of a step is used as the sum, except where the host sums or updates in half
    precision. It has the bits of a sum made by zk_push."""
    b = bench(tmp_path, stream(family, 1, 5), law.uneven(family, tmp_path), 5)
    keys = *UNEVEN, "train.global_batch=1", *more
    some = [
        {"family": family, **PLAIN, **way}
        for way in (
            {},
            {"queue": "late", "again": "full", "overlap": True, "stage": 3},
            {"queue": "shuffled:1", "accumulate": "layers", "threads": 2},
            {"stage": 3, "offload": "cpu", "params": "cpu", "ratio": 0.5},
            {"stage": 1, "offload": "cpu"},
        )
    ]
    pushes = [
        "_push(" in trainer.generate(law.path(family), *keys, *law.keys(way))
        for way in some
    ]
    assert pushes == [False, False, False, bool(more), True]
    results = {str(way): b.run(way, *keys) for way in some}
    agree(results)
    steps = map(json.loads, results[str(some[0])].steps)
    assert sum(not step["skipped"] for step in steps) >= 2


@pytest.mark.slow
def test_an_order_of_products_has_one_hash(tmp_path: pathlib.Path) -> None:
    """Each order of products in bf16 has one hash, with every object of kernels (AMX by emulation)
    and with the head's rows in chunks or all at once."""
    b = bench(tmp_path, stream("gpt", 16, 5), law.uneven("gpt", tmp_path), 5)
    keys = *recipe("bf16", 16), "train.micro_batch=2", "train.sequence=32"
    isas = [*zk.isas((*zk.ISAS, zk.BEST)), *["amx"] * zk.runs("tiles")]
    found = {}
    for order in ("pairs", "tiles"):
        pinned = *keys, f"train.products={order}"
        rows = zip(
            (*IN_BRIEF, *({} for _ in isas)),
            itertools.cycle(isas),
            itertools.cycle((32, 64)),
            strict=False,
        )
        results = {}
        for way, isa, chunk in rows:
            row = {"family": "gpt", **PLAIN, **way, "kind": f"bf16 {isa}"}
            results[f"{row} {chunk}"] = b.run(row, *pinned, f"train.head_chunk={chunk}")
        agree(results)
        found[order] = next(iter(results.values())).weights
    assert found["pairs"] != found["tiles"]


@pytest.mark.slow
@pytest.mark.parametrize("family", law.FAMILIES)
def test_documents_change_bits_where_they_end(
    tmp_path: pathlib.Path, family: str
) -> None:
    """Separating documents changes no bit without an end of a document, and changes bits with one.
    A prompt is treated like data: only tokens after the last end count."""
    tokens = stream(family, 8, 2)
    way = {"family": family, **PLAIN, "stage": 3, "ranks": 2}
    weights = law.uneven(family, tmp_path)
    whole = np.where(tokens == 1, 2, tokens)
    for data, alike in ((whole, True), (tokens, False)):
        b = bench(tmp_path, data, weights, 2)
        joined, packed = (
            b.run(way, *recipe("f32", 8), *more) for more in ((), law.PACKED)
        )
        assert (joined.weights == packed.weights) == alike
        assert (joined.steps == packed.steps) == alike
    program = trainer.build(trainer.generate(law.path(family), *law.PACKED))

    def said(*prompt: int) -> str:
        np.array(prompt, "<u4").tofile(tmp_path / "prompt")
        options = "--steps", 0, "--sample", 20, "--temperature", 0.1
        out = trainer.sh(program, *options, "--prompt-tokens", tmp_path / "prompt")
        return out.splitlines()[-1]

    alone = said(7, 6)
    assert said(9, 8, 1, 7, 6) == said(5, 1, 7, 6) == alone
    assert said(9, 7, 6) != alone


@pytest.mark.slow
@pytest.mark.parametrize("family", law.FAMILIES)
def test_gradients_span_six_decades(tmp_path: pathlib.Path, family: str) -> None:
    """The largest elements of the tensors' gradients span six decades at the first and the last
    step of the runs above, by the float64 evaluator."""
    before, after, tokens = (
        law.uneven(family, tmp_path),
        tmp_path / "after",
        stream(family, 8),
    )
    keys = recipe("f32", 8)
    trainer.write_tokens(tmp_path / "tokens", tokens)
    trainer.sh(
        trainer.build(trainer.generate(law.path(family), *keys)),
        "--data",
        tmp_path / "tokens",
        "--steps",
        law.STEPS,
        "--load",
        before,
        "--save",
        after,
    )
    spec = reader.load(str(law.path(family)), keys)
    for place, step in ((before, 0), (after, law.STEPS - 1)):
        params = {
            n: np.float64(x) for n, x in load_file(place / "model.safetensors").items()
        }
        batch = oracle.batch(tokens, spec.train.sequence, 8 * step, 8, law.HOLE)
        _, _, grads = oracle.gradients(spec, params, *batch)
        size = np.sort([np.abs(g).max() for g in grads.values()])
        assert size[-1] > 1e6 * size[0] > 0, (step, size)
        # Also without the largest and the smallest tensor
        assert size[-2] > 1e3 * size[1], (
            step,
            size,
        )


@pytest.mark.slow
def test_the_ways_are_what_they_claim() -> None:
    """The ways have both orders of summation, several depths of prefetch, and ragged pieces of both
    collectives, and every two values of every two choices meet."""
    seen, ragged = set(), set()
    for way in ways(8, *KINDS):
        spec = reader.load(
            str(law.path(way["family"])), [*recipe("f32", 8), *law.keys(way)]
        )
        p = search.find(spec).plan
        seen |= {
            str(p.head.order),
            f"prefetch {min(p.head.prefetch, 2)}",
            f"micro-batches {p.head.micro_batches}",
        }
        units: dict[tuple[str, str], set[int]] = {}
        for step in (s for section in p.sections for s in section.steps):
            if step.op in ("gather", "alltoall"):
                sizes = units.setdefault((step.op, step.unit), set())
                sizes |= {i.value for i in step.ints if i.name == "bytes"}
        ragged |= {op for (op, _), sizes in units.items() if len(sizes) > 1}
    assert {
        "ranks",
        "local",
        "local,hosts,step",
        "shard,step,replica",
        "prefetch 0",
        "prefetch 1",
        "prefetch 2",
        "micro-batches 1",
        "micro-batches 2",
        "micro-batches 4",
        "micro-batches 8",
    } <= seen
    assert ragged == {"gather", "alltoall"}
    for factors, seed in ((ANY_STAGE, 1), (STAGE_3, 2), (OFFLOADED, 4)):
        rows = law.covering(factors, seed, law.fits)
        assert all(map(law.fits, rows))
        spread = ("stage", "ranks", *LAYOUT, "offload", "params")
        some = {name: factors[name] for name in spread if name in factors}
        can = [
            row
            for values in itertools.product(*some.values())
            if law.fits(row := dict(zip(some, values, strict=True)))
        ]
        for a, b in itertools.permutations(factors, 2):
            met = {(row[a], row[b]) for row in rows}
            meet = itertools.product(factors[a], factors[b])
            if a in some and b in some:
                meet = ((row[a], row[b]) for row in can)
            assert met == set(meet), (a, b)


# ---- controls: a change of the recipe changes bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision,ranks,stage",
    [("f32", 2, 1), pytest.param("bf16", 4, 3, marks=pytest.mark.slow)],
)
def test_controls(
    tmp_path: pathlib.Path, precision: str, ranks: int, stage: int
) -> None:
    """Another order of the same 8 gradients, other micro-batches and another clipping give other
    bits."""
    b = bench(tmp_path, stream("gpt", 8), law.uneven("gpt", tmp_path))
    way = {"family": "gpt", **PLAIN, "ranks": ranks, "stage": stage}
    plain = recipe(precision, 8)
    others = [
        b.run(way, *plain, *changed)
        for changed in (
            [],
            ["train.sum=fold"],
            ["train.micro_batch=2"],
            ["train.optimizer.clip=0.5"],
        )
    ]
    assert len({other.weights for other in others}) == len(others)
    # Clipping comes after the first norm
    assert others[0].steps[0] == others[3].steps[0]
    losses = [json.loads(other.steps[-1])["loss"] for other in others]
    # Other bits, but the same training
    assert np.allclose(losses, losses[0], rtol=0.01)


def test_ranks_with_each_others_samples(tmp_path: pathlib.Path) -> None:
    """Gradients that two ranks of different hosts exchange are summed in another order. This gives
    other bits and about the same loss, and the checker refuses the plan."""
    b = bench(tmp_path, stream("gpt", 8, 5), law.uneven("gpt", tmp_path), 5)
    way = {"family": "gpt", **PLAIN, "stage": 3, "ranks": 4, "local": 2}
    keys = recipe("f32", 8)
    p = search.find(reader.load(str(law.path("gpt")), [*keys, *law.keys(way)])).plan
    section = p.section("micro_batch")
    (batch,) = (s for s in section.steps if s.op == "batch")
    near, far, own = batch.ints
    assert (near.name, far.name) == ("of_local", "of_hosts")
    turned = (
        dataclasses.replace(near, value=far.value),
        dataclasses.replace(far, value=near.value),
        own,
    )
    other = mutants.changed(
        p,
        section,
        [
            dataclasses.replace(s, ints=turned) if s is batch else s
            for s in section.steps
        ],
    )
    assert mutants.refused(other)
    plain = b.run(way, *keys)
    options = ("--load", law.uneven("gpt", tmp_path), "--steps", 5)
    found = law.run(
        trainer.build(test_mutants.source(other)),
        *("--data", tmp_path / "tokens", *options, "--threads", 1),
        log=tmp_path / "log",
    )
    assert found.weights != plain.weights
    losses = [
        [json.loads(line)["loss"] for line in run.steps] for run in (plain, found)
    ]
    assert np.allclose(*losses, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family,precision", [("gpt", "bf16"), ("llama", "f32")])
def test_fold_obeys_the_law_too(
    tmp_path: pathlib.Path, family: str, precision: str
) -> None:
    b = bench(tmp_path, stream(family, 24, 5), law.uneven(family, tmp_path), 5)
    some = [
        {
            "family": family,
            **PLAIN,
            "stage": stage,
            "ranks": ranks,
            "reduce": reduce,
            "overlap": bool(stage % 2),
            "queue": queue,
            "threads": ranks % 3 + 1,
        }
        for stage, ranks, reduce, queue in [
            (0, 1, BIG, "eager"),
            (0, 3, 5000, "late"),
            (1, 2, 14000, "shuffled:5"),
            (2, 4, 5000, "shuffled:6"),
            (3, 8, 14000, "eager"),
            (3, 3, BIG, "shuffled:7"),
        ]
    ]
    agree(
        {str(way): b.run(way, *recipe(precision, 24), "train.sum=fold") for way in some}
    )


# ---- initial weights

SLOW_BUT_GPT = [
    family if family == "gpt" else pytest.param(family, marks=pytest.mark.slow)
    for family in law.FAMILIES
]


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOW_BUT_GPT)
def test_initial_weights(tmp_path: pathlib.Path, family: str) -> None:
    """Initial weights depend on the seed and on nothing else."""

    def start(*keys: str) -> str:
        source = trainer.generate(law.path(family), "train.micro_batch=1", *keys)
        return law.run(
            trainer.build(source), "--steps", 0, log=tmp_path / "log"
        ).weights

    spread = [
        start(f"zero.stage={stage}", f"cluster.ranks={ranks}", *keys)
        for stage, ranks, keys in [
            (0, 1, []),
            (2, 8, ["train.precision=bf16"]),
            (
                3,
                8,
                [
                    "zero.overlap_comm=false",
                    "zero.stage3_param_persistence_threshold=5000",
                ],
            ),
            (
                3,
                3,
                [
                    "train.global_batch=6",
                    "train.precision=bf16",
                    "train.sequence=7",
                ],
            ),
        ]
    ]
    assert len(set(spread)) == 1
    assert (
        start("train.seed=7") != spread[0]
        and start("train.seed=4294967297") != spread[0]
    )


# ---- the hash


def test_the_hash_sees_every_bit(tmp_path: pathlib.Path) -> None:
    """The hash sees a flipped bit, two swapped elements, two swapped tensors and a moved sign.
    Loading saved weights keeps it."""
    folder, name = tmp_path / "w", "model.safetensors"
    binary = trainer.build(
        trainer.generate(
            law.path("qwen3"),
            "zero.stage=3",
            "cluster.ranks=3",
            "train.global_batch=6",
        )
    )
    trainer.sh(binary, "--steps", 0, "--save", folder)
    params = load_file(folder / name)
    at = "model.layers.{}.mlp.down_proj.weight"

    def loaded(changed: dict[str, np.ndarray]) -> str:
        save_file(params | changed, folder / name)
        return law.run(
            binary, "--steps", 0, "--load", folder, log=tmp_path / "log"
        ).weights

    def flipped(tensor: str, element: int, bit: int) -> dict[str, np.ndarray]:
        x = params[tensor].copy()
        x.view(np.uint32).reshape(-1)[element] ^= np.uint32(1 << bit)
        return {tensor: x}

    swapped = params[at.format(0)].copy()
    swapped[0, :2] = swapped[0, 1::-1]
    found = [
        loaded({}),
        loaded({at.format(0): swapped}),
        loaded(
            {
                at.format(0): params[at.format(1)],
                at.format(1): params[at.format(0)],
            }
        ),
    ]
    found += [
        loaded(flipped(tensor, element, bit))
        for tensor, element, bit in [
            ("model.norm.weight", 63, 0),
            ("model.embed_tokens.weight", 0, 0),
            ("model.embed_tokens.weight", -1, 31),
            (at.format(1), 5000, 11),
            (at.format(1), 5001, 11),
            ("model.layers.0.self_attn.q_norm.weight", 23, 22),
        ]
    ]
    assert len(set(found)) == len(found) and loaded({}) == found[0]


# ---- shapes that nothing divides

# Family, blocks, old and new sizes, settings, ranks.
RAGGED = {
    "vocab 257": ("gpt", 1, {256: 257}, ["train.micro_batch=1"], [1, 2, 8]),
    # fewer than 8 * 1024 elements: some ranks own only padding
    "width 8": (
        "qwen3",
        1,
        {64: 8, 176: 10, 256: 11},
        ["train.micro_batch=1"],
        [1, 3, 8],
    ),
    "one token": (
        "gpt",
        3,
        {},
        ["train.sequence=1", "train.micro_batch=1"],
        [1, 2, 4],
    ),
    "three of one token": (
        "llama",
        2,
        {256: 300},
        ["train.sequence=1", "train.micro_batch=3"],
        [1, 2, 8],
    ),
    "odd": (
        "llama",
        1,
        {64: 40, 176: 27, 256: 1025},
        ["train.sequence=17", "train.micro_batch=1"],
        [1, 3, 6],
    ),
    "a long head": (
        "gpt",
        1,
        {60: 12, 240: 7, 256: 50257},
        ["train.sequence=5", "train.micro_batch=2"],
        [1, 4, 6],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case,precision",
    covering([*RAGGED], ("f32", "bf16")),
)
def test_ragged_shapes(tmp_path: pathlib.Path, case: str, precision: str) -> None:
    family, blocks, sizes, keys, ranks = RAGGED[case]
    spec = law.changed(family, tmp_path, blocks, sizes)
    keys = ["train.global_batch=24", f"train.precision={precision}", *keys]
    loaded = reader.load(str(spec), ["cluster.ranks=1", *keys])
    T, vocab, steps = loaded.train.sequence, loaded.model.vocab, 5
    b = bench(
        tmp_path,
        law.tokens(vocab, 24 * T * steps + 1, holes=True),
        None,
        steps,
        vocab,
        T,
    )
    some = [(0, 0), (0, 1), (1, 2), (2, 1), (3, 1), (3, 2)]
    results = {}
    for n, (stage, r) in enumerate(some):
        way = {
            "family": family,
            **PLAIN,
            "stage": stage,
            "ranks": ranks[r],
            "overlap": n % 3 > 0,
            "small": 100 * (n % 2),
            "reduce": 2500 * (1 + n),
            "gather": 6000,
            "queue": ["eager", "shuffled:8", "late"][n % 3],
            "threads": 1 + n % 2,
        }
        results[str(way)] = b.run(way, *keys, spec=spec)
    agree(results)


# ---- without end


@pytest.mark.parametrize("isa", [*zk.ISAS, "tiles"])
@pytest.mark.parametrize("family", law.FAMILIES)
def test_known_hashes(tmp_path: pathlib.Path, family: str, isa: str) -> None:
    zk.need(isa)
    kind, name = trainer.GCC, isa
    if isa == "tiles":
        kind, name = trainer.TILES, "amx"
    assert law.known(kind, family, tmp_path, ZK_ISA=name) == law.KNOWN[family]


def test_an_option_names_the_object(tmp_path: pathlib.Path) -> None:
    made = trainer.build(trainer.generate(law.path("gpt")))
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 400))
    said = {}
    for isa in ("avx2", "avx3"):
        words = ("--data", tmp_path / "tokens", "--steps", 1, "--isa", isa)
        said[isa] = program.run(made, *words, "--log", tmp_path / isa)
    first, *_ = map(json.loads, (tmp_path / "avx2").read_text().splitlines())
    assert said["avx2"].code == 0 and first["kernels"] == "avx2"
    assert said["avx3"].code == 2
    allowed = "allowed where the processor runs them: "
    assert f"{allowed}avx2, avx512, avx512bf16, amx" in said["avx3"].err
    assert not (tmp_path / "avx3").exists()
