"""test_context.py -- tests samples that are cut into blocks, which ranks share: one hash over all
ways to spread the blocks, and other bits for another number of blocks."""

import json
import os
import pathlib
import re
import signal

import numpy as np
import pytest
from zg.check import check
from zg.predict import cost
from zg.read.spec import SpecError, load
from zg.write import explain

from tests.law import test_reference as reference
from tests.law.test_law import ANY_STAGE, BIG, OFFLOADED, PLAIN, UNEVEN, agree, bench
from tests.lib import chance, choices, law, oracle, patience, program, trainer
from tests.lib.plans import planned
from tests.reference import known

BLOCKS, SAMPLES, STEPS = 8, 8, 5
ATTENTION = "model.units[1].ops[0].residual[1].attention"
# 8 heads that 8 ranks can share, of 2 key-value heads
HEADS = f"{ATTENTION}.heads=8", f"{ATTENTION}.head_dim=8"
CUT = f"train.sequence_blocks={BLOCKS}", "train.sum={block: 64}", *HEADS
RANKS = {"ranks": [1, 2, 4, 8], "context": [1, 2, 4, 8], "family": ["qwen3", "llama"]}


def fits(way: dict) -> bool:
    """Return whether ranks can share samples in this way."""
    N, W = way["context"], way["ranks"]
    if W % N or not law.fits(way):
        return False
    return not any(0 < way[key] < W and way[key] % N for key in ("local", "shard"))


WAYS = law.covering(ANY_STAGE | RANKS, 1, fits) + law.covering(
    OFFLOADED | RANKS, 2, fits
)
# A few ways that are far apart.
FEW = (
    {"ranks": 1},
    {"ranks": 8, "context": 8, "stage": 3, "overlap": True, "again": "full"},
    {"ranks": 4, "context": 2, "stage": 2, "queue": "shuffled:1", "reduce": 5000},
    {"ranks": 8, "context": 4, "stage": 3, "local": 4, "unmap": 1, "prefetch": BIG},
    {"ranks": 2, "context": 2, "stage": 0, "queue": "late"},
    {"ranks": 8, "context": 2, "stage": 3, "shard": 4, "accumulate": "layers"},
    {"ranks": 2, "stage": 1, "threads": 3},
)
MORE = {
    "f32": (),
    "bf16": ("train.precision=bf16",),
    "f16": ("train.precision=f16",),
    "documents": ("data.documents=mask", "data.end=1"),
    "dropout": ("train.dropout=0.1", "train.attention_dropout=0.1"),
    "means of micro-batches": (
        "train.loss_mean=micro_batch",
        "train.micro_batch=2",
        "train.head_chunk=5",
    ),
    "dropout of attention and documents": (
        "train.attention_dropout=0.1",
        "data.documents=mask",
        "data.end=1",
    ),
    "two samples": ("train.micro_batch=2",),
    "adapters": ("train.lora={rank: 4, alpha: 4, match: all-linear}",),
    "a quantized base": (
        "train.lora={rank: 4, alpha: 4, match: all-linear, base: int8}",
    ),
    "chunks of the MLP": ("train.mlp_chunk=1",),
    "windows, a cap and yarn": (
        f"{ATTENTION}.window=[8, null]",
        f"{ATTENTION}.softcap=20",
        f"{ATTENTION}.rope.scaling={{type: yarn, factor: 4, original_context: 16}}",
    ),
    "rotation of neighbours in one layer, longrope": (
        f"{ATTENTION}.rope={{theta: 10000, width: 4, interleaved: true, scaling: {{type: longrope, factor: 4, "
        "original_context: 16, short_factor: [1, 1], long_factor: [1, 3]}}",
        f"{ATTENTION}.rope_layers=[true, false]",
    ),
}


def recipe(precision: str, *more: str) -> list[str]:
    sizes = f"train.global_batch={SAMPLES}", f"train.precision={precision}"
    return [*UNEVEN, *sizes, *CUT, *more]


def stream() -> np.ndarray:
    return law.tokens(256, 40 * SAMPLES * STEPS + 1, holes=True)


def one_hash(
    folder: pathlib.Path, family: str, ways: list[dict], keys: list[str]
) -> None:
    weights = law.uneven(family, folder, *HEADS)
    b = bench(folder, stream(), weights, STEPS)
    plain = {"family": family, "context": 1, "accumulate": "micro_batches", **PLAIN}
    made = [{**plain, **way} for way in ({}, *ways)]
    agree({str(way): b.run(way, *keys) for way in made})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_one_hash(tmp_path: pathlib.Path, family: str, precision: str) -> None:
    """Every other way of the covering arrays has one hash with one rank."""
    turn = precision == "bf16"
    some = [way for way in WAYS if way["family"] == family]
    one_hash(tmp_path, family, some[turn::4], recipe(precision))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_one_hash_of_all_ways(
    tmp_path: pathlib.Path, family: str, precision: str
) -> None:
    some = [way for way in WAYS if way["family"] == family]
    one_hash(tmp_path, family, some, recipe(precision))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE)
def test_one_hash_with_everything_else(tmp_path: pathlib.Path, kind: str) -> None:
    one_hash(tmp_path, "llama", FEW, recipe("f32", *MORE[kind]))


DEEP = "model.units[1].blocks=4"


# Norms come after attention, as in OLMo 2, and no norm before the MLP.
AFTER = """model.units[1].ops=[
    {residual: [{attention: {name: self_attn, heads: 8, head_dim: 8, kv_heads: 2}},
        {rmsnorm: {name: post_attention_layernorm, eps: 1.0e-6}}]},
    {residual: [{linear: {name: mlp.up_proj, out: 96}}, {relu2: {}},
        {linear: {name: mlp.down_proj, out: 64}}]}]"""
# Norms come after attention and after the MLP.
BOTH = (
    AFTER[:-3]
    + """,
        {rmsnorm: {name: post_feedforward_layernorm, eps: 1.0e-6}}]}]"""
)
VALUES = (
    {"ranks": 8, "context": 8, "stage": 3, "offload": "cpu"},
    {"ranks": 4, "context": 2, "stage": 2, "queue": "late"},
    {"ranks": 2, "context": 1, "stage": 3, "queue": "shuffled:2"},
    {"ranks": 1, "context": 1},
)


@pytest.mark.slow
@pytest.mark.parametrize("again", law.AGAIN)
def test_offloaded_values(tmp_path: pathlib.Path, again: str) -> None:
    """Saved values and inputs of units wait on the host if there are four layers, of one block on a
    rank and of several."""
    b = bench(tmp_path, stream(), None, STEPS)
    plain = {"family": "llama", "context": 1, "accumulate": "micro_batches", **PLAIN}
    made = [{**plain, "again": again}]
    made += [{**plain, **way, "values": True, "again": again} for way in VALUES]
    for way in made[1:]:
        p = planned("llama-tiny", *recipe("bf16", DEEP), *law.keys(way))
        saved = {"far.save.block", "far.save_heads.block"} if again == "none" else set()
        assert {"far.x", *saved} <= {c.name for c in p.classes}
    agree({str(way): b.run(way, *recipe("bf16", DEEP)) for way in made})


@pytest.mark.slow
@pytest.mark.parametrize(
    "ops,trained", [(AFTER, "q_proj"), (AFTER, "down_proj"), (BOTH, "q_proj")]
)
def test_saved_heads_are_exchanged_again(
    tmp_path: pathlib.Path, ops: str, trained: str
) -> None:
    """The output of attention is saved as heads. Backward exchanges it before all else of samples if
    it needs a recomputed linear of it. With a norm at the end, it needs that first, so rows are
    saved, too."""
    b = bench(tmp_path, stream(), None, STEPS)
    plain = {"family": "llama", "context": 1, "accumulate": "micro_batches", **PLAIN}
    adapters = f"train.lora={{rank: 4, alpha: 4, match: [{trained}]}}"
    keys = recipe("f32", ops, adapters)
    linear = {**plain, "again": "[linear]"}
    made = [plain, linear]
    made += [{**linear, "ranks": W, "context": N} for W, N in ((2, 1), (4, 2), (8, 8))]
    agree({str(way): b.run(way, *keys) for way in made})


# Two kinds of blocks have equally many parameters, so their gradients share a class. Attention is
# in the second alone.
KINDS = """model.units=[
    {embedding: {tokens: model.embed_tokens}},
    {blocks: 1, name: "model.first.{l}", ops: [{residual: [
        {linear: {name: up, out: 80}}, {relu2: {}}, {linear: {name: down, out: 64}}]}]},
    {blocks: 1, name: "model.second.{l}", ops: [{residual: [
        {attention: {name: attn, heads: 8, head_dim: 8, kv_heads: 2}}]}]},
    {head: [{rmsnorm: {name: model.norm, eps: 1.0e-6}}, {linear: {name: lm_head, out: 256}}]}]"""


@pytest.mark.slow
def test_kinds_that_share_a_class_of_gradients(tmp_path: pathlib.Path) -> None:
    """A kind of blocks with attention has a gradient for each of a rank's blocks of a sample, also
    if a kind without shares the class."""
    b = bench(tmp_path, stream(), None, STEPS)
    plain = {"family": "llama", "context": 1, "accumulate": "micro_batches", **PLAIN}
    keys = [key for key in recipe("f32") if key not in HEADS] + [KINDS]
    p = planned("llama-tiny", *keys, *law.keys(plain))
    slots = {c.name: c.slots for c in p.classes if c.name.startswith("grad.block")}
    assert slots == {"grad.block": BLOCKS}
    ways = (
        {"ranks": 2},
        {"ranks": 4, "context": 2, "stage": 3},
        {"ranks": 8, "context": 8},
    )
    agree({str(way): b.run({**plain, **way}, *keys) for way in ({}, *ways)})


@pytest.mark.slow
def test_labels_and_verified_copies(tmp_path: pathlib.Path) -> None:
    """A file of labels says which tokens are targets, and --verify-every finds the same hashes in
    every layout."""
    tokens = law.tokens(256, 40 * SAMPLES * STEPS + 1)
    hidden = np.where(np.arange(tokens.size) % 3, tokens, 65535)
    for name, some in {"train.bin": tokens, "labels": hidden}.items():
        trainer.write_tokens(tmp_path / name, some)
    meta = {"format": 1, "vocab": 256, "dtype": "uint16", "ignore": 65535}

    def hashes(labels: str | None, *keys: str) -> list[tuple[int, str]]:
        files = {"train.bin": {"tokens": tokens.size, "labels": labels}}
        (tmp_path / "meta.json").write_text(json.dumps({**meta, "files": files}))
        binary = trainer.build(
            trainer.generate(law.path("llama"), *recipe("bf16"), *keys)
        )
        options = "--data", tmp_path, "--steps", STEPS, "--verify-every", 2
        law.run(binary, *options, log=tmp_path / "log")
        lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
        return [(x["step"], x["weights"]) for x in lines if "weights" in x]

    ways = {
        (8, 8, 1),
        (8, 4, 3),
        (8, 2, 0),
        (2, 1, 2),
    }
    one = hashes("labels", "cluster.ranks=1")
    assert len(one) == STEPS // 2
    for ranks, context, stage in ways:
        layout = f"cluster.ranks={ranks}", f"cluster.context_parallel={context}"
        assert hashes("labels", *layout, f"zero.stage={stage}") == one
    assert hashes(None, "cluster.ranks=1") != one


@pytest.mark.slow
def test_many_blocks_on_a_rank(tmp_path: pathlib.Path) -> None:
    """A rank may have more blocks than a function of C has operands."""
    blocks = "train.sequence_blocks=32", "train.sum={block: 64}"
    sizes = "train.sequence=64", *blocks, DEEP
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 4 * 64 * STEPS + 1))

    def weights(ranks: int, context: int, stage: int, *keys: str) -> law.Result:
        layout = f"cluster.ranks={ranks}", f"cluster.context_parallel={context}"
        keys = "train.global_batch=4", f"zero.stage={stage}", *sizes, *layout, *keys
        binary = trainer.build(trainer.generate(law.path("llama"), *keys))
        options = "--data", tmp_path / "tokens", "--steps", STEPS
        return law.run(binary, *options, log=tmp_path / "log")

    one = weights(1, 1, 0)
    assert weights(2, 1, 2) == one
    assert weights(2, 2, 3, "train.offload_activations=true") == one


ALIKE = {
    "means of micro-batches": ("train.loss_mean=micro_batch", "train.micro_batch=2"),
    "documents": ("data.documents=mask", "data.end=1"),
    "a window": (f"{ATTENTION}.window=[8, null]",),
    "two samples": ("train.micro_batch=2",),
    "one key-value head": (f"{ATTENTION}.kv_heads=1",),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALIKE)
def test_blocks_compute_what_whole_samples_do(
    tmp_path: pathlib.Path, kind: str
) -> None:
    """Losses and norms of samples in blocks differ from those of whole samples by rounding alone:
    in f32, each in a few thousand terms."""
    b = bench(tmp_path, stream(), None, STEPS)
    plain = {"family": "llama", "context": 1, "accumulate": "micro_batches", **PLAIN}
    found = []
    for n in (1, 4):
        run = b.run(plain, *recipe("f32", *ALIKE[kind]), f"train.sequence_blocks={n}")
        lines = map(json.loads, run.steps)
        found.append([(line["loss"], line["norm"]) for line in lines])
    assert np.allclose(*found, rtol=1e-5, atol=0)


def test_learned_positions_of_blocks(tmp_path: pathlib.Path) -> None:
    """The same with learned positions and a tied head, which gpt has."""
    b = bench(tmp_path, stream(), None, STEPS)
    plain = {"family": "gpt", "context": 1, "accumulate": "micro_batches", **PLAIN}
    keys = "train.micro_batch=2", "train.global_batch=8", "train.sum=tree"
    found = []
    for way, n in ((plain, 1), (plain, 3), ({**plain, "ranks": 3, "context": 3}, 3)):
        run = b.run(way, *keys, f"train.sequence_blocks={n}")
        lines = map(json.loads, run.steps)
        found.append([(line["loss"], line["norm"]) for line in lines])
    assert np.allclose(found[0], found[1], rtol=1e-5, atol=0)
    assert found[1] == found[2]


def test_resumes_in_any_layout(tmp_path: pathlib.Path) -> None:
    """A run that goes on with other ranks, which share samples in another way, has the bits of one
    that never stopped."""
    b = bench(tmp_path, stream(), None, STEPS)
    plain = {"family": "llama", "context": 1, "accumulate": "micro_batches", **PLAIN}
    whole = b.run(plain, *recipe("bf16"))
    folder = tmp_path / "checkpoints"
    steps: list[str] = []
    for turn, way in enumerate((FEW[1], FEW[2], FEW[0], FEW[3], FEW[5])):
        made = {**plain, **way}
        source = trainer.generate(law.path("llama"), *recipe("bf16"), *law.keys(made))
        part = law.run(
            trainer.build(source),
            *("--data", tmp_path / "tokens", "--steps", turn + 1),
            *("--checkpoints", folder),
            log=tmp_path / "log",
        )
        steps += part.steps
    assert part.weights == whole.weights
    assert tuple(steps) == whole.steps


def test_controls(tmp_path: pathlib.Path) -> None:
    """Another number of blocks is another recipe: it has other weights, near the first ones, and
    does not resume a checkpoint of the first."""
    b = bench(tmp_path, stream(), None, STEPS)
    plain = {"family": "llama", "context": 1, "accumulate": "micro_batches", **PLAIN}
    found = {
        n: b.run(plain, *recipe("f32"), f"train.sequence_blocks={n}")
        for n in (1, 2, 4, 8)
    }
    assert len({x.weights for x in found.values()}) == len(found)
    losses = [[json.loads(line)["loss"] for line in x.steps] for x in found.values()]
    # f32 gradients in other orders: rounding of 2^-24 in each of a few thousand terms
    assert np.allclose(losses, losses[0], rtol=1e-5, atol=0)
    folder = tmp_path / "checkpoints"
    for n, code in ((8, 0), (4, 4)):
        keys = *recipe("f32"), f"train.sequence_blocks={n}", *law.keys(plain)
        done = program.run(
            trainer.build(trainer.generate(law.path("llama"), *keys)),
            *("--data", tmp_path / "tokens", "--steps", 2, "--checkpoints", folder),
        )
        assert done.code == code, done.err
    assert "train.sequence_blocks" in done.err


# ---- float64

SHARED = "train.sequence_blocks=4", "cluster.ranks=4", "cluster.context_parallel=4"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_gradients(tmp_path: pathlib.Path, name: str) -> None:
    """Gradients of samples that four ranks share are PyTorch's: no tensor's is added twice, or by
    one rank only, or scaled by the number of ranks."""
    path, params, tokens, ref = reference.setting(name)
    found = reference.shown(path, tmp_path, params, tokens, *SHARED)
    assert (
        reference.off(reference.losses(tmp_path), ref["plain/loss"]) <= reference.LOSS
    )
    for tensor, g in found.items():
        error = reference.off(g, ref[f"plain/grad/{tensor}"])
        assert error <= reference.GRADIENT, f"{tensor}: off by {error:.3g}"


def test_gradients_under_masks_of_blocks(tmp_path: pathlib.Path) -> None:
    """Each block has a mask of its own: that of its number among all blocks of the run. Attention
    has that of the first block and of all heads."""
    path, params, tokens, _ = reference.setting("llama")
    dropouts = "train.dropout=0.25", "train.attention_dropout=0.2"
    keys = (*reference.SHOW, *SHARED, *dropouts)
    after = trainer.train(path, tmp_path, params, tokens, 1, *keys)
    spec = load(str(path), keys)
    G = spec.train.global_batch
    batch = oracle.batch(tokens, spec.train.sequence, 0, G)
    moved = {n: (x - np.float64(after[n])) / reference.RATE for n, x in params.items()}
    found = {n: u / (1 - np.abs(u)) for n, u in moved.items()}

    def worst(count: int) -> float:
        given = chance.keys(spec.train.seed, 0, count)
        _, _, want = oracle.gradients(spec, params, *batch, keys=given)
        return max(reference.off(found[n], want[n]) for n in found)

    assert worst(4 * G) <= reference.GRADIENT
    assert worst(G) > 1e3 * reference.GRADIENT


@pytest.mark.slow
def test_gradients_of_long_samples(tmp_path: pathlib.Path) -> None:
    """The same with samples of 1,024 tokens, whose sums have that many terms: sqrt(30 * 1024)
    roundings of 2^-24."""
    T, bound = 1024, 1.1e-5
    sizes = f"train.sequence={T}", "train.global_batch=2", "train.micro_batch=1"
    path, params, _, _ = reference.setting("llama")
    spec = load(str(path), sizes)
    tokens = law.tokens(256, 2 * T + 1)
    found = reference.shown(path, tmp_path, params, tokens, *sizes, *SHARED)
    _, _, grads = oracle.gradients(spec, params, *oracle.batch(tokens, T, 0, 2, -1))
    for tensor, g in found.items():
        error = reference.off(g, known.digest(tensor, grads[tensor]))
        assert error <= bound, f"{tensor}: off by {error:.3g} of the largest element"


# ---- memory and wire


def test_memory() -> None:
    """Twice the tokens on two ranks take less memory a rank than one rank takes for half of them.
    One block at a time leaves all values between functions in temporary space."""

    def arena(*keys: str) -> int:
        sizes = "train.micro_batch=1", "train.global_batch=1", "train.recompute=full"
        more = "model.units[0].embedding.context=32768", "targets=[cpu]"
        return planned("demo", *sizes, *more, *keys).arena("cpu")

    two = "cluster.ranks=2", "cluster.context_parallel=2", "train.sequence_blocks=2"
    whole = arena("cluster.ranks=1", "train.sequence=16384")
    assert arena(*two, "train.sequence=32768") < whole
    shared = planned("llama-tiny", *SHARED)
    assert not {"rows", "heads"} & {c.name for c in shared.classes}


def test_bytes_of_a_token() -> None:
    """A token takes a rank the inputs of 32 layers and the head, and two gradients of such, each
    shared by 8 ranks, and most of the rest is one layer's temporary values."""
    sizes = "train.sequence=131072", "train.global_batch=1", "train.micro_batch=1"
    shared = "train.sequence_blocks=8", "cluster.context_parallel=8", "cluster.ranks=8"
    more = "train.recompute=full", "targets=[sm_90]"
    p = planned("llama3-8b", *sizes, *shared, *more)
    found = {c.name: each for c, each in cost.by_token(p)}
    width = 4096 * 2 / 8
    assert (found["x"], found["dx"]) == (33 * width, 2 * width)
    assert found["tmp"] > 0.9 * (sum(found.values()) - 35 * width)
    said = explain.memory(p)
    assert f"{found['x']:,.1f}" in said and "of 1 sample, which 8 ranks share" in said
    whole = f"{sum(found.values()):,.0f}"
    assert (
        f"bytes of activations on a rank for each token of a sample: {whole}"
        in explain.explain(p)
    )


@pytest.mark.parametrize("again,times", [("none", 2), ("full", 3)])
def test_bytes_of_exchanges(again: str, times: int) -> None:
    """A rank receives (N - 1) / N of its rows of queries, keys and values, and of attention's
    output: forward, backward, and forward again if that is recomputed."""
    N, T, layers, A = 2, 40, 2, 4
    H, G, D, f32 = 4, 4, 16, 4  # two copies of each of 2 key-value heads
    keys = "cluster.ranks=4", f"cluster.context_parallel={N}", "train.global_batch=8"
    p = planned(
        "llama-tiny", "train.sequence_blocks=4", f"train.recompute={again}", *keys
    )
    rows = T // N * (N - 1) // N
    each = rows * (H + 2 * G + H) * D * f32
    assert cost.exchanged(p) == times * each * layers * A


# ---- refusals


@pytest.mark.parametrize(
    "keys,says",
    [
        (("train.sequence_blocks=3",), "3 does not divide train.sequence 40"),
        (
            ("cluster.context_parallel=2",),
            "2 ranks do not divide the 1 blocks of a sample; allowed: 1, or "
            "train.sequence_blocks: 2, another recipe",
        ),
        (
            ("cluster.ranks=3", "cluster.context_parallel=2"),
            "2 does not divide 3 ranks",
        ),
        (
            (
                "cluster.ranks=5",
                "cluster.context_parallel=5",
                "train.sequence_blocks=5",
            ),
            "5 ranks cannot share the 4 query heads and 2 key-value heads of model.layers.{l}; "
            "allowed: 1",
        ),
        (
            (
                "train.sequence_blocks=4",
                "cluster.ranks=8",
                "train.global_batch=2",
                "train.micro_batch=1",
            ),
            "8 does not divide train.global_batch 2, and ranks do not share samples "
            "(cluster.context_parallel); allowed: cluster.ranks",
        ),
        (
            ("train.sequence_blocks=4", "cluster.ranks=2", "train.sum=fold"),
            "a tree of 1 gradients has no node of the 4 of a sample, which are added first; "
            "allowed: {block: 4}, another recipe",
        ),
        (
            (
                "train.sequence_blocks=4",
                "cluster.ranks=8",
                "cluster.context_parallel=4",
                "cluster.local=2",
            ),
            "4 ranks do not divide cluster.local 2",
        ),
    ],
)
def test_refusals(keys: tuple[str, ...], says: str) -> None:
    with pytest.raises(SpecError) as refusal:
        planned("llama-tiny", *keys)
    assert says in str(refusal.value)


# ---- evaluation

SPREAD = (
    {"blocks": 4, "ranks": 1},
    {"blocks": 4, "ranks": 4, "context": 4, "stage": 3, "queue": "late"},
    {"blocks": 4, "ranks": 4, "context": 2, "queue": "shuffled:2"},
    {"blocks": 2, "ranks": 4, "context": 2, "stage": 3},
)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("data.documents=mask", "data.end=1")])
@pytest.mark.parametrize("kind", [trainer.GCC, trainer.EMULATED], ids=["cpu", "gpu"])
def test_draws_and_evaluates(
    tmp_path: pathlib.Path, kind: trainer.Kind, more: tuple[str, ...]
) -> None:
    """A program of blocks draws the tokens and gets the examples right that one of whole samples
    does, also if samples are longer than the context."""
    T, sizes = 40, (*UNEVEN, f"train.global_batch={SAMPLES}", "train.micro_batch=2")
    weights = law.uneven("llama", tmp_path)
    trainer.write_tokens(tmp_path / "tokens", stream())
    chance = np.random.default_rng(5)
    examples = []
    for label in 3 * [0, 1, 2]:
        lengths = chance.integers(1, T // 4, 4)
        words = [chance.integers(2, 256, n).tolist() for n in lengths]
        words[0] += chance.integers(2, 256, 20).tolist()
        examples.append(choices.Example(words[0], words[1:], label))
    (tmp_path / "choices").write_bytes(choices.file(examples))
    data = "--data", tmp_path / "tokens", "--load", weights, "--steps", 0
    asked = "--sample", 60, "--eval", tmp_path / "choices", "--threads", 1

    def told(way: dict[str, object]) -> str:
        keys = [
            f"train.sequence_blocks={way.get('blocks', 1)}",
            f"cluster.context_parallel={way.get('context', 1)}",
            f"cluster.ranks={way['ranks']}",
            f"zero.stage={way.get('stage', 1)}",
            "train.accumulate=layers",
        ]
        source = trainer.generate(law.path("llama"), *sizes, *keys, *more)
        queue = "--queue", way.get("queue", "eager")
        env = {"ZR_SHARE_GPU": 1} if kind == trainer.EMULATED else {}
        done = program.run(trainer.build(source, kind), *data, *asked, *queue, **env)
        assert done.code == 0, done.err
        drawn = done.out.splitlines()[-1]
        return f"{done.line('eval ')}, {drawn}"

    found = [told({"ranks": 1}), *map(told, SPREAD)]
    assert len({*found}) == 1, found
    assert len({*found[0]}) > 20 and ": 0 of" not in found[0]


def test_a_group_that_shares_nothing_is_refused(tmp_path: pathlib.Path) -> None:
    """A program whose sums over a sample's ranks name another group does not start."""
    trainer.write_tokens(tmp_path / "tokens", stream())
    keys = "cluster.ranks=4", "cluster.context_parallel=2", "train.sequence_blocks=2"
    source = trainer.generate(law.path("llama"), *keys)
    wrong = source.replace(".sharing = GROUP_CONTEXT", ".sharing = GROUP_ALL")
    assert wrong != source
    done = program.run(
        trainer.build(wrong), *("--data", tmp_path / "tokens", "--steps", 1)
    )
    assert done.code == 4 and "no group 0 of 2 ranks shares samples" in done.err


@pytest.mark.slow
@pytest.mark.waits
def test_a_stopped_rank_is_named(tmp_path: pathlib.Path) -> None:
    """A stopped rank of a context group is named, and so is a rank that waits for it."""
    trainer.write_tokens(tmp_path / "tokens", stream())
    keys = "cluster.ranks=4", "cluster.context_parallel=2", "train.sequence_blocks=2"
    running = program.start(
        trainer.build(trainer.generate(law.path("llama"), *keys)),
        tmp_path / "tokens",
        *("--steps", 10**6),
        ZR_TIMEOUT_S=2 * patience.busy(),
    )
    program.wait_for_step(running, 1)
    pids = program.children(running.pid)
    os.kill(pids[1], signal.SIGSTOP)
    error = running.communicate(timeout=patience.LIMIT)[1]
    assert running.returncode == 7 and program.gone(pids), error
    stuck, waiting = re.search(
        r": rank (\d) makes no progress in .*; rank (\d) waits for it\b", error
    ).groups()
    assert stuck == "1" != waiting, error


PROVEN = {
    "an offloaded optimizer of two groups": (
        "cluster.ranks=8",
        "cluster.context_parallel=4",
        "zero.stage=1",
        "zero.offload_optimizer.device=cpu",
    ),
    "attention is frozen below": (
        "cluster.ranks=1",
        "train.lora={rank: 4, alpha: 4, match: [gate_proj, down_proj]}",
    ),
    "attention's output is frozen": (
        "cluster.ranks=1",
        "train.recompute=[attention]",
        "train.lora={rank: 4, alpha: 4, match: [q_proj, v_proj]}",
    ),
    "three levels of sums on one queue": (
        "cluster.ranks=16",
        "cluster.context_parallel=4",
        "cluster.local=8",
        "zero.overlap_comm=false",
        "train.global_batch=16",
    ),
}


@pytest.mark.parametrize("what", PROVEN)
def test_plans_that_are_proven(what: str) -> None:
    """The checker proves the plans of settings that it once refused."""
    check.check(planned("llama-tiny", *PROVEN[what], "train.sequence_blocks=4"))
