"""test_probe.py -- tests --check-gpus under emulation, where a GPU can be made slow."""

from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

from tests.cuda import test_cuda
from tests.lib import program, trainer, zk
from tests.runtime.test_handshake import together

KEYS = ("train.micro_batch=1", "train.global_batch=4")
ALL = r"product {0}, copy {1}, gather {1}"
RATE = r"[\d.e+-]+ TFLOP/s", r"[\d.e+-]+ GB/s"
SHARE = tuple(f"{rate} \\(\\d+ %\\)" for rate in RATE)


def built(*keys: str) -> pathlib.Path:
    return trainer.build(
        trainer.generate(test_cuda.SPEC, *KEYS, *keys), trainer.EMULATED
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ("cluster.ranks=2", "zero.stage=3"),
        ("cluster.ranks=4", "zero.stage=0", "train.precision=bf16"),
        ("cluster.ranks=2", "zero.stage=1", "zero.overlap_comm=false"),
        (
            "cluster.ranks=4",
            "cluster.local=2",
            "zero.stage=3",
            "zero.shard_size=2",
            "train.precision=f16",
        ),
    ],
)
def test_each_rank_has_a_line(keys: tuple[str, ...]) -> None:
    done = program.run(built(*keys), "--check-gpus")
    assert done.code == 0, done.err
    n = int(keys[0].removeprefix("cluster.ranks="))
    first, *lines = done.out.splitlines()
    assert re.fullmatch(f"median of {n} ranks: {ALL.format(*RATE)}", first), first
    assert len(lines) == n
    for r, line in enumerate(lines):
        own = rf"rank {r}: host \S+, {r} of {n} there: {ALL.format(*SHARE)}"
        assert re.fullmatch(own, line), line


@pytest.mark.slow
def test_a_single_rank_gathers_nothing() -> None:
    done = program.run(built("cluster.ranks=1"), "--check-gpus")
    assert done.code == 0 and "copy" in done.out and "gather" not in done.out


@pytest.mark.slow
@pytest.mark.parametrize("slow,times", [(0, "1.3"), (1, "1.3"), (1, "1.05")])
def test_a_slow_gpu_is_named(tmp_path: pathlib.Path, slow: int, times: str) -> None:
    """A rank whose GPU has less than 85 % of the median ends with exit code 3."""
    given = "--check-gpus"
    ended = together(
        [built("cluster.ranks=2", "zero.stage=3")] * 2,
        tmp_path,
        given,
        given,
        more={slow: {"ZR_EMULATE_SLOW": times}},
    )
    found = times == "1.3"
    assert [code for code, _ in ended] == [3 * (found and r == slow) for r in (0, 1)]
    if found:
        assert re.search(
            rf"rank {slow} on host \S+: the GPU reaches 77 % of the median, less than 85 %; .*\n",
            ended[slow][1],
        ), ended


def test_a_cpu_has_no_such_check() -> None:
    source = trainer.generate(test_cuda.SPEC, *KEYS, "cluster.ranks=2")
    done = program.run(trainer.build(source), "--check-gpus")
    assert done.code == 2 and "an option of the program for GPUs" in done.err


def test_the_product() -> None:
    x, w = np.random.default_rng(1).standard_normal((2, 48, 48)).astype(np.float32)
    y = np.empty_like(x)
    zk.Kernels(zk.EMULATED).zk_probe(y, x, w, 48)
    assert abs(y - x @ w.T).max() < 48 * 2**-24 * 48 * 16
