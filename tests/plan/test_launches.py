"""test_launches.py -- tests that every launch of every plan fits a processor: its kernel's
registers and shared memory, as ptxas reported them (cuda_budget.txt), and the kernel's limit of
threads."""

import pytest
from zg.facts import grids
from zg.plan.plan import Plan

from tests import cuda_budget
from tests.cuda_budget import Use
from tests.lib import launches, zk
from tests.lib.launches import Launch
from tests.lib.plans import EACH, keys, planned
from tests.plan.test_plan import GOLDEN_WAYS, SMALL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not zk.runs(zk.EMULATED),
        reason="this processor cannot run the emulation",
    ),
]

# More widths and heads than the specs have: they decide how many elements a thread takes and how
# many threads share a row.
NORMS, MLP = "model.units[1].ops[0].residual", "model.units[1].ops[1].residual"
SHAPES = [
    (
        "gpt-tiny",
        width,
        (f"{NORMS}[1].attention.heads={heads}", f"{MLP}[2].gelu={gelu}"),
    )
    for width, heads, gelu in (
        (63, 3, "erf"),
        (384, 3, "tanh"),
        (768, 3, "erf"),
        (4224, 33, "tanh"),
        (8448, 66, "tanh"),
        (8455, 95, "erf"),
    )
]
SHAPES += [
    (
        "qwen3-tiny",
        width,
        (
            f"{NORMS}[1].attention.head_dim={head}",
            f"{MLP}[1].linear.out=[{inner}, {inner}]",
        ),
    )
    for width, head, inner in (
        (61, 6, 7),
        (128, 256, 48),
        (520, 130, 9),
        (8256, 64, 64),
        (8257, 34, 33),
    )
]
TYPES = {
    "f32": ("train.precision=f32",),
    "bf16": ("train.precision=bf16",),
    "f16": ("train.precision=f16",),
    "bf16 alone": (
        "train.precision=bf16",
        "train.optimizer.moments=bf16",
        "train.optimizer.masters=false",
    ),
    "many ranks": (
        "train.precision=bf16",
        "train.optimizer.moments=bf16",
        "cluster.ranks=2000",
        "train.global_batch=4000",
        "train.micro_batch=1",
        "train.sum=tree",
    ),
}

GPUS = "targets=[cpu, sm_80, sm_90, sm_100]"
# As compiled
SCOPE = {
    "sm_80": "sm_80",
    "sm_90": "sm_90a",
    "sm_100": "sm_100",
}
# Most bytes of dynamic shared memory that need no opt-in in cuda.h
PLAIN = 48 << 10

# A warp has 32 times a thread's registers, rounded up to 256, and a block's warps are counted in
# multiples of four (cuda_occupancy.h).
REGISTERS, STEP, SIDES = 65536, 256, 4
USES = {
    (use.kernel, use.target): use
    for use in cuda_budget.read(cuda_budget.TABLE.read_text())
}


def registers(use: Use, block: int) -> int:
    """Return the registers that a block of threads is granted."""
    of_warp = grids.up(32 * use.registers, STEP)
    return of_warp * grids.up(-(-block // 32), SIDES)


def wrong(target: str, launch: Launch, use: Use) -> list[str]:
    """Return the reasons why a launch does not fit a processor."""
    shared = launch.shared + use.shared
    most = PLAIN if launch.shared <= PLAIN else grids.SHARED[target]
    return [
        f"{launch} on {target}: {what} {have}, at most {limit}"
        for what, have, limit in (
            ("threads", launch.block, use.threads),
            ("registers", registers(use, launch.block), REGISTERS),
            ("bytes of shared memory", shared, most),
        )
        if have > limit
    ]


def all_wrong(p: Plan) -> list[str]:
    """Return these reasons for all launches, and grids that no launch uses. A norm with frozen
    weights keeps the grid for their gradients, which are null."""
    frozen = {
        c.launch
        for fn in p.fns
        for c in fn.calls
        if c.kernel == "zk_qknorm_bwd" and "null" in c.args
    }
    idle = {
        (run.launch, target, grid.block, grid.shared)
        for run in p.runs
        for grid in run.grids
        for target in run.targets
        if run.launch not in frozen
    }
    found = set()
    for target, run, made in launches.of_plan(p):
        idle -= {(run.launch, target, launch.block, launch.shared) for launch in made}
        found |= {
            text
            for launch in made
            for text in wrong(target, launch, USES[launch.kernel, SCOPE[target]])
        }
    return sorted(found) + sorted(f"{row} is idle" for row in idle)


@EACH
def test_launches_of_every_spec_fit(name: str, way: str) -> None:
    assert all_wrong(planned(name, *keys(name, way))) == []


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize(
    "name,width,sets", SHAPES, ids=lambda x: None if type(x) is tuple else x
)
def test_launches_of_other_shapes_fit(name: str, width: int, sets, types: str) -> None:
    assert (
        all_wrong(
            planned(
                name,
                f"model.width={width}",
                f"{MLP}[3].linear.out={width}",
                *sets,
                *TYPES[types],
            )
        )
        == []
    )


@pytest.mark.parametrize("way", GOLDEN_WAYS)
def test_launches_of_golden_plans_fit(way: str) -> None:
    p = planned(SMALL, *GOLDEN_WAYS[way], GPUS)
    assert {target for target, _, _ in launches.of_plan(p)} == set(SCOPE)
    assert all_wrong(p) == []
