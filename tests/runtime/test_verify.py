"""test_verify.py -- tests --verify-every: the log has the weights' exact hash, and a copy that has
changed on one rank ends the run before it is saved."""

from __future__ import annotations

import json
import re
from pathlib import Path

import compare
import pytest

from tests.lib import law, program, trainer

BF16 = "train.precision=bf16"
RANKS = ("cluster.ranks=3", "train.global_batch=12")
HOSTS = ("cluster.ranks=6", "cluster.local=2", "zero.shard_size=2")
SETS = (*HOSTS, "zero.states=shard")
FOURS = (
    "cluster.ranks=8",
    "train.global_batch=16",
    "zero.shard_size=4",
    SETS[-1],
)
THRESHOLD = "zero.stage3_param_persistence_threshold"
HOST = "zero.offload_optimizer={device: cpu, ratio: 0.5}"
WAYS = {
    "one rank": (),
    "whole": (*RANKS, "zero.stage=0"),
    "sharded states": (*RANKS, "zero.stage=1"),
    "host and device": (*RANKS, "zero.stage=2", HOST),
    "sharded, some persistent": (*RANKS, "zero.stage=3", f"{THRESHOLD}=200"),
    "in a file": (
        *RANKS,
        "zero.stage=3",
        "zero.offload_optimizer={device: nvme, nvme_path: /tmp}",
    ),
    "hosts share parameters": (*HOSTS, "zero.stage=3"),
    "hosts share states": (*SETS, "zero.stage=3", f"{THRESHOLD}=200"),
    "hosts share states alone": (*SETS, "zero.stage=2"),
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.bin"
    trainer.write_tokens(path, law.tokens(256, 20000))
    return path


def made(*keys: str) -> str:
    return trainer.generate(law.path("gpt"), "train.global_batch=12", *keys)


def verified(log: Path) -> dict[int, str]:
    """Return the weights' hashes by step."""
    lines = map(json.loads, log.read_text().splitlines())
    return {x["step"]: x["weights"] for x in lines if "weights" in x}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_all_ways_log_the_hashes_that_runs_end_with(
    tokens: Path, tmp_path: Path, precision: str
) -> None:
    """The logged hashes are those with which runs of as many steps end, however weights are split
    and queues run; nothing else changes."""
    ends, logs = {}, {}
    for steps in (2, 4):
        plain = law.run(
            trainer.build(made(f"train.precision={precision}")),
            "--data",
            tokens,
            "--steps",
            steps,
            log=tmp_path / "plain",
        )
        ends[steps] = plain.weights
    for n, way in enumerate(WAYS):
        log = tmp_path / f"{n}"
        found = law.run(
            trainer.build(made(f"train.precision={precision}", *WAYS[way])),
            "--data",
            tokens,
            "--steps",
            4,
            "--verify-every",
            2,
            "--queue",
            ("eager", "late", "shuffled:1")[n % 3],
            log=log,
        )
        assert verified(log) == ends, way
        assert (found.weights, found.steps) == (plain.weights, plain.steps)
        logs[way] = log
    first, *others = logs.values()
    assert [compare.compare(first, other) for other in others] == ([0] * len(others))


@pytest.mark.slow
def test_the_emulated_program_verifies(tokens: Path, tmp_path: Path) -> None:
    keys = (BF16, "cluster.ranks=2", "zero.stage=2")
    log = tmp_path / "log"
    ended = law.run(
        trainer.build(made(*keys), trainer.EMULATED),
        "--data",
        tokens,
        "--steps",
        2,
        "--verify-every",
        1,
        log=log,
    )
    found = verified(log)
    assert list(found) == [1, 2] and found[2] == ended.weights


def test_nothing_is_allocated(data: Path) -> None:
    """Nothing is allocated: the program ends if memory is requested after the start of the first
    step."""
    binary = program.built("plain")
    for ranks in (1, 2):
        done = program.train(binary, data, "--verify-every", 1, RANKS=ranks)
        assert done.code == 0, done.err


# State changed on rank 1 (with sets of four, on 3) in the last bit of a byte; its row; its place.
DAMAGES = {
    "parameters of a stage with sharded masters": (
        (BF16, "zero.stage=1"),
        "PARAM_BLOCK(2) + 4100",
        r"params \(h.%d",
    ),
    "masters of which each rank has all": (
        ("zero.stage=0",),
        "PARAM_EMBED(0)",
        r"master \(wte",
    ),
    "a moment of which each rank has all": (
        ("zero.stage=0",),
        "V_BLOCK(1) + 8",
        r"exp_avg_sq \(h.%d",
    ),
    "persistent parameters": (
        ("zero.stage=3", f"{THRESHOLD}=200"),
        "PARAM_PERSISTENT(0)",
        r"master \(\S*",
    ),
    "the steps that are counted": (
        ("zero.stage=3",),
        "CTL(0) + offsetof(zk_ctl, applied)",
        r"applied \(the step's numbers",
    ),
    "parameters that hosts share": (
        (*HOSTS, BF16, "zero.stage=3", f"{THRESHOLD}=0"),
        "PARAM_BLOCK(2) + 4100",
        r"params \(h.%d",
    ),
    "masters that hosts share": (
        (*SETS, "zero.stage=3", f"{THRESHOLD}=0"),
        "PARAM_BLOCK(2) + 4100",
        r"master \(h.%d",
    ),
    "masters that sets of four share": (
        (*FOURS, "zero.stage=3", f"{THRESHOLD}=0"),
        "PARAM_BLOCK(2) + 4100",
        r"master \(h.%d",
    ),
    "moments that hosts share": (
        (*SETS, "zero.stage=2"),
        "V_BLOCK(1) + 8",
        r"exp_avg_sq \(h.%d",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGES)
def test_a_copy_that_has_changed_ends_the_run(
    tokens: Path, tmp_path: Path, what: str
) -> None:
    """A changed copy ends the run before anything of that step is saved. Each rank of the group
    with the copies reports it."""
    keys, place, row = DAMAGES[what]
    where, ranks = (3, "[37]") if FOURS[0] in keys else (1, "1")
    if HOSTS[0] in keys:
        ranks = "[135]"
    whole = made(*RANKS, *keys)
    report = "FN(report) {"
    assert whole.count(report) == 1
    turn = f"static int64_t n; if (++n == 3 && RANK == {where})"
    flip = f"((char *)a)[{place}] ^= 1;"
    binary = trainer.build(whole.replace(report, f"{report} {turn} {flip}"))
    saved = tmp_path / "saved"
    given = (
        "--data",
        tokens,
        "--steps",
        4,
        "--checkpoints",
        saved,
        "--save-every",
        1,
    )
    done = program.run(binary, *given, "--verify-every", 3)
    assert done.code == 3, done.err
    assert re.search(
        rf"^rank {ranks}: after step 3 this rank's {row}.* and the tensors stored with it\)",
        done.err,
        re.M,
    ), done.err
    assert sorted(x.name for x in saved.glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]
