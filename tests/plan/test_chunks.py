"""test_chunks.py -- tests the head and the loss in chunks of tokens: bits, memory, and refusals of
the checker and the reader."""

import itertools
import json
import pathlib
import re
from dataclasses import replace

import pytest
from zg.check import check
from zg.check.order import CheckError
from zg.facts import ops
from zg.plan import text
from zg.plan.operand import base
from zg.plan.plan import Plan
from zg.read import spec
from zg.search import search

from tests.lib import law, mutants, program, trainer

WHOLE = 66  # tokens of a micro-batch of gpt-tiny


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    trainer.write_tokens(
        tmp_path / "tokens", law.tokens(256, 40 * law.SAMPLES + 1, holes=True)
    )
    trainer.write_tokens(tmp_path / "val", law.tokens(256, 5 * 40 + 1, holes=True))
    return tmp_path


def planned(name: str, *keys: str) -> Plan:
    return search.find(spec.load(f"{trainer.ROOT}/model_specs/{name}.yaml", keys)).plan


# 128 tokens per micro-batch: bf16 needs chunks of a multiple of 32.
HALVES = (
    "train.precision=bf16",
    "train.sequence=32",
    "train.micro_batch=4",
    "train.global_batch=16",
)


def divisors(family: str) -> list[int]:
    t = spec.load(str(law.path(family))).train
    rows = t.micro_batch * t.sequence
    return [n for n in range(1, rows + 1) if rows % n == 0]


def run(
    folder: pathlib.Path,
    family: str,
    steps: int,
    *keys: str,
    queue: str = "eager",
    kind: trainer.Kind = trainer.GCC,
) -> law.Result:
    binary = trainer.build(trainer.generate(law.path(family), *keys), kind)
    return law.run(
        binary,
        "--data",
        folder / "tokens",
        "--val",
        folder / "val",
        "--steps",
        steps,
        "--queue",
        queue,
        log=folder / "log",
    )


# ---- the bits


# Token 0 also stands for ignored inputs.
DOCUMENTS = ("data.documents=mask", "data.end=0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,more",
    [*((family, ()) for family in law.FAMILIES), ("qwen3", DOCUMENTS)],
)
def test_f32_bits_do_not_depend_on_chunks(
    folder: pathlib.Path, family: str, more: tuple[str, ...]
) -> None:
    """The bits of f32 on a CPU do not depend on chunks or ends of documents: a chain of additions
    continues from chunk to chunk."""
    sizes = divisors(family)
    found = {
        m: run(
            folder,
            family,
            6,
            f"train.head_chunk={m}",
            "zero.stage=3",
            *more,
            queue="shuffled:1",
        )
        for m in (sizes[-1], sizes[-2], sizes[len(sizes) // 2], sizes[1])
    }
    assert len({(r.weights, r.steps, r.val) for r in found.values()}) == 1


# A bf16 gradient is rounded once, from an f32 sum over chunks, so its bits are those without chunks
# as long as that sum is in f32. An untied head without chunks sums in f32, too, so it agrees.
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_bf16_is_rounded_once(folder: pathlib.Path, family: str) -> None:
    found = {
        run(
            folder,
            family,
            6,
            *HALVES,
            f"train.head_chunk={m}",
            f"zero.stage={stage}",
            queue="late",
        ).weights
        for m, stage in ((128, 1), (64, 3), (32, 2))
    }
    assert len(found) == 1


@pytest.mark.parametrize("family,precision", [("gpt", "f32"), ("llama", "bf16")])
@pytest.mark.slow
def test_chunks_under_emulation(
    folder: pathlib.Path, family: str, precision: str
) -> None:
    """No accesses of two chunks race, and the bits are those of other ways to spread the same
    recipe."""
    keys = (
        (*HALVES, "train.head_chunk=64")
        if precision == "bf16"
        else (f"train.head_chunk={divisors(family)[-2]}",)
    )
    ways = [
        ("zero.stage=3", "cluster.ranks=2"),
        ("zero.stage=1", "cluster.ranks=1"),
    ]
    found = {
        run(folder, family, 2, *keys, *way, queue="late", kind=trainer.EMULATED)
        for way in ways
    }
    assert len({(r.weights, r.val) for r in found}) == 1
    cpu = run(folder, family, 2, *keys)
    loss = [json.loads(r.steps[0])["loss"] for r in (found.pop(), cpu)]
    assert abs(loss[0] - loss[1]) < 2.0**-12 * loss[1]


def test_a_sample_is_drawn_from_any_chunk(folder: pathlib.Path) -> None:
    """A sample of 33 tokens after the prompt is drawn from every chunk in turn."""
    said = set()
    for m in (WHOLE, 11, 3):
        binary = trainer.build(
            trainer.generate(law.path("gpt"), f"train.head_chunk={m}")
        )
        done = program.run(
            binary, "--data", folder / "tokens", "--steps", 3, "--sample", 40
        )
        assert done.code == 0, done.err
        said.add(done.out.splitlines()[-1])
    assert len(said) == 1 and len(said.pop()) > 40


# ---- memory

BIG = (
    "train.micro_batch=16",
    "train.global_batch=512",
    "train.sequence=1024",
    "train.precision=bf16",
)


def tmp(p: Plan) -> int:
    return p.cls("tmp").stride


def test_logits_are_those_of_a_chunk() -> None:
    """Chunks shrink the logits of GPT-2 124M with 16384 tokens to an eighth, and the arena by as
    many bytes."""
    whole = planned("gpt2-124m", *BIG, "train.head_chunk=16384")
    auto = planned("gpt2-124m", *BIG)
    logits = 16384 * 50264 * 2
    assert rounds(whole) == 1 and rounds(auto) == 8
    assert (
        whole.arena("cpu") - auto.arena("cpu") == tmp(whole) - tmp(auto) >= 0.8 * logits
    )
    assert tmp(auto) < 0.25 * logits
    fn = next(f for f in auto.fns if f.name == "train.head")
    assert all(c.args[4] == 2048 for c in fn.calls if c.kernel == "zk_linear_fwd")


def rounds(p: Plan) -> int:
    """Return the number of chunks, which both functions of the head share."""
    found = {
        max(c.rounds for c in f.calls)
        for f in p.fns
        if f.name.endswith(".head") and f.name.startswith(("train", "eval"))
    }
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    "name,keys,want",
    [
        ("gpt-tiny", (), 1),
        ("demo", (), 1),
        ("gpt2-124m", ("train.sequence=512",), 4),  # of 256 tokens
        ("gpt2-1558m", BIG, 4),  # 50264 <= 4 * 8 * 1600
        ("llama3-8b", ("train.micro_batch=1", "train.precision=bf16"), 1),
        (
            "llama3-8b",
            (
                "cluster.ranks=64",
                "train.micro_batch=4",
                "train.precision=bf16",
                "train.global_batch=512",
            ),
            4,
        ),
    ],
)
def test_auto(name: str, keys: tuple[str, ...], want: int) -> None:
    """`auto` chooses chunks by shape and precision, whatever the ranks, stage or recomputed ops."""
    assert rounds(planned(name, *keys)) == want
    assert rounds(planned(name, *keys, "zero.stage=1")) == want
    assert rounds(planned(name, *keys, "train.recompute=full")) == want


def test_a_head_of_its_own_is_chunked_where_that_saves() -> None:
    """An untied head is chunked only if that saves memory: chunks in bf16 need an f32 sum of four
    bytes per weight."""
    for batch, n in ((1, 1), (4, 4)):
        keys = (
            "cluster.ranks=64",
            f"train.micro_batch={batch}",
            "train.precision=bf16",
            "train.global_batch=512",
        )
        auto = planned("llama3-8b", *keys)
        rows = batch * auto.head.sequence
        whole = planned("llama3-8b", *keys, f"train.head_chunk={rows}")
        if n == 1:
            assert auto == whole
        else:
            assert auto.cls("acc").stride == 4 * 128256 * 4096
            assert auto.arena("cpu") < whole.arena("cpu")


def test_values_of_a_loop_lie_apart() -> None:
    """Values that calls in a loop touch are alive in all rounds, so they do not overlap."""
    p = planned("gpt-tiny", "train.head_chunk=11")
    fn = next(f for f in p.fns if f.name == "train.head")
    entropy = next(c for c in fn.calls if c.kernel == "zk_cross_entropy")
    logits = entropy.args[2].at
    moving = {
        a
        for c in fn.calls
        if c.rounds > 1
        for a in c.args
        if base(a) == "tmp" and a.by_round
    }
    spans = sorted(
        [(a.at, a.at + 6 * a.by_round) for a in moving]
        + [(logits, logits + 11 * 256 * 4)]
    )
    assert len(spans) == 4
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


# ---- the plan's text, the checker


def test_rounds_are_printed_and_read() -> None:
    p = planned("gpt-tiny", "train.head_chunk=22")
    printed = text.print_plan(p)
    assert text.parse(printed) == p and re.search(
        r"^call\*3 zk_linear_bwd_w .* c$", printed, re.M
    )
    for wrong in ("call*1 ", "call*03 ", "call* ", "call*x "):
        with pytest.raises(text.PlanError):
            text.parse(printed.replace("call*3 ", wrong, 1))


@pytest.mark.parametrize(
    "name,precision",
    [("gpt-tiny", "f32"), ("gpt-tiny", "bf16"), ("llama-tiny", "bf16")],
)
@pytest.mark.slow
def test_broken_rounds_are_refused(name: str, precision: str) -> None:
    """A deleted or swapped call and a changed round, stride, place or number are refused. Only the
    statistics of an evaluation's norm may lie anywhere."""
    p = planned(
        name,
        f"train.precision={precision}",
        "train.sequence=32",
        "train.micro_batch=3",
        "train.global_batch=6",
        "train.head_chunk=32",
    )
    assert not mutants.refused(p) and rounds(p) == 3
    made = [
        m for m in mutants.of_calls(p) if m.what.startswith(("train.head", "eval.head"))
    ]
    assert len(made) > 150
    open_ = [m.what for m in made if not mutants.refused(m.plan)]
    assert all("norm_fwd: tmp" in what for what in open_) and len(open_) < 3, open_
    for body in ("train.head", "eval.head"):
        f, fn = next((f, fn) for f, fn in enumerate(p.fns) if fn.name == body)
        for n, (a, b) in enumerate(itertools.pairwise(fn.calls)):
            calls = (*fn.calls[:n], b, a, *fn.calls[n + 2 :])
            swapped = replace(p, fns=mutants.put(p.fns, f, replace(fn, calls=calls)))
            free = {a.kernel, b.kernel} in FREE
            assert mutants.refused(swapped) != free, (a, b)


# Neighbours that may be swapped: the two gradients of a linear, which use different results; the
# sum of losses and calls that read no loss.
FREE = [
    {"zk_linear_bwd_x", "zk_linear_bwd_w"},
    {"zk_loss_sum", "zk_layernorm_bwd"},
    {"zk_loss_sum", "zk_round"},
    {"zk_round", "zk_rmsnorm_bwd"},
]


@pytest.mark.parametrize(
    "keys,said",
    [
        (
            ("train.head_chunk=20",),
            "20 does not divide the 66 tokens of a micro-batch; "
            "allowed: auto, 11 or 22",
        ),
        (
            ("train.head_chunk=100",),
            "100 does not divide the 66 tokens of a micro-batch; allowed: auto, 66",
        ),
        (
            ("train.head_chunk=0",),
            "is out of range or not an integer; allowed: auto or an integer",
        ),
        (("train.head_chunk=some",), "allowed: auto or an integer"),
        (
            (*HALVES, "train.head_chunk=16"),
            "16 is not a multiple of 32, the number of terms that bf16 sums at once; "
            "allowed: auto, 32",
        ),
        (
            ("train.precision=bf16", "train.head_chunk=22"),
            "22 is not a multiple of 32, the number of terms that bf16 sums at once; "
            "allowed: auto, 66",
        ),
    ],
)
def test_a_wrong_chunk_is_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(spec.SpecError, match=re.escape(said)):
        spec.load(f"{trainer.ROOT}/model_specs/gpt-tiny.yaml", keys)


def test_chunks_of_bf16_are_of_whole_terms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4000 tokens make 8 chunks of 500 in f32, and in bf16 5 chunks of 800, a multiple of 32. The
    checker refuses others, and such slices."""
    keys = "train.sequence=500", "train.micro_batch=8", "train.global_batch=16"
    assert rounds(planned("gpt2-124m", *keys)) == 8
    assert rounds(planned("gpt2-124m", *keys, "train.precision=bf16")) == 5
    sliced = spec.load(
        f"{trainer.ROOT}/tests/data/sliced.yaml",
        ["train.precision=bf16", "zero.stage3_max_live_parameters=16384"],
    )
    plans = (
        planned("gpt-tiny", *HALVES, "train.head_chunk=32"),
        search.find(sliced).plan,
    )
    monkeypatch.setitem(ops.TERMS, "bf16", 1024)
    for p in plans:
        with pytest.raises(CheckError, match="goes on with a sum behind"):
            check.check(p)


def test_a_biased_head_goes_in_one(tmp_path: pathlib.Path) -> None:
    text = law.path("llama").read_text()
    path = tmp_path / "biased.yaml"
    path.write_text(
        text.replace(
            "{name: lm_head, out: 256}",
            "{name: lm_head, out: 256, bias: true}",
        )
    )
    assert rounds(search.find(spec.load(str(path))).plan) == 1
    with pytest.raises(spec.SpecError, match="has a bias"):
        spec.load(
            str(path),
            [
                "train.head_chunk=11",
                "train.micro_batch=1",
                "train.sequence=33",
            ],
        )
