"""test_vocabulary.py -- tests a vocabulary that is no multiple of 8: rows by token are stored with
zero padding, and training, saving, measuring and counting ignore the padding."""

import json
import pathlib
import struct
from dataclasses import replace

import numpy as np
import pytest
import yaml
from zg.facts import ops
from zg.plan.plan import Plan
from zg.read import spec
from zg.search import search

from tests.lib import law, mutants, oracle, program, trainer

V = 251

# Hashes of f32 weights after 20 steps of two blocks, from a version without padding: zeros change
# no bit.
UNPADDED = {
    "gpt": "640a1fce1fb170a76dec6e9eb7d44d32",
    "qwen3": "95545ed21ef3fc25a8dc138f418daee9",
    "llama": "09561f0c8eb4e634be6a4d1a51912771",
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    trainer.write_tokens(tmp_path / "tokens", law.tokens(V, 40 * law.SAMPLES + 1))
    trainer.write_tokens(tmp_path / "val", law.tokens(V, 5 * 40 + 1))
    return tmp_path


def program_of(
    family: str,
    folder: pathlib.Path,
    *keys: str,
    kind: trainer.Kind = trainer.GCC,
) -> pathlib.Path:
    return trainer.build(
        trainer.generate(law.changed(family, folder, 2, {256: V}), *keys), kind
    )


def run(
    folder: pathlib.Path, binary: pathlib.Path, steps: int, *options: object
) -> law.Result:
    return law.run(
        binary,
        "--data",
        folder / "tokens",
        "--val",
        folder / "val",
        "--steps",
        steps,
        *options,
        log=folder / "log",
    )


# ---- the bits


@pytest.mark.parametrize("family", law.FAMILIES)
def test_bits_are_those_without_padding(folder: pathlib.Path, family: str) -> None:
    ways = [
        (("zero.stage=0", "cluster.ranks=1"), "eager"),
        (("zero.stage=3",), "shuffled:1"),
    ]
    found = {
        run(folder, program_of(family, folder, *keys), 20, "--queue", queue).weights
        for keys, queue in ways
    }
    assert found == {UNPADDED[family]}


@pytest.mark.parametrize(
    "kind", [trainer.GCC, trainer.EMULATED], ids=["cpu", "emulated"]
)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_padding_is_zero_after_load(
    folder: pathlib.Path, family: str, kind: trainer.Kind
) -> None:
    """Padding is zero after loading, in bf16, where masters and gathered parameters are separate;
    dead slots hold NaN. A run from saved first weights equals the run that makes them."""
    binary = program_of(
        family, folder, "train.precision=bf16", "zero.stage=3", kind=kind
    )
    late = "--queue", "late"
    run(folder, binary, 0, "--save", folder / "first")
    made, loaded = (
        run(folder, binary, 2, *late),
        run(folder, binary, 2, *late, "--load", folder / "first"),
    )
    assert made == loaded
    assert (
        all(np.isfinite(json.loads(line)["loss"]) for line in made.steps) and made.val
    )
    whole = program_of(
        family, folder, "train.precision=bf16", "zero.stage=1", kind=kind
    )
    assert run(folder, whole, 2, *late, "--load", folder / "first") == made


# ---- storage and counts


def planned(family: str, folder: pathlib.Path, *keys: str) -> Plan:
    return search.find(
        spec.load(str(law.changed(family, folder, 2, {256: V})), keys)
    ).plan


@pytest.mark.parametrize("family", law.FAMILIES)
def test_rows_of_logits_begin_at_multiples_of_16_bytes(
    family: str, tmp_path: pathlib.Path
) -> None:
    p = planned(family, tmp_path, "train.precision=bf16")
    fn = next(f for f in p.fns if f.name == "train.head")
    linear = next(c for c in fn.calls if c.kernel == "zk_linear_fwd")
    assert linear.args[5] == 256 and linear.args[5] % ops.VOCAB == 0
    padded = [t for t in p.tensors if t.shape[0] != t.elems // (t.shape + (1,))[1]]
    # Tied, or an untied head.
    assert len(padded) == (1 if family != "llama" else 2)
    shapes = oracle.shapes(spec.load(str(law.changed(family, tmp_path, 2, {256: V}))))
    assert p.head.params == sum(int(np.prod(s)) for s in shapes.values())


def test_a_head_is_rows_by_token_in_every_family(folder: pathlib.Path) -> None:
    """A head is stored as rows by token in every family, like Hugging Face's lm_head, though
    GPT-2's other linears are [in,out]."""
    path = law.changed("gpt", folder, 2, {256: V})
    mapping = yaml.safe_load(path.read_text())
    mapping["model"]["units"][-1]["head"][-1] = {
        "linear": {"name": "lm_head", "out": V, "bias": True}
    }
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    binary = trainer.build(trainer.generate(path))
    program.run(
        binary,
        "--data",
        folder / "tokens",
        "--steps",
        2,
        "--save",
        folder / "out",
    )
    raw = (folder / "out" / "model.safetensors").read_bytes()
    entries = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert entries["lm_head.weight"]["shape"] == [V, mapping["model"]["width"]]
    assert entries["lm_head.bias"]["shape"] == [V]


# ---- the checker


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_wrong_padding_is_refused(family: str, tmp_path: pathlib.Path) -> None:
    p = planned(family, tmp_path, "train.precision=bf16")
    n, t = next((n, t) for n, t in enumerate(p.tensors) if t.shape[0] == 256)
    assert not mutants.refused(p)
    for rows in (V, V + 1, 248, 264):
        wrong = replace(t, shape=(rows, *t.shape[1:]))
        assert mutants.refused(replace(p, tensors=mutants.put(p.tensors, n, wrong))), (
            rows
        )
    for rows in (V - 1, V + 1, 256):
        wrong = replace(t, parts=(f"{t.name}={rows}",))
        assert mutants.refused(replace(p, tensors=mutants.put(p.tensors, n, wrong))), (
            rows
        )
    made = [
        m
        for m in mutants.of_calls(p)
        if m.what.startswith(("train.head", "eval.head"))
        and ("linear" in m.what or "entropy" in m.what)
    ]
    assert (
        len(made) > 50 and [m.what for m in made if not mutants.refused(m.plan)] == []
    )
