"""test_activations.py -- tests which values `train.offload_activations` moves to the host arena:
those that a backward reads. The model has blocks of plain linears, whose backward reads the input
for the weight's gradient alone."""

import pathlib

import pytest
import yaml
from zg.check import check
from zg.plan.plan import Plan
from zg.read import spec
from zg.search import search

from tests.lib import law, trainer

WIDTH, T, VOCAB = 64, 8, 16
LORA = {"rank": 2, "alpha": 4, "match": ["down"]}
# For each case: keys of `train` beside the model, and the units whose input a backward reads.
CASES = {
    "nothing is frozen": ({}, [0, 1, 2, 3, 4, 5]),
    "the lower entry": (
        {"optimizer": {"groups": [{"match": ["h.*"], "frozen": True}]}},
        [3, 4, 5],
    ),
    "the upper entry": (
        {"optimizer": {"groups": [{"match": ["g.*"], "frozen": True}]}},
        [0, 1, 2],
    ),
    "one layer": (
        {"optimizer": {"groups": [{"match": ["h.1.*"], "frozen": True}]}},
        [0, 2, 3, 4, 5],
    ),
    "adapters": ({"lora": LORA}, []),
    "adapters, whose inputs are recomputed": (
        {"lora": LORA, "recompute": "full"},
        [0, 1, 2, 3, 4, 5],
    ),
}


def path_of(folder: pathlib.Path, case: str) -> pathlib.Path:
    def linear(name: str, out: int = WIDTH) -> dict:
        return {"linear": {"name": name, "out": out}}

    def blocks(name: str) -> dict:
        ops = [{"residual": [linear("up"), linear("down")]}]
        return {"blocks": 3, "name": name + ".{l}", "ops": ops}

    more, _ = CASES[case]
    train = {
        "global_batch": 4,
        "micro_batch": 1,
        "sequence": T,
        **more,
        "optimizer": {"lr": 0.1, **more.get("optimizer", {})},
    }
    units = [{"embedding": {"tokens": "t"}}, blocks("h"), blocks("g")]
    model = {
        "vocab": VOCAB,
        "width": WIDTH,
        "names": "llama",
        "units": [*units, {"head": [linear("out", VOCAB)]}],
    }
    path = folder / "spec.yaml"
    path.write_text(
        yaml.safe_dump({"model": model, "train": train, "targets": ["cpu"]})
    )
    return path


def planned(path: pathlib.Path, *keys: str) -> Plan:
    p = search.find(spec.load(str(path), keys)).plan
    check.check(p)
    return p


@pytest.mark.parametrize("case", CASES)
def test_what_backward_reads_goes(tmp_path: pathlib.Path, case: str) -> None:
    """Each such value goes to the host and back once, to a place of its own, except the last three
    of seven."""
    p = planned(path_of(tmp_path, case), "train.offload_activations=true")
    places = range(sum(n < 4 for n in CASES[case][1]))
    moves = [
        (s.queue, s.outs[0].index if s.queue == "down" else s.ins[0].index)
        for s in p.section("micro_batch").steps
        if s.op == "copy" and "far.x" in (s.ins[0].cls, s.outs[0].cls)
    ]
    down = [("down", n) for n in places]
    assert moves == down + [("up", n) for n in reversed(places)]
    assert sum(c.slots for c in p.classes if c.name == "far.x") == len(places)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one layer", "the upper entry", "adapters"])
def test_bits(tmp_path: pathlib.Path, case: str) -> None:
    path = path_of(tmp_path, case)
    trainer.write_tokens(tmp_path / "tokens", law.tokens(VOCAB, 400))
    ways = {
        (): "eager",
        ("train.offload_activations=true",): "shuffled:1",
        (
            "train.offload_activations=true",
            "zero.stage=3",
            "zero.stage3_param_persistence_threshold=0",
            "cluster.ranks=2",
        ): "late",
    }
    found = [
        law.run(
            trainer.build(trainer.generate(path, *way)),
            *("--data", tmp_path / "tokens", "--steps", 3),
            *("--val", tmp_path / "tokens", "--val-every", 2),
            *("--queue", queue),
            log=tmp_path / "log",
        )
        for way, queue in ways.items()
    ]
    assert all(x == found[0] for x in found)
