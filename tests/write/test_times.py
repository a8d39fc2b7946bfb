"""test_times.py -- tests that a predicted step adds up: its parts are the whole step, and its
waits name their causes."""

import json
import re
from dataclasses import replace

import pytest
from zg.plan.plan import Plan
from zg.plan.text import digest
from zg.predict import cost, device, play
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
    for part, busy in t.busy.items():
        assert 0 <= t.exposed[part] <= busy * (1 + 1e-9), part
    assert sum(w.seconds for w in t.waits) <= sum(t.exposed.values())
    h = p.head
    assert t.tokens == h.batch * h.sequence * h.micro_batches * h.ranks


HOSTS = ("cluster.ranks=8", "cluster.local=4", "train.micro_batch=1")
FILE = "stage 3, all in a file"
# A slow link, disk or host; keys of a plan; the parts that get nearly all of the time that it costs
SLOW = {
    "peers": ({"peers": Link(1e7)}, (), ("all-gather", "reduce-scatter")),
    "peers, own sums": (
        {"peers": Link(1e7)},
        ("zero.stage=1", "cluster.ranks=4", "train.micro_batch=1"),
        ("all-gather", "reduce-scatter"),
    ),
    "network": (
        {"network": Link(1e6)},
        HOSTS,
        ("all-gather between hosts", "reduce-scatter between hosts"),
    ),
    "host": (
        {"host": Link(1e6)},
        keys("gpt-tiny", "stage 3, all on the host"),
        ("copy",),
    ),
    "read": ({"read": Link(1e6)}, keys("gpt-tiny", FILE), ("copy",)),
    "write": ({"write": Link(1e6)}, keys("gpt-tiny", FILE), ("copy",)),
    "update": (
        {"update": 1e6},
        keys("gpt-tiny", "stage 2, the optimizer on the host"),
        ("optimizer", "gradient norm", "reduce-scatter"),
    ),
}


@pytest.mark.parametrize("what", SLOW)
def test_what_is_slow_is_exposed(what: str) -> None:
    """Each part of a slow link, disk or host has a share of the step, and together they have the
    seconds that the step takes longer, though queue main waits for few of their commands
    directly."""
    slower, more, parts = SLOW[what]
    p = planned("gpt-tiny", "targets=[sm_90]", *more)
    fast, slow = times.times(clock(p)), times.times(clock(p, **slower))
    assert all(slow.exposed[part] > 0.05 * slow.seconds for part in parts)
    lost = sum(slow.exposed[part] - fast.exposed.get(part, 0.0) for part in parts)
    assert slow.seconds > 5 * fast.seconds
    assert lost == pytest.approx(slow.seconds - fast.seconds, rel=0.05)
    wait, text = slow.waits[0], times.table(clock(p, **slower))
    assert wait.part in parts
    assert f"{wait.waiting} waits for {wait.cause}" in text


BESIDE = "gather", "up", "fetch"


def test_a_wait_names_what_runs_meanwhile() -> None:
    """Gathers and the copies from a slow disk that they wait for have times of their own, which
    together are as long as queue main's wait."""
    p = planned("gpt-tiny", "targets=[sm_90]", *keys("gpt-tiny", FILE))
    x = play.step(clock(p, read=Link(1e6)))
    ways = [
        b.path for b in x.bars if [c.step.queue for c, _ in b.path[:3]] == [*BESIDE]
    ]
    assert ways
    for (gather, short), _, (_, long), *_ in ways:
        assert short == gather.end - gather.begin < 0.01 * long
    free = x.begin
    for b in (b for b in x.bars if b.step.queue == "main"):
        assert sum(s for _, s in b.path) == pytest.approx(b.begin - free, abs=1e-12)
        free = b.end


def test_ranks_beyond_a_host_are_noted() -> None:
    note = "all 16 ranks count as one host: set cluster.local"
    some = ("cluster.ranks=16", "train.micro_batch=1", "train.global_batch=16")
    for more, said in (
        (("targets=[sm_90]",), True),
        (("targets=[sm_90]", "cluster.local=8"), False),
        (("targets=[cpu]",), False),
    ):
        table = times.table(clock(planned("gpt-tiny", *some, *more)))
        assert (note in table) == said


def test_numbers_of_things_are_english() -> None:
    p = planned("gpt-tiny", "cluster.ranks=1", "train.global_batch=2", "targets=[cpu]")
    table = times.table(clock(p))
    assert "1 rank, " in table and "1 micro-batch of" in table and "1 thread a" in table


def test_data_has_the_tables_numbers() -> None:
    p = planned("gpt2-124m-8gpu", "targets=[sm_90]", "train.precision=bf16")
    found, t = json.loads(times.data(clock(p))), times.times(clock(p))
    assert found["step"] == t.seconds and found["flops"] == cost.flops(p)
    peak = device.load("h100").peak["bf16"]
    assert found["mfu"] == pytest.approx(cost.flops(p) / t.seconds / 8 / peak)
    assert found["tokens_per_second"] == t.tokens / t.seconds
    assert (found["plan"], found["ranks"], found["tokens"]) == (digest(p), 8, t.tokens)
    assert found["days_of_1e9_tokens"] == pytest.approx(1e9 / t.rate / 86400)
    assert (found["schedule_steps"], found["days_of_schedule"]) == (0, None)
    found = json.loads(times.data(clock(p), 500))
    assert found["schedule_steps"] == 500
    assert found["days_of_schedule"] == pytest.approx(500 * t.seconds / 86400)
    for steps, name in ((500, "500 steps"), (10**6, "1,000,000 steps")):
        lines = times.table(clock(p), steps).splitlines()
        (said,) = (line for line in lines if line.startswith(name))
        assert said.split("  ")[-1].strip() == times.long(steps * t.seconds)
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
