"""test_gpu_memory.py -- tests device memory under emulation: the plan's arena and the libraries'
share are taken at the start, and more steps or layers take not a byte more."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from zg.facts import reserve
from zg.facts.commands import COLLECTIVES

from tests.lib import plans, trainer
from tests.lib.patience import LIMIT

sys.path.append(str(trainer.ROOT / "bench"))
from gpu_check import memory_of  # noqa: E402

SPEC = trainer.ROOT / "model_specs" / "gpt-tiny.yaml"
KEYS = (
    "train.micro_batch=1",
    "train.global_batch=4",
    "train.sequence=16",
    "cluster.ranks=2",
    "zero.stage=3",
)
# Bytes that the emulated device allocates at a time, like a GPU
PAGE = 2 << 20
# Two handles of cuBLASLt; three communicators and their connections
LIBRARIES = (2 + 3 * 3) * PAGE
# Of a step: begin, micro-batch, update; a validation has one more
GRAPHS = 3 * PAGE


FEW = ("--val-tokens", "64")


def taken(
    folder: pathlib.Path,
    blocks: int,
    steps: int,
    *options: str,
    **settings: str,
) -> dict[str, int]:
    """Return the memory that a run reports, and its plan's arena."""
    spec, tokens = folder / f"{blocks}.yaml", folder / "tokens"
    spec.write_text(SPEC.read_text().replace("blocks: 3", f"blocks: {blocks}"))
    trainer.write_tokens(tokens, [i * i % 251 for i in range(3000)])
    program = trainer.build(trainer.generate(spec, *KEYS), trainer.EMULATED)
    done = subprocess.run(
        [program, "--data", tokens, "--steps", str(steps), *options],
        text=True,
        capture_output=True,
        timeout=LIMIT,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stderr
    said = re.search(
        r"^device memory: arena (\d+) bytes \((\d+) taken\), libraries (\d+)$",
        done.stdout,
        re.M,
    )
    lost = re.findall(
        r"^device memory: (-?\d+) bytes less are free than after the first step$",
        done.stdout,
        re.M,
    )
    found = dict(
        zip(
            ("arena", "taken", "libraries"),
            map(int, said.groups()),
            strict=True,
        )
    )
    assert (
        f"\ndevice memory: NCCL's communicators {3 * PAGE} bytes when they were made\n"
        in done.stdout
    )
    seen = memory_of(done.stdout)
    assert {name: seen[name] for name in found} == found
    assert f"\ndevice memory: {seen['found']} bytes before the arena (" in done.stdout
    assert seen["lost"] == sum(map(int, lost))
    return found | {
        "plan": plans.planned(str(spec), *KEYS).arena("sm_90"),
        "lost": sum(map(int, lost)),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "options,graphs",
    [
        ((), GRAPHS),
        (("--no-graph",), 0),
        (("--val", "tokens", *FEW, "--val-every", "2"), GRAPHS + PAGE),
        (("--val", "tokens", *FEW, "--no-graph"), 0),
        (("--checkpoints", "ck", "--save-every", "1"), GRAPHS),
    ],
)
def test_nothing_grows(
    tmp_path: pathlib.Path, options: tuple[str, ...], graphs: int
) -> None:
    """Memory does not grow with steps; a graph that is played later takes its memory before the
    first step, too."""
    options = tuple(str(tmp_path / o) if o in ("tokens", "ck") else o for o in options)
    found = taken(tmp_path, 3, 4, *options)
    assert found["arena"] == found["plan"] <= found["taken"] < found["plan"] + PAGE
    assert (found["libraries"], found["lost"]) == (LIBRARIES + graphs, 0)


@pytest.mark.slow
def test_a_communicator_for_each_queue_and_group(
    tmp_path: pathlib.Path,
) -> None:
    """There is a communicator for each queue and group that the plan uses, and no other."""
    keys = (
        *(*KEYS, "cluster.ranks=4", "cluster.local=2"),
        *("zero.stage3_param_persistence_threshold=0",),
    )
    trainer.write_tokens(tmp_path / "tokens", [i * i % 251 for i in range(3000)])
    done = subprocess.run(
        [
            trainer.build(trainer.generate(SPEC, *keys), trainer.EMULATED),
            *("--data", tmp_path / "tokens", "--steps", "2"),
        ],
        text=True,
        capture_output=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    p = plans.planned(str(SPEC), *keys)
    used = [pair for pair, ops in p.meetings.items() if ops & {*COLLECTIVES}]
    assert len(used) == 5 < 3 * len(p.groups)
    assert (
        f"\ndevice memory: NCCL's communicators {len(used) * PAGE} bytes when they were made\n"
        in done.stdout
    )
    assert "less are free than after the first step" not in done.stdout


@pytest.mark.slow
def test_growth_is_seen(tmp_path: pathlib.Path) -> None:
    """An emulated NCCL that keeps a page in every collective is detected (a control)."""
    found = taken(tmp_path, 3, 3, ZR_EMULATE_LEAK="1")
    # Two steps after the first
    assert found["lost"] > 0 and found["lost"] % (2 * PAGE) == 0


@pytest.mark.slow
def test_layers_cost_what_the_plan_says(tmp_path: pathlib.Path) -> None:
    few, many = (taken(tmp_path, blocks, 1) for blocks in (2, 9))
    assert few["libraries"] == many["libraries"] == LIBRARIES + GRAPHS
    assert few["arena"] == few["plan"] and many["arena"] == many["plan"]
    grown = many["plan"] - few["plan"]
    assert grown > PAGE and abs(many["taken"] - few["taken"] - grown) < PAGE


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("zero.offload_optimizer.device=cpu",)])
def test_memory_that_cannot_be_pinned(
    tmp_path: pathlib.Path, more: tuple[str, ...]
) -> None:
    """All ranks end at the start with the documented code and advice if memory cannot be pinned.
    With a byte more room they run, and save beside steps."""
    trainer.write_tokens(tmp_path / "tokens", [i * i % 251 for i in range(3000)])
    program = trainer.build(trainer.generate(SPEC, *KEYS, *more), trainer.EMULATED)
    need = plans.planned(str(SPEC), *KEYS, *more).host + reserve.BOUNCE
    for room, code in ((need - 1, 3), (need, 0)):
        done = subprocess.run(
            [
                *(program, "--data", tmp_path / "tokens", "--steps", "2"),
                *("--checkpoints", tmp_path / "ck", "--save-every", "1"),
            ],
            text=True,
            capture_output=True,
            timeout=LIMIT,
            env=os.environ | {"ZR_EMULATE_PINNED": str(room)},
        )
        assert done.returncode == code, done.stderr
        said = re.search(
            r"rank [01]: .*pinning \d+\.\d{3} GiB of the host's memory: .*; end other "
            "programs, or generate with more ranks",
            done.stderr,
        )
        assert bool(said) == bool(code)


@pytest.mark.slow
def test_a_device_that_is_too_full_for_nccl(tmp_path: pathlib.Path) -> None:
    """A device too full for NCCL is refused before the arena is taken, because NCCL's buffers come
    after it."""
    trainer.write_tokens(tmp_path / "tokens", [i * i % 251 for i in range(3000)])
    program = trainer.build(trainer.generate(SPEC, *KEYS), trainer.EMULATED)
    need = plans.planned(str(SPEC), *KEYS).arena("sm_90") + reserve.nccl("sm_90", 2)
    for room, code in ((need - 1, 3), (need, 0)):
        done = subprocess.run(
            [program, "--data", tmp_path / "tokens", "--steps", "1"],
            text=True,
            capture_output=True,
            timeout=LIMIT,
            env=os.environ | {"ZR_EMULATE_FREE": str(room)},
        )
        assert done.returncode == code, done.stderr
        assert ("and NCCL up to 0.416 GiB more" in done.stderr) == bool(code)


def test_who_has_no_allowance() -> None:
    assert reserve.nccl("sm_90", 1) == reserve.nccl("cpu", 8) == 0
