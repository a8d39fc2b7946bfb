"""test_packed.py -- tests folders that bitsandbytes quantized: their weights to the bit, one hash
however the work is spread, a base that keeps their numbers, and malformed ones."""

from __future__ import annotations

import functools
import json
import pathlib
import random
import shutil
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from zg import main

from tests.lib import law, packed, program, quantized, trainer
from tests.lib.ways import ADAPTED, ONE

Tensors = packed.Tensors
SHORT = ("train.sequence=12",)
FEW = [ADAPTED[x] for x in ("one rank", "stage 3")]
WAYS = [*FEW, *(ADAPTED[x] for x in ("stage 1", "one queue", "offloaded", "in parts"))]


@functools.cache
def built(folder: str, *keys: str, kind: trainer.Kind = trainer.GCC) -> pathlib.Path:
    """Return the program of --from, with these settings."""
    sets = [word for key in (*SHORT, *keys) for word in ("--set", key)]
    chosen = main.arguments(["--from", str(packed.DATA / folder), *sets])
    return trainer.build(main.text(chosen), kind)


def lora(base: str) -> str:
    more = f", base: {base}" if base else ""
    return f"train.lora={{rank: 4, alpha: 6, match: [q_proj, down_proj]{more}}}"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("packed") / "tokens"
    trainer.write_tokens(made, law.tokens(64, 12 * 8 * 3 + 1))
    return made


def saved(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: x.array() for name, x in packed.read(folder).items()}


# ---- values


@pytest.mark.parametrize("folder", packed.FOLDERS)
def test_the_formulas_are_bitsandbytes(folder: str) -> None:
    """The formulas of the tests give the weights that bitsandbytes gave."""
    found = packed.weights(packed.read(packed.DATA / folder))
    for name, told in packed.TOLD[folder].items():
        first = found[name].ravel()[: len(told["first"])]
        assert np.array_equal(first, np.float32(told["first"])), name
        assert packed.digest(found[name]) == told["sha256"], name


@pytest.mark.parametrize("kind", (trainer.GCC, trainer.CLANG, trainer.ASAN))
@pytest.mark.parametrize("folder", packed.FOLDERS)
def test_values(tmp_path: pathlib.Path, folder: str, kind: trainer.Kind) -> None:
    """All ranks load the bits of bitsandbytes' weights, and save them in plain f32 with a
    config.json of plain weights."""
    given = packed.DATA / folder
    for way in WAYS if (folder, kind) == ("nf4", trainer.GCC) else [ADAPTED["stage 3"]]:
        out = tmp_path / "out"
        done = program.run(
            built(folder, *way, kind=kind),
            *("--load", given, "--steps", 0, "--save", out, "--save-dtype", "f32"),
        )
        assert done.code == 0 and "Sanitizer" not in done.err, done.err
        assert f"{given}: bitsandbytes has quantized 7 of the tensors" in done.err
        found = load_file(out / "model.safetensors")
        want = packed.weights(packed.read(given))
        assert found.keys() == want.keys()
        for name, x in want.items():
            assert np.array_equal(found[name], x), name
        for name, told in packed.TOLD[folder].items():
            assert packed.digest(found[name]) == told["sha256"], name
        config = json.loads((given / "config.json").read_text())
        del config["quantization_config"]
        told = json.loads((out / "config.json").read_text())
        assert told == config | {"dtype": "float32"}
        shutil.rmtree(out)


def test_types_of_a_save(tmp_path: pathlib.Path) -> None:
    """A tensor is saved in the type to which it was dequantized."""
    given = packed.DATA / "mixed"
    done = program.run(
        built("mixed"), "--load", given, "--steps", 0, "--save", tmp_path
    )
    assert done.code == 0, done.err
    found = {name: x.dtype for name, x in packed.read(tmp_path).items()}
    layer = "model.layers.0"
    assert {x.split(".")[-2]: t for x, t in found.items() if x.startswith(layer)} == {
        "q_proj": "BF16",
        "k_proj": "F16",
        "v_proj": "F32",
        "o_proj": "F32",
        "gate_proj": "BF16",
        "up_proj": "F16",
        "down_proj": "BF16",
        "input_layernorm": "BF16",
        "post_attention_layernorm": "BF16",
    }


@pytest.mark.parametrize("place", ("first", "last", "only", "twice"))
def test_config_without_the_key(tmp_path: pathlib.Path, place: str) -> None:
    """quantization_config is cut out of config.json wherever it is."""
    folder = tmp_path / "in"
    shutil.copytree(packed.DATA / "nf4", folder)
    config = json.loads((folder / "config.json").read_text())
    key = {"quantization_config": config.pop("quantization_config")}
    whole = {
        "first": {**key, **config},
        "last": {**config, **key},
        "only": key,
        "twice": {**key, **config},
    }[place]
    text = json.dumps(whole, indent=1)
    if place == "twice":
        text = f"{json.dumps(key)[:-1]}, {text[1:]}"
    (folder / "config.json").write_text(text)
    out = tmp_path / "out"
    done = program.run(built("nf4"), "--load", folder, "--steps", 0, "--save", out)
    assert done.code == 0, done.err
    want = {} if place == "only" else config
    assert json.loads((out / "config.json").read_text()) == want
    assert "dequantized weights, and no quantization_config" in done.err


# ---- adapters


@pytest.mark.parametrize(
    "folder, base, precision",
    [
        ("nf4", "nf4", "bf16"),
        ("nf4", "nf4", "f16"),
        ("nf4", "int8", "f32"),
        ("nf4", "", "f32"),
        ("int8", "int8", "f16"),
        ("mixed", "nf4", "f32"),
    ],
)
def test_law(
    tmp_path: pathlib.Path,
    tokens: pathlib.Path,
    folder: str,
    base: str,
    precision: str,
) -> None:
    """All ways have one hash, which covers the base."""
    keys = (lora(base), f"train.precision={precision}")

    def run(given: pathlib.Path, *way: str) -> law.Result:
        work = ("--data", tokens, "--steps", 3, "--load", given)
        return law.run(built(folder, *keys, *way), *work, log=tmp_path / "log")

    ways = WAYS if precision == "bf16" else FEW
    found = {run(packed.DATA / folder, *way) for way in ways}
    assert len(found) == 1
    tensors = packed.read(packed.DATA / folder)
    name = "model.layers.0.mlp.down_proj.weight"
    data = bytearray(tensors[name].data)
    data[-1] ^= 0x40
    tensors[name] = replace(tensors[name], data=bytes(data))
    packed.write(tmp_path / "other", tensors)
    assert run(tmp_path / "other", *ADAPTED["stage 3"]) not in found


def trained(
    given: pathlib.Path, out: pathlib.Path, tokens: pathlib.Path, *keys: str
) -> dict[str, np.ndarray]:
    """Return the adapters after three steps from a folder."""
    work = ("--data", tokens, "--steps", 3, "--load", given, "--save", out)
    law.run(built(given.name, *ONE, *keys), *work, log=out.with_suffix(".log"))
    return load_file(out / "adapter_model.safetensors")


def beside(at: pathlib.Path, folder: str, made: dict[str, np.ndarray]) -> pathlib.Path:
    """Write a plain folder with these weights, under the name of another."""
    at.mkdir(exist_ok=True)
    packed.write(at / folder, {name: packed.plain(x) for name, x in made.items()})
    return at / folder


@pytest.mark.parametrize("precision", ("f32", "bf16", "f16"))
@pytest.mark.parametrize(
    "folder, base", (("nf4", "nf4"), ("int8", "int8"), ("mixed", "nf4"))
)
def test_a_base_that_keeps_the_numbers(
    tmp_path: pathlib.Path,
    tokens: pathlib.Path,
    folder: str,
    base: str,
    precision: str,
) -> None:
    """A base in the folder's own form trains adapters to the bits of a plain base that has its
    weights, in bf16 those of bitsandbytes. Linears in another form are quantized anew."""
    tensors = packed.read(packed.DATA / folder)
    exact, whole = packed.weights(tensors), packed.weights(tensors, exact=False)
    same = {  # linears that keep their numbers
        "nf4": packed.linears(tensors),
        "int8": ["model.layers.0.mlp.down_proj.weight"],
        "mixed": [],
    }[folder]
    few = {  # and those that are quantized anew; others have parts within a chunk
        "nf4": [],
        "int8": [x for x in packed.linears(tensors) if x not in same],
        "mixed": [
            f"model.layers.0.{x}_proj.weight" for x in ("self_attn.o", "mlp.down")
        ],
    }[folder]
    want = {**exact}
    for name in same:
        want[name] = whole[name] if folder == "nf4" else kept8(tensors, name)
    for name in few:
        want[name] = quantized.weights(exact[name], base)
    keys = (f"train.precision={precision}",)
    given = packed.DATA / folder
    found = trained(given, tmp_path / "few", tokens, lora(base), *keys)
    plain = beside(tmp_path / "in", folder, want)
    other = trained(plain, tmp_path / "plain", tokens, lora(""), *keys)
    assert all(np.array_equal(found[x], other[x]) for x in other)
    if folder == "nf4" and precision == "bf16":
        rounds = trained(given, tmp_path / "exact", tokens, lora(""), *keys)
        assert all(np.array_equal(found[x], rounds[x]) for x in rounds)


def kept8(tensors: Tensors, name: str) -> np.ndarray:
    """Return weights of 8 bits with a rounded factor for each row, one ulp from bitsandbytes'."""
    rows = tensors[name.replace(".weight", ".SCB")].array() * packed.INVERSE
    found = np.float32(tensors[name].array()) * rows[:, None]
    exact = packed.products(tensors, name)
    assert (np.abs(found - exact) <= 2.0**-23 * np.abs(exact)).all()
    return found


def test_a_merged_model(tmp_path: pathlib.Path, tokens: pathlib.Path) -> None:
    """--merge adds the adapters to the dequantized weights, and says so."""
    given = packed.DATA / "nf4"
    adapters = trained(given, tmp_path / "adapter", tokens, lora("nf4"))
    out = tmp_path / "merged"
    done = program.run(
        built("nf4", *ONE, lora("nf4")),
        *("--load", given, "--adapter", tmp_path / "adapter", "--steps", 0),
        *("--save", out, "--merge", "--save-dtype", "f32"),
    )
    assert done.code == 0, done.err
    told = "gets the dequantized weights with the adapters added, and no quantization"
    assert told in done.err
    found = load_file(out / "model.safetensors")
    for name, x in packed.weights(packed.read(given)).items():
        of = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        want = np.float64(x)
        if f"{of}A.weight" in adapters:
            a, b = (np.float64(adapters[f"{of}{end}.weight"]) for end in "AB")
            want = want + 6 / 4 * (b @ a)
        assert np.array_equal(found[name], np.float32(want)), name


def test_quantizing_twice() -> None:
    """A form that the program does not store, with f32 factors, is quantized anew: the codes stay,
    and a factor moves by less than its 8 bits round it. docs/data.md has these changes."""
    rng = np.random.default_rng(1)
    x = np.float32(rng.normal(size=(256, 1024)) * 0.02)
    blocks = x.reshape(-1, 64)
    most = np.abs(blocks).max(1)
    codes = quantized.nearest(blocks * (np.float32(1) / most[:, None]), quantized.NF4)
    once = packed.rounded(quantized.NF4[codes] * most[:, None], "bfloat16")
    twice = quantized.weights(once.ravel(), "nf4").reshape(once.shape)
    largest = np.abs(twice).max(1)
    again = np.abs(quantized.NF4[:, None, None] * largest[None, :, None] - twice)
    assert np.array_equal(again.argmin(0), codes)
    values = quantized.dynamic()
    widest = np.diff(values).max() / 2
    kept = np.abs(once).max(1)
    for first in range(0, kept.size, 256):
        part = kept[first : first + 256]
        scale = np.abs(part - np.float32(part.astype(np.float64).mean())).max()
        moved = np.abs(largest[first : first + 256] - part)
        assert (moved <= widest * scale * (1 + 2.0**-20) + 2.0**-23 * part).all()

    def rms(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))

    eight = quantized.weights(once.ravel(), "int8").reshape(once.shape)
    changes = (rms(once, blocks), rms(twice, once), rms(eight, once))
    assert [f"{x:.1%}" for x in changes] == ["9.2%", "0.3%", "0.7%"]


# ---- malformed folders

Q = "model.layers.0.self_attn.q_proj.weight"
O = "model.layers.0.self_attn.o_proj.weight"


def without(end: str) -> Callable[[Tensors], None]:
    return lambda x: x.__delitem__(f"{Q}{end}")


def another(end: str, **parts: object) -> Callable[[Tensors], None]:
    return lambda x: x.update({f"{Q}{end}": replace(x[f"{Q}{end}"], **parts)})


def says(**keys: object) -> Callable[[Tensors], None]:
    """Return a function that changes keys of the JSON; None removes one."""

    def change(x: Tensors) -> None:
        name, state = packed.state_of(x, Q)
        state = {k: v for k, v in {**state, **keys}.items() if v is not None}
        data = json.dumps(state).encode()
        x[name] = packed.Tensor("U8", (len(data),), data)

    return change


def renamed(to: str) -> Callable[[Tensors], None]:
    def change(x: Tensors) -> None:
        name, _ = packed.state_of(x, Q)
        x[f"{Q}{packed.STATE}{to}"] = x.pop(name)

    return change


def raw(text: str) -> Callable[[Tensors], None]:
    def change(x: Tensors) -> None:
        name, _ = packed.state_of(x, Q)
        x[name] = packed.Tensor("U8", (len(text),), text.encode())

    return change


def outside(x: Tensors) -> None:
    name = f"{Q}.nested_absmax"
    x[name] = replace(x[name], data=np.float32([np.inf]).tobytes())


BAD = {
    "nf4": [
        (without(".absmax"), f"tensor {Q}: absmax is missing beside it"),
        (without(".quant_map"), f"tensor {Q}: quant_map is missing beside it"),
        (without(".nested_absmax"), f"{Q}: nested_absmax is missing beside it"),
        (without(".nested_quant_map"), f"{Q}: nested_quant_map is missing beside"),
        (without(""), "the weight to which it belongs is missing"),
        (
            without(f"{packed.STATE}nf4"),
            f"{Q}: quant_state.bitsandbytes__nf4 (or fp4) is missing beside it",
        ),
        (renamed("int4"), f"{Q}: quant_state.bitsandbytes__nf4 (or fp4) is missing"),
        (renamed("fp4"), f"{Q}: quant_state: quant_type contradicts the tensor's name"),
        (says(quant_type="af4"), f"{Q}: quant_state: quant_type contradicts the"),
        (says(blocksize=128), f"{Q}: absmax is U8 with 256 elements; U8 with 128 is"),
        (says(blocksize=48), f"{Q}: quant_state: a block must have 32, 64, 128 ... or"),
        (says(blocksize=0), "a block must have 32, 64, 128 ... or 4096 elements"),
        (
            says(nested_blocksize=128),
            "nested_absmax is F32 with 1 elements; F32 with 2",
        ),
        (says(nested_blocksize=None), f"{Q}: quant_state: nested_blocksize is missing"),
        *(
            (says(nested_offset=x), f"{Q}: quant_state: nested_offset must be a number")
            for x in (None, "0.5", [3], True, 1e300)
        ),
        (
            says(shape=[128, 129]),
            "shape [128, 129] has 16512 elements of 4 bits, but the tensor has 8192 bytes",
        ),
        (says(shape=[64, 256]), f"{Q} has shape [64, 256]; the model has [128, 128]"),
        (says(shape=[16384]), f"{Q}: quant_state: shape must be [rows, columns]"),
        (says(shape=[2**40, 2**40]), "quant_state: shape must be [rows, columns]"),
        (says(shape=None), "quant_state: shape must be [rows, columns]"),
        (says(dtype="float64"), "dtype must be float32, bfloat16 or float16"),
        (raw("[]"), f"{Q}: quant_state, byte 0: expected an object"),
        (raw('{"blocksize": -1}'), f"{Q}: quant_state, byte 14: expected an integer"),
        (raw("{" + " " * 5000), f"{Q}: quant_state is too long for its JSON"),
        (
            another(".absmax", dtype="I8"),
            f"{Q}: absmax is I8 with 256 elements; U8 with 256 is needed",
        ),
        (
            another(".quant_map", data=bytes(64)),
            f"{Q}: quant_map does not have the levels of its type",
        ),
        (
            another(".quant_map", shape=(4, 2, 2), dtype="U32"),
            "quant_map is U32 with 16",
        ),
        (outside, f"{Q}: element [0, "),
    ],
    "int8": [
        (
            lambda x: x.pop(Q.replace(".weight", ".SCB")),
            f"tensor {Q}: SCB is missing beside it",
        ),
        (another("", dtype="U8"), f"{Q}: SCB is beside it, so it must be I8 [rows"),
        (another("", shape=(1024,)), f"{Q}: SCB is beside it, so it must be I8 [rows"),
        (another("", shape=(16, 64)), f"{Q}: SCB is F32 with 32 elements; F32 with 16"),
        (another("_format", data=b"\1"), f"{Q}: weight_format must be 0, which is row"),
        (
            lambda x: x.update({f"{Q}.absmax": packed.plain(np.zeros(1))}),
            f"{Q}: has the tensors of 8 bits and of 4 bits beside it",
        ),
    ],
}


@pytest.mark.parametrize(
    "folder, change, told", [(f, *case) for f, cases in BAD.items() for case in cases]
)
def test_malformed_folders(
    tmp_path: pathlib.Path, folder: str, change: Callable[[Tensors], None], told: str
) -> None:
    """Each is refused in one line that names the tensor, and nothing is written."""
    tensors = packed.read(packed.DATA / folder)
    change(tensors)
    packed.write(tmp_path / "in", tensors)
    out = tmp_path / "out"
    for way in (ONE, ADAPTED["stage 3"]):
        done = program.run(
            *(built(folder, *way), "--load", tmp_path / "in", "--steps", 0),
            *("--save", out),
        )
        assert done.code == 2 and told in done.err, done.err
        assert sum(": tensor " in line for line in done.err.splitlines()) == 1
        assert not out.exists() or not any(out.iterdir())


def mutant(x: Tensors, rng: random.Random) -> None:
    """Change the type, shape, size, bytes, name or JSON of a tensor beside a weight."""
    name = rng.choice([n for n in x if ".layers." in n and "norm" not in n])
    old, how = x[name], rng.randrange(5)
    if how == 0 and old.data:
        data = bytearray(old.data)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        x[name] = replace(old, data=bytes(data))
    elif how == 1:
        n = rng.choice((0, 1, 4, len(old.data) // 2, len(old.data) + 4))
        x[name] = packed.Tensor("U8", (n,), (old.data * 2 + bytes(8))[:n])
    elif how == 2:
        x[f"{name}x"] = x.pop(name)
    elif how == 3:
        x.pop(name)
    else:
        name, state = packed.state_of(x, Q)
        key = rng.choice([*state])
        state[key] = rng.choice((0, 1, -1, 2**62, 64, [], [0, 0], "nf4", None, 1e300))
        data = json.dumps(state).encode()[: rng.choice((9999, 9999, 20))]
        x[name] = packed.Tensor("U8", (len(data),), data)


@pytest.mark.slow
def test_mutants(tmp_path: pathlib.Path) -> None:
    """Mutants are loaded with the weights of their numbers or refused, without an access out of
    bounds."""
    rng, codes, out = random.Random(1), [], tmp_path / "out"
    binary = built("nf4", *ADAPTED["one queue"], lora("nf4"), kind=trainer.ASAN)
    save = ("--save", out, "--merge", "--save-dtype", "f32")
    for _ in range(80):
        tensors = packed.read(packed.DATA / "nf4")
        mutant(tensors, rng)
        packed.write(tmp_path / "in", tensors)
        done = program.run(binary, "--load", tmp_path / "in", "--steps", 0, *save)
        assert done.code in (0, 2) and "Sanitizer" not in done.err, done.err
        assert "runtime error" not in done.err, done.err
        codes.append(done.code)
        if done.code == 0:
            found = load_file(out / "model.safetensors")
            for name, x in packed.weights(tensors).items():
                assert np.array_equal(found[name], x), name
            shutil.rmtree(out)
    assert 8 < codes.count(0) < 72
