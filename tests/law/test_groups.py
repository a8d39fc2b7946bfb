"""test_groups.py -- tests groups of tensors with rates and decays of their own. Frozen tensors keep
their bits and have no part in the norm; a flat that is frozen whole has no state."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from zg.check import check
from zg.facts import ops
from zg.plan import plan
from zg.read import spec as reader
from zg.search import search

from tests.law import test_optimizers, test_reference
from tests.lib import law, oracle, trainer, zk

EMBED = '{match: [wte.weight, "wpe.*"], frozen: true}'
PART = '{match: ["*.c_attn.*", "ln_f.*"], frozen: true}'
OWN = '{match: ["*.mlp.*.weight"], lr_factor: 0.25, weight_decay: 0.3}'


def groups(*listed: str) -> str:
    return f"train.optimizer.groups=[{', '.join(listed)}]"


def planned(*keys: str) -> plan.Plan:
    p = search.find(reader.load(str(law.path("gpt")), keys)).plan
    check.check(p)
    return p


def test_the_first_match_has_a_tensor() -> None:
    p = planned(
        groups(
            '{match: ["*.ln_1.*"], frozen: true}',
            OWN,
            '{match: ["*.bias", "*ln_1*", "h.*"], lr_factor: 2}',
        )
    )
    has = {t.name: (t.rate, t.decay, t.frozen) for t in p.tensors}
    assert has["h.{l}.ln_1.bias"][2] == has["h.{l}.ln_1.weight"][2] == 1
    assert has["h.{l}.mlp.c_fc.weight"] == (0.25, 0.3, 0)
    assert has["h.{l}.mlp.c_fc.bias"] == (2.0, 0.0, 0)
    assert has["h.{l}.attn.c_attn.weight"] == (2.0, 0.1, 0) and has["wte.weight"] == (
        1.0,
        0.1,
        0,
    )


def test_a_group_that_gets_no_tensor_is_told() -> None:
    last = '{match: ["h.0.attn.c_attn.bias", "h.*.mlp.c_fc.weight"], frozen: true}'
    first = '{match: ["*.bias"], lr_factor: 2}', OWN
    told = "--set: train.optimizer.groups[2].match: has no effect: earlier groups already match every"

    def notes(*listed):
        return reader.load(str(law.path("gpt")), [groups(*listed)]).notes

    assert [note.startswith(told) for note in notes(*first, last)] == [True]
    assert notes(*first) == notes(first[0], last) == ()


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("listed", [[EMBED], [PART, OWN]], ids=["a flat", "parts"])
def test_frozen_stays_to_the_bit(
    tmp_path: pathlib.Path, listed: list[str], precision: str
) -> None:
    """Frozen tensors keep the bits that functions read (rounded in bf16). The others change, and
    the norm of the first step is that of their gradients."""
    path, params, tokens, _ = test_reference.setting("gpt")
    keys = (
        groups(*listed),
        f"train.precision={precision}",
        "train.schedule.warmup=0",
    )
    after = trainer.train(path, tmp_path, params, tokens, 3, *keys)
    p = planned(*keys)
    frozen = {
        part.split("=")[0].replace("{l}", str(l))
        for t in p.tensors
        if t.frozen
        for part in t.parts
        for l in range(t.count)
    }
    assert frozen and frozen < set(params)
    for name, x in params.items():
        read = zk.rounded(np.float32(x), precision)
        assert (after[name].tobytes() == read.tobytes()) == (name in frozen), name
    spec = reader.load(str(path), keys)
    batch = oracle.batch(tokens, spec.train.sequence, 0, spec.train.global_batch)
    _, _, grads = oracle.gradients(spec, params, *batch)
    norm = np.sqrt(
        sum(float((g * g).sum()) for n, g in grads.items() if n not in frozen)
    )
    first = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[1])
    assert abs(first["norm"] - norm) <= (1e-5 if precision == "f32" else 0.02) * norm


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_law(tmp_path: pathlib.Path, precision: str) -> None:
    found = test_optimizers.lawful(
        tmp_path,
        "gpt",
        groups(PART, EMBED, OWN),
        f"train.precision={precision}",
    )
    assert len(found) == 1


@pytest.mark.parametrize(
    "more",
    [(), ("train.precision=bf16",), ("zero.offload_optimizer={device: cpu}",)],
    ids=["f32", "bf16", "on the host"],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_flat_that_is_frozen_whole_has_no_state(
    stage: int, more: tuple[str, ...]
) -> None:
    """A flat that is frozen whole has no moments and no master. With a tied head the final norm
    lies in the embedding's flat."""
    keys = (
        f"zero.stage={stage}",
        "zero.stage3_param_persistence_threshold=0",
        *more,
    )
    p = planned(groups(EMBED, '{match: ["ln_f.*"], frozen: true}'), *keys)

    def states(p, flat):
        return [s.what for s in p.stores if s.flat == flat and s.what in ops.STATES]

    master = ["master"] * ("master" in states(p, "block"))
    assert states(p, "embed") == []
    assert states(p, "block") == [*master, "m", "v"]
    assert not {"m.embed", "v.embed"} & {c.name for c in p.classes}
    assert states(planned(groups(EMBED), *keys), "embed") == [
        *master,
        "m",
        "v",
    ]


@pytest.mark.parametrize("listed", [[EMBED], [PART]], ids=["the embedding", "parts"])
def test_the_checker_knows_what_is_frozen(listed: list[str]) -> None:
    """The checker refuses a plan in which one more or one less tensor is frozen than functions
    expect."""
    p = planned(groups(*listed), "zero.stage3_param_persistence_threshold=0")
    for n, t in enumerate(p.tensors):
        broken = [{"frozen": 2}, {"rate": -1.0}, {"decay": -1.0}]
        if not any(x.frozen for x in p.tensors if x.flat == t.flat and x is not t):
            broken.append({"frozen": 1 - t.frozen})
        for change in broken:
            tensors = (
                *p.tensors[:n],
                dataclasses.replace(t, **change),
                *p.tensors[n + 1 :],
            )
            with pytest.raises(check.CheckError):
                check.check(dataclasses.replace(p, tensors=tensors))
