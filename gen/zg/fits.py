"""fits.py -- does a plan fit `cluster.memory`, and what would make it fit.

A rank's arena on each target, and what a GPU holds beside it, must fit the device, its host arena
the host, its file the disk. Where one does not, the changes of WAYS are tried: none of them changes
a bit (of exact reductions). RULES do, which another sum of gradients may be worth.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator

from . import reserve
from .keytypes import RECOMPUTE
from .plan import Plan
from .spec import Spec, SpecError, agree

Change = Callable[[Spec], Spec]
Move = tuple[str, Change]               # settings as they are typed, and what they change


def _train(text: str, **keys: object) -> Move:
    return text, lambda s: replace(s, train=replace(s.train, **keys))


def _path(s: Spec) -> str:
    """Of the file that a rank has."""
    return s.zero.offload_optimizer.nvme_path or s.zero.offload_param.nvme_path or "DIR"


def _device(key: str, name: str, old: tuple[str, ...] = ("none", "cpu", "nvme")) -> Move:
    """Where what zero.KEY says lies, if it lies in one of these; its other keys stay. DIR: the
    spec's directory, else one for the user to say."""
    def change(s: Spec) -> Spec:
        now = getattr(s.zero, key)
        made = replace(now, device=name, nvme_path=_path(s) if name == "nvme" else now.nvme_path)
        good = now.device in old and now.device != name
        return replace(s, zero=replace(s.zero, **{key: made if good else now}))
    file = f" zero.{key}.nvme_path=DIR" if name == "nvme" else ""
    return f"zero.{key}.device={name}{file}", change


_AGAIN = _train("train.recompute=full", recompute=RECOMPUTE)
_GRAINS = _train("train.accumulate=grains", accumulate="grains")
STASH = _train("train.offload_activations=true", offload_activations=True)
_KEPT = _train("train.offload_activations=false", offload_activations=False)
_SPLIT: Move = ("zero.stage=3", lambda s: replace(s, zero=replace(s.zero, stage=3)))
STATES, _HERE = (_device("offload_optimizer", name) for name in ("cpu", "none"))
PARAMS, _GATHERED = (_device("offload_param", name) for name in ("cpu", "none"))
_BACK, _NEAR = (_device(part, "cpu", ("nvme",)) for part in ("offload_optimizer", "offload_param"))
_AWAY, _FAR = (_device(part, "nvme", ("cpu",)) for part in ("offload_optimizer", "offload_param"))
_FILE, _FILES = (_device(part, "nvme") for part in ("offload_optimizer", "offload_param"))
# From what costs least; with train.accumulate layers, what saves memory is tried without, too.
_LESS: tuple[tuple[Move, ...], ...] = (
    (_SPLIT,), (_AGAIN,), (STASH,), (_SPLIT, _AGAIN), (_SPLIT, _AGAIN, STASH),
    (STATES,), (STATES, _AGAIN), (STATES, _AGAIN, STASH),
    (_SPLIT, STATES), (_SPLIT, STATES, _AGAIN), (_SPLIT, STATES, _AGAIN, STASH),
    (_SPLIT, STATES, PARAMS, _AGAIN), (_SPLIT, STATES, PARAMS, _AGAIN, STASH),
    (_SPLIT, _FILE), (_SPLIT, _FILE, _FILES, _AGAIN), (_SPLIT, _FILE, _FILES, _AGAIN, STASH),
)
WAYS: tuple[tuple[Move, ...], ...] = (
    (_HERE, _GATHERED), (_GATHERED,), (_KEPT,), (_NEAR,), (_BACK,), (_BACK, _NEAR), (_AWAY,),
    (_FAR,), (_AWAY, _FAR), *_LESS[:3], (_GRAINS,), *_LESS[3:],
    *((_GRAINS, *way) for way in _LESS))
# Rules of summation, from what takes most.
RULES: tuple[Move, ...] = (
    _train("train.sum=tree", sum="tree"), _train("train.sum={block: 16}", sum={"block": 16}),
    _train("train.sum=fold", sum="fold"))
MOST = 3                        # ways that are named


def needs(p: Plan) -> dict[str, int]:
    """Bytes of a rank, on the target that needs most."""
    gpu = set(p.head.targets) - {"cpu"}
    return {"device": reserve.most(p),
            "host": p.host if gpu else p.end("hosted"), "file": p.filed}


def _over(spec: Spec, p: Plan) -> list[tuple[str, int, int]]:
    """(memory, needed, there) where a plan does not fit."""
    limits = {name: getattr(spec.cluster.memory, name) for name in needs(p)}
    return [(name, need, limits[name]) for name, need in needs(p).items()
            if limits[name] is not None and need > limits[name]]


def _fitting(spec: Spec, build: Callable[[Spec], Plan]) -> Iterator[str]:
    tried = [spec]
    for way in WAYS:
        changed = spec
        for _, change in way:
            changed = change(changed)
        try:
            agree(changed)
            if changed not in tried and not _over(changed, build(changed)):
                yield " ".join(text for text, _ in way).replace("=DIR", f"={_path(spec)}")
        except SpecError:       # what this way cannot keep: a bound of the spec, or another key
            pass
        tried.append(changed)


def other_bits(spec: Spec, fits: Callable[[Spec], bool]) -> str:
    """What to say of the first rule of summation with which it fits, if there is one."""
    for text, change in RULES:
        try:
            if fits(change(spec)):
                return f"; with other bits {text}, whose sums of gradients take less"
        except SpecError:
            pass
    return ""


def require(spec: Spec, p: Plan, build: Callable[[Spec], Plan]) -> None:
    """SpecError where the plan does not fit, with up to MOST ways that do. build: a spec's plan."""
    over = _over(spec, p)
    if not over:
        return
    name, need, there = over[0]
    most = max(p.head.targets, key=lambda t: reserve.device(p, t))
    beside = reserve.bytes_of(most, p.head.ranks)
    of = [f"target {most}"] * (len(p.head.targets) > 1) + \
        [f"arena {p.arena(most):,} and about {beside:,} beside it"] * (beside > 0)
    where = f" ({': '.join(of)})" if name == "device" and of else ""
    good = [text for text, _ in zip(_fitting(spec, build), range(MOST))]
    raise spec.wrong(f"cluster.memory.{name}",
                     f"a rank needs {need:,} bytes of {name} memory{where} and has {there:,}",
                     (" or ".join(good) or "more ranks, smaller micro-batches or a smaller model: "
                      "no way that is tried (stage 3, recompute, offloading) fits either") +
                     other_bits(spec, lambda changed: not _over(changed, build(changed))))
