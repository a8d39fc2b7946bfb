"""test_lora.py -- tests LoRA adapters: gradients and steps against float64, one hash however the
work is spread, an unchanged base, and dropout in training alone."""

import json
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from zg.check import check
from zg.plan import plan
from zg.plan.operand import Index
from zg.read import spec as reader
from zg.read import whole
from zg.search import search
from zg.write import peft

from tests.law import test_dropout, test_reference
from tests.lib import chance, law, oracle, trainer
from tests.lib.ways import ADAPTED, ONE, WHOLE
from tests.reference import known

MOST = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
LORA = {
    "gpt": ("train.lora={rank: 4, alpha: 6, match: [c_attn, c_fc]}",),
    "llama": ("train.lora={rank: 4, alpha: 6}",),
    "qwen3": (f"train.lora={{rank: 3, alpha: 12, match: {MOST}}}",),
    "gpt, all linears": (
        "train.lora={rank: 5, alpha: 6, match: all-linear, rslora: true}",
    ),
    "head": ("train.lora={rank: 4, alpha: 6, match: [v_proj, lm_head]}",),
    "head in chunks": (
        "train.lora={rank: 3, alpha: 6, match: [lm_head]}",
        "train.sequence=64",
        "train.head_chunk=32",
        "model.vocab=251",
        "model.units[2].head[1].linear.out=251",
    ),
    "llama, groups": (
        "train.lora={rank: 4, alpha: 6, match: all-linear, groups: ["
        "{match: [q_proj, mlp.down_proj], rank: 2, alpha: 9}, "
        "{match: [k_proj, q_proj], rank: 3}, {match: up_proj, alpha: 1}]}",
    ),
    "llama, dropout": ("train.lora={rank: 4, alpha: 6, dropout: 0.25}",),
    "gpt, dropout of both kinds": (
        "train.lora={rank: 4, alpha: 6, match: all-linear, dropout: 0.5}",
        "train.dropout=0.25",
    ),
    "llama, whole": (
        "train.lora={rank: 4, alpha: 6, whole: [embed_tokens, lm_head, input_layernorm]}",
    ),
    "qwen3, whole": ("train.lora={rank: 4, alpha: 6, whole: [lm_head, q_norm]}",),
    "gpt, whole": ("train.lora={rank: 4, alpha: 6, whole: [wpe, h.1.ln_2]}",),
    "head, dropout": (
        "train.lora={rank: 4, alpha: 6, match: [o_proj, lm_head], dropout: 0.25}",
    ),
}


def path_of(name: str) -> pathlib.Path:
    return law.path("llama" if name.startswith("head") else name.split(",")[0])


def setting(name: str) -> tuple[pathlib.Path, oracle.Arrays, np.ndarray]:
    """Return the path of a tiny spec, weights of base and adapters without zeros, and tokens."""
    path = path_of(name)
    spec = reader.load(str(path), LORA[name])
    params = {
        tensor: known.weight(tensor, shape, known.is_norm_weight(tensor))
        for tensor, shape in oracle.shapes(spec).items()
    }
    T, V = spec.train.sequence, spec.model.vocab
    return path, params, known.stream(name, T, V)


def drawn(spec: reader.Spec, count: int) -> list[int]:
    """Return the keys of the first samples of a run, none if it draws nothing."""
    return chance.keys(spec.train.seed, 0, count) if spec.keyed else []


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def is_trained(spec: reader.Spec, name: str) -> bool:
    return is_adapter(name) or whole.is_whole(spec.train.lora, name)


def second(spec: reader.Spec) -> tuple[str, str]:
    """Return both names of a tied weight that is trained whole, in PEFT's files."""
    embedding, head = whole.tied(spec.model) or ("", "")
    if not (head and is_trained(spec, f"{embedding}.weight")):
        return "", ""
    return f"{peft.lead(spec)}{embedding}.weight", f"{peft.LEAD}{head}.weight"


def written(
    spec: reader.Spec, folder: pathlib.Path, params: oracle.Arrays, tokens: np.ndarray
) -> tuple[object, ...]:
    """Write weights of base and adapters, and tokens. Return the options that load them."""
    lora, lead = spec.train.lora, peft.lead(spec)
    base, old = (folder / name for name in ("base", "old"))
    for made in (base, old):
        made.mkdir(exist_ok=True)
    narrow = {n: np.float32(x) for n, x in params.items()}
    save_file(
        {n: x for n, x in narrow.items() if not is_adapter(n)},
        base / "model.safetensors",
    )
    low = {lead + n: x for n, x in narrow.items() if is_trained(spec, n)}
    own, other = second(spec)
    low |= {other: low[own]} if other else {}
    save_file(low, old / "adapter_model.safetensors")
    (old / "adapter_config.json").write_text(peft.config(spec, lora))
    trainer.write_tokens(folder / "tokens.bin", tokens)
    return "--data", folder / "tokens.bin", "--load", base, "--adapter", old


def trained(
    path: pathlib.Path,
    folder: pathlib.Path,
    params: oracle.Arrays,
    tokens: np.ndarray,
    steps: int,
    *keys: str,
) -> dict[str, np.ndarray]:
    """Return the adapters after `steps` steps from given weights, by the names of `params`."""
    spec, new = reader.load(str(path), keys), folder / "new"
    given = written(spec, folder, params, tokens)
    trainer.sh(
        trainer.build(trainer.generate(path, *keys)),
        *(*given, "--steps", steps, "--save", new, "--log", folder / "log.jsonl"),
    )
    found = load_file(new / "adapter_model.safetensors")
    own, other = second(spec)
    if other:
        assert (found.pop(other) == found[own]).all()
    return {n.removeprefix(peft.lead(spec)): x for n, x in found.items()}


def planned(name: str, *keys: str) -> plan.Plan:
    keys = (*LORA[name], *keys)
    p = search.find(reader.load(str(path_of(name)), keys)).plan
    check.check(p)
    return p


# ---- values


@pytest.mark.parametrize("name", LORA)
def test_the_evaluators_gradients(name: str) -> None:
    """The evaluator's gradients of trained tensors match differences of its own loss."""
    path, params, tokens = setting(name)
    spec = reader.load(str(path), LORA[name])
    batch = oracle.batch(tokens, spec.train.sequence, 0, 2)
    given = {"keys": drawn(spec, 2)}
    _, _, grads = oracle.gradients(spec, params, *batch, **given)
    rng, step = np.random.Generator(np.random.Philox(1)), 1e-6
    way = {
        n: rng.uniform(-1, 1, x.shape) * is_trained(spec, n) for n, x in params.items()
    }
    ends = [
        oracle.gradients(
            spec, {n: x + s * way[n] for n, x in params.items()}, *batch, **given
        )[0]
        for s in (-step, step)
    ]
    slope = sum(float((grads[n] * way[n]).sum()) for n in params)
    # Two losses of about 6 are each off by some 1e-15, divided by 2e-6. The cubic term goes with
    # step^2 and is 5e-9 here. A wrong formula is off by 1e-3 or more.
    assert abs((ends[1] - ends[0]) / (2 * step) - slope) <= 2e-8


@pytest.mark.parametrize("name", LORA)
def test_gradients(tmp_path: pathlib.Path, name: str) -> None:
    """Gradients of the first step are within f32's bound for whole models. Without the mask of a
    dropout, or with other samples' masks, they are far off."""
    path, params, tokens = setting(name)
    keys = (*test_reference.SHOW, *LORA[name])
    after = trained(path, tmp_path, params, tokens, 1, *keys)
    spec = reader.load(str(path), LORA[name])
    G = spec.train.global_batch
    batch = oracle.batch(tokens, spec.train.sequence, 0, G)
    assert after.keys() == {n for n in params if is_trained(spec, n)}
    moved = {
        n: (params[n] - np.float64(x)) / test_reference.RATE for n, x in after.items()
    }
    found = {n: u / (1 - np.abs(u)) for n, u in moved.items()}

    def worst(given: list[int]) -> tuple[float, float]:
        loss, _, want = oracle.gradients(spec, params, *batch, keys=given)
        off = [test_reference.off(found[n], want[n]) for n in found]
        return max(off), abs(test_reference.losses(tmp_path)[0] - loss) / loss

    gradient, loss = worst(drawn(spec, G))
    assert gradient <= test_reference.GRADIENT
    assert loss <= test_reference.LOSS
    for other in ([], drawn(spec, G)[::-1]) if spec.keyed else ():
        assert worst(other)[0] > 1e3 * test_reference.GRADIENT


def test_first_values(tmp_path: pathlib.Path) -> None:
    """First values are PEFT's: A is uniform within 1 / sqrt(inputs) and B is zero, so the model
    equals the base."""
    source = trainer.generate(law.path("qwen3"), *LORA["qwen3"])
    program = trainer.build(source)
    trainer.sh(program, "--steps", 0, "--save", tmp_path)
    after = load_file(tmp_path / "adapter_model.safetensors")
    drawn = np.concatenate(
        [x.ravel() * np.sqrt(x.shape[1]) for n, x in after.items() if "lora_A" in n]
    )
    assert np.abs(drawn).max() <= 1 and drawn.size > 2000
    # means and squares of n uniform numbers, within five standard deviations
    n = drawn.size
    assert abs(drawn.mean()) <= 5 * np.sqrt(1 / 3 / n)
    assert abs((drawn**2).mean() - 1 / 3) <= 5 * np.sqrt(4 / 45 / n)
    assert len(np.unique(drawn)) > 0.99 * n
    assert not any(x.any() for n, x in after.items() if "lora_B" in n)


# ---- bits


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,precision",
    [
        ("llama", "f32"),
        ("gpt", "bf16"),
        ("qwen3", "f32"),
        ("head", "bf16"),
        ("head in chunks", "f32"),
        ("head in chunks", "bf16"),
        ("llama, groups", "f32"),
        ("llama, dropout", "bf16"),
        ("gpt, dropout of both kinds", "f32"),
        ("head, dropout", "bf16"),
        ("llama, whole", "bf16"),
        ("qwen3, whole", "f32"),
        ("gpt, whole", "f32"),
    ],
)
def test_law(tmp_path: pathlib.Path, name: str, precision: str) -> None:
    """All ways have one hash. Another scale and another dropout have others."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(251, 64 * 8 * 3 + 1))

    def run(*keys: str) -> law.Result:
        keys = (f"train.precision={precision}", "train.micro_batch=1", *keys)
        source = trainer.generate(path_of(name), *LORA[name], *keys)
        return law.run(
            trainer.build(source),
            *("--data", tmp_path / "tokens", "--steps", 3),
            log=tmp_path / "log",
        )

    few = ("one rank", "recomputed", "layers")
    found = {run(*ADAPTED[x]) for x in (few if name[:3] in ("gpt", "qwe") else ADAPTED)}
    for key in ("alpha=7", "dropout=0.3"):
        other = run(f"train.lora.{key}", *ADAPTED["stage 1"])
        assert len(found) == 1 and other.weights not in {r.weights for r in found}


# ---- dropout


@pytest.mark.parametrize("name", ["llama, dropout", "head, dropout"])
def test_only_training_drops(tmp_path: pathlib.Path, name: str) -> None:
    """Validations and the likeliest tokens are those of adapters without dropout, while training
    steps differ. The weights stay as they are."""
    path, params, tokens = setting(name)
    np.arange(4, dtype=np.int32).tofile(tmp_path / "prompt")

    def run(*keys: str) -> tuple[law.Result, list[str]]:
        keys = (*test_dropout.STILL, *LORA[name], *keys)
        program = trainer.build(trainer.generate(path, *keys))
        given = written(reader.load(str(path), keys), tmp_path, params, tokens)
        val = ("--val", tmp_path / "tokens.bin", "--val-every", 1, "--steps", 2)
        found = law.run(program, *given, *val, log=tmp_path / "log")
        draw = ("--steps", 0, "--sample", 12, "--temperature", 0)
        draw += ("--prompt-tokens", tmp_path / "prompt")
        return found, trainer.sh(program, *given[2:], *draw).split()[-12:]

    (plain, one), (dropped, other) = run("train.lora.dropout=0"), run()
    assert plain.val and plain.val == dropped.val and one == other
    assert plain.steps != dropped.steps


def test_what_is_dropped_is_not_saved() -> None:
    """Backward draws each adapter's input again: a block saves as much as without
    dropout."""
    sizes = [
        {c.name: c.stride for c in p.classes if c.name.startswith("save.")}
        for p in (planned("llama"), planned("llama, dropout"))
    ]
    assert sizes[0] == sizes[1] != {}


def test_places_are_checked() -> None:
    """Backward draws each mask again at the place of its own adapter."""
    p = planned("llama, dropout")
    q, v = Index(2, 0, 0), Index(2, 0, 1)
    changed = test_dropout.changed
    check.check(changed(p, "fwd.block", {0: q, 1: v}))
    check.check(changed(p, "bwd.block", {0: v, 1: v, 2: q, 3: q}))
    for name, at in (
        ("fwd.block", {0: v, 1: q}),
        ("fwd.block", {0: Index(2, 0, 2)}),
        ("bwd.block", {0: q}),
        ("bwd.block", {1: q}),
        ("bwd.block", {2: v, 3: v}),
        ("bwd.block", {0: q, 1: q, 2: v, 3: v}),
    ):
        with pytest.raises(check.CheckError):
            check.check(changed(p, name, at))


# ---- memory and wire


@pytest.mark.parametrize("stage", range(4))
def test_the_base_has_no_states(stage: int) -> None:
    """Masters, moments, sums, gradients and reductions have exactly the adapters' elements."""
    p = planned("llama", f"zero.stage={stage}", WHOLE, "train.precision=bf16")
    moving = [t for t in p.tensors if not t.frozen]
    assert {t.name.rpartition(".")[0][-6:] for t in moving} == {
        "lora_A",
        "lora_B",
    }
    # for each of two layers: A of 64 inputs, B of 64 and 32 outputs; all in one flat
    assert sum(t.elems * t.count for t in moving) == 2 * 4 * (64 + 64 + 64 + 32)
    (flat,) = {t.flat for t in moving}
    for s in p.stores:
        assert s.flat == flat or s.what == "params"
    sent = [
        step
        for section in p.sections
        for step in section.steps
        if step.op == "alltoall"
    ]
    assert sent and {step.unit.partition("[")[0] for step in sent} == {flat}


@pytest.mark.parametrize("base", ["", ", base: nf4"])
def test_a_whole_tensor_has_states(base: str) -> None:
    """Modules trained whole have masters, moments and gradient sums; all other tensors of the base
    have none, and keep their type."""
    lora = f"train.lora={{rank: 4, alpha: 6, whole: [embed_tokens, lm_head]{base}}}"
    keys = (lora, "zero.stage=3", WHOLE, "train.precision=bf16")
    p = search.find(reader.load(str(path_of("llama")), keys)).plan
    check.check(p)
    moving = {t.name for t in p.tensors if not t.frozen and not is_adapter(t.name)}
    assert moving == {"model.embed_tokens.weight", "lm_head.weight"}
    assert not any(t.quantized.format for t in p.tensors if t.name in moving)
    of = {t.flat for t in p.tensors if not t.frozen}
    assert {s.flat for s in p.stores if s.what != "params"} == of


# ---- on a GPU

SHORT = {
    "qwen3": ("train.sequence=12",),
    "head in chunks": (),
    "llama, dropout": ("train.sequence=12",),
    "qwen3, whole": ("train.sequence=12",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_under_emulation(tmp_path: pathlib.Path, name: str) -> None:
    """The GPU's kernels have one hash, too, and their losses are a CPU's within the rounding of
    bf16 logits: 2^-9 of numbers below 1, random over 24 tokens or more."""
    trainer.write_tokens(tmp_path / "tokens", law.tokens(251, 40 * 8 * 3 + 1))
    short = ("train.global_batch=2", "model.units[1].blocks=1", *SHORT[name])

    def run(kind: trainer.Kind, *keys: str) -> law.Result:
        keys = (*short, "train.micro_batch=1", *keys)
        source = trainer.generate(
            path_of(name), *LORA[name], "train.precision=bf16", *keys
        )
        return law.run(
            trainer.build(source, kind),
            *("--data", tmp_path / "tokens", "--steps", 2),
            log=tmp_path / "log",
        )

    first, second, cpu = (
        run(trainer.EMULATED, *ONE),
        run(trainer.EMULATED, *ADAPTED["stage 3"], "cluster.ranks=2"),
        run(trainer.GCC, *ONE),
    )
    assert first == second
    for a, b in zip(first.steps, cpu.steps, strict=True):
        x, y = (json.loads(line)["loss"] for line in (a, b))
        assert abs(x - y) <= 1e-3
