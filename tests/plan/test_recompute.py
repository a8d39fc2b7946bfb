"""test_recompute.py -- tests the effects of `train.recompute`: the repeated calls, the memory
saved, the flops added, and that the checker notices any other value in place of a recomputed one.
test_law.py tests the bits."""

import itertools
import pathlib
import tempfile
from dataclasses import replace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zg.check import check
from zg.plan.operand import Operand
from zg.plan.plan import Call, Fn, Plan
from zg.predict import cost
from zg.read import spec
from zg.read.keytypes import RECOMPUTE
from zg.search import search
from zg.write import explain

from tests.lib import drawn, law, mutants, trainer
from tests.lib.plans import NAMES, planned

FULL = "train.recompute=full"


def kernels(p: Plan, name: str) -> list[str]:
    fn = next(f for f in p.fns if f.name == name)
    return [c.kernel.removeprefix("zk_") for c in fn.calls]


def held(p: Plan, *names: str) -> int:
    """Return the bytes of these classes."""
    return sum(c.slots * c.stride for c in p.classes if c.name.split(".")[0] in names)


# ---- the recomputed calls, and their order


def test_a_block_made_again() -> None:
    """A block is recomputed except for its last linear, whose output nothing reads; the first
    reader comes next."""
    assert kernels(planned("gpt-tiny", FULL), "bwd.block") == [
        "linear_bwd_x",
        "layernorm_fwd",
        "linear_fwd",
        "attention_fwd",
        "linear_fwd",
        "layernorm_fwd",
        "linear_fwd",
        "gelu_fwd",
        "linear_bwd_w",
        "linear_bwd_b",
        "gelu_bwd",
        "linear_bwd_x",
        "linear_bwd_w",
        "linear_bwd_b",
        "layernorm_bwd",
        "linear_bwd_x",
        "linear_bwd_w",
        "linear_bwd_b",
        "attention_bwd",
        "linear_bwd_x",
        "linear_bwd_w",
        "linear_bwd_b",
        "layernorm_bwd",
    ]


def test_some_ops_made_again_late() -> None:
    """Single ops are recomputed just before their first reader, so their values live shortly."""
    p = planned("gpt-tiny", "train.recompute=[gelu, layernorm]")
    calls = kernels(p, "bwd.block")
    for n, kernel in enumerate(calls):
        if kernel in ("gelu_fwd", "layernorm_fwd"):
            assert calls[n + 1] == "linear_bwd_w"
    assert sum(k.endswith("_fwd") for k in calls) == 3
    # GELU's values
    assert held(p, "tmp") <= held(planned("gpt-tiny"), "tmp") + 4 * 66 * 240


@pytest.mark.parametrize(
    "word,again",
    [
        # rotated, and rotated back; its input is not saved
        (
            "rope",
            ["qknorm_fwd", "rope", "rope"],
        ),
        ("residual", ["linear_fwd", "add"]),
        ("swiglu", ["swiglu_fwd"]),
        ("attention", ["attention_fwd"]),
        ("qknorm", ["qknorm_fwd"]),
    ],
)
def test_an_op_brings_what_it_reads(word: str, again: list[str]) -> None:
    calls = kernels(planned("qwen3-tiny", f"train.recompute=[{word}]"), "bwd.block")
    assert [k for k in calls if k.endswith("_fwd") or k in again] == again


def test_an_op_that_no_block_has_is_said() -> None:
    def read(words):
        return search.find(
            spec.load(
                f"{trainer.ROOT}/model_specs/gpt-tiny.yaml",
                [f"train.recompute={words}"],
            )
        ).notes

    assert read("[gelu, rope]") == ("train.recompute: no block has rope",)
    assert read("full") == read("none") == read("[gelu]") == ()


def test_an_op_of_which_backward_reads_its_statistics_alone(
    tmp_path: pathlib.Path,
) -> None:
    """Backward reads the statistics alone of a norm after its branch, whose output only a sum
    reads, and of a norm of heads that are rotated."""
    mapping = yaml.safe_load((trainer.ROOT / "model_specs/qwen3-tiny.yaml").read_text())
    blocks = next(u for u in mapping["model"]["units"] if "blocks" in u)
    for op in blocks["ops"]:
        op["residual"].append(op["residual"].pop(0))
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(mapping))
    for words in ("full", "[rmsnorm]", "[qknorm]", "none"):
        keys = [f"train.recompute={words}"]
        p = search.find(spec.load(str(tmp_path / "spec.yaml"), keys)).plan
        check.check(p)
        check.check(planned("qwen3-tiny", *keys))
        again = sum(k == "rmsnorm_fwd" for k in kernels(p, "bwd.block"))
        assert again == (2 if words in ("full", "[rmsnorm]") else 0)


# ---- memory and flops


@pytest.mark.parametrize("name", NAMES)
def test_memory_falls_by_what_is_not_saved(name: str) -> None:
    """Memory falls by the unsaved values to the byte. Only saved values and temporary space change,
    and a deep model keeps about one layer's values, in that space."""
    kept = planned(name, "train.recompute=none")
    again = planned(name, FULL)
    passing = ("save", "tmp")
    fall = held(kept, *passing) - held(again, *passing)
    for target in kept.head.targets:
        assert kept.arena(target) - again.arena(target) == fall

    def rest(p):
        return [
            replace(c, at=0) for c in p.classes if c.name.split(".")[0] not in passing
        ]

    assert rest(kept) == rest(again) and held(again, "save") == 0
    layers = max(c.slots for c in kept.classes if c.name.startswith("save."))
    assert held(again, "tmp") <= held(kept, "tmp") + held(kept, "save") / layers
    for target in again.head.targets:
        assert f"{again.arena(target):,}" in explain.memory(again)


def test_flops_are_counted_apart() -> None:
    """Recomputed flops are counted separately: without the last linear GPT-2's are 3 + 1 + 4 of 12
    C^2 per layer and token, and attention."""
    keys = ("train.sequence=1024", "train.micro_batch=1")
    kept, again = (
        planned("gpt2-124m", *keys),
        planned("gpt2-124m", *keys, FULL),
    )
    layers, tokens, T, C = 12, 4 * 1024, 1024, 768
    assert cost.again(again) == layers * tokens * (2 * 8 * C * C + 2 * T * C)
    assert cost.again(kept) == 0 and cost.flops(kept) == cost.flops(again)
    some = planned("gpt2-124m", *keys, "train.recompute=[gelu, layernorm]")
    assert cost.again(some) == 0
    assert f"flops of recomputation: {cost.again(again):.4g}" in explain.explain(again)


def test_backward_is_twice_forward() -> None:
    """Backward costs twice forward by the functions' own flops, with biases, too."""
    for name in ("gpt-tiny", "qwen3-tiny"):
        flops = {f.name: f.flops for f in planned(name).fns}
        assert flops["bwd.block"] == 2 * flops["fwd.block"] > 0


# ---- any model, any choice


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn.specs(),
    st.lists(st.sampled_from(RECOMPUTE), unique=True),
    st.sampled_from(["f32", "bf16"]),
)
def test_drawn_models(mapping: drawn.Mapping, words: list[str], precision: str) -> None:
    """Drawn models with drawn choices have plans that the checker accepts; nothing saved is
    recomputed, and no more memory is held than before."""
    mapping["train"] |= {"precision": precision, "recompute": words}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "spec.yaml"
        path.write_text(yaml.safe_dump(mapping))
        again = search.find(spec.load(str(path))).plan
        kept = search.find(spec.load(str(path), ["train.recompute=none"])).plan
    check.check(again)
    assert held(again, "save") <= held(kept, "save")
    assert cost.again(again) >= cost.again(kept) == 0


# ---- the checker


def having(p: Plan, name: str, calls: list[Call]) -> Plan:
    def swap(f):
        return replace(f, calls=tuple(calls)) if f.name == name else f

    return replace(p, fns=tuple(map(swap, p.fns)))


def function(p: Plan, name: str) -> Fn:
    return next(f for f in p.fns if f.name == name)


@pytest.mark.parametrize("name", ["gpt-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("again", ["none", "full", "[attention, layernorm, rmsnorm]"])
def test_the_checker_sees_another_value(name: str, again: str) -> None:
    """The checker refuses any operand of a backward call that is replaced by that of another call
    of the same kernel, which often has the same size."""
    p = planned(name, f"train.recompute={again}")
    check.check(p)
    calls = list(function(p, "bwd.block").calls)
    tried = 0
    for a, b in itertools.permutations(range(len(calls)), 2):
        for n, x in (
            enumerate(calls[a].args) if calls[a].kernel == calls[b].kernel else ()
        ):
            y = calls[b].args[n]
            if x != y and isinstance(x, Operand):
                mixed = replace(
                    calls[a],
                    args=(*calls[a].args[:n], y, *calls[a].args[n + 1 :]),
                )
                refused(having(p, "bwd.block", [*calls[:a], mixed, *calls[a + 1 :]]))
                tried += 1
    assert tried >= 80


def refused(p: Plan) -> None:
    with pytest.raises(check.CheckError):
        check.check(p)


def test_the_checker_sees_a_call_that_forward_did_not_make() -> None:
    """The checker refuses a recomputed call with another epsilon, with the other norm's weight, or
    of a saved value."""
    p = planned("gpt-tiny", FULL)
    calls = list(function(p, "bwd.block").calls)
    n = next(n for n, c in enumerate(calls) if c.kernel == "zk_layernorm_fwd")
    other = [c for c in calls if c.kernel == "zk_layernorm_fwd"][1]
    for args in (
        (*calls[n].args[:-1], 0.001),
        (*calls[n].args[:5], *other.args[5:7], *calls[n].args[7:]),
    ):
        assert args != calls[n].args
        refused(
            having(
                p,
                "bwd.block",
                [*calls[:n], replace(calls[n], args=args), *calls[n + 1 :]],
            )
        )


def test_the_checker_sees_a_call_made_again_in_vain() -> None:
    p = planned("gpt-tiny")
    norm, bwd = (
        function(p, "fwd.block").calls[0],
        function(p, "bwd.block").calls,
    )
    idle = replace(
        norm,
        args=(
            Operand("tmp"),
            Operand("tmp", p.cls("x").stride),
            *norm.args[2:],
        ),
    )
    assert norm.kernel == "zk_layernorm_fwd"
    with pytest.raises(check.CheckError, match="recomputed and not read"):
        check.check(having(p, "bwd.block", [idle, *bwd]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "qwen3-tiny"])
def test_mutants_of_calls(name: str) -> None:
    """Every mutant with a deleted call or a shifted operand is refused, except for numbers that are
    a kernel's own matter (test_mutants.py runs those)."""
    for again in ("full", "[attention, gelu, swiglu]"):
        p = planned(name, f"train.recompute={again}", "targets=[cpu]")
        made = [m for m in mutants.of_calls(p) if m.what.startswith("bwd.block")]
        open_ = []
        for m in made:
            try:
                check.check(m.plan)
                open_.append(m.what)
            except check.CheckError:
                pass
        assert len(made) > 100 and not open_


TWINS = [
    [
        {
            "layernorm": {
                "name": f"{name}.norm",
                "eps": 1e-5,
                "weight": False,
                "bias": False,
            }
        },
        {"linear": {"name": f"{name}.up", "out": 24}},
        {"gelu": "tanh"},
        {"linear": {"name": f"{name}.down", "out": 32}},
    ]
    for name in ("first", "second", "third")
]


@pytest.mark.parametrize("again", ["none", "full", "[layernorm]", "[gelu]"])
def test_branches_that_begin_alike(tmp_path: pathlib.Path, again: str) -> None:
    """Branches may begin with equal norms of one value, each with a gradient of its own; without
    one of them the plan is refused."""
    keys = yaml.safe_load((trainer.ROOT / "model_specs" / "gpt-tiny.yaml").read_text())
    width = keys["model"]["width"]
    for branch in TWINS:
        branch[-1]["linear"]["out"] = width
    keys["model"]["units"][1]["ops"] = [{"residual": [{"parallel": TWINS}]}]
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(keys))
    p = search.find(spec.load(str(path), [f"train.recompute={again}"])).plan
    check.check(p)
    (fn,) = (f for f in p.fns if f.name == "bwd.block")
    at = [n for n, c in enumerate(fn.calls) if c.kernel == "zk_layernorm_bwd"]
    assert len(at) == len(TWINS)
    wrong = replace(fn, calls=tuple(c for n, c in enumerate(fn.calls) if n != at[1]))
    with pytest.raises(check.CheckError):
        check.check(replace(p, fns=tuple(wrong if f is fn else f for f in p.fns)))


@pytest.mark.parametrize("again", ["full", "[rmsnorm]"])
def test_a_norm_at_the_end_is_not_made_again(
    tmp_path: pathlib.Path, again: str
) -> None:
    """The norm that makes a block's output keeps its statistics, because to recompute them would
    write the output again. Weights are those of a run that recomputes nothing."""
    ops = (
        "model.units[1].ops=[{residual: [{attention: {name: self_attn, heads: 4}}]}, "
        "{rmsnorm: {name: norm, eps: 1.0e-6}}]"
    )
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 2000))
    p = planned("llama-tiny", ops, f"train.recompute={again}")
    check.check(p)
    assert "rmsnorm_fwd" not in kernels(p, "bwd.block")
    found = [
        law.run(
            trainer.build(
                trainer.generate(law.path("llama"), ops, f"train.recompute={x}")
            ),
            *("--data", tmp_path / "tokens", "--steps", 3),
            log=tmp_path / "log",
        )
        for x in ("none", again)
    ]
    assert found[0] == found[1]
