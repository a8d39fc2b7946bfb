"""test_notes.py -- tests zgen's notes on plans that a user may regret, and that following them
helps."""

import re
import subprocess

import pytest
from zg.predict import cost
from zg.read import spec
from zg.search import search
from zg.write import explain, notes

from tests.lib import trainer

MANY = "train.global_batch=512", "train.micro_batch=1"


def told(name: str, *keys: str) -> list[str]:
    read = spec.load(f"{trainer.ROOT}/model_specs/{name}.yaml", keys)
    built = search.find(read)
    return list(notes.notes(built.plan, lambda: search.other_rules(built.spec)))


def wire(name: str, *keys: str) -> int:
    read = spec.load(f"{trainer.ROOT}/model_specs/{name}.yaml", keys)
    return cost.training_wire(search.find(read).plan).bytes


def test_a_wire_of_many_micro_batches_is_told() -> None:
    (note,) = told("gpt2-124m", *MANY)
    assert (
        "191,038,263,872 bytes in a step of 256 micro-batches, 256 times the 3P (W-1)/W of one"
        in note
    )
    less = wire("gpt2-124m", *MANY, "train.accumulate=layers")
    assert "train.accumulate=layers" in note and less == 64_227_947_072
    assert "train.micro_batch" in note
    assert wire("gpt2-124m", MANY[0], "train.micro_batch=64") == pytest.approx(
        191_038_263_872 / 64, rel=0.01
    )


def test_stages_without_gathers_name_no_layers() -> None:
    (note,) = told("gpt2-124m", *MANY, "zero.stage=2")
    assert "2P (W-1)/W" in note and "train.accumulate" not in note


@pytest.mark.parametrize("micro_batches,said", [(3, False), (5, True)])
def test_a_few_micro_batches_are_not(micro_batches: int, said: bool) -> None:
    batch = f"train.global_batch={4 * micro_batches}"
    found = told("demo", "cluster.ranks=2", "train.micro_batch=2", batch)
    assert bool(found) == said


def test_one_rank_has_no_wire() -> None:
    assert told("demo", "cluster.ranks=1", "train.global_batch=64") == []


def test_sums_that_another_rule_would_spare_are_told() -> None:
    keys = ("cluster.ranks=1", *MANY, "train.sum=tree")
    (note,) = told("gpt2-124m", *keys)
    held, least = (int(n.replace(",", "")) for n in re.findall(r"([\d,]{9,}) \(", note))
    fold = search.find(
        spec.load(
            f"{trainer.ROOT}/model_specs/gpt2-124m.yaml",
            ("cluster.ranks=1", *MANY, "train.sum=fold"),
        )
    ).plan
    assert "with train.sum=tree; train.sum=fold takes" in note
    assert least == cost.sums(fold) and held - least > notes.MUCH
    assert explain.size(least) in note


def test_sums_that_no_rule_would_spare_are_not() -> None:
    """No note is given if another rule spares little: two ranks of gpt2-124m have 0.93 GiB of sums,
    and fold would spare little of those of llama3-8b."""
    keys = ("train.micro_batch=64", "train.global_batch=512")
    assert not [n for n in told("gpt2-124m", *keys) if "train.sum" in n]
    assert not [n for n in told("llama3-8b") if "train.sum" in n]


def test_the_command_says_it() -> None:
    done = subprocess.run(
        [
            trainer.ROOT / "gen/zgen",
            trainer.ROOT / "model_specs/gpt2-124m.yaml",
            *(word for key in MANY for word in ("--set", key)),
            "--emit",
            "plan",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stderr.startswith("zgen: note: wire: a rank receives")


def test_a_rule_that_cannot_be_is_no_way() -> None:
    """A rule of sums that is impossible is not suggested: no GPU adds the gradients of so many
    ranks as one tree, so fold stays, and nothing is refused."""
    keys = ("zero.stage=0", "cluster.ranks=8192", "train.global_batch=16384")
    notes_ = told("gpt2-1558m", *keys, "train.micro_batch=1", "train.sum=fold")
    assert not any("train.sum" in note for note in notes_)
