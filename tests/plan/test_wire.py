"""test_wire.py -- tests bytes and collectives of a training step: the papers' formulas, zgen's
output, train.c's numbers and the runtime's own counts agree.

The formulas below come from the papers and from the rules of padding, not from the plan. A rank
receives (W-1)/W of all that is gathered or reduced, so 2P for stages 0 to 2 and 3P for stage 3
(Rajbhandari et al. 2020, section 7) at one micro-batch a step.
"""

import dataclasses
import json
import math
import pathlib
import re

import pytest
from zg.plan import plan
from zg.predict import cost
from zg.read import spec as reader
from zg.search import search
from zg.write import explain

from tests.lib import law, oracle, program, trainer

SUMS = 72 * 8  # bytes of the exact sums in one all-reduce
BLOCK = 1024  # elements: tensors begin at multiples, shards are multiples
HUGE = 500_000_000


def up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and reduced together: the elements of a rank's shard, and how
    often a micro-batch needs the whole."""

    shard: int
    uses: int


def joined(shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the elements of each stored tensor: q, k, v are one, and so are gate and up."""
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        one = re.sub(
            r"\b[qkv]_proj\b",
            "qkv",
            re.sub(r"\b(gate|up)_proj\b", "gate_up", name),
        )
        found[one] = found.get(one, 0) + math.prod(shape)
    return found


def units(spec) -> list[Unit]:
    """Return the units: those that stage 3 gathers, then persistent parameters. At other stages all
    are whole."""
    W, width = spec.cluster.ranks, {"f32": 4, "bf16": 2}[spec.train.precision]
    small = spec.zero.stage3_param_persistence_threshold if spec.zero.stage == 3 else -1
    tied = not any("lm_head" in name for name in oracle.shapes(spec))
    elems: dict[str, int] = {}
    for name, n in joined(oracle.shapes(spec)).items():
        layer = re.search(r"\.(\d+)\.", "." + name)
        unit = (
            layer[1]
            if layer
            else "head"
            if re.search(r"lm_head|ln_f|model\.norm", name)
            else "embedding"
        )
        unit = (
            "kept" if n <= small else "embedding" if tied and unit == "head" else unit
        )
        elems[unit] = elems.get(unit, 0) + up(n, BLOCK)
    # A block is needed forward and backward. The embedding is not needed backward, and the head
    # runs forward and backward at once; a tied embedding is needed once more, by the head.
    uses = {"embedding": 1 + tied, "head": 1, "kept": 0}
    return [
        Unit(up(-(-n // W), max(BLOCK, 4096 // width)), uses.get(name, 2))
        for name, n in elems.items()
    ]


def expected(spec) -> tuple[int, int]:
    """Return the bytes that a rank receives, and its collectives, in a training step."""
    W, stage = spec.cluster.ranks, spec.zero.stage
    width = {"f32": 4, "bf16": 2}[spec.train.precision]
    A = spec.train.global_batch // (spec.train.micro_batch * W)
    # Stages 0 and 1, and micro-batches that go through a unit together, sum a rank's own
    # micro-batches first if the tree of sums has such a node; so does one rank alone.
    layers = spec.train.accumulate == "layers"
    local = W == 1 or (stage < 2 or layers) and A > 1 and A & (A - 1) == 0
    total = [(W - 1) * SUMS, 1]

    def moved(u: Unit, times: int, wide: int, bucket: int) -> None:
        total[0] += times * (W - 1) * u.shard * wide
        total[1] += times * -(-u.shard // max(BLOCK, bucket // W // BLOCK * BLOCK))

    reduce, gather = (
        spec.zero.reduce_bucket_size,
        spec.zero.allgather_bucket_size,
    )
    for u in units(spec):
        if local and W > 1:
            moved(u, 1, 4, reduce)  # sums are never rounded
        if not local:
            moved(u, A, width, reduce)  # gradients are, once
        if stage == 3:
            moved(u, u.uses if layers else A * u.uses, width, gather)
        if stage == 0 and W > 1:
            moved(u, 1, 4, gather)  # all ranks get the sums
        if stage in (1, 2) or stage == 3 and not u.uses:
            # All ranks get the owner's new parameters
            moved(u, 1, width, gather)
    return total[0], total[1]


def loaded(family: str, *keys: str):
    return reader.load(str(law.path(family)), keys)


WAYS = [
    [
        f"zero.stage={stage}",
        f"cluster.ranks={W}",
        "train.micro_batch=1",
        f"train.global_batch={W * A}",
        f"train.precision={precision}",
        f"train.accumulate={accumulate}",
        *buckets,
    ]
    for stage in range(4)
    for W in (1, 2, 3, 4)
    for A in (1, 2, 3, 4)
    for precision in ("f32", "bf16")
    for buckets in (
        [],
        [
            "zero.reduce_bucket_size=5000",
            "zero.allgather_bucket_size=9000",
            "zero.stage3_param_persistence_threshold=0",
        ],
    )
    for accumulate in ("micro_batches", "layers")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,every",
    [
        ("gpt", 7),
        ("llama", 9),
        ("qwen3", 11),
        *(
            pytest.param(family, 1, marks=pytest.mark.exhaustive)
            for family in law.FAMILIES
        ),
    ],
)
def test_the_plan_is_the_formula(family: str, every: int) -> None:
    """Printed totals, the sum of the printed lines, and train.c's numbers equal the formula in up
    to 512 ways."""
    assert len(WAYS) == 512
    for keys in WAYS[::every]:
        spec = loaded(family, *keys)
        p = search.find(spec).plan
        want = expected(spec)
        summary = cost.summary(p)
        assert (summary["wire"], summary["messages"]) == want, keys
        said = [
            (int(b.replace(",", "")), int(m))
            for m, b in re.findall(
                r"(\d+) collectives? +([\d,]+) bytes", explain.explain(p)
            )
        ]
        assert said[-1] == want and sum(b for b, _ in said[:-1]) == want[0], keys
        assert sum(m for _, m in said[:-1]) == want[1], keys


@pytest.mark.parametrize(
    "name,stage,ratio",
    [
        ("gpt2-124m", 0, 2),
        ("gpt2-124m", 1, 2),
        ("gpt2-124m", 2, 2),
        ("llama3-8b", 1, 2),
        ("llama3-8b", 3, 3),
        ("gpt2-1558m", 3, 3),
    ],
)
def test_large_models_are_the_papers_multiples(
    name: str, stage: int, ratio: int
) -> None:
    """Large models receive 2P or 3P at one micro-batch a step, (W-1)/W of it, in the stored type,
    with padding under 1 %. The embedding and an untied head need fewer gathers than 3P."""
    path = trainer.ROOT / "model_specs" / f"{name}.yaml"
    spec = reader.load(
        str(path),
        [
            f"zero.stage={stage}",
            "cluster.ranks=8",
            "train.micro_batch=1",
            "train.global_batch=8",
            "train.precision=bf16" if stage else "train.precision=f32",
        ],
    )
    p = search.find(spec).plan
    whole = p.head.params * (2 if stage else 4) * 7 / 8
    shapes = oracle.shapes(spec)
    spared = (
        sum(
            math.prod(shape)
            for tensor, shape in shapes.items()
            if re.search("wpe|embed_tokens|lm_head", tensor)
        )
        if stage == 3
        else 0
    )
    ideal = (ratio - spared / p.head.params) * whole
    assert 0.999 * ideal <= cost.training_wire(p).bytes <= 1.01 * ideal
    assert f"the ZeRO papers' {ratio}P" in explain.explain(p)


def counted(folder: pathlib.Path, family: str, *keys: str, steps: int = 2) -> None:
    """Assert that a run's own count equals the plan's and the formula's."""
    source = trainer.generate(law.path(family), *keys)
    spec = loaded(family, *keys)
    want = expected(spec)
    stated = re.search(r"\.wire = (\d+), \.messages = (\d+),", source)
    assert (int(stated[1]), int(stated[2])) == want
    trainer.write_tokens(folder / "tokens", law.tokens(256, 5000))
    done = program.run(
        trainer.build(source),
        "--data",
        folder / "tokens",
        "--steps",
        steps,
        "--log",
        folder / "log",
        "--val",
        folder / "tokens",
    )
    assert done.code == 0, done.err
    assert (
        done.line("wire")
        == f"wire {want[0]} bytes and {want[1]} collectives per rank and step"
    ), keys
    last = json.loads((folder / "log").read_text().splitlines()[-1])
    assert (last["wire"], last["collectives"]) == want


@pytest.mark.parametrize("stage,ranks", [(0, 2), (1, 3), (2, 2), (3, 4)])
def test_the_runtime_counts_the_same(
    tmp_path: pathlib.Path, stage: int, ranks: int
) -> None:
    counted(
        tmp_path,
        "gpt",
        f"zero.stage={stage}",
        f"cluster.ranks={ranks}",
        "train.micro_batch=1",
        f"train.global_batch={2 * ranks}",
        "zero.reduce_bucket_size=9000",
    )


@pytest.mark.slow
@pytest.mark.parametrize("n", range(0, len(WAYS), 7))
def test_the_runtime_counts_the_same_everywhere(tmp_path: pathlib.Path, n: int) -> None:
    """Every seventh way, with alternating families, counts the same. 7 is coprime to the numbers of
    choices, so every value of every choice occurs many times."""
    counted(tmp_path, law.FAMILIES[n % 3], *WAYS[n], steps=1)


def test_a_wrong_count_shows(tmp_path: pathlib.Path) -> None:
    """A program that moves other bytes than it states reports it at its end, with an exit code of
    its own, after saving its weights."""
    source = trainer.generate(law.path("gpt"), "zero.stage=1", "cluster.ranks=2")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 5000))
    for stated, counted in (
        ("wire", "bytes received"),
        ("messages", "collectives"),
    ):
        n = int(re.search(rf"\.{stated} = (\d+)", source)[1])
        wrong = trainer.build(
            source.replace(f".{stated} = {n}", f".{stated} = {n + 1}")
        )
        done = program.run(
            wrong,
            "--data",
            tmp_path / "tokens",
            "--steps",
            2,
            "--hash",
            "--save",
            tmp_path / stated,
        )
        assert done.code == 8 and done.err.count("the plan says") == 1
        assert (
            f": {2 * n} {counted} in 2 steps; the plan says {n + 1} a step" in done.err
        )
        assert (
            done.line("weights") and (tmp_path / stated / "model.safetensors").exists()
        )


# ---- stages 1 and 2 reduce-scatter


def reductions(p: plan.Plan) -> dict[str, int]:
    """Return the elements of its own part that a rank gets summed in a step, by unit."""
    found: dict[str, int] = {}
    for section in p.sections:
        for step in section.steps:
            if section.name in ("micro_batch", "update") and step.op.split(".")[0] in (
                "sum",
                "join",
            ):
                n = next(i.value for i in step.ints if i.name == "n")
                key = f"{step.op.split('.')[1]} {step.outs[0].index}"
                found[key] = found.get(key, 0) + n
    return found


@pytest.mark.parametrize("family", law.FAMILIES)
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_are_reduced_and_scattered(
    family: str, stage: int, micro_batches: int
) -> None:
    """A rank gets the sum of its own part alone, half an all-reduce. No rank gathers sums, and
    stage 2 has room for its own part only; stage 0 does gather them."""
    keys = [
        "cluster.ranks=4",
        "train.micro_batch=1",
        f"train.global_batch={4 * micro_batches}",
        "zero.reduce_bucket_size=7000",
    ]
    p = search.find(loaded(family, f"zero.stage={stage}", *keys)).plan
    instances = {f"{f.name} {l}": f.shard for f in p.flats for l in range(f.count)}
    assert reductions(p) == instances
    gathered = [
        r.cls.split(".")[0]
        for s in p.sections
        for x in s.steps
        if x.op == "gather"
        for r in x.ins
    ]
    assert gathered and set(gathered) == {"param"}
    if stage == 2 or micro_batches == 1:
        for f in p.flats:
            assert p.cls(f"sum.{f.name}").stride == f.shard * 4 * f.nodes
    zero = search.find(loaded(family, "zero.stage=0", *keys)).plan
    steps = [x for s in zero.sections for x in s.steps if x.op == "gather"]
    assert {r.cls.split(".")[0] for x in steps for r in x.ins} == {"sum"}
