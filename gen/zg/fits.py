"""fits.py -- does a plan fit `cluster.memory`, and what would make it fit.

A rank's arena on each target must fit the device, its host arena the host, its file the disk. Where
it does not, the changes of WAYS are tried: none of them changes a bit (of exact reductions).
"""
from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator

from .keytypes import RECOMPUTE
from .plan import Plan
from .spec import Spec, SpecError, agree

Change = Callable[[Spec], Spec]


def _train(**keys: object) -> Change:
    return lambda s: replace(s, train=replace(s.train, **keys))


def _zero(**keys: object) -> Change:
    return lambda s: replace(s, zero=replace(s.zero, **keys))


def _device(key: str, name: str, old: tuple[str, ...] = ("none", "cpu", "nvme")) -> Change:
    """Where what zero.KEY says lies, if it lies in one of these; its other keys stay. Which
    directory is for the user to say."""
    def change(s: Spec) -> Spec:
        now = getattr(s.zero, key)
        path = now.nvme_path or ("DIR" if name == "nvme" else None)
        made = replace(now, device=name, nvme_path=path)
        return _zero(**{key: made if now.device in old and now.device != name else now})(s)
    return change


def _nvme(*parts: str) -> str:
    return " ".join(f"zero.{part}.device=nvme zero.{part}.nvme_path=DIR" for part in parts)


_AGAIN = _train(recompute=RECOMPUTE)
_GRAINS = _train(accumulate="grains")
STASH, _KEPT = (_train(offload_activations=x) for x in (True, False))
_SPLIT = _zero(stage=3)
STATES, _HERE = (_device("offload_optimizer", name) for name in ("cpu", "none"))
PARAMS, _GATHERED = (_device("offload_param", name) for name in ("cpu", "none"))
_BACK, _NEAR = (_device(part, "cpu", ("nvme",)) for part in ("offload_optimizer", "offload_param"))
_AWAY, _FAR = (_device(part, "nvme", ("cpu",)) for part in ("offload_optimizer", "offload_param"))
_FILE, _FILES = (_device(part, "nvme") for part in ("offload_optimizer", "offload_param"))
# From what costs least: settings as they are typed, and what they change.
WAYS: tuple[tuple[str, tuple[Change, ...]], ...] = (
    ("zero.offload_optimizer.device=none zero.offload_param.device=none", (_HERE, _GATHERED)),
    ("zero.offload_param.device=none", (_GATHERED,)),
    ("train.offload_activations=false", (_KEPT,)),
    ("zero.offload_param.device=cpu", (_NEAR,)),
    ("zero.offload_optimizer.device=cpu", (_BACK,)),
    ("zero.offload_optimizer.device=cpu zero.offload_param.device=cpu", (_BACK, _NEAR)),
    (_nvme("offload_optimizer"), (_AWAY,)),
    (_nvme("offload_param"), (_FAR,)),
    (_nvme("offload_optimizer", "offload_param"), (_AWAY, _FAR)),
    ("zero.stage=3", (_SPLIT,)),
    ("train.recompute=full", (_AGAIN,)),
    ("train.offload_activations=true", (STASH,)),
    ("train.accumulate=grains", (_GRAINS,)),
    ("train.accumulate=grains train.recompute=full", (_GRAINS, _AGAIN)),
    ("zero.stage=3 train.recompute=full", (_SPLIT, _AGAIN)),
    ("zero.stage=3 train.recompute=full train.offload_activations=true", (_SPLIT, _AGAIN, STASH)),
    ("zero.stage=3 zero.offload_optimizer.device=cpu", (_SPLIT, STATES)),
    ("zero.stage=3 zero.offload_optimizer.device=cpu train.recompute=full",
     (_SPLIT, STATES, _AGAIN)),
    ("zero.stage=3 zero.offload_optimizer.device=cpu zero.offload_param.device=cpu "
     "train.recompute=full", (_SPLIT, STATES, PARAMS, _AGAIN)),
    (f"zero.stage=3 {_nvme('offload_optimizer')}", (_SPLIT, _FILE)),
    (f"zero.stage=3 {_nvme('offload_optimizer', 'offload_param')} train.recompute=full",
     (_SPLIT, _FILE, _FILES, _AGAIN)),
)
MOST = 3                        # ways that are named


def needs(p: Plan) -> dict[str, int]:
    """Bytes of a rank, on the target that takes most."""
    gpu = set(p.head.targets) - {"cpu"}
    return {"device": max(p.arena(t) for t in p.head.targets),
            "host": p.host if gpu else p.end("hosted"), "file": p.filed}


def _over(spec: Spec, p: Plan) -> list[tuple[str, int, int]]:
    """(memory, needed, there) where a plan does not fit."""
    limits = {name: getattr(spec.cluster.memory, name) for name in needs(p)}
    return [(name, need, limits[name]) for name, need in needs(p).items()
            if limits[name] is not None and need > limits[name]]


def _fitting(spec: Spec, build: Callable[[Spec], Plan]) -> Iterator[str]:
    tried = [spec]
    for text, changes in WAYS:
        changed = spec
        for change in changes:
            changed = change(changed)
        try:
            agree(changed)
            if changed not in tried and not _over(changed, build(changed)):
                yield text
        except SpecError:       # what this way cannot keep: a bound of the spec, or another key
            pass
        tried.append(changed)


def require(spec: Spec, p: Plan, build: Callable[[Spec], Plan]) -> None:
    """SpecError where the plan does not fit, with up to MOST ways that do. build: a spec's plan."""
    over = _over(spec, p)
    if not over:
        return
    name, need, there = over[0]
    good = [text for text, _ in zip(_fitting(spec, build), range(MOST))]
    raise spec.wrong(f"cluster.memory.{name}", f"a rank needs {need:,} bytes of {name} memory and "
                     f"has {there:,}", " or ".join(good) or "more ranks, smaller micro-batches or "
                     "a smaller model: no other way of splitting it fits either")
