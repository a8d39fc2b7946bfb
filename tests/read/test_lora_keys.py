"""test_lora_keys.py -- tests train.lora: the linears that it matches, the tensors that it freezes,
its groups in PEFT's words, and its refusals."""

import json
import re

import pytest
from zg.graph import moves
from zg.read import spec as reader
from zg.write import peft

from tests.lib import law

LINEARS = "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj, or all-linear"
MODULES = "embed_tokens, input_layernorm, lm_head, model.norm, post_attention_layernorm"
KEY = "--set: train.lora"
GROUP = "--set: train.optimizer.groups"


def load(family: str, lora: str, *more: str) -> reader.Spec:
    return reader.load(str(law.path(family)), [f"train.lora={lora}", *more])


def test_defaults_are_pefts() -> None:
    found = {f: load(f, "{rank: 2, alpha: 4}").train.lora for f in law.FAMILIES}
    assert found["gpt"].match == ("c_attn",)
    assert found["llama"].match == found["qwen3"].match == ("q_proj", "v_proj")
    assert reader.load(str(law.path("gpt"))).train.lora is None


HEAD = "model.units[2].head=[{rmsnorm: {name: norm}}, {linear: {name: %s, out: 64, bias: false}}, {linear: {name: %s, out: 256, bias: false}}]"


def test_all_linears_are_all_but_the_logits() -> None:
    found = {
        f: load(f, "{rank: 2, alpha: 4, match: all-linear}").train.lora.match
        for f in ("gpt", "llama")
    }
    assert found["gpt"] == ("c_attn", "c_fc", "c_proj")
    assert found["llama"] == tuple(
        f"{x}_proj" for x in ("down", "gate", "k", "o", "q", "up", "v")
    )
    both = load("llama", "{rank: 2, alpha: 4, match: [all-linear, lm_head]}")
    assert both.train.lora.match == (*sorted({*found["llama"], "lm_head"}),)


def test_all_linears_of_a_head() -> None:
    """A linear of the head that is not the last one is among them."""
    all_ = "{rank: 2, alpha: 4, match: all-linear}"
    made = load("llama", all_, HEAD % ("dense", "lm_head"))
    assert "dense" in made.train.lora.match and "lm_head" not in made.train.lora.match
    (first, last) = (op.rows for op in made.model.units[-1].ops[1:])
    assert first[0].adapters and not last[0].adapters
    with pytest.raises(reader.SpecError) as error:
        load("llama", all_, HEAD % ("dense", "up_proj"))
    assert str(error.value).startswith(
        f"{KEY}.match[0]: 'all-linear' leaves out up_proj, but another linear has this name"
    )


@pytest.mark.parametrize("rslora,scale", [("false", 4 / 9), ("true", 4 / 3)])
def test_scale(rslora: str, scale: float) -> None:
    given = f"{{rank: 9, alpha: 4, rslora: {rslora}}}"
    assert load("llama", given).train.lora.scale == scale


@pytest.mark.parametrize(
    "family,lora,said",
    [
        ("qwen3", "{rank: 4, alpha: 1, match: [lm_head]}", f"{KEY}.match[0]: 'lm_head' is the head, which shares the weight of model.embed_tokens; allowed: {LINEARS.replace('lm_head, ', '')}"),
        ("gpt", "{rank: 4, alpha: 1, match: [lm_head]}", f"{KEY}.match[0]: 'lm_head' is the head, which shares the weight of wte; allowed: c_attn, c_fc, c_proj, or all-linear"),
        ("llama", "{rank: 4, alpha: 1, match: [q_proj, embed_tokens]}", f"{KEY}.match[1]: 'embed_tokens' is an embedding; allowed: {LINEARS}"),
        ("gpt", "{rank: 4, alpha: 1, match: [wpe]}", f"{KEY}.match[0]: 'wpe' is an embedding; allowed: c_attn, c_fc, c_proj, or all-linear"),
        ("llama", "{rank: 4, alpha: 1, match: [norm]}", f"{KEY}.match[0]: 'norm' is not the name of a linear; allowed: {LINEARS}"),
        ("llama", "{rank: 4, alpha: 1, match: [proj]}", f"{KEY}.match[0]: 'proj' is not the name of a linear; allowed: {LINEARS}"),
        ("llama", "{rank: 4, alpha: 1, match: all_linear}", f"{KEY}.match[0]: 'all_linear' is not the name of a linear; did you mean all-linear? allowed: {LINEARS}"),
        ("llama", "{rank: 4, alpha: 1, match: [q_proj, q_porj]}", f"{KEY}.match[1]: 'q_porj' is not the name of a linear; did you mean q_proj? allowed: {LINEARS}"),
        ("llama", "{rank: 4, alpha: 1, match: []}", f"{KEY}.match: is empty; allowed: a list of at least one"),
        ("llama", "{rank: 0, alpha: 1}", f"{KEY}.rank: 0 is out of range; allowed: an integer from 1 to 2147483647"),
        ("llama", "{rank: 33, alpha: 1}", f"{KEY}.rank: 33 is too large for self_attn.v_proj, which has 64 inputs and 32 outputs; allowed: up to 32"),
        ("llama", "{rank: 4}", f"{KEY}.alpha: is missing; allowed: a number from 1e-09 to 1e+09"),
        ("llama", "{rank: 4, alpha: 0}", f"{KEY}.alpha: 0 is out of range; allowed: a number from 1e-09 to 1e+09"),
        ("llama", "{rank: 4, alpha: 1, lora_dropout: 0.1}", f"{KEY}.lora_dropout: is not a key here; did you mean dropout? allowed: rank, alpha, match, rslora, base, dropout, groups, whole"),
        ("llama", "{rank: 4, alpha: 1, dropout: 1}", f"{KEY}.dropout: 1 is out of range; allowed: a number from 0 to 0.99"),
        ("llama", "{rank: 4, alpha: 1, base: int4}", f"{KEY}.base: 'int4' is not known; did you mean int8? allowed: int8 or nf4"),
        ("llama", "{rank: 4, alpha: 1, whole: [embed_token]}", f"{KEY}.whole[0]: 'embed_token' is not the name of a module; did you mean embed_tokens? allowed: {MODULES}"),
        ("llama", "{rank: 4, alpha: 1, whole: [lm_head, q_proj]}", f"{KEY}.whole[1]: 'q_proj' is a linear of blocks, which may have an adapter (train.lora.match); allowed: {MODULES}"),
        ("llama", "{rank: 4, alpha: 1, match: lm_head, whole: lm_head}", f"{KEY}.whole[0]: 'lm_head' has an adapter (train.lora.match); allowed: {MODULES}"),
        ("llama", "{rank: 4, alpha: 1, whole: norm}", f"{KEY}.whole[0]: 'norm' is also the end of model.layers.0.input_layernorm, which PEFT would train, too; allowed: {MODULES}"),
        ("gpt", "{rank: 4, alpha: 1, whole: lora_A}", f"{KEY}.whole[0]: 'lora_A' is not the name of a module; allowed: lm_head, ln_1, ln_2, ln_f, wpe, wte"),
        ("llama", "{rank: 4, alpha: 1, whole: 3}", f"{KEY}.whole[0]: 3 is not text; allowed: letters, digits, '_', '-' and single dots (in quotes where it looks like a number)"),
        ("llama", "{rank: 4, alpha: 1, groups: [{match: q_proj}]}", f"{KEY}.groups[0]: sets nothing; allowed: rank, alpha, or both"),
        ("llama", "{rank: 4, alpha: 1, groups: [{rank: 2}]}", f"{KEY}.groups[0].match: is missing; allowed: a list of at least one"),
        ("llama", "{rank: 4, alpha: 1, groups: [{match: q_proj, rank: 0}]}", f"{KEY}.groups[0].rank: 0 is out of range; allowed: an integer from 1 to 2147483647"),
        ("llama", "{rank: 4, alpha: 1, groups: [{match: q_proj, alpha: 2}, {match: v_proj, rank: 33}]}", f"{KEY}.groups[1].rank: 33 is too large for self_attn.v_proj, which has 64 inputs and 32 outputs; allowed: up to 32"),
        ("llama", "{rank: 33, alpha: 1, groups: [{match: q_proj, rank: 2}]}", f"{KEY}.rank: 33 is too large for self_attn.v_proj, which has 64 inputs and 32 outputs; allowed: up to 32"),
        ("llama", "{rank: 4, alpha: 1, groups: [{match: [q_proj, o_proj], rank: 2}]}", f"{KEY}.groups[0].match[1]: 'o_proj' is not the name of linears with adapters; allowed: q_proj, v_proj"),
        ("llama", "{rank: 4, alpha: 1, groups: [{match: q_prj, rank: 2}]}", f"{KEY}.groups[0].match[0]: 'q_prj' is not the name of linears with adapters; did you mean q_proj? allowed: q_proj, v_proj"),
        ("llama", "{rank: 4, alpha: 1, groups: [{match: q_proj, rank: 2}, {match: q_proj, rank: 3}]}", f"{KEY}.groups[1].match: has no effect: earlier groups match all of its linears; allowed: linears that no earlier group matches"),
        ("llama", "{rank: 4, alpha: 1, groups: [{match: layers.0.self_attn.q_proj, rank: 2}]}", f"{KEY}.groups[0].match[0]: 'layers.0.self_attn.q_proj' is not the name of linears with adapters; the layers of an entry of blocks have one rank and alpha; allowed: q_proj, v_proj"),
    ],
)  # fmt: skip
def test_refused(family: str, lora: str, said: str) -> None:
    with pytest.raises(reader.SpecError) as error:
        load(family, lora)
    assert str(error.value) == said


def pefts(said: dict, module: str) -> tuple[int, float]:
    """Return the rank and alpha that PEFT gives a module (its get_pattern_key)."""
    found = []
    for key, usual in (
        ("rank_pattern", said["r"]),
        ("alpha_pattern", said["lora_alpha"]),
    ):
        hits = [
            x
            for pattern, x in said.get(key, {}).items()
            if re.match(rf"(.*\.)?({pattern})$", module)
        ]
        found.append(hits[0] if hits else usual)
    return tuple(found)


GROUPS = (
    "{match: self_attn.q_proj, rank: 2}, {match: [q_proj, k_proj], alpha: 0.5}, "
    "{match: [proj, up_proj, mlp.down_proj], rank: 8, alpha: 16}"
)


def test_groups_are_pefts_patterns() -> None:
    """Each module has the rank and alpha that PEFT reads from the written patterns."""
    given = f"{{rank: 4, alpha: 6, match: all-linear, groups: [{GROUPS}]}}"
    with pytest.raises(reader.SpecError):  # no module's name ends in .proj
        load("llama", given)
    spec = load("llama", given.replace("proj, up", "up"))
    said = json.loads(peft.config(spec, spec.train.lora))
    (blocks,) = [unit for unit in spec.model.units if unit.kind == "blocks"]
    names = {
        "q_proj": (2, 6), "k_proj": (4, 0.5), "v_proj": (4, 6), "o_proj": (4, 6),
        "gate_proj": (4, 6), "up_proj": (8, 16), "down_proj": (8, 16),
    }  # fmt: skip
    rows = [row for op in blocks.ops for inner in op.ops for row in inner.rows]
    adapters = [adapter for row in rows for adapter in row.adapters]
    found = {
        down.weights["w"].name.split(".")[1]: (down.dims["N"], up.dims["scale"])
        for down, up in adapters
    }
    assert found == {name: (r, alpha / r) for name, (r, alpha) in names.items()}
    for name, size in names.items():
        part = "mlp" if name[0] in "gud" else "self_attn"
        assert pefts(said, f"model.layers.1.{part}.{name}") == size
    assert "rank_pattern" not in peft.config(*plain_of("llama"))


def plain_of(family: str) -> tuple[reader.Spec, object]:
    spec = load(family, "{rank: 4, alpha: 6}")
    return spec, spec.train.lora


def test_a_group_trains_adapters_alone() -> None:
    """A rate of B's own (LoRA+) is a group like any other."""
    own = "train.optimizer.groups=[{{match: [{}], lr_factor: 16}}]"
    made = load("llama", "{rank: 2, alpha: 4}", own.format('"*.lora_B.*"'))
    assert [g.frozen for g in made.train.optimizer.groups] == [
        False,
        False,
        True,
    ]
    with pytest.raises(reader.SpecError) as error:
        load(
            "llama",
            "{rank: 2, alpha: 4}",
            own.format('"*.lora_B.*", "*norm*"'),
        )
    assert str(error.value) == (
        f"{GROUP}[0].match[1]: '*norm*' matches model.layers.0.input_layernorm.weight, which "
        "train.lora freezes; allowed: patterns that match only adapters, such as '*.lora_B.weight', "
        "and modules of train.lora.whole"
    )


@pytest.mark.parametrize("words", ["lm_head", "[embed_tokens]", "[wte, lm_head]"])
def test_a_tied_weight_has_two_names(words: str) -> None:
    """Either name of a tied weight stands for both, in the recipe and in PEFT's file, and a note
    says so."""
    family = "gpt" if "wte" in words else "qwen3"
    name = "wte" if family == "gpt" else "embed_tokens"
    made = load(family, f"{{rank: 4, alpha: 6, whole: {words}}}")
    assert made.train.lora.whole == tuple(sorted([name, "lm_head"]))
    (told,) = [note for note in made.notes if "whole" in note]
    assert told.endswith(f"{name} and lm_head share one weight, which is trained whole")
    said = json.loads(peft.config(made, made.train.lora))
    assert said["modules_to_save"] == [*made.train.lora.whole]
    assert said["ensure_weight_tying"] is True


def test_whole_modules_of_a_layer_and_of_a_head() -> None:
    """A name with a layer's number means that layer; a head of its own has one name, and its group
    may have a rate of its own."""
    given = "{rank: 4, alpha: 6, whole: [layers.1.input_layernorm, lm_head]}"
    own = "train.optimizer.groups=[{match: ['lm_head.*'], lr_factor: 0.5}]"
    made = load("llama", given, own)
    assert made.train.lora.whole == ("layers.1.input_layernorm", "lm_head")
    assert not [note for note in made.notes if "whole" in note]
    names = ("model.layers.{}.input_layernorm.weight", "lm_head.weight")
    found = [
        moves.group(made, names[i].format(l), [(names[i].format(l), 1)], (1,), 0)
        for i, l in ((0, 0), (0, 1), (1, 0))
    ]
    assert [(rate, frozen) for rate, _, frozen in found] == [(1, 1), (1, 0), (0.5, 0)]
    assert "ensure_weight_tying" not in peft.config(made, made.train.lora)


@pytest.mark.parametrize("names", ["h", "transformer.h"])
def test_names_of_pefts_files(names: str) -> None:
    """Names in PEFT's files are those of a whole transformers model, whether a spec includes the
    model's own part or not."""
    key = f'model.units[1].name="{names}.{{l}}"'
    spec = load("gpt", "{rank: 2, alpha: 1}", key)
    block = spec.model.units[1].name
    whole = f"{peft.lead(spec)}{block}.attn"
    assert whole == "base_model.model.transformer.h.{l}.attn"
