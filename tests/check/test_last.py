"""test_last.py -- tests that dead slots are not read: a plan whose slot dies before its last use is
refused, and runs of its program show the error. This covers each class that ever dies."""

import pathlib
import re
from dataclasses import replace

import pytest
from zg.check import check
from zg.passes import last
from zg.plan.plan import Plan, Step

from tests.check.test_mutants import (  # noqa: F401
    SHARED,
    SMALL,
    data,
    planned,
    source,
    told,
)
from tests.lib import mutants, plans, trainer

MOVED = ("gpt-tiny", "zero.stage=3", "train.offload_activations=true")
LAYERS = (
    "gpt-tiny",
    "zero.stage=3",
    "train.accumulate=layers",
    "cluster.ranks=2",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.precision=bf16",
    "zero.stage3_param_persistence_threshold=0",
)
# A rank has two of four blocks, or one of four, whose activations wait on the host.
BLOCKS = (*SHARED, "cluster.ranks=2", "cluster.context_parallel=2")
ONE_BLOCK = (*SHARED, "cluster.context_parallel=4", "train.recompute=none")
CLASSES = {
    "x": SMALL,
    "save.block": SMALL,
    "dx": SMALL,
    "grad.block": SMALL,
    "near.x": MOVED,
    "near.save.block": MOVED,
    "ring.block": LAYERS,
    "grad.embed": LAYERS,
    "acc": LAYERS,
    "save_heads.block": ONE_BLOCK,
}


def calls(p: Plan, s: Step) -> bool:
    """Return whether a step may end a slot: it calls a function, or copies to the host."""
    return s.queue == "down" or s.op in {f.name for f in p.fns}


def sooner(p: Plan, cls: str) -> Plan:
    """Return the plan with a slot of the class dying at the use before its last."""
    section = p.section("micro_batch")
    steps = list(section.steps)
    ways = (
        mutants.early(steps, n, slot, lambda s: calls(p, s))
        for n, s in enumerate(steps)
        for slot in mutants.ends(s)
        if slot[0] == cls
    )
    return mutants.changed(p, section, next(way for way in ways if way))


@pytest.mark.slow
def test_these_are_all_that_die() -> None:
    kinds = {cls.partition(".")[0] for cls in CLASSES}
    dying = {
        c.name.partition(".")[0]
        for name in plans.NAMES
        if "tiny" in name
        for way in plans.WAYS
        for c in plans.planned(name, *plans.keys(name, way)).passing
    }
    assert dying <= kinds == set(last.DIES)
    shared = {c.name for c in planned(*BLOCKS).passing}
    assert shared >= {*last.PASSES} and not {*last.PASSES} & dying


BOTH = pytest.mark.parametrize(
    "kind",
    [trainer.GCC, pytest.param(trainer.EMULATED, marks=pytest.mark.slow)],
    ids=["cpu", "emulated"],
)


# Classes that are tried on an emulated GPU, one of each plan.
EACH_PLAN = (
    "dx",
    "near.x",
    "ring.block",
)


@pytest.mark.parametrize(
    "cls,kind",
    [
        *((cls, trainer.GCC) for cls in CLASSES),
        *(
            pytest.param(
                cls,
                trainer.EMULATED,
                marks=pytest.mark.slow if cls in EACH_PLAN else pytest.mark.exhaustive,
            )
            for cls in CLASSES
        ),
    ],
    ids=[f"{cls}-{kind}" for kind in ("cpu", "emulated") for cls in CLASSES],
)
def test_what_is_read_dead(cls: str, kind: trainer.Kind, data: pathlib.Path) -> None:
    """The plan is refused. An eager run, which poisons nothing, is unaffected; late and shuffled
    runs show the error."""
    p = planned(*CLASSES[cls])
    mutant = sooner(p, cls)
    assert mutants.refused(mutant)
    want = told(trainer.build(source(p), kind), data, "eager")
    program = trainer.build(source(mutant), kind)
    assert want[-1].startswith("weights") and told(program, data, "eager") == want
    for queue in ("late", "shuffled:1"):
        assert told(program, data, queue) != want


# Changes of train.c that read a slot after its death, by the command that ends it: copied to the
# host again; ended before it is sent.
BEHIND = {
    "copy": (
        MOVED,
        r"(zr_copy\(z, ZR_DOWN, )zr_last\((NEAR_X\(0\))\)(.*\n)",
        r"\g<0>\1\2\3",
    ),
    "done": (
        SMALL,
        r"(?=zr_alltoall\(z, ZR_REDUCE, GROUP_ALL, (GRAD_HEAD\(0\)), .*(INBOX\(.\)))",
        r"zr_done(z, ZR_REDUCE, GROUP_ALL, \2, zr_last(\1));\n    ",
    ),
}


@BOTH
@pytest.mark.parametrize("ends", BEHIND)
def test_each_command_ends_what_is_marked(
    ends: str, kind: trainer.Kind, data: pathlib.Path
) -> None:
    keys, find, put = BEHIND[ends]
    text = source(planned(*keys))
    made, found = re.subn(find, put, text)
    assert found == 1
    want = told(trainer.build(text, kind), data, "eager")
    program = trainer.build(made, kind)
    assert want[-1].startswith("weights") and told(program, data, "eager") == want
    assert told(program, data, "late") != want


@BOTH
def test_what_an_evaluation_leaves(data: pathlib.Path, kind: trainer.Kind) -> None:
    """The next evaluation, of validation or sampling, would read a dead slot if its embedding were
    missing."""
    p = planned(*SMALL)
    section = p.section("eval")
    steps = [s for s in section.steps if s.op != "fwd.embed"]
    mutant = mutants.changed(p, section, steps)
    assert mutants.refused(mutant)
    program = trainer.build(source(mutant), kind)
    args = ("--data", data, "--steps", 0, "--queue")
    eager, late = (
        trainer.sh(program, "--val", data, *args, queue) for queue in ("eager", "late")
    )
    assert "val loss" in eager and "nan" not in eager and "nan" in late
    drawn = [
        trainer.sh(program, "--sample", 9, *args, queue, encoding="latin-1").partition(
            "to the first step\n"
        )[2]
        for queue in ("eager", "late")
    ]
    assert all(drawn) and drawn[0] != drawn[1]


def test_a_mark_where_nothing_can_die() -> None:
    """Last-use marks are refused on the operands of gathers, sends and tokens, tried on every such
    step."""
    p = planned(*SMALL)
    section = p.section("micro_batch")

    def marked(refs):
        return tuple(replace(r, last=True) for r in refs)

    def outs(s):
        return replace(s, outs=marked(s.outs))

    def ins(s):
        return replace(s, ins=marked(s.ins))

    changes = [(op, outs, "cannot end here") for op in ("gather", "alltoall", "batch")]
    changes += [(op, ins, "cannot end here") for op in ("alltoall", "done", "sum")]
    # a state never dies
    changes.append(("gather", ins, "param.embed.* still holds p of embed"))
    for op, change, said in changes:
        mine = [s.op.partition(".")[0] == op for s in section.steps]
        assert any(mine)
        steps = [
            change(s) if own else s for s, own in zip(section.steps, mine, strict=True)
        ]
        mutant = mutants.changed(p, section, steps)
        with pytest.raises(check.CheckError, match=said):
            check.play(mutant, check.functions(mutant, check.units(mutant)))


def test_a_mark_of_what_has_no_slot(data: pathlib.Path) -> None:
    """A run ends with an error if a hand-edited program marks an address that is no slot."""
    text = source(planned(*SMALL))
    program = trainer.build(text.replace("next, CTL(0)", "next, zr_last(CTL(0))"))
    assert (
        told(program, data, "eager") == told(program, data, "late") == ["exit code 4"]
    )
