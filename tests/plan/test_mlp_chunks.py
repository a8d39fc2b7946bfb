"""test_mlp_chunks.py -- tests MLPs that tokens go through in chunks: bits, memory, and refusals of
the checker and the reader."""

import pathlib
from dataclasses import replace

import pytest
from zg.check import check
from zg.check.order import CheckError
from zg.plan.operand import base
from zg.plan.plan import Call, Plan
from zg.read.spec import SpecError

from tests.law.test_law import IN_BRIEF, PLAIN, UNEVEN, agree, bench, stream
from tests.lib import law, mutants
from tests.lib.plans import planned

SIZES = "train.sequence=64", "train.micro_batch=2", "train.global_batch=16"
CHUNK = "train.mlp_chunk=32"
MLP = "model.units[1].ops[1].residual"
# MLPs of other families: one linear and GELU; GeGLU behind two norms; a norm behind the MLP; two.
ONE = f"{MLP}[1].linear={{name: mlp.up_proj, out: 96}}", f"{MLP}[2]={{gelu: tanh}}"
NORM = "{{rmsnorm: {{name: {}, eps: 1.0e-5}}}}"
GATED = (
    "{{linear: {{name: [{0}.gate_proj, {0}.up_proj], out: [96, 96]}}}}, {{swiglu: {{}}}}, "
    "{{linear: {{name: {0}.down_proj, out: 64}}}}"
)
FIRST = NORM.format("post_attention_layernorm"), GATED.format("mlp")
BEHIND = f"{MLP}=[{', '.join((*FIRST, NORM.format('behind')))}]"
TWO = f"{MLP}=[{', '.join((*FIRST, NORM.format('between'), GATED.format('mlp2')))}]"
KINDS = {
    "llama": ("llama", "f32", ()),
    "llama, bf16": ("llama", "bf16", ("train.products=tiles",)),
    "qwen3, f16": ("qwen3", "f16", ()),
    "one linear, bf16": ("llama", "bf16", ("train.products=pairs", *ONE)),
    "a norm behind, f32": ("llama", "f32", (BEHIND,)),
    "two, bf16": ("llama", "bf16", (TWO,)),
    "ops, bf16": ("qwen3", "bf16", (*law.OPS, "train.dropout=0.1")),
    "frozen, bf16": (
        "llama",
        "bf16",
        ("train.optimizer.groups=[{match: ['*.down_proj.*'], frozen: true}]",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_hash(tmp_path: pathlib.Path, kind: str) -> None:
    """Chunks change no bit on a CPU, wherever and in whatever order the work is done."""
    family, precision, more = KINDS[kind]
    own = {*more} & {*ONE, BEHIND, TWO}  # other tensors than the family's
    weights = None if own else law.uneven(family, tmp_path)
    b = bench(tmp_path, stream(family, 32, 3), weights, 3)
    keys = *UNEVEN, *SIZES, f"train.precision={precision}", *more
    ways = [{"family": family, **PLAIN, **way} for way in ({}, *IN_BRIEF)]
    chunks = ["auto", *(32, 64) * len(ways)]
    agree(
        {
            f"{way} {n}": b.run(way, *keys, f"train.mlp_chunk={n}")
            for way, n in zip(ways, chunks, strict=False)
        }
    )


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("again", ["none", "full", "[linear]", "[rmsnorm, residual]"])
@pytest.mark.parametrize("mlps", [BEHIND, TWO], ids=["a norm behind", "two"])
def test_values_are_recomputed_in_their_rounds(
    mlps: str, again: str, precision: str
) -> None:
    """A value that a norm behind an MLP reads is recomputed by rounds of its own."""
    keys = f"train.recompute={again}", f"train.precision={precision}"
    check.check(planned("llama-tiny", *SIZES, CHUNK, mlps, *keys))


def test_memory() -> None:
    """Values between an MLP's linears have the rows of one chunk, in the temporary space of forward
    and of backward, and are not saved."""
    keys = "train.precision=f32", "train.recompute=none", *SIZES
    whole, few = (planned("llama-tiny", *keys, *more) for more in ((), (CHUNK,)))
    rows, F = 128, 176
    saved = whole.cls("save.block").stride - few.cls("save.block").stride
    between = 4 * rows * (2 * F + F)
    assert between <= saved < between + 4096 * 2
    for p, m in ((whole, rows), (few, 32)):
        calls = [c for f in p.fns for c in f.calls if c.kernel == "zk_swiglu_fwd"]
        assert calls and all(c.args[2] == m and c.rounds == rows // m for c in calls)
    long = "cluster.ranks=8", "train.global_batch=8", "train.sequence=131072"
    long = *long, "train.recompute=full", "train.offload_activations=true"
    whole, few = (
        planned("llama3-8b", *long, f"train.mlp_chunk={m}").cls("tmp").stride
        for m in ("auto", 8192)
    )
    assert few < 0.45 * whole


# ---- refusals of the checker


def broken(*keys: str) -> Plan:
    return planned("llama-tiny", *SIZES, CHUNK, *keys)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_mutants_of_calls(precision: str) -> None:
    """A deleted call and a changed round, stride, place or number are refused."""
    p = broken(f"train.precision={precision}", "targets=[cpu]")
    named = "fwd.block", "bwd.block"
    made = [m for m in mutants.of_calls(p) if m.what.startswith(named)]
    open_ = [m.what for m in made if not mutants.refused(m.plan)]
    assert len(made) > 200 and not open_


def with_calls(p: Plan, calls: list[Call]) -> Plan:
    fns = [
        replace(f, calls=tuple(calls)) if f.name == "bwd.block" else f for f in p.fns
    ]
    return replace(p, fns=tuple(fns))


def test_sums_are_not_mixed_up() -> None:
    """The f32 sums of two weights of one size may not change places, nor may the gradients to which
    they are rounded."""
    p = broken("train.precision=bf16", *ONE)
    check.check(p)
    (calls,) = (list(f.calls) for f in p.fns if f.name == "bwd.block")
    sums = [
        n
        for n, c in enumerate(calls)
        if c.kernel == "zk_linear_bwd_w" and base(c.args[0]) == "tmp"
    ]
    rounded = [n for n, c in enumerate(calls) if c.kernel == "zk_round"]
    assert len(sums) == len(rounded) == 2
    for at in (sums, rounded):
        one, other = (calls[n] for n in at)
        swapped = [*calls]
        swapped[at[0]] = replace(one, args=(other.args[0], *one.args[1:]))
        swapped[at[1]] = replace(other, args=(one.args[0], *other.args[1:]))
        with pytest.raises(CheckError):
            check.check(with_calls(p, swapped))


def test_a_sum_is_rounded_once_and_whole() -> None:
    """The f32 sum of a gradient is rounded after the last round, and neither rounds itself nor goes
    on afterwards."""
    p = broken("train.precision=bf16")
    (calls,) = (list(f.calls) for f in p.fns if f.name == "bwd.block")
    n = next(n for n, c in enumerate(calls) if c.kernel == "zk_round")
    first = next(n for n, c in enumerate(calls) if c.rounds > 1)
    for other in (
        [*calls[:n], *calls[n + 1 :]],
        [*calls[:n], calls[n], *calls[n:]],
        [*calls[:first], calls[n], *calls[first:n], *calls[n + 1 :]],
    ):
        with pytest.raises(CheckError):
            check.check(with_calls(p, other))


# ---- refusals of the reader

REFUSED = [
    ("llama-tiny", (), "train.mlp_chunk: 32 does not divide the 40 tokens"),
    (
        "gpt-tiny",
        ("train.sequence=32",),
        "train.mlp_chunk: h.{l}.mlp.c_fc.bias: the gradient of a bias cannot be summed in "
        "chunks; allowed: auto, or an MLP without biases",
    ),
    (
        "llama-tiny",
        (*SIZES, "train.lora={rank: 4, alpha: 4, match: all-linear}"),
        "train.mlp_chunk: gradients of adapters cannot be summed in chunks",
    ),
    (
        "llama-tiny",
        (
            *SIZES,
            f"{MLP}=[{FIRST[0]}, {{parallel: [[{GATED.format('a')}], [{GATED.format('b')}]]}}]",
        ),
        "train.mlp_chunk: two MLPs of a block have one input",
    ),
    (
        "llama-tiny",
        (*SIZES, f"{MLP}[2]={{scale: 2.0}}", f"{MLP}[1].linear={{name: a, out: 64}}"),
        "train.mlp_chunk: a block has no linear, activation and linear in a row",
    ),
]


@pytest.mark.parametrize("name,keys,said", REFUSED)
def test_refusals(name: str, keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpecError) as refusal:
        planned(name, *keys, CHUNK)
    assert said in str(refusal.value)


def test_refusal_of_blocks_in_parts() -> None:
    keys = "cluster.ranks=2", "train.global_batch=2", "train.mlp_chunk=1024"
    with pytest.raises(SpecError, match="block is gathered in parts"):
        planned("llama3-8b", *keys, "zero.stage3_max_live_parameters=140000")
