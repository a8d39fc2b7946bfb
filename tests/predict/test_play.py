"""test_play.py -- tests that a plan is played as its queues run: times by hand, waits, graphs, and
commands that share a device."""

from dataclasses import replace

import pytest
from zg.facts.commands import COLLECTIVES
from zg.facts.queues import QUEUES
from zg.plan.plan import Plan, Step
from zg.predict import cost, play
from zg.predict.device import Device, Link, Rates, class_of
from zg.predict.seconds import Clock, operands

from tests.lib.law import PACKED
from tests.lib.plans import WAYS, keys, planned

FLAT = Rates(
    precision="f32", cold={"products": ((1.0, 1e11),), "others": ((1.0, 1e10),)}
)


def made(target: str = "cpu", **more: object) -> Device:
    """Return a device with round numbers and no latencies."""
    return replace(
        Device(
            about="round numbers",
            target=target,
            rates=(FLAT,),
            copy=1e12,
            update=1e10,
            peers=Link(1e10),
            network=Link(1e9),
            host=Link(2e10),
            read=Link(3e9),
            write=Link(1e9),
            launch=0.0,
        ),
        **more,
    )


def first(p: Plan, op: str, unit: str = "") -> Step:
    steps = (s for section in p.step for s in section.steps)
    return next(s for s in steps if s.op == op and s.unit.startswith(unit))


def ends(bars: list[play.Bar]) -> float:
    """Return the end of queue main's last command."""
    return max(b.end for b in bars if b.step.queue == "main")


def test_times_are_worked_out_by_hand() -> None:
    """A collective takes its bytes at the link's bandwidth, a product its FLOPs, a sum its bytes,
    a copy the bytes of its link."""
    p = planned("gpt2-124m", "train.precision=bf16", "targets=[sm_90]")
    clock = Clock(p, made("sm_90"))
    gather = first(p, "gather", "block")
    assert clock.seconds(gather) == 3_538_944 * 2 / 1e10
    flops = next(f.flops for f in p.fns if f.name == "fwd.block")
    bytes_ = 2 * 512 * 768 * 2  # of a norm: one tensor read, one written
    took = clock.seconds(first(p, "fwd.block"))
    assert flops / 1e11 + 2 * bytes_ / 1e10 < took < 1.2 * flops / 1e11
    added = clock.seconds(first(p, "sum.block"))
    assert added == pytest.approx(3_538_944 * (2 * 2 + 2 * 4) / 1e10)
    late = Clock(p, made("sm_90", peers=Link(1e10, latency=1e-3, hop=1e-4)))
    assert late.seconds(gather) == clock.seconds(gather) + 1e-3 + 1e-4
    assert Clock(p, made("sm_90", launch=1e-6)).seconds(first(p, "count")) == 1e-6


def test_no_product_is_faster_than_its_bytes() -> None:
    """A thin product takes its operands' bytes at the rate at which a copy reads and writes."""
    fast = replace(FLAT, cold={"products": ((1.0, 1e30),), "others": ((1.0, 1e30),)})
    lora = ("train.lora={rank: 4, alpha: 8}", "targets=[sm_90]")
    p = planned("llama-tiny", *lora)
    clock = Clock(p, made("sm_90", rates=(fast,), copy=5e9))
    step = first(p, "fwd.block")
    calls = next(f.calls for f in p.fns if f.name == step.op)
    thin = [c for c in calls if class_of(c.kernel) != "others"]
    bytes_ = sum(o.bytes for c in thin for o in operands(p, step, c))
    assert clock.seconds(step) == pytest.approx(bytes_ / 1e10)
    assert Clock(p, made("sm_90", rates=(fast,), copy=1e18)).seconds(step) < 1e-9


def test_hops_follow_the_algorithm() -> None:
    """Among 8 ranks a ring has 7 hops, an all-reduce goes three levels up a tree and down, and an
    all-to-all sends to all ranks at once."""
    p = planned("gpt2-124m-8gpu", "targets=[sm_90]", "train.precision=bf16")
    near, far = (Clock(p, made("sm_90", peers=Link(1e10, hop=x))) for x in (0, 1e-4))
    for op, hops in (("gather", 7), ("alltoall", 0), ("allreduce", 6)):
        step = first(p, op)
        more = far.seconds(step) - near.seconds(step)
        assert more == pytest.approx(hops * 1e-4, abs=1e-9)


def test_copies_take_their_link() -> None:
    p = planned("gpt-tiny", *keys("gpt-tiny", "stage 3, all in a file"))
    clock = Clock(p, made())
    rates = {"load": 3e9, "fetch": 3e9, "store": 1e9, "up": 2e10, "down": 2e10}
    found = set()
    for s in (s for x in p.step for s in x.steps if s.op == "copy"):
        size = next(i.value for i in s.ints if i.name == "bytes")
        assert clock.seconds(s) == size / rates.get(s.queue, 1e12)
        found.add(s.queue)
    assert found >= {"load", "store", "fetch", "up"}


@pytest.mark.parametrize("targets", ["sm_90", "cpu"])
def test_rings_enter_a_host_once(targets: str) -> None:
    """Between hosts NCCL's all-gather over all ranks brings a host its bytes once; the pieces of
    an all-to-all and of groups of one rank a host are each rank's own, and a CPU's ranks all fetch
    for themselves."""
    seen = set()
    for more in ((), ("zero.shard_size=2", "zero.states=all")):
        p = planned(
            "gpt-tiny",
            *("cluster.ranks=8", "cluster.local=4", "train.micro_batch=1"),
            *(f"targets=[{targets}]", *more),
        )
        clock = Clock(p, made(targets, copy=1e18, peers=Link(1e18)))
        for s in (s for x in p.step for s in x.steps):
            if s.op not in ("gather", "alltoall") or not cost.far(p, s.group):
                continue
            once = targets != "cpu" and s.op == "gather" and p.on_host(s.group) == 4
            took = (1 if once else 4) * cost.wire_of(p, s).far / 1e9
            assert clock.seconds(s) == pytest.approx(took), (s.op, s.group)
            seen.add((s.op, s.group))
    assert {op for op, _ in seen} == {"gather", "alltoall"}
    assert {p.on_host(group) for op, group in seen if op == "gather"} >= {1}


def test_the_ring_of_a_reduce_scatter_enters_a_host_whole() -> None:
    """A ring over all ranks brings a host the pieces of all ranks but one, whatever its ranks
    count."""
    p = planned(
        "gpt-tiny",
        *("cluster.ranks=8", "cluster.local=4", "train.micro_batch=1"),
        *("targets=[sm_90]", "train.reduction=fast"),
    )
    clock = Clock(p, made("sm_90", peers=Link(1e18)))
    steps = [s for x in p.step for s in x.steps if s.op == "reducescatter"]
    assert steps
    for s in steps:
        piece = next(i.value for i in s.ints if i.name == "bytes")
        assert clock.seconds(s) == pytest.approx(7 * piece / 1e9)


def test_a_cpu_reads_an_all_to_all_in_place() -> None:
    p = planned("gpt-tiny", "targets=[cpu]")
    assert Clock(p, made()).seconds(first(p, "alltoall")) == 0


IN_A_FILE = (
    "zero.stage=3",
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=.",
)


@pytest.mark.parametrize("write", [1e5, 1e6, 1e7, 3e7, 1e8])
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize(
    "more",
    [
        keys("gpt-tiny", "stage 3, all in a file"),
        (*IN_A_FILE, "train.global_batch=64"),
    ],
)
def test_a_step_is_one_of_a_run_that_has_settled(
    more: tuple[str, ...], target: str, write: float
) -> None:
    """A disk that is slower than all else holds up later steps, not the first ones. A faster one
    writes beside the micro-batches, those that are not played among them."""
    p = planned("gpt-tiny", *more, f"targets=[{target}]")
    cores = 2 if target == "cpu" else 0
    clock = Clock(p, made(target, write=Link(write), cores=cores))
    whole = play.played(clock, 1 << 20, steps=64)
    real = (ends(whole[-1]) - ends(whole[-9])) / 8
    assert play.step(clock).seconds == pytest.approx(real, rel=0.02)


def test_a_part_of_a_calls_bytes_comes_from_the_cache() -> None:
    """An operand that the function has just touched is in the cache if the cache is large."""
    hot = {"products": ((1.0, 1e30),), "others": ((1.0, 1e30),)}
    p = planned("gpt-tiny", "targets=[cpu]")
    step = first(p, "fwd.block")
    cold, some, every = (
        Clock(p, made(cache=cache, rates=(replace(FLAT, hot=hot),))).seconds(step)
        for cache in (0, 1 << 16, 1 << 40)
    )
    assert cold == Clock(p, made()).seconds(step)
    assert every < 1e-3 * some < 1e-3 * cold


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_every_function_of_packed_documents_takes_time(name: str) -> None:
    clock = Clock(planned(name, *PACKED, "targets=[cpu]"), made())
    steps = [
        s
        for section in clock.p.step
        for s in section.steps
        if s.op[:3] in ("fwd", "bwd")
    ]
    assert steps and all(clock.seconds(s) > 0.0 for s in steps)


@pytest.mark.parametrize("way", [way for way in WAYS if "NCCL" not in way])
@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_no_command_begins_before_its_events(target: str, way: str) -> None:
    """Commands of a queue follow each other, and none begins before all that it waits for."""
    p = planned("llama-tiny", *keys("llama-tiny", way), f"targets=[{target}]")
    clock = Clock(p, made(target, cores=2 if target == "cpu" else 0))
    bars = [b for step in play.played(clock, 2, steps=2) for b in step]
    free = dict.fromkeys(QUEUES, 0.0)
    done: dict[object, float] = {}
    left = iter(bars)
    for _ in range(2):
        for section in p.step:
            for _ in range(min(section.repeat, 2)):
                for s in section.steps:
                    after = max([free[s.queue], *(done.get(e, 0.0) for e in s.waits)])
                    free[s.queue] = after
                    if s.op != "mark":
                        bar = next(left)
                        assert bar.step == s and bar.begin >= after - 1e-12
                        assert bar.end - bar.begin >= clock.seconds(s) - 1e-12
                        free[s.queue] = bar.end
                    done |= dict.fromkeys(s.recs, free[s.queue])
    assert next(left, None) is None


def test_a_slow_gather_delays_its_unit() -> None:
    """A bar's cause is the gather that it waits for, and its end the bar's begin."""
    p = planned("gpt-tiny", "targets=[sm_90]")
    for peers, waiting in ((1e15, 0), (1e5, 4)):
        clock = Clock(p, made("sm_90", peers=Link(peers), copy=1e15))
        (bars,) = play.played(clock, 1)
        late = [
            b
            for b in bars
            if b.step.kind == "fwd" and b.cause and b.cause.step.op == "gather"
        ]
        assert all(b.begin == b.cause.end for b in late if b.cause)
        assert len(late) >= waiting


def test_a_gpu_plays_graphs_one_after_the_other() -> None:
    """Nothing of a micro-batch begins on a GPU before all of the last one has ended."""
    for targets, apart in (("[sm_90]", True), ("[cpu]", False)):
        p = planned("gpt-tiny", f"targets={targets}")
        (bars,) = play.played(Clock(p, made(p.head.targets[0])), 2)
        one, two = (
            [b for b in bars if (b.section, b.turn) == ("micro_batch", n)]
            for n in (0, 1)
        )
        begins = min(b.begin for b in two)
        assert (begins >= max(b.end for b in one)) == apart


def test_commands_that_meet_slow_each_other() -> None:
    """The busy times of all queues add up to the step on a CPU of one core; a collective on a GPU
    slows the kernels beside it by the share that it takes."""
    p = planned("gpt2-124m", "cluster.ranks=1", "targets=[cpu]")
    clock = Clock(p, made(cores=1))
    (bars,) = play.played(clock, 1)
    alone = sum(clock.seconds(b.step) for b in bars)
    assert max(b.end for b in bars) == pytest.approx(alone)

    p = planned("gpt2-124m", "targets=[sm_90]")
    slow = Clock(p, made("sm_90", peers=Link(1e9, takes=0.5)))
    (bars,) = play.played(slow, 1)
    wires = [b for b in bars if b.step.op in COLLECTIVES and b.step.queue != "main"]
    for b in bars:
        inside = any(w.begin <= b.begin and b.end <= w.end for w in wires)
        if b.step.kind == "fwd" and inside:
            assert b.end - b.begin == pytest.approx(2 * slow.seconds(b.step))
            break
    else:
        raise AssertionError("no forward lies within a collective")


@pytest.mark.parametrize(
    "waits,more",
    [
        ("store", ("cluster.ranks=1", "zero.offload_optimizer.device=nvme")),
        ("gather", ("cluster.ranks=2", "cluster.local=1")),
    ],
)
def test_a_cpus_core_is_free_while_a_command_waits(
    waits: str, more: tuple[str, ...]
) -> None:
    """The file and other hosts slow no kernel beside them, and are not slowed by kernels."""
    path = "zero.offload_optimizer.nvme_path=."
    p = planned("gpt2-124m", "targets=[cpu]", path, *more)
    clock = Clock(p, made(cores=1, write=Link(1e8), network=Link(1e8)))
    assert clock.cores == 1
    bars = [b for step in play.played(clock, 1, 2) for b in step]
    beside = False
    for b in bars:
        others = {x.step.queue for x in bars if x.begin < b.end and b.begin < x.end}
        if b.step.queue == waits or others == {"main", waits}:
            assert b.end - b.begin == pytest.approx(clock.seconds(b.step))
            beside |= others == {"main", waits}
    assert beside


def test_many_micro_batches_take_as_long_as_their_last() -> None:
    """A step of many micro-batches is predicted from three, as if all were played."""
    p = planned("gpt-tiny", "train.global_batch=32", "targets=[cpu]")
    clock = Clock(p, made(cores=2))
    x = play.step(clock)
    assert x.more == p.section("micro_batch").repeat - x.last - 1 > 0
    whole, again = play.played(clock, 1 << 20, steps=2)
    real = ends(again) - ends(whole)
    assert x.seconds == pytest.approx(real, rel=1e-6)
    assert sum(n for _, n in x.counted()) == len(again)
