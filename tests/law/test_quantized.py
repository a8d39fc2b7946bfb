"""test_quantized.py -- tests a quantized base of LoRA adapters: its values, and one hash however
the work is spread."""

import pathlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from zg.check import check, order
from zg.facts.kernels import DEQUANTIZE
from zg.plan import plan, text
from zg.plan.quantized import Quantized
from zg.read import spec as reader
from zg.search import search

from tests.lib import law, oracle, program, quantized, trainer
from tests.lib.ways import ADAPTED, ONE, WHOLE
from tests.reference import known

# Parts of a linear that fill chunks of nf4, and a down_proj that does not.
WIDE = (
    "model.width=128",
    "model.units[1].blocks=2",
    "model.units[1].ops[0].residual[1].attention.kv_heads=4",
    "model.units[1].ops[1].residual[1].linear.out=[256, 256]",
    "model.units[1].ops[1].residual[3].linear.out=128",
    "train.sequence=12",
)
MATCH = "match: [q_proj, down_proj]"


def keys(format_: str, *more: str) -> tuple[str, ...]:
    base = f", base: {format_}" if format_ else ""
    lora = f"train.lora={{rank: 4, alpha: 6, {MATCH}{base}}}"
    return (*WIDE, lora, "train.micro_batch=1", *more)


def in_few_bits(name: str) -> bool:
    return ".layers." in name and "norm" not in name


def folder(at: pathlib.Path) -> oracle.Arrays:
    """Write a base of bf16's values, and return it."""
    spec = reader.load(str(law.path("llama")), keys(""))
    found = {}
    for name, shape in oracle.shapes(spec).items():
        if ".lora_" not in name:
            x = np.float32(known.weight(name, shape, known.is_norm_weight(name)))
            if in_few_bits(name):  # blocks differ in size, and one is zero
                x *= np.float32(2) ** -(np.arange(shape[0]) % 5)[:, None]
                x[1, :64] = 0
            found[name] = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    at.mkdir()
    save_file(found, at / "model.safetensors")
    return found


def plain(base: oracle.Arrays, format_: str, at: pathlib.Path) -> None:
    """Write a base that has the values of a quantized one."""
    at.mkdir()
    found = {
        n: quantized.weights(x, format_) if in_few_bits(n) else x
        for n, x in base.items()
    }
    save_file(found, at / "model.safetensors")


@pytest.mark.parametrize("format_", ("int8", "nf4"))
@pytest.mark.parametrize("precision", ("f32", "bf16"))
def test_values(tmp_path: pathlib.Path, format_: str, precision: str) -> None:
    """A quantized base trains adapters to the bits of a plain base that has its values."""
    plain(folder(tmp_path / "base"), format_, tmp_path / "plain")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(251, 12 * 8 * 3 + 1))
    found = []
    for name, stored in (("base", format_), ("plain", ""), ("base", "")):
        source = trainer.generate(
            law.path("llama"),
            *keys(stored, f"train.precision={precision}", "cluster.ranks=1"),
        )
        out = tmp_path / f"{name}-{stored}"
        law.run(
            trainer.build(source),
            *("--data", tmp_path / "tokens", "--steps", 3),
            *("--load", tmp_path / name, "--save", out),
            log=tmp_path / "log",
        )
        found.append(load_file(out / "adapter_model.safetensors"))
    few, same, other = found
    assert all(np.array_equal(few[n], same[n]) for n in few)
    assert not all(np.array_equal(few[n], other[n]) for n in few)


@pytest.mark.parametrize(
    "format_,precision", (("int8", "f32"), ("nf4", "bf16"), ("nf4", "f16"))
)
def test_law(tmp_path: pathlib.Path, format_: str, precision: str) -> None:
    """All ways have one hash, which covers the base."""
    base = folder(tmp_path / "base")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(251, 12 * 8 * 3 + 1))

    def run(*way: str) -> law.Result:
        source = trainer.generate(
            law.path("llama"), *keys(format_, f"train.precision={precision}", *way)
        )
        return law.run(
            trainer.build(source),
            *("--data", tmp_path / "tokens", "--steps", 3),
            *("--load", tmp_path / "base"),
            log=tmp_path / "log",
        )

    nvme = f"device: nvme, nvme_path: {tmp_path}"
    filed = (f"zero.offload_optimizer={{{nvme}}}", f"zero.offload_param={{{nvme}}}")
    found = {run(*way) for way in (*ADAPTED.values(), (*ADAPTED["one queue"], *filed))}
    name = "model.layers.0.mlp.down_proj.weight"
    base[name][0, :64] = -base[name][0, :64]
    save_file(base, tmp_path / "base" / "model.safetensors")
    other = run(*ADAPTED["stage 3"])
    assert len(found) == 1 and other not in found


def files(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("format_", ("int8", "nf4"))
def test_a_merged_model(tmp_path: pathlib.Path, format_: str) -> None:
    """--merge adds the adapters to the weights of --load, on any number of ranks."""
    base = folder(tmp_path / "base")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(251, 12 * 8 * 3 + 1))
    merged, adapters = [], {}
    for way in (ONE, ADAPTED["stage 3"]):
        binary = trainer.build(
            trainer.generate(law.path("llama"), *keys(format_, *way))
        )
        work = ("--data", tmp_path / "tokens", "--steps", 3)
        given = (*work, "--load", tmp_path / "base", "--save")
        trainer.sh(binary, *given, tmp_path / f"merged{len(merged)}", "--merge")
        merged.append(files(tmp_path / f"merged{len(merged)}"))
        trainer.sh(binary, *given, tmp_path / "adapters")
        adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert all(np.array_equal(merged[0][n], merged[1][n]) for n in base)
    trainer.sh(binary, *given, tmp_path / "base", "--merge")
    over = files(tmp_path / "base")
    assert all(np.array_equal(merged[0][n], over[n]) for n in base)
    assert merged[0].keys() == base.keys()
    for name, x in base.items():
        of = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        want = np.float64(x)
        if f"{of}A.weight" in adapters:
            a, b = (np.float64(adapters[f"{of}{end}.weight"]) for end in "AB")
            want = want + 6 / 4 * (b @ a)
        assert np.array_equal(merged[0][name], np.float32(want))


def test_a_run_goes_on(tmp_path: pathlib.Path) -> None:
    """A checkpoint has the quantized weights: a run goes on from it with other ranks and without
    the folder of the base, to the same bits; a merge then needs the folder, before the steps."""
    base = folder(tmp_path / "base")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(251, 12 * 8 * 3 + 1))

    def run(way: tuple[str, ...], *more: object) -> law.Result:
        source = trainer.generate(
            law.path("llama"), *keys("nf4", "train.precision=bf16", *way)
        )
        given = ("--data", tmp_path / "tokens", *more)
        return law.run(trainer.build(source), *given, log=tmp_path / "log")

    load = ("--load", tmp_path / "base")
    keeps = ("--checkpoints", tmp_path / "kept")
    whole = run(ONE, "--steps", 3, *load, "--verify-every", 1)
    run(ADAPTED["stage 3"], "--steps", 2, *load, *keeps)
    found = run(ADAPTED["one queue"], "--steps", 3, *keeps)
    assert found.weights == whole.weights
    source = trainer.generate(
        law.path("llama"), *keys("nf4", "train.precision=bf16", *ONE)
    )
    command = ("--data", tmp_path / "tokens", "--steps", 3, *keeps, "--merge")
    done = program.run(trainer.build(source), *command, "--save", tmp_path / "merged")
    assert done.code == 2 and "--merge needs --load" in done.err
    done = program.run(
        trainer.build(source), *command, "--save", tmp_path / "merged", *load
    )
    assert done.code == 0 and len(files(tmp_path / "merged")) == len(base)
    save_file({}, tmp_path / "model.safetensors")
    for wrong, told in (("none", "none: No such file"), (".", "is missing; the model")):
        done = program.run(
            trainer.build(source),
            *("--data", tmp_path / "tokens", "--steps", 4, *keeps, "--merge"),
            *("--save", tmp_path / "new", "--save-dtype", "f32"),
            *("--load", tmp_path / wrong),
        )
        assert done.code == 2 and f"--load {tmp_path / wrong}" in done.err, done.err
        assert told in done.err and "step 4" not in done.out


# ---- plans


def planned(*more: str) -> plan.Plan:
    way = ("cluster.ranks=2", "zero.stage=3", WHOLE, "train.precision=bf16", *more)
    return search.find(reader.load(str(law.path("llama")), keys("nf4", *way))).plan


def test_memory_and_wire() -> None:
    """A block's frozen tensors have 33 bytes for every 64 weights and 8 for every 16384, and gathers
    bring as many."""
    p = planned("model.units[1].ops[1].residual[1].linear.out=[1024, 1024]")
    rows = (128, 128, 128, 128, 1024, 1024)
    weights = [128 * n for n in rows] + [1024 * 128]
    assert all(n % 16384 == 0 for n in weights)
    stored = sum(n // 64 * 33 + n // 16384 * 8 for n in weights)
    mine = [t for t in p.tensors if t.quantized.format]
    assert 2 * sum(t.elems for t in mine) == stored
    assert sum(t.params for t in mine) == sum(weights)
    (flat,) = {t.flat for t in mine}
    f = p.flat(flat)
    assert stored <= 2 * p.head.ranks * f.shard < 1.05 * stored + 20000
    gathers = [
        i.value
        for s in p.section("micro_batch").steps
        if s.op == "gather" and s.unit.startswith("block")
        for i in s.ints
        if i.name == "bytes"
    ]
    assert set(gathers) == {2 * f.shard, 2 * p.flat("block").shard}


def _wrong(p: plan.Plan) -> Iterator[plan.Plan]:
    """Yield plans with one mistake in a quantized tensor, or in a call that dequantizes one."""
    for n, t in enumerate(p.tensors):
        few = t.quantized
        if few.format:
            for other in (
                Quantized("int8", few.columns, few.rows),
                Quantized(few.format, few.columns // 2, few.rows),
                Quantized(few.format, few.columns, few.rows[::-1] + (1,)),
                Quantized(),
            ):
                changed = replace(t, quantized=other)
                yield replace(p, tensors=(*p.tensors[:n], changed, *p.tensors[n + 1 :]))
    for n, fn in enumerate(p.fns):
        for m, call in enumerate(fn.calls):
            if call.kernel != DEQUANTIZE:
                continue
            y, w, *numbers = call.args
            for args in (
                (y, w, *numbers[:2], 1),
                (replace(y, at=y.at + 64), w, *numbers),
                (y, replace(w, at=w.at + 2048), *numbers),
                None,
            ):
                changed = [replace(call, args=args)] if args else []
                calls = (*fn.calls[:m], *changed, *fn.calls[m + 1 :])
                fns = (*p.fns[:n], replace(fn, calls=calls), *p.fns[n + 1 :])
                yield replace(p, fns=fns)


def test_wrong_plans_are_refused() -> None:
    p = planned()
    check.check(p)
    assert text.parse(text.print_plan(p)) == p
    wrong = [*_wrong(p)]
    assert len(wrong) == 4 * 4 + 8 * 4
    for one in wrong:
        with pytest.raises(order.CheckError):
            check.check(one)


def test_a_part_within_a_chunk_stays() -> None:
    """A linear whose parts would share a chunk keeps its type, and a note says so."""
    spec = reader.load(
        str(law.path("llama")), ("train.lora={rank: 4, alpha: 6, base: nf4}",)
    )
    built = search.find(spec)
    kept = [n for n in built.notes if n.startswith("train.lora.base: ")]
    assert len(kept) == 2 and all("stays in f32" in n for n in kept)
    few = {
        t.name.rpartition(".")[0][-6:] for t in built.plan.tensors if t.quantized.format
    }
    assert few == {"o_proj", "n_proj"}


# ---- on a GPU


@pytest.mark.slow
def test_under_emulation(tmp_path: pathlib.Path) -> None:
    """The GPU's kernels have one hash, too, also by nvcc's PTX, and the losses of a plain base with
    the same values."""
    plain(folder(tmp_path / "base"), "nf4", tmp_path / "plain")
    trainer.write_tokens(tmp_path / "tokens", law.tokens(251, 12 * 8 * 3 + 1))

    def run(
        base: str, format_: str, *way: str, kind: trainer.Kind = trainer.EMULATED
    ) -> law.Result:
        way = ("train.precision=bf16", "train.global_batch=2", *way)
        source = trainer.generate(law.path("llama"), *keys(format_, *way))
        return law.run(
            trainer.build(source, kind),
            *("--data", tmp_path / "tokens", "--steps", 2),
            *("--load", tmp_path / base),
            log=tmp_path / "log",
            ZR_EMULATE_CC="90",
        )

    first = run("base", "nf4", *ONE)
    assert first == run("base", "nf4", *ADAPTED["one queue"])
    assert first == run(
        "base", "nf4", *ADAPTED["one queue"], kind=trainer.BY_PTX["sm_90"]
    )
    assert first.steps == run("plain", "", *ONE).steps
    assert first.steps != run("base", "", *ONE).steps
