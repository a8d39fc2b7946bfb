"""test_overlap.py -- tests that all-gathers of an emitted program hide behind the work of the unit
before them, updates on the host behind the next forward, and a piece's sum behind the next piece's
transfer.

All that the plan allows to be hidden is hidden, and nothing if no unit is gathered ahead.
bench/overlap.py measures the time that this saves.
"""

import itertools
import pathlib
from collections.abc import Callable

import pytest
from zg.plan import plan
from zg.read import spec as reader
from zg.search import search

from tests.lib import law, mutants, program, trainer
from tests.lib.plans import planned
from tests.runtime import test_profile

# The embedding's tables are persistent: its work is too short to hide anything.
BLOCKS = ("fwd.block", "bwd.block")
KEYS = ["zero.stage=3", "cluster.ranks=2", 'zero.replicate=["wte.*", "wpe.*"]']


def steps(p: plan.Plan) -> list[plan.Step]:
    """Return the steps of a training step."""
    return [x for s in p.step for x in s.steps * s.repeat]


def played(
    p: plan.Plan, takes: Callable[[plan.Step], float], times: int
) -> list[dict[str, float]]:
    """Return when each queue has finished each training step, by the plan alone: steps of a queue
    run in order, and a wait is for the newest record."""
    now, ends = {s.queue: 0.0 for s in steps(p)}, []
    recorded: dict[tuple[str, int], float] = {}
    for _ in range(times):
        for step in steps(p):
            at = max(
                [
                    now[step.queue],
                    *(recorded.get((e.name, e.index), 0.0) for e in step.waits),
                ]
            )
            now[step.queue] = at + takes(step)
            recorded |= {(e.name, e.index): now[step.queue] for e in step.recs}
        ends.append(dict(now))
    return ends


def simulated(p: plan.Plan, rate: float, delay: float) -> float:
    """Return the seconds of a training step in which functions take flops / rate, gathers take the
    delay, and all else takes nothing."""
    of = {f.name: f.flops for f in p.fns}
    ends = played(p, lambda s: delay if s.op == "gather" else of.get(s.op, 0) / rate, 1)
    return max(ends[0].values())


def gathers(p: plan.Plan) -> int:
    """Return the number of gathers in a training step."""
    return sum(x.op == "gather" for x in steps(p))


def flops(p: plan.Plan) -> int:
    """Return the flops of a rank in a training step."""
    of = {f.name: f.flops for f in p.fns}
    return sum(of.get(x.op, 0) for x in steps(p))


class Ahead:
    """A spec whose gathers can run ahead of their use."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.spec = law.changed("gpt", folder, 3, {60: 240, 240: 960})

    def keys(self, batch: int, ahead: str) -> list[str]:
        return [
            *KEYS,
            f"zero.stage3_prefetch_bucket_size={ahead}",
            f"train.micro_batch={batch}",
            f"train.global_batch={2 * batch}",
        ]

    def plan(self, batch: int, ahead: str) -> plan.Plan:
        keys = self.keys(batch, ahead)
        return search.find(reader.load(str(self.spec), keys)).plan

    def build(self, batch: int, ahead: str) -> pathlib.Path:
        keys = self.keys(batch, ahead)
        return trainer.build(trainer.generate(self.spec, *keys))


def test_what_the_plan_says(tmp_path: pathlib.Path) -> None:
    """The plan alone decides how much is hidden.

    A block's forward takes twice as long as a gather here. No prefetch hides nothing. One unit
    ahead hides all gathers except the first of a micro-batch, the one after the update, and the
    part that the head's work is too short for. Work a quarter as long as a gather hides little.
    """
    made = Ahead(tmp_path)
    shown = {}
    for ahead in ("auto", "0"):
        p = made.plan(2, ahead)
        # Three blocks forward and backward, the head, persistent parameters.
        assert gathers(p) == 8
        forward = next(f.flops for f in p.fns if f.name == "fwd.block")
        for seconds in (2, 0.25):
            rate = forward / seconds
            shown[ahead, seconds] = simulated(p, rate, 1) - simulated(p, rate, 0)
    assert shown["0", 2] == pytest.approx(8) and shown["0", 0.25] == pytest.approx(8)
    assert 2 <= shown["auto", 2] < 3 and 5 < shown["auto", 0.25] < 8


HOST, PARAMS = (
    "zero.offload_optimizer.device=cpu",
    "zero.offload_param.device=cpu",
)
DISK = (
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=/tmp",
)
FILED = ("zero.offload_param.device=nvme", "zero.offload_param.nvme_path=/tmp")


@pytest.mark.parametrize(
    "keys",
    [
        ("zero.stage=1", HOST),
        ("zero.stage=1", *DISK),
        ("zero.stage=1", "cluster.ranks=1", *DISK),
        ("zero.stage=2", *DISK),
        ("zero.stage=3", HOST),
        ("zero.stage=3", HOST, PARAMS),
        ("zero.stage=3", *DISK, PARAMS),
        ("zero.stage=3", HOST, *FILED),
        ("zero.stage=3", *DISK, *FILED),
    ],
)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_an_update_on_the_host_goes_on_beside_the_next_forward(
    keys: tuple[str, ...], precision: str
) -> None:
    """An update on the host, or one of the file's queues, that takes half of a forward adds only
    the part for which the first block waits to a step."""
    p = planned(
        "gpt-tiny",
        f"train.precision={precision}",
        "zero.sub_group_size=5000",
        *keys,
    )
    of = {f.name: f.flops for f in p.fns}
    forward = sum(of[s.op] for s in p.section("eval").steps if s.op in of)
    elements = {
        s: next(i.value for i in s.ints if i.name == "n")
        for s in p.section("update").steps
        if s.queue == "host" and s.op.startswith("update.")
    }
    waited = sum(
        n
        for s, n in elements.items()
        if s.unit in ("embed[0]", "persistent[0]", "block[0]")
    )
    tiled = [
        s
        for s in steps(p)
        if s.queue in ("load", "store") and "tile." in f"{s.ins}{s.outs}"
    ]
    assert 0 < waited < 0.7 * sum(elements.values())

    def pace(queue: str, seconds: float) -> float:
        work = (
            elements
            if queue == "host"
            else {s: s.ints[-1].value for s in tiled if s.queue == queue}
        )

        def part(s):
            return of.get(s.op, 0) + seconds * work.get(s, 0) / sum(work.values())

        ends = [now["main"] for now in played(p, part, 4)]
        assert ends[3] - ends[2] == pytest.approx(ends[2] - ends[1])
        return ends[3] - ends[2]

    alone = pace("host", 0)
    for queue in {"host", *(s.queue for s in tiled)}:
        added, most = (
            pace(queue, forward / 2) - alone,
            waited / sum(elements.values()),
        )
        assert -1 < added <= most * forward / 2 + 1


PIECES = "zero.reduce_bucket_size=20000"
LAYERS = (
    "train.accumulate=layers",
    "cluster.ranks=2",
    "train.global_batch=4",
    "train.micro_batch=1",
)
ONE = "zero.overlap_comm=false"


def brought(p: plan.Plan) -> list[tuple[mutants.Work, mutants.Work]]:
    """Return each piece that arrives with the sum of the piece before it, within a section or
    within a unit whose own gradients had to be summed first."""
    pairs, added = [], None
    for w in mutants.played(p):
        op = w.key[1]
        if op in mutants.REDUCES and added:
            pairs.append((added, w))
        added = (
            w
            if op.startswith(("sum.", "join."))
            else None
            if op in ("next", "count", "recount", "batch")
            else added
        )
    return pairs


@pytest.mark.parametrize(
    "keys",
    [
        ("zero.stage=3",),
        ("zero.stage=3", PIECES),
        ("zero.stage=2", "train.precision=bf16"),
        ("zero.stage=1", PIECES),
        ("zero.stage=0", "train.global_batch=16"),
        (*LAYERS, PIECES),
        (*LAYERS, HOST, PIECES),
        ("zero.stage=2", HOST, PIECES),
        ("zero.stage=3", "train.reduction=fast", "targets=[sm_90]", PIECES),
    ],
)
def test_a_piece_comes_while_the_one_before_is_added(
    keys: tuple[str, ...],
) -> None:
    """A piece waits for the sum of the piece two before it, whose slot it takes, and not for the
    one before, not even through another queue. With one queue each piece waits for the one
    before."""
    pairs, alone = (
        brought(planned("gpt-tiny", *keys)),
        brought(planned("gpt-tiny", *keys, ONE)),
    )
    assert len(pairs) == len(alone) > 4
    assert not any(mutants.before(a, b) for a, b in pairs)
    assert all(mutants.before(a, b) for (a, _), (_, b) in itertools.pairwise(pairs))
    assert all(mutants.before(a, b) for a, b in alone)


@pytest.mark.parametrize("bucket", [2000, 20000, 10**9])
def test_what_reductions_take(bucket: int) -> None:
    """The n pieces of a micro-batch take n + 1 if each takes 1 to arrive and 1 to be added, and 2 n
    with one queue."""
    for more, each in ((), 1), ((ONE,), 2):
        p = planned(
            "gpt-tiny",
            "zero.stage=2",
            f"zero.reduce_bucket_size={bucket}",
            *more,
        )
        n = sum(s.op == "alltoall" for s in p.section("micro_batch").steps)

        def part(s):
            return s.op == "alltoall" or s.op.startswith("sum.")

        assert n > 3 and p.head.micro_batches > 0
        ends = max(played(p, part, 1)[0].values())
        assert ends == p.head.micro_batches * (n * each + (each == 1))


def unordered(p: plan.Plan) -> list[bool]:
    """Return for each block function of a training step whether the plan lets a gather run beside
    it."""
    work = mutants.played(p)
    gathered = [w for w in work if w.key[1] == "gather"]
    beside = [
        any(not mutants.before(w, g) and not mutants.before(g, w) for g in gathered)
        for w in work
        if w.key[1] in BLOCKS
    ]
    return beside[: sum(s.op in BLOCKS for s in steps(p))]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["auto", "0"])
def test_gathers_run_beside_work(tmp_path: pathlib.Path, ahead: str) -> None:
    """A gather and a block function that the plan orders never overlap in a run. Those that it does
    not order overlap in at least one step, however busy the machine is."""
    made = Ahead(tmp_path)
    tokens, profile = tmp_path / "tokens", tmp_path / "profile"
    trainer.write_tokens(tokens, law.tokens(256, 40000))
    done = program.run(
        made.build(8, ahead),
        *("--data", tokens, "--steps", 20, "--threads", 1),
        *("--profile", profile, "--profile-steps", "2-20"),
        ZR_GATHER_DELAY_US=10000,
    )
    assert done.code == 0, done.err
    found = test_profile.read(profile)
    want = unordered(made.plan(8, ahead))
    assert any(want) == (ahead == "auto")
    for rank in range(2):
        gathered = [e for e in found[rank, "gather"] if e["name"] == "gather"]
        met = [False] * len(want)
        for step in range(2, 21):
            blocks = [
                e
                for e in found[rank, "main"]
                if e["args"]["step"] == step
                and test_profile.named(e) in ("fwd_block", "bwd_block")
            ]
            assert len(blocks) == len(want)
            for i, e in enumerate(blocks):
                met[i] |= any(meet(e, g) for g in gathered)
        assert met == want


def meet(a: test_profile.Event, b: test_profile.Event) -> bool:
    return a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
