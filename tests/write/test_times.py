"""test_times.py -- tests that a predicted step adds up: its parts are the whole step, and its
waits name their causes."""

import json
import re
from dataclasses import replace

import pytest
from zg.plan.plan import Plan
from zg.predict import cost, device
from zg.predict.device import Link
from zg.predict.seconds import Clock
from zg.write import times

from tests.lib import trainer
from tests.lib.plans import WAYS, keys, planned


def clock(p: Plan, **more: object) -> Clock:
    found = device.load(device.DEFAULT[p.head.targets[0]])
    return Clock(p, replace(found, **more))


@pytest.mark.parametrize("way", [way for way in WAYS if "NCCL" not in way])
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("batch", [8, 64])
def test_parts_add_up_to_the_step(target: str, way: str, batch: int) -> None:
    """They do so, too, if few of the micro-batches are played."""
    given = (*keys("llama-tiny", way), f"train.global_batch={batch}")
    p = planned("llama-tiny", *given, f"targets=[{target}]")
    t = times.times(clock(p))
    assert batch == 8 or p.section("micro_batch").repeat == 1 or t.played.more > 0
    assert sum(t.exposed.values()) == pytest.approx(t.seconds, rel=1e-9)
    assert all(0 <= t.exposed.get(part, 0) for part in t.busy)
    h = p.head
    assert t.tokens == h.batch * h.sequence * h.micro_batches * h.ranks


def test_a_slow_wire_is_exposed() -> None:
    p = planned("gpt-tiny", "targets=[sm_90]")
    fast = times.times(clock(p, peers=Link(1e15)))
    slow = times.times(clock(p, peers=Link(1e7)))
    assert slow.exposed["all-gather"] > 10 * fast.exposed["all-gather"]
    wait = slow.waits[0]
    assert "all-" in wait.cause and wait.seconds > 0.1 * slow.seconds
    text = times.table(clock(p, peers=Link(1e7)))
    assert f"{wait.waiting} waits for {wait.cause}" in text


def test_data_has_the_tables_numbers() -> None:
    p = planned("gpt2-124m-8gpu", "targets=[sm_90]", "train.precision=bf16")
    found, t = json.loads(times.data(clock(p))), times.times(clock(p))
    assert found["step"] == t.seconds and found["flops"] == cost.flops(p)
    peak = device.load("h100").peak["bf16"]
    assert found["mfu"] == pytest.approx(cost.flops(p) / t.seconds / 8 / peak)
    assert found["tokens_per_second"] == t.tokens / t.seconds
    assert f"{t.rate:,.0f}, {t.rate / 8:,.0f} a rank" in times.table(clock(p))


def test_the_program_has_the_predicted_step_of_its_device() -> None:
    """train.c states the step of `cluster.device` in that target's column, and no other."""
    path = trainer.ROOT / "model_specs" / "gpt-tiny.yaml"

    def columns(*more: str) -> list[str]:
        source = trainer.generate(path, "targets=[cpu,sm_90]", *more)
        table = source.split("zr_column columns[] = {\n")[1].split("};")[0]
        return re.findall(r'\{"\w+", \w+, \d+, (.*?)\},', table)

    assert columns() == ["0", "0"]
    p = planned("gpt-tiny", "targets=[cpu,sm_90]")
    said = float(
        times.data(Clock(p, device.load("h100"))).split('"step": ')[1].split(",")[0]
    )
    assert columns("cluster.device=h100") == ["0", f"{said:.4g}"]
