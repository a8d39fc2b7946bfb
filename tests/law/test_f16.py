"""test_f16.py -- tests training in f16: the loss scale is DeepSpeed's, step by step; steps that
overflow are skipped alike wherever they run; a DeepSpeed config with fp16 trains."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
from zg.check import check
from zg.plan import plan, text
from zg.read.schema import LossScale
from zg.read.spec import SpecError, load
from zg.search import search

from tests.kernels.test_optimizer import made, recipe
from tests.lib import law, program, trainer, zk
from tests.read import test_dsconfig

read, refusal = test_dsconfig.read, test_dsconfig.refusal


# ---- the scale of each step


class Lowest(Exception):
    pass


class DeepSpeed:
    """DeepSpeed's DynamicLossScaler, as documented: it counts steps from 0, and the last overflow
    is at -1."""

    def __init__(self, s: zk.Scaler) -> None:
        self.scale, self.s, self.left = s.first, s, s.hysteresis
        self.step, self.last = 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.s.hysteresis == 1 or self.left == 1:
                if self.scale == self.s.least:
                    raise Lowest
                self.scale = max(self.scale / 2, self.s.least)
            else:
                self.left -= 1
            self.last = self.step
        else:
            if self.s.consecutive:
                self.left = self.s.hysteresis
            if (self.step - self.last) % self.s.window == 0:
                self.left = self.s.hysteresis
                self.scale *= 2
        self.step += 1


def played(
    k: zk.Kernels, s: zk.Scaler, script: Iterator[bool]
) -> list[tuple[float, int]]:
    """Return the kernels' scale of each step, and the reason why it was skipped."""
    ctl, r, out = zk.Ctl(), recipe(scaler=s, clip=0), []
    for overflow in script:
        k.zk_begin(ctl, np.zeros(zk.SUMS, np.int64), r)
        sums = made(4.0, 2.0 * 66, 66, bad=int(overflow))
        k.zk_factor(ctl, sums, r)
        out.append((ctl.scale, ctl.skipped))
        # Not scaled, and known even if the step is skipped
        assert ctl.loss == 2
        if not overflow:
            assert (ctl.norm, ctl.factor) == (
                2 / ctl.scale,
                np.float32(1 / ctl.scale),
            )
    return out


SCALERS = [
    zk.Scaler(2.0**8, 1, 2, 1, 0),
    zk.Scaler(2.0**16, 1, 5, 2, 0),
    zk.Scaler(2.0**16, 1, 5, 2, 1),
    zk.Scaler(2.0**4, 0.25, 3, 4, 0),
    zk.Scaler(100.0, 3.0, 1, 3, 1),
    zk.Scaler(2.0, 8.0, 4, 1, 0),
]


@pytest.mark.parametrize(
    "s", SCALERS, ids=lambda s: f"{s.first:g}-{s.window}-{s.hysteresis}"
)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_scale_is_deepspeeds(target: str, s: zk.Scaler, share: float) -> None:
    rng = np.random.default_rng(1)
    script = [bool(x < share) for x in rng.random(120)]
    theirs, want = DeepSpeed(s), []
    for overflow in script:
        want.append((theirs.scale, zk.RESCALED if overflow else 0))
        try:
            theirs.update(overflow)
        except Lowest:
            want[-1] = theirs.scale, zk.LOWEST
            break
    found = played(zk.Kernels(target), s, script[: len(want)])
    assert found == want
    assert len({scale for scale, _ in found}) > 1


def test_the_floor_has_patience_too(target: str) -> None:
    """Hysteresis is used up at the least scale, too, before the run ends."""
    found = played(zk.Kernels(target), zk.Scaler(4.0, 4.0, 3, 3, 0), [True, True, True])
    assert found == [(4, zk.RESCALED), (4, zk.RESCALED), (4, zk.LOWEST)]


def test_what_has_no_target_says_nothing_of_the_scale(target: str) -> None:
    k, ctl, r = (
        zk.Kernels(target),
        zk.Ctl(),
        recipe(scaler=zk.Scaler(256, 1, 2, 1, 0)),
    )
    scales = []
    for valid in (66, 0, 0, 66, 66):
        k.zk_begin(ctl, np.zeros(zk.SUMS, np.int64), r)
        k.zk_factor(ctl, made(1.0, 1.0, valid), r)
        scales.append(ctl.scale)
        assert ctl.skipped == (0 if valid else zk.FAULTY)
    assert scales == [256, 256, 256, 256, 512]


def test_a_fixed_scale_stays(target: str) -> None:
    found = played(
        zk.Kernels(target),
        zk.Scaler(128, 1, 0, 2, 0),
        [True, False, True, True, False],
    )
    assert found == [
        (128, zk.FAULTY),
        (128, 0),
        (128, zk.FAULTY),
        (128, zk.FAULTY),
        (128, 0),
    ]


def test_the_gradient_of_a_loss_is_scaled_once(target: str) -> None:
    """A gradient is scaled before it is rounded, so small values that f16 would lose are kept."""
    k, M, V = zk.Kernels(target, zk.F16), 4, 64
    x = zk.store(np.random.default_rng(3).standard_normal((M, V)), zk.F16)
    hit, loss = np.arange(M, dtype=np.int32), np.empty(M, np.float32)
    exact, found = np.empty((M, V), np.float32), np.empty((M, V), np.float16)
    zk.Kernels(target).zk_cross_entropy(
        loss, exact, x.astype(np.float32), hit, None, M, V, 2**20
    )
    k.zk_cross_entropy(loss, found, x, hit, np.array([2.0**16]), M, V, 2**20)
    assert found.tobytes() == zk.store(exact * np.float32(2**16), zk.F16).tobytes()
    k.zk_cross_entropy(loss, found, x, hit, None, M, V, 2**20)
    assert len(np.unique(found)) < 20  # subnormal: only a few values are left
    k.zk_cross_entropy(loss, found, x, hit, np.array([2.0**40]), M, V, 2**20)
    assert np.isinf(found).any()


# ---- keys of a spec and a ds_config.json


@functools.cache
def tokens() -> np.ndarray:
    return law.tokens(256, 33 * 8 * 40, holes=True)


def planned(*keys: str) -> plan.Plan:
    return search.find(load(str(law.path("gpt")), ("train.precision=f16", *keys))).plan


def test_fp16_and_its_loss_scale(tmp_path: pathlib.Path) -> None:
    keys = {
        "loss_scale": 0,
        "initial_scale_power": 12,
        "loss_scale_window": 200,
        "hysteresis": 3,
        "consecutive_hysteresis": True,
        "min_loss_scale": 4,
        "auto_cast": False,
    }
    spec = read(
        tmp_path,
        {"fp16": {"enabled": True, **keys}, "bf16": {"enabled": False}},
    )
    assert spec.train.precision == "f16"
    assert dataclasses.astuple(spec.train.loss_scale) == (
        0,
        12,
        200,
        3,
        True,
        4,
    )
    assert search.find(spec).plan.recipe.scaler == (
        plan.Scaler(4096.0, 4.0, 200, 3, 1),
    )
    spec = read(tmp_path, {"fp16": {"enabled": True, "loss_scale": 128}})
    assert search.find(spec).plan.recipe.scaler == (plan.Scaler(128.0, 1.0, 0, 2, 0),)
    # "auto" leaves the type to the spec; a type that needs no scale gets none.
    auto = {"fp16": {"enabled": "auto", **keys}}
    assert read(tmp_path, auto, ("train.precision=f16",)).train.loss_scale.window == 200
    for sets in ((), ("train.precision=bf16",)):
        spec = read(tmp_path, auto, sets)
        assert spec.train.loss_scale == LossScale() and spec.train.precision != "f16"
        assert "fp16: has no effect here unless train.precision is f16" in spec.notes[0]
    spec = read(
        tmp_path,
        {"fp16": {"enabled": True, **keys}},
        ("train.precision=bf16",),
    )
    assert (spec.train.precision, spec.train.loss_scale) == (
        "bf16",
        LossScale(),
    )
    for off in ({}, {"enabled": False}):
        assert read(tmp_path, {"fp16": {**keys, **off}}).train.precision == "f32"


@pytest.mark.parametrize("ours", ["bf16", "f16", "f32"])
def test_no_type_of_16_bits(tmp_path: pathlib.Path, ours: str) -> None:
    """A file that switches off the 16-bit type it names gives f32, with a note if the spec has
    another type. The command line takes precedence, and so does a type that the file enables."""
    text = law.path("gpt").read_text().replace("precision: f32", f"precision: {ours}")
    (tmp_path / "s.yaml").write_text(text)
    for off in ("fp16", "bf16"):
        (tmp_path / "ds.json").write_text(f'{{"{off}": {{"enabled": false}}}}')
        made = load(str(tmp_path / "s.yaml"), (), str(tmp_path / "ds.json"))
        notes = [
            n
            for n in made.notes
            if f"not the spec's {ours}: the file enables neither" in n
        ]
        assert made.train.precision == "f32" and len(notes) == (ours != "f32")
        sets = (f"train.precision={ours}",)
        made = load(str(tmp_path / "s.yaml"), sets, str(tmp_path / "ds.json"))
        assert made.train.precision == ours and not [
            n for n in made.notes if "enables neither" in n
        ]
    (tmp_path / "ds.json").write_text(
        '{"fp16": {"enabled": false}, "bf16": {"enabled": true}}'
    )
    made = load(str(tmp_path / "s.yaml"), (), str(tmp_path / "ds.json"))
    assert made.train.precision == "bf16" and not made.notes


@pytest.mark.parametrize(
    "config,said",
    [
        (
            {"hysteresis": 0},
            "fp16.hysteresis: is 0; allowed: an integer from 1",
        ),
        (
            {"min_loss_scale": 0},
            "fp16.min_loss_scale: train.loss_scale.min: 0 is out of range",
        ),
        (
            {"initial_scale_power": 8, "min_loss_scale": 257},
            "fp16.min_loss_scale: train.loss_scale.min: 257 is above the initial scale, 2^8; allowed: up to 256",
        ),
    ],
)
def test_keys_out_of_range(tmp_path: pathlib.Path, config: dict, said: str) -> None:
    assert said in refusal(tmp_path, {"fp16": {"enabled": True, **config}})


def test_a_fixed_scale_makes_keys_idle(tmp_path: pathlib.Path) -> None:
    """A fixed scale makes keys idle, and a note names each with its place. A dynamic scale has no
    such note."""
    fixed = read(
        tmp_path,
        {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 3}},
    )
    assert any(
        note.endswith(
            ": train.loss_scale.window: has no effect: train.loss_scale.scale makes the scale static"
        )
        and ":1: " in note
        for note in fixed.notes
    ), fixed.notes
    moving = read(
        tmp_path,
        {"fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 3}},
    )
    assert not any("loss_scale" in note for note in moving.notes)


def test_halves_need_masters() -> None:
    with pytest.raises(
        SpecError,
        match="f16 parameters need f32 masters; allowed: true, or with train.precision bf16",
    ):
        planned("train.optimizer.masters=false")


def test_the_checker_asks_for_the_scale() -> None:
    """A plan in f16 multiplies gradients by ctl's scale in its one place, no other type does, and
    the recipe has the scaler."""
    p = planned()
    check.check(p)
    bare = dataclasses.replace(p.recipe, scaler=())
    odd = dataclasses.replace(p.recipe, scaler=(plan.Scaler(-1.0, 1.0, 5, 1, 0),))
    for recipe_ in (bare, odd):
        with pytest.raises(check.CheckError, match="scaler"):
            check.check(dataclasses.replace(p, recipe=recipe_))
    entropy = [
        (f, n)
        for f in p.fns
        for n, c in enumerate(f.calls)
        if c.kernel == "zk_cross_entropy"
    ]
    assert len(entropy) == 2
    for f, n in entropy:
        old = f.calls[n].args[4]
        assert str(old) == ("null" if f.name.startswith("eval") else "ctl+80:scale")
        for new in {*map(text.arg, ("null", "ctl+80", "ctl+0", "ctl+72", "sums+0"))} - {
            old
        }:
            call = dataclasses.replace(
                f.calls[n],
                args=(*f.calls[n].args[:4], new, *f.calls[n].args[5:]),
            )
            fn = dataclasses.replace(f, calls=(*f.calls[:n], call, *f.calls[n + 1 :]))
            fns = tuple(fn if g is f else g for g in p.fns)
            with pytest.raises(check.CheckError):
                check.check(dataclasses.replace(p, fns=fns))


# ---- runs

KEYS = "train.precision=f16", "train.global_batch=8", "train.micro_batch=1"
WAYS = [
    ("zero.stage=0", "cluster.ranks=1"),
    ("zero.stage=1", "cluster.ranks=2"),
    ("zero.stage=2", "cluster.ranks=4", "train.recompute=full"),
    ("zero.stage=3", "cluster.ranks=2", "zero.overlap_comm=false"),
    ("zero.stage=3", "cluster.ranks=8", "zero.reduce_bucket_size=5000"),
    (
        "zero.stage=3",
        "cluster.ranks=8",
        "cluster.local=2",
        "zero.shard_size=4",
    ),
    (
        "zero.stage=2",
        "cluster.ranks=2",
        "zero.offload_optimizer.device=cpu",
        "zero.sub_group_size=5000",
    ),
    (
        "zero.stage=3",
        "cluster.ranks=2",
        "zero.offload_optimizer.device=cpu",
        "zero.offload_param.device=cpu",
    ),
]


def ran(
    folder: pathlib.Path,
    keys: tuple[str, ...],
    steps: int,
    *options: object,
    kind: trainer.Kind = trainer.GCC,
) -> law.Result:
    trainer.write_tokens(folder / "tokens", tokens())
    binary = trainer.build(trainer.generate(law.path("gpt"), *keys), kind)
    return law.run(
        binary,
        "--data",
        folder / "tokens",
        "--steps",
        steps,
        *options,
        log=folder / "log",
    )


@pytest.mark.slow
def test_one_hash_with_steps_that_overflow(tmp_path: pathlib.Path) -> None:
    """Bits, losses and scales do not depend on how the work is spread. The scale falls from 2^32
    until gradients fit and rises after two steps, so steps also overflow in the middle."""
    scale = ("train.loss_scale={initial_scale_power: 32, window: 2}",)
    found = [
        ran(
            tmp_path,
            (*KEYS, *scale, *keys),
            34,
            "--queue",
            "shuffled:1" if n % 2 else "eager",
        )
        for n, keys in enumerate(WAYS)
    ]
    first = found[0]
    assert all(x == first for x in found)
    log = [json.loads(line) for line in first.steps]
    skipped = [line["skipped"] for line in log]
    begin = skipped.index(0)
    assert begin > 10 and 1 in skipped[begin:] and skipped[-6:].count(0) >= 2
    assert [line["scale"] for line in log[:3]] == [2.0**32, 2.0**32, 2.0**31]
    assert all(
        (line["norm"] is None) == line["skipped"] and line["loss"] > 1 for line in log
    )


def test_f16_follows_f32(tmp_path: pathlib.Path) -> None:
    """The loss in f16 follows that in f32.

    A number is stored some 80 times on its way, each time with a random error of at most 2^-11, so
    gradients are off by some 2^-8 of themselves. So is the fall of the loss, at most one half here:
    2^-9. The error of forward alone is a mean over hundreds of tokens of either sign, and less.
    """
    rest = "train.global_batch=8", "train.micro_batch=1"
    half = ran(tmp_path, (*KEYS, "train.loss_scale.scale=1024"), 20)
    full = ran(tmp_path, rest, 20)
    a, b = ([json.loads(line) for line in x.steps] for x in (half, full))
    off = [abs(x["loss"] - y["loss"]) for x, y in zip(a, b, strict=True)]
    assert 0 < max(off) <= 2.0**-9, off
    assert not any(line["skipped"] for line in a) and b[0]["loss"] - b[-1]["loss"] > 0.2


@pytest.mark.slow
def test_a_deepspeed_config(tmp_path: pathlib.Path) -> None:
    """A DeepSpeed config with stage 2, the optimizer on the host and fp16 is generated and trains,
    and skipped steps are reported."""
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "weight_decay": 3e-7},
        },
        "fp16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    (tmp_path / "spec.yaml").write_text(
        law.path("gpt").read_text().replace("min_lr: 1.0e-4", "min_lr: 0")
    )
    source = trainer.sh(
        "gen/zgen", tmp_path / "spec.yaml", "--zero", tmp_path / "ds.json"
    )
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 33 * 16 * 8))
    found = law.run(
        trainer.build(source),
        "--data",
        tmp_path / "tokens",
        "--steps",
        6,
        log=tmp_path / "log",
    )
    log = [json.loads(line) for line in found.steps]
    assert log[0]["scale"] == 2.0**16 and log[-1]["loss"] < log[0]["loss"]
    end = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert end["skipped"] == sum(line["skipped"] for line in log)


@pytest.mark.parametrize(
    "keys,step,said",
    [
        (
            (
                "train.loss_scale={initial_scale_power: 127, min: 1.7e38, hysteresis: 3}",
            ),
            4,
            "loss scale, 1.7e+38, is the minimum",
        ),
        (
            ("train.loss_scale.scale=1e30", "train.max_skips=4"),
            4,
            "gradients of 4 steps in a row",
        ),
        (
            ("train.loss_scale.scale=1e30", "train.max_skips=2"),
            2,
            "rate or the loss scale, or check",
        ),
    ],
)
def test_a_run_that_leads_nowhere_ends(
    tmp_path: pathlib.Path, keys: tuple[str, ...], step: int, said: str
) -> None:
    trainer.write_tokens(tmp_path / "tokens", tokens())
    binary = trainer.build(
        trainer.generate(law.path("gpt"), *KEYS, "cluster.ranks=2", *keys)
    )
    done = program.run(
        binary,
        "--data",
        tmp_path / "tokens",
        "--steps",
        30,
        "--log",
        tmp_path / "log",
    )
    assert done.code == 6 and said in done.err, done.err
    assert len((tmp_path / "log").read_text().splitlines()) == 1 + step
