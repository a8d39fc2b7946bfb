"""test_ratio.py -- tests an optimizer that stays partly on the device
(zero.offload_optimizer.ratio): the bytes of both parts, their overlap, the same bits, and weights
saved and loaded.

tests/law/test_law.py and tests/cuda/test_emulated.py test all ways of spreading the work.
"""

import pathlib
import re
from fractions import Fraction

import pytest
from zg.check import check
from zg.plan.plan import Plan
from zg.predict import cost
from zg.read import spec
from zg.search import search

from tests.lib import law, mutants, trainer
from tests.lib.plans import below, planned

HOST, PARAMS = (
    "zero.offload_optimizer.device=cpu",
    "zero.offload_param.device=cpu",
)
FILE = (
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=/tmp",
)
TILE = "zero.sub_group_size=5000"


def ratio(of: float) -> str:
    return f"zero.offload_optimizer.ratio={of}"


# ---- bytes


def size(p: Plan, *arenas: str) -> int:
    """Return the bytes of a rank's states in these arenas."""
    return sum(
        c.slots * c.stride
        for c in p.classes
        if c.arena in arenas
        and c.name.split(".")[0].removeprefix("near_") in ("master", "m", "v")
    )


@pytest.mark.parametrize("where", [(HOST,), FILE])
@pytest.mark.parametrize("moments", ["f32", "bf16"])
@pytest.mark.parametrize("of", [0.0001, 0.1, 0.5, 0.9])
def test_each_part_to_the_byte(of: float, moments: str, where: tuple[str, ...]) -> None:
    """The host has the fewest whole blocks of each shard that hold its share, the file whole pages
    of any state, and the device has exactly the rest."""
    keys = (
        "zero.stage=3",
        "cluster.ranks=2",
        "train.precision=bf16",
        TILE,
        *where,
        f"train.optimizer.moments={moments}",
    )
    all_, some = (
        planned("gpt-tiny", *keys),
        planned("gpt-tiny", *keys, ratio(of)),
    )
    unit = 1024 if where == (HOST,) else 2048
    width = 4 + 2 * (4 if moments == "f32" else 2)
    moved = rest = 0
    for f in some.flats:
        blocks = f.shard // unit
        kept = min(
            f.shard * (1 - Fraction(str(of))) // unit,
            blocks - (f.shard % unit == 0),
        )
        near_ = some.near(f)
        assert near_ == kept * unit < f.shard
        near = {
            c.name: c
            for c in some.classes
            if c.name.endswith(f".{f.name}") and c.name.startswith("near_")
        }
        assert [c.arena for c in near.values()] == ["device"] * 3 * (near_ > 0)
        assert len(near) == 3 * (near_ > 0)
        assert all(c.slots == f.count for c in near.values())
        moved += f.count * near_ * width
        rest += f.count * (f.shard - near_) * width
    pages = 4096 * 3 * sum(f.count for f in some.flats) * (moments == "bf16")
    assert 0 <= size(some, "device") - moved <= pages and size(all_, "device") == 0
    assert 0 <= size(some, "host", "file") - rest <= pages
    if moments == "f32":
        assert size(all_, "host", "file") == moved + rest
    sums = sum(c.slots * c.stride for c in some.classes if c.name.startswith("sum."))
    assert some.arena("cpu") - planned("gpt-tiny", *keys).arena("cpu") == size(
        some, "device"
    ) + sums - sum(c.slots * c.stride for c in all_.classes if c.name == "part")
    assert dict(cost.memory(some))["optimizer state"] == size(some, "device")


def test_without_masters_of_their_own() -> None:
    """Parameters on the device are the masters of the part that stays there in f32."""
    p = planned("gpt-tiny", "zero.stage=2", HOST, ratio(0.5))
    assert {c.name for c in p.classes if c.name.startswith("near_")} == {
        f"near_{s}.{f.name}" for s in "mv" for f in p.flats
    }
    away = planned("gpt-tiny", "zero.stage=3", HOST, PARAMS, ratio(0.5))
    names = {c.name for c in away.classes}
    assert "near_master.block" in names and "master.block" not in names
    assert "near_master.persistent" not in names and "master.persistent" in names


def test_a_ratio_of_one_is_no_ratio() -> None:
    keys = ("zero.stage=3", HOST)
    assert planned("gpt-tiny", *keys, ratio(1)) == planned("gpt-tiny", *keys)


# ---- at once


@pytest.mark.parametrize(
    "keys",
    [
        ("zero.stage=2",),
        ("zero.stage=3", PARAMS),
        ("zero.stage=3", "train.precision=bf16", PARAMS),
    ],
)
def test_both_parts_work_at_once(keys: tuple[str, ...]) -> None:
    """The device updates its part of a shard while the host works on the shard before. Unless
    parameters are offloaded, neither side waits for the other."""
    p = planned("gpt-tiny", *keys, HOST, ratio(0.5), TILE)
    works = mutants.played(p)
    first, second = [n for n, w in enumerate(works) if w.key[1] == "factor"][:2]
    near, host = (
        [w for w in works[first:second] if w.key[1].startswith(word)]
        for word in ("near_update.", "update.")
    )
    assert len(near) == sum(f.count for f in p.flats if p.near(f)) > 0 < len(host)

    def shard(w):
        return (w.key[1].partition(".")[2], w.key[4][0])

    for n, a in enumerate(near):
        others = near if PARAMS not in keys else near[n - 1 : n]
        for b in (b for b in host if shard(b) in map(shard, others)):
            assert not mutants.before(a, b) and not mutants.before(b, a), (
                a.key,
                b.key,
            )


# ---- bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("ratio")
    trainer.write_tokens(made / "tokens", law.tokens(256, 40 * 30, holes=True))
    return made


def run(
    folder: pathlib.Path,
    way: tuple[str, ...],
    *options: object,
    kind: trainer.Kind = trainer.GCC,
    **settings: object,
) -> law.Result:
    made = trainer.build(
        trainer.generate(
            law.path("gpt"),
            "train.global_batch=8",
            "train.micro_batch=1",
            TILE,
            *way,
        ),
        kind,
    )
    return law.run(
        made,
        "--data",
        folder / "tokens",
        "--val",
        folder / "tokens",
        *options,
        log=folder / "log",
        **settings,
    )


RECIPES = {
    "f32": (),
    "bf16": ("train.precision=bf16",),
    "f16": ("train.precision=f16",),
    "bf16 moments": ("train.precision=bf16", "train.optimizer.moments=bf16"),
    "SGD": ("train.optimizer={type: SGD, lr: 0.01, momentum: 0.9}",),
    "Lion": ("train.optimizer={type: Lion, lr: 0.001}",),
    "Adagrad": (
        "train.optimizer={type: Adagrad, lr: 0.01}",
        "train.precision=bf16",
    ),
    "frozen": ('train.optimizer.groups=[{match: ["h.*.mlp.*"], frozen: true}]',),
}
WAYS = [
    ("zero.stage=1", "cluster.ranks=2", HOST, ratio(0.5)),
    ("zero.stage=3", "cluster.ranks=4", HOST, PARAMS, ratio(0.3)),
    ("zero.stage=2", "cluster.ranks=1", *FILE, ratio(0.7)),
    (
        "zero.stage=3",
        "cluster.ranks=2",
        "zero.overlap_comm=false",
        *FILE,
        PARAMS,
        ratio(0.01),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "f32",
        "bf16 moments",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in RECIPES
            if name not in ("f32", "bf16 moments")
        ),
    ],
)
def test_one_hash(folder: pathlib.Path, recipe: str) -> None:
    queues = ["late", "shuffled:1", "eager", "shuffled:2"]
    want = run(folder, (*RECIPES[recipe], "zero.stage=0"), "--steps", 3)
    assert [
        run(folder, (*RECIPES[recipe], *way), "--steps", 3, "--queue", queue)
        for way, queue in zip(WAYS, queues, strict=True)
    ] == [want] * len(WAYS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [pytest.param("f32", marks=pytest.mark.exhaustive), "bf16 moments"],
)
def test_one_hash_on_the_emulated_gpu(folder: pathlib.Path, recipe: str) -> None:
    orders = ["late", "shuffled:1", "eager", "shuffled:2"]
    want = run(
        folder,
        (*RECIPES[recipe], "zero.stage=0"),
        "--steps",
        2,
        kind=trainer.EMULATED,
    )
    assert [
        run(
            folder,
            (*RECIPES[recipe], *way),
            "--steps",
            2,
            "--queue",
            "late",
            kind=trainer.EMULATED,
            ZR_EMULATE=order,
        )
        for way, order in zip(WAYS, orders, strict=True)
    ] == [want] * len(WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_weights_out_and_in(
    folder: pathlib.Path, tmp_path: pathlib.Path, precision: str
) -> None:
    """Weights saved under any placement load under any other, and the files have the same bytes."""
    ways = [("zero.stage=0", "cluster.ranks=1"), *WAYS]
    recipe, files, found = RECIPES[precision], [], []
    for n, way in enumerate(ways):
        more = ("--load", tmp_path / str(n - 1)) if n else ()
        found.append(
            run(
                folder,
                (*recipe, *way),
                "--steps",
                0 if n else 2,
                "--save",
                tmp_path / str(n),
                *more,
            ).weights
        )
        text = (tmp_path / str(n) / "model.safetensors").read_bytes()
        files.append(text[8 + int.from_bytes(text[:8], "little") :])
    assert len(set(found)) == len(set(files)) == 1


# ---- messages and refusals


@pytest.mark.parametrize(
    "keys,said",
    [
        (
            ("zero.stage=1", HOST, ratio(0)),
            "0 offloads nothing; allowed: above 0",
        ),
        (("zero.stage=1", HOST, ratio(1.5)), "a number from 0 to 1"),
        (("zero.stage=1", HOST, ratio("half")), "a number from 0 to 1"),
        (
            ("zero.stage=0", HOST, ratio(0.5)),
            "at stage 0 every rank updates all",
        ),
    ],
)
def test_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(spec.SpecError, match="zero.offload_optimizer") as e:
        planned("gpt-tiny", *keys)
    assert said in str(e.value)


def test_noted() -> None:
    path = str(law.path("gpt"))
    notes = spec.load(path, (ratio(0.5),)).notes
    assert [
        "ratio: has no effect while the device is none" in note for note in notes
    ] == [True]
    made = search.find(spec.load(path, ("zero.stage=3", HOST, ratio(0.5))))
    assert any(
        "sums of gradients stay on the device with a ratio" in n for n in made.notes
    )
    assert not below(made.plan)


# ---- the checker: all mutants of steps are tried in tests/check/test_mutants.py


@pytest.mark.slow
def test_a_broken_part_is_refused() -> None:
    """The part on the device is initialised, rounded and updated exactly once, in order: every
    mutant of its steps is refused or the same program."""
    p = planned(
        "gpt-tiny",
        "zero.stage=3",
        "train.precision=bf16",
        HOST,
        PARAMS,
        ratio(0.5),
        TILE,
    )
    check.check(p)
    works = mutants.played(p)
    pairs = mutants.forced(works)
    tried = [m for m in mutants.mutants(p) if re.search(r" near_\w+\.", m.what)]
    kept = [
        m.what
        for m in tried
        if not mutants.refused(m.plan) and not mutants.same(m.plan, works, pairs)
    ]
    assert len(tried) > 200 and kept == []
