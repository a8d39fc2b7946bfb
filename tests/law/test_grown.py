"""test_grown.py -- tests rows for new tokens: their first values, one hash however the work is
spread, saved folders, adapters over a grown model, and bad input."""

import json
import pathlib
import re
import shutil
from collections.abc import Mapping

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from zg import main
from zg.read import spec
from zg.read.node import SpecError

from tests.lib import law, program, trainer
from tests.reference import known

FEW, MANY = 250, 301  # neither is a multiple of the stored rows, 8
TINY = trainer.ROOT / "tests" / "reference" / "hf"
# An untied head, a tied one, and one with a bias
FAMILIES = ("llama", "qwen3", "phi")
BY_TOKEN = {
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "qwen3": ("model.embed_tokens.weight",),
    "phi": ("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"),
}
KEYS = ("train.sequence=12", "train.micro_batch=1", "train.optimizer.lr=0.01")
SHARDED = ("zero.stage=3", "zero.stage3_param_persistence_threshold=0")
WAYS = (
    ("cluster.ranks=1", "zero.stage=0"),
    ("cluster.ranks=4", "zero.stage=2"),
    ("cluster.ranks=2", *SHARDED, "train.recompute=full"),
    (
        "cluster.ranks=4",
        *SHARDED,
        "zero.offload_optimizer.device=cpu",
        "zero.offload_param.device=cpu",
    ),
    ("cluster.ranks=2", *SHARDED, "zero.stage3_max_live_parameters=9000"),
)


def written(folder: pathlib.Path, family: str, kind: str = "f4") -> pathlib.Path:
    """Write a folder with FEW rows, of known weights in f4 or f2, and return it."""
    folder.mkdir()
    config = json.loads((TINY / family / "config.json").read_text())
    config |= {"vocab_size": FEW, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    made = build(folder)
    trainer.sh(made, "--steps", 0, "--save", folder)
    shapes = load_file(folder / "model.safetensors")
    weights = {n: known.of_model(family, n, x.shape) for n, x in shapes.items()}
    narrow = {n: x.astype(kind) for n, x in weights.items()}
    save_file(narrow, folder / "model.safetensors", {"format": "pt"})
    return folder


def source(folder: pathlib.Path, *keys: str, vocab: int | None = None) -> str:
    words = ["--from", str(folder)]
    words += ["--vocab", str(vocab)] if vocab else []
    return main.text(
        main.arguments([*words, *(w for key in (*KEYS, *keys) for w in ("--set", key))])
    )


def build(folder: pathlib.Path, *keys: str, vocab: int | None = None) -> pathlib.Path:
    return trainer.build(source(folder, *keys, vocab=vocab))


def weights_of(folder: pathlib.Path) -> Mapping[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def mean(x: np.ndarray) -> np.ndarray:
    """Return the mean of rows, added in their order in float64 and rounded once."""
    total = np.zeros(x.shape[1:])
    for row in x:
        total = total + np.float64(row)
    return np.float32(total / len(x))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    made = written(tmp_path_factory.mktemp("grown") / request.param, request.param)
    trainer.write_tokens(made / "tokens", law.tokens(MANY, 12 * 8 * 3 + 1))
    return made


def run(
    binary: pathlib.Path, folder: pathlib.Path, steps: int, *more: object
) -> law.Result:
    given = ("--data", folder / "tokens", "--load", folder, "--steps", steps)
    return law.run(binary, *given, *more, log=folder.parent / "log")


@pytest.mark.parametrize("way", [0, 2])
def test_new_rows(folder: pathlib.Path, tmp_path: pathlib.Path, way: int) -> None:
    """New rows of the embedding, the head and its bias are the mean of the folder's; all other
    numbers are the folder's. The saved folder has N rows, says so, and loads alone."""
    binary = build(folder, *WAYS[way], vocab=MANY)
    first = run(binary, folder, 0, "--save", tmp_path / "new")
    old, new = weights_of(folder), weights_of(tmp_path / "new")
    assert new.keys() == old.keys()
    for name, x in old.items():
        if name in BY_TOKEN[folder.name]:
            assert new[name].shape == (MANY, *x.shape[1:])
            assert (new[name][FEW:] == mean(x)).all() and mean(x).any()
        assert (new[name][: len(x)] == x).all()
    said = json.loads((tmp_path / "new" / "config.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert said == {**config, "vocab_size": MANY}
    shutil.copy(folder / "tokens", tmp_path / "new")
    again = build(tmp_path / "new", *WAYS[0])
    for of in (binary, again):
        assert run(of, tmp_path / "new", 0).weights == first.weights
    assert run(again, tmp_path / "new", 2).steps == run(binary, folder, 2).steps


@pytest.mark.slow
def test_law(folder: pathlib.Path) -> None:
    """All ways have one hash, and train with tokens that the folder lacks."""
    found = {run(build(folder, *way, vocab=MANY), folder, 3) for way in WAYS}
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_in_halves(tmp_path: pathlib.Path, precision: str) -> None:
    """A folder in f16 has the mean of its own numbers, saved in its type; ways of 16-bit training,
    also of a frozen base, have one hash."""
    folder = written(tmp_path / "llama", "llama", "f2")
    trainer.write_tokens(folder / "tokens", law.tokens(MANY, 12 * 8 * 3 + 1))
    key = f"train.precision={precision}"
    binary = build(folder, key, *WAYS[2], vocab=MANY)
    run(binary, folder, 0, "--save", tmp_path / "new")
    old, new = weights_of(folder), weights_of(tmp_path / "new")
    for name in BY_TOKEN["llama"]:
        assert (new[name][FEW:] == mean(old[name]).astype("f2")).all()
    for more in ((), ("train.lora={rank: 2, alpha: 4}",), ("model.vocab_rows=init",)):
        found = {
            run(build(folder, key, *more, *way, vocab=MANY), folder, 2)
            for way in WAYS[::2]
        }
        assert len(found) == 1


@pytest.mark.parametrize("keys", [(), ("train.lora={rank: 2, alpha: 4}",)])
def test_initial_rows(
    folder: pathlib.Path,
    tmp_path: pathlib.Path,
    keys: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """New rows of model.vocab_rows=init keep the values of a run without --load, also in a frozen
    base, and all other numbers are the folder's. Ways have one hash, which is not that of the
    mean."""
    drawn, merged = "model.vocab_rows=init", ["--merge"] * len(keys)
    binary = build(folder, *keys, *WAYS[2], drawn, vocab=MANY)
    assert ("are frozen at their initial values" in capsys.readouterr().err) == bool(
        keys
    )
    run(binary, folder, 0, "--save", tmp_path / "new", *merged)
    fresh = build(folder, *keys, *WAYS[0], drawn, vocab=MANY)
    trainer.sh(fresh, "--steps", 0, "--save", tmp_path / "fresh", *merged)
    old, new = weights_of(folder), weights_of(tmp_path / "new")
    first = weights_of(tmp_path / "fresh")
    assert new.keys() == old.keys() == first.keys()
    for name, x in old.items():
        assert (new[name][: len(x)] == x).all()
        if name in BY_TOKEN[folder.name]:
            assert len(new[name]) == MANY
            assert (new[name][FEW:] == first[name][FEW:]).all()
            assert (new[name][FEW:] != 0).any() == (x.ndim == 2)
    shutil.copy(folder / "tokens", tmp_path / "new")
    assert run(binary, tmp_path / "new", 0).weights == run(binary, folder, 0).weights
    ways = [build(folder, *keys, *way, drawn, vocab=MANY) for way in WAYS[:3]]
    (one,) = {run(way, folder, 2) for way in ways}
    mean = run(build(folder, *keys, *WAYS[0], vocab=MANY), folder, 2)
    assert one.weights != mean.weights


def test_a_recipe_has_first_values(folder: pathlib.Path) -> None:
    """The recipe names first values that are not the mean, and the emitted spec gives the same
    program."""
    drawn = "model.vocab_rows=init"
    made = source(folder, drawn, vocab=MANY)
    assert 'model.vocab_rows: \\"init\\"' in made
    assert "vocab_rows" not in source(folder, vocab=MANY)
    words = ["--from", str(folder), "--vocab", str(MANY), "--set", drawn]
    said = main.text(main.arguments([*words, "--emit", "config"]))
    assert re.search(r'^model.vocab_rows: "init" +# --set', said, re.M)
    text = main.text(main.arguments([*words, "--emit", "spec"]))
    spec = folder.parent / "drawn.yaml"
    spec.write_text(text)
    (line,) = re.findall(r"\.vocab_drawn = .+", made)
    assert line in trainer.generate(spec, *KEYS)


def test_a_run_goes_on(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A run of a grown model resumes on another layout with the bits of one that never stopped."""
    one, three = (build(folder, *WAYS[i], vocab=MANY) for i in (0, 2))
    whole = run(one, folder, 3)
    run(three, folder, 2, "--checkpoints", tmp_path)
    given = ("--data", folder / "tokens", "--steps", 3, "--checkpoints", tmp_path)
    after = law.run(one, *given, log=tmp_path / "log")
    assert after.weights == whole.weights


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_adapters_of_a_grown_model(
    folder: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The new rows of a model with adapters are trained whole if asked, and stay at their mean
    otherwise, as a note says. Adapters load over the folder, and a merged folder has N rows."""
    frozen = "train.lora={rank: 2, alpha: 4}"
    given = ("--save", tmp_path / "new", "--merge")
    run(build(folder, frozen, *WAYS[2], vocab=MANY), folder, 2, *given)
    assert (
        f"the {MANY - FEW} new rows of model.embed_tokens.weight, lm_head.weight are frozen at the "
        "mean of the others; whole: [embed_tokens, lm_head] trains them"
    ) in capsys.readouterr().err
    old, new = weights_of(folder), weights_of(tmp_path / "new")
    for name in BY_TOKEN["llama"]:
        assert (new[name][FEW:] == mean(old[name])).all()
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["vocab_size"] == MANY

    whole = "train.lora={rank: 2, alpha: 4, whole: [embed_tokens, lm_head]}"
    binary = build(folder, whole, *WAYS[2], vocab=MANY)
    assert "new rows" not in capsys.readouterr().err
    after = run(binary, folder, 2, "--save", tmp_path / "adapter")
    low = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in BY_TOKEN["llama"]:
        made = low[f"base_model.model.{name}"]
        assert made.shape[0] == MANY and (made[FEW:] != mean(old[name])).any()
    again = run(binary, folder, 0, "--adapter", tmp_path / "adapter")
    assert again.weights == after.weights
    # adapters of a model that has not grown
    few = build(folder, whole)
    trainer.sh(few, "--load", folder, "--steps", 0, "--save", tmp_path / "few")
    words = ("--load", folder, "--steps", 0, "--adapter", tmp_path / "few")
    done = program.run(binary, *words)
    assert done.code == 2
    assert f"has shape [{FEW}, 48]; the model has [{MANY}, 48]" in done.err


def test_adapters_of_a_model_that_peft_resized(
    folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """PEFT 0.21.2 saves the embedding and the head of a resized model beside its adapters. They are
    accepted if --load's are the same, and the error otherwise names the resized model."""
    binary = build(folder, "train.lora={rank: 2, alpha: 4}", *WAYS[2], vocab=MANY)
    grown, adapter = tmp_path / "grown", tmp_path / "adapter"
    plain = build(folder, *WAYS[0], vocab=MANY)
    trainer.sh(plain, "--load", folder, "--steps", 0, "--save", grown)
    after = run(binary, folder, 2, "--save", adapter)
    low = load_file(adapter / "adapter_model.safetensors")
    new = weights_of(grown)
    first, *others = BY_TOKEN[folder.name]
    new |= {"lm_head.weight": new[first]} if not others else {}
    for name in {first, "lm_head.weight", *others}:
        low[f"base_model.model.{name}"] = new[name]
    save_file(low, adapter / "adapter_model.safetensors")
    given = ("--data", folder / "tokens", "--steps", 0, "--adapter", adapter)
    again = law.run(binary, *given, "--load", grown, log=tmp_path / "log")
    assert again.weights == after.weights
    few = program.run(binary, *given, "--load", folder)
    low["base_model.model.lm_head.weight"] = new["lm_head.weight"] + np.float32(1)
    save_file(low, adapter / "adapter_model.safetensors")
    other = program.run(binary, *given, "--load", grown)
    for done in (few, other):
        assert done.code == 2
        assert (
            "differs from --load's, or --load is missing; PEFT saves it if the embedding "
            "was resized: save that model, too, and --load it"
        ) in done.err


# ---- bad input


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_other_rows(folder: pathlib.Path) -> None:
    """A folder with fewer rows than the program grows, or than a program that grows none has, is
    refused, and the error names --vocab. As many rows as there are change nothing."""
    wrong = trainer.build(
        trainer.generate(spec_of(folder), "model.vocab_from=200", *WAYS[0])
    )
    same = trainer.build(trainer.generate(spec_of(folder), *WAYS[0]))
    for binary in (wrong, same):
        done = program.run(binary, "--load", folder, "--steps", 0)
        assert done.code == 2
        assert f"has shape [{FEW}, 48]; the model has [{MANY}, 48]" in done.err
        assert f"model.vocab {FEW}, or with --from and --vocab, which adds" in done.err
        lacks = f"[{MANY}, 48], of which a folder may lack the rows from 200 on"
        assert (lacks in done.err) == (binary is wrong)
    texts = [spec.text(None, (), None, str(folder), n) for n in (FEW, None)]
    assert texts[0] == texts[1]


def spec_of(folder: pathlib.Path) -> pathlib.Path:
    """Return the spec of the grown model without vocab_from."""
    words = ["--from", str(folder), "--vocab", str(MANY), "--emit", "spec"]
    text = main.text(main.arguments(words))
    assert f"vocab_from: {FEW}" in text
    made = folder.parent / "grown.yaml"
    made.write_text(text.replace(f"  vocab_from: {FEW}\n", ""))
    return made


@pytest.mark.parametrize(
    "vocab,keys,why",
    [
        (200, (), f"--vocab: 200 is below the {FEW} rows of the model (config.json's vocab_size); allowed: {FEW} or more"),
        (-1, (), f"--vocab: -1 is below the {FEW} rows"),
        (2**40, (), "--vocab: model.vocab: 1099511627776 is out of range; allowed: an integer from 2 to 2147483647"),
        (MANY, ("model.vocab_from=301",), "--set: model.vocab_from: 301 is not below model.vocab 301; allowed: 1 to 300"),
        (MANY, ("model.vocab_rows=zero",), "--set: model.vocab_rows: 'zero' is not known; allowed: mean or init"),
        (None, ("model.vocab_rows=init",), "--set: model.vocab_rows: init has no effect without model.vocab_from, which --vocab of --from sets; allowed: mean"),
        (MANY, ("model.vocab_from=0",), "--set: model.vocab_from: 0 is out of range; allowed: an integer from 1"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_refused(
    folder: pathlib.Path, vocab: int | None, keys: tuple[str, ...], why: str
) -> None:
    with pytest.raises(SpecError) as error:
        source(folder, *keys, vocab=vocab)
    assert why in str(error.value)


def test_a_spec_has_keys_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """--vocab is of --from, because only a folder can have fewer rows."""
    with pytest.raises(SystemExit) as error:
        main.arguments([str(law.path("llama")), "--vocab", "300"])
    assert error.value.code == 2
    assert "--vocab needs --from DIR" in capsys.readouterr().err
