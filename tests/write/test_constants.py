"""test_constants.py -- every constant and array that a train.c uses is declared there, once."""

import pathlib
from itertools import product

import pytest
from zg.plan.plan import Plan

from tests.check.test_mutants import planned, source
from tests.lib import trainer

PIECES = (
    "zero.stage3_param_persistence_threshold=0",
    "zero.reduce_bucket_size=5000",
    "zero.allgather_bucket_size=5000",
)
HOST = (
    "zero.offload_optimizer.device=cpu",
    "zero.sub_group_size=3000",
    "zero.reduce_bucket_size=9000",
)
GRIDS = [(4, 2, 0), (8, 4, 2), (8, 2, 4), (8, 0, 4), (8, 4, 4), (16, 4, 8)]


def declared_once(p: Plan, folder: pathlib.Path) -> None:
    """The compiler finds each constant, and no second one of its name."""
    path = folder / "train.c"
    path.write_text(source(p))
    words = ("-std=gnu11", "-fsyntax-only", "-Wall", "-Wextra", "-Werror")
    quiet = "-Wno-unused-function"
    trainer.sh("gcc", *words, quiet, "-Iruntime", "-Ikernels", path)


@pytest.mark.parametrize("stage,grid", [*product((1, 2, 3), GRIDS)])
def test_grids_in_pieces(
    stage: int, grid: tuple[int, int, int], tmp_path: pathlib.Path
) -> None:
    ranks, local, shared = grid
    more = [f"cluster.local={local}"] * (local > 0)
    more += [f"zero.shard_size={shared}"] * (shared > 0)
    declared_once(
        planned(
            "gpt-tiny",
            f"zero.stage={stage}",
            f"cluster.ranks={ranks}",
            "train.micro_batch=1",
            f"train.global_batch={2 * ranks}",
            *more,
            *PIECES,
        ),
        tmp_path,
    )


@pytest.mark.parametrize("ratio", ["0.5", "0.7", "1.0"])
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam"])
def test_a_part_on_the_host(ratio: str, optimizer: str, tmp_path: pathlib.Path) -> None:
    declared_once(
        planned(
            "gpt-tiny",
            "zero.stage=3",
            "cluster.ranks=2",
            "train.global_batch=8",
            f"zero.offload_optimizer.ratio={ratio}",
            f"train.optimizer.type={optimizer}",
            *HOST,
        ),
        tmp_path,
    )


def test_windows_of_a_block_in_parts(tmp_path: pathlib.Path) -> None:
    """A block that is gathered in parts has arrays of windows for each part."""
    p = planned(
        "llama-tiny",
        "zero.stage3_max_live_parameters=17000",
        "zero.stage3_prefetch_bucket_size=0",
        "zero.stage3_param_persistence_threshold=0",
        "model.units[1].ops[0].residual[1].attention.window=[40,17]",
    )
    assert "static const int64_t block_0_window[] = {40, 17};" in source(p)
    declared_once(p, tmp_path)
