"""test_margin.py -- tests train.sm_margin: SMs that a GPU's GEMMs leave to NCCL. In the emulation a
product's first choice depends on the number of SMs, and a product that gets fewer SMs than it
counts on, because of NCCL's communicators, ends the program."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from dataclasses import replace

import pytest
from zg.check import check
from zg.facts import reserve
from zg.plan import text
from zg.read import spec
from zg.write import explain

from tests.lib import law, plans, trainer
from tests.lib.patience import LIMIT
from tests.runtime import test_handshake

SPEC = law.path("gpt")
RECIPE = ("train.micro_batch=1", "train.global_batch=4", "train.sequence=16")
MARGIN = 12  # half of it is no power of two
PRODUCT = re.compile(r"(linear_(fwd|bwd_[xw])|slice_\w+)\.\d+")


def source(*keys: str, margin: int = MARGIN) -> str:
    return trainer.generate(
        SPEC, *RECIPE, *keys, *[f"train.sm_margin={margin}"] * (margin > 0)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("margin")
    trainer.write_tokens(made / "tokens", law.tokens(256, 2000))
    return made


def weights(
    folder: pathlib.Path,
    program: pathlib.Path,
    *options: object,
    **settings: object,
) -> str:
    return law.run(
        program,
        "--data",
        folder / "tokens",
        "--steps",
        2,
        *options,
        log=folder / "log",
        **settings,
    ).weights


def emulated(*keys: str, margin: int = MARGIN) -> pathlib.Path:
    return trainer.build(source(*keys, margin=margin), trainer.EMULATED)


def attempt(
    program: pathlib.Path, folder: pathlib.Path, **settings: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, "--data", folder / "tokens", "--steps", "1"],
        text=True,
        capture_output=True,
        timeout=LIMIT,
        env=os.environ | {k: str(v) for k, v in settings.items()},
    )


# ---- bits

SPREAD = {
    "one rank": ("cluster.ranks=1", "zero.stage=0"),
    "stage 3": ("cluster.ranks=2", "zero.stage=3"),
    "stage 2, 4 ranks": ("cluster.ranks=4", "zero.stage=2"),
    "hosts": ("cluster.ranks=4", "zero.stage=3", "cluster.local=2"),
    "one queue": (
        "cluster.ranks=2",
        "zero.stage=3",
        "zero.overlap_comm=false",
    ),
}


@pytest.mark.slow
def test_one_hash_over_ranks(folder: pathlib.Path) -> None:
    """Each margin has one hash of its own, whatever the number of ranks."""
    found = {name: weights(folder, emulated(*keys)) for name, keys in SPREAD.items()}
    assert len(set(found.values())) == 1, found
    assert (
        weights(folder, emulated(*SPREAD["stage 3"]), "--no-graph") == found["one rank"]
    )
    others = [weights(folder, emulated(*SPREAD["one rank"], margin=n)) for n in (0, 16)]
    assert len({*found.values(), *others}) == 3


def test_a_cpu_has_the_same_bits(folder: pathlib.Path) -> None:
    with_it, without = (
        weights(folder, trainer.build(source("cluster.ranks=2", margin=n)))
        for n in (MARGIN, 0)
    )
    assert with_it == without


# ---- SMs that NCCL takes


@pytest.mark.slow
@pytest.mark.parametrize("margin", [2, 12, 64])
def test_nccl_takes_no_more(folder: pathlib.Path, margin: int) -> None:
    done = attempt(emulated(*SPREAD["stage 3"], margin=margin), folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "was,becomes,held",
    [
        (".blocks = 6", ".blocks = 7", 14),
        (".channels = 4", ".channels = 8", 16),
    ],
)
def test_what_takes_more_is_seen(
    folder: pathlib.Path, was: str, becomes: str, held: int
) -> None:
    """A communicator with a block too many, or with channels that NCCL rounds up to eight, is
    detected (a control)."""
    text = source(*SPREAD["stage 3"])
    assert text.count(was) == 1
    done = attempt(trainer.build(text.replace(was, becomes), trainer.EMULATED), folder)
    assert done.returncode != 0
    assert (
        f"a product on 120 of 132 processors, beside communicators on {held}"
        in done.stderr
    )


def test_its_parts() -> None:
    """A communicator has blocks for half of the margin. Its channels are the largest power of two
    within them, and no more than without a margin."""
    assert reserve.channels(0) == reserve.CHANNELS == 8
    for margin in range(2, 65, 2):
        blocks, channels = reserve.blocks(margin), reserve.channels(margin)
        assert 2 * blocks == margin and 1 <= channels <= min(blocks, 8)
        assert channels == 8 or 2 * channels > blocks and not channels & channels - 1
        assert (
            reserve.nccl("sm_90", 4, margin)
            == (3 * channels * 12 + (blocks + 1) * 10) * 2**20
        )


def test_the_allowance_counts_them() -> None:
    """The allowance is part of the plan's device memory, and of the memory that the program
    requires before it starts NCCL."""
    keys = "cluster.ranks=2", "zero.stage=3"
    some, none = (
        plans.planned("gpt-tiny", *keys, f"train.sm_margin={n}") for n in (MARGIN, 0)
    )
    assert (
        reserve.device(none, "sm_90") - reserve.device(some, "sm_90")
        == (4 * 12 + (32 - MARGIN // 2) * 10) * 2**20
    )
    assert some.arena("sm_90") == none.arena("sm_90")
    assert reserve.device(some, "cpu") == reserve.device(none, "cpu")
    columns = re.findall(r'^ {4}\{"(\w+)", (\d+), (\d+), 0\},$', source(*keys), re.M)
    assert {name: int(n) for name, _, n in columns} == {
        name: reserve.nccl(name, 2, MARGIN) for name in some.head.targets
    }
    assert f"{reserve.device(some, 'sm_90'):,}" in explain.memory(some)


@pytest.mark.slow
def test_a_device_of_few_processors(folder: pathlib.Path) -> None:
    """A device with too few SMs for products, such as a slice of a GPU, is refused before anything
    starts."""
    program = emulated(*SPREAD["stage 3"], margin=16)
    for processors, code in ((16, 3), (18, 0)):
        done = attempt(program, folder, ZR_EMULATE_SMS=processors)
        assert done.returncode == code, done.stderr
        said = re.search(
            r"rank [01]: train\.sm_margin is 16, but device \d has 16 SMs; generate it "
            "again with a smaller one, or 0\n",
            done.stderr,
        )
        assert bool(said) == bool(code)


# ---- places that state the margin


def test_the_plan_says_it() -> None:
    """The plan states the margin for every product on every GPU and for nothing else, and so do
    outputs made from the plan."""
    # Some linears are in slices
    keys = (
        "cluster.ranks=2",
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=64",
        "zero.stage3_max_live_parameters=23000",
    )
    p = plans.planned("llama-tiny", *keys, f"train.sm_margin={MARGIN}")
    assert p.head.margin == MARGIN and text.parse(text.print_plan(p)) == p
    assert any(r.launch.startswith("slice_") for r in p.runs)
    for r in p.runs:
        product = PRODUCT.fullmatch(r.launch) and "cpu" not in r.targets
        assert r.margin == (MARGIN if product else 0), r
    assert f"leave {MARGIN} SMs to NCCL, 6 to each of two" in explain.explain(p)
    off = plans.planned("llama-tiny", *keys)
    assert "margin" not in text.print_plan(off) and "SMs" not in explain.explain(off)
    assert off == plans.planned("llama-tiny", *keys, "train.sm_margin=0")


@pytest.mark.parametrize("wrong", ["less", "on a cpu", "not a product", "the head"])
def test_a_plan_that_says_otherwise_is_refused(wrong: str) -> None:
    p = plans.planned("gpt-tiny", f"train.sm_margin={MARGIN}")
    row = next(
        n
        for n, r in enumerate(p.runs)
        if (
            r.grids
            if wrong == "not a product"
            else PRODUCT.fullmatch(r.launch)
            and ("cpu" in r.targets) == (wrong == "on a cpu")
        )
    )
    runs = list(p.runs)
    runs[row] = replace(runs[row], margin=MARGIN - 2 if wrong == "less" else MARGIN)
    head = replace(p.head, margin=16 if wrong == "the head" else MARGIN)
    check.check(p)
    with pytest.raises(
        check.CheckError, match=r"^launch \w+\.\d leaves \d+ SMs, not \d+"
    ):
        check.check(replace(p, head=head, runs=tuple(runs)))


def test_the_program_says_it() -> None:
    for margin, line in ((MARGIN, [f"sm_margin {MARGIN}"]), (0, [])):
        said = trainer.sh(
            trainer.build(source(margin=margin)), "--version"
        ).splitlines()
        assert [x for x in said if "margin" in x] == line


def test_without_a_gpu_it_has_no_effect() -> None:
    for targets, notes in (("cpu", 1), ("cpu, sm_90", 0)):
        made = spec.load(str(SPEC), ["train.sm_margin=2", f"targets=[{targets}]"])
        assert [
            n
            for n in made.notes
            if "train.sm_margin: has no effect on the target cpu" in n
        ] == list(made.notes) and len(made.notes) == notes


IDLE = {
    "one rank": "there are no collectives with one rank",
    "one queue": "without overlap_comm no GEMM runs during a collective",
}


@pytest.mark.parametrize("name", SPREAD)
def test_where_it_buys_nothing(name: str) -> None:
    """A note says that a margin without collectives beside products buys nothing, and NCCL is not
    limited."""
    keys = *SPREAD[name], f"train.sm_margin={MARGIN}"
    notes, idle = spec.load(str(SPEC), [*RECIPE, *keys]).notes, name in IDLE
    said = [n for n in notes if "train.sm_margin: leaves SMs unused" in n]
    assert len(said) == idle and (not idle or said[0].endswith(IDLE[name]))
    blocks, channels = (0, 8) if idle else (6, 4)
    text, p = source(*SPREAD[name]), plans.planned(str(SPEC), *RECIPE, *keys)
    assert f".margin = {MARGIN}, .blocks = {blocks}, .channels = {channels}," in text
    room = reserve.device(p, "sm_90") - p.arena("sm_90")
    if not p.axes:  # with several groups: test_gpu_memory.py
        without = reserve.bytes_of("sm_90", p.head.ranks, 0 if idle else MARGIN)
        assert room == without
    said = f"GEMMs leave {MARGIN} SMs " + (
        "unused" if idle else f"to NCCL, 6 {'on' if p.axes else 'to'} each"
    )
    assert said in explain.explain(p)


@pytest.mark.slow
def test_ranks_of_other_margins_do_not_mix(folder: pathlib.Path) -> None:
    programs = [emulated("cluster.ranks=2", margin=n) for n in (MARGIN, 16)]
    first, other = test_handshake.together(
        programs, folder, *["--data tokens --steps 1"] * 2
    )
    assert first[0] == 5 and other[0] == 4 and ": runs plan " in other[1], other


# ---- tables of algorithms


@pytest.mark.slow
def test_a_table_is_of_a_margin(folder: pathlib.Path) -> None:
    """A table's products state the number of SMs for which they were timed, and others are not
    used. The emulated library refuses an algorithm made for another number."""
    keys, margin = {}, 16
    for n in (0, margin):
        tuned = tune(emulated("cluster.ranks=1", margin=n), folder, folder / f"{n}")
        keys[n] = [row.split(" : ")[0] for row in tuned.splitlines()[1:-1]]
    assert (
        keys[margin] == [f"{key} on 116 SMs" for key in keys[0]] and len(keys[0]) >= 15
    )
    one, many = (
        emulated(*SPREAD[name], margin=margin) for name in ("one rank", "stage 3")
    )
    untuned = weights(folder, one)
    tuned = {
        weights(folder, program, "--gemms", folder / f"{margin}")
        for program in (one, many)
    }
    assert len(tuned) == 1 and tuned != {untuned}
    assert weights(folder, one, "--gemms", folder / "0") == untuned
    done = subprocess.run(
        [
            one,
            "--data",
            folder / "tokens",
            "--steps",
            "1",
            "--gemms",
            folder / "0",
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert f"/0: has 0 of {len(keys[0])} products\n" in done.stderr


def tune(program: pathlib.Path, folder: pathlib.Path, table: pathlib.Path) -> str:
    trainer.sh(program, "--data", folder / "tokens", "--gemms", table, "--tune")
    return table.read_text()
