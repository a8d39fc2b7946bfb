"""spec.py -- reads a spec's file into a frozen Spec; every mistake of the user becomes a SpecError.

    load("model.yaml", ["zero.stage=3", "cluster.ranks=4"], zero="ds_config.json")

yamltext.py reads YAML, dsconfig.py a DeepSpeed config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..facts import kinds
from . import (
    chunk,
    context,
    dsconfig,
    dsjson,
    dswords,
    hf,
    layout,
    old,
    speckeys,
    taken,
    usertext,
    yamltext,
)
from .chunk import near
from .keyplace import KeyPlace, fail, typed
from .keytypes import TOKEN
from .node import (
    Mistakes,
    Names,
    Node,
    Path,
    SpecError,
    dotted,
    several,
    shown,
)
from .schema import (
    Aio,
    Cluster,
    Data,
    LossScale,
    LrSchedule,
    Model,
    Op,
    Optimizer,
    Spec,
    SpecKeys,
    Train,
    Unit,
    Zero,
)
from .units import alone, build, named

__all__ = [
    "Cluster",
    "Data",
    "Model",
    "Op",
    "Optimizer",
    "LrSchedule",
    "Spec",
    "SpecError",
    "Train",
    "Unit",
    "Zero",
    "load",
    "text",
]

_KEY = re.compile(
    r"[A-Za-z0-9_]+(\[\d{1,6}\])*(\.[A-Za-z0-9_]+(\[\d{1,6}\])*)*", re.ASCII
)
_STEP = re.compile(r"\[(\d+)\]|([^.\[]+)")


# ---- text to nodes


def _document(path: str, mistakes: Mistakes) -> Node:
    place = usertext.place(path)
    reader = yamltext.Reader(place)
    root = taken.read(
        usertext.text(path),
        place,
        reader.read,
        SpecKeys.model_fields,
        "spec",
    )
    if not isinstance(root.value, dict):
        raise SpecError(
            f"{root.where}: the file holds {shown(root.value)}; "
            f"allowed: a mapping with the keys {', '.join(SpecKeys.model_fields)}"
        )
    if reader.twice:
        mistakes.lines += reader.twice
        mistakes.bad |= {(key,) for key in root.value}
    return root


def _deepspeed(path: str) -> Node:
    """Parse a ds_config.json."""
    place = usertext.place(path)
    return taken.read(
        usertext.text(path),
        place,
        lambda text: dsjson.parse(text, place),
        dswords.TOP,
        "zero",
    )


# ---- changes from the command line and from a ds_config.json


def _put(root: Node, key: str, value: Node | None) -> None:
    """Set a dotted key or an item of a list, and create the mappings on the way. None removes the
    key."""
    path = [int(n) if n else word for n, word in _STEP.findall(key)]
    at = root
    for n, step in enumerate(path):
        wrong = _misfit(at, step, dotted(tuple(path[:n])))
        if wrong:
            raise SpecError(f"{value.where if value else at.where}: {key}: {wrong}")
        if n < len(path) - 1:
            at = (
                at.value[step]
                if isinstance(step, int)
                else at.value.setdefault(step, Node({}, (value or at).where))
            )
    if value is None:
        at.value.pop(path[-1], None)
    else:
        at.value[path[-1]] = value


def _misfit(at: Node, step: str | int, name: str) -> str:
    """Return the error of a step of a key that does not fit its parent, '' if it fits."""
    held = at.value
    if isinstance(held, list):
        items = (
            f"{name}[0] to {name}[{len(held) - 1}]" if held else "a list as its value"
        )
        if not isinstance(step, int):
            return f"{name} holds a list; allowed: {items}"
        return (
            ""
            if step < len(held)
            else f"{name} has {len(held)} items; allowed: {items}, "
            "or the whole list (--set cannot append)"
        )
    if isinstance(step, int):
        return (
            f"{name} is not given; allowed: the whole list, {name}=[...]"
            if held == {}
            else f"{name} holds {shown(held)}; allowed: {name} without [{step}]"
        )
    return (
        ""
        if isinstance(held, dict)
        else f"{name} holds {shown(held)}; allowed: a key inside a mapping"
    )


def _set(root: Node, text: str) -> None:
    """Apply one --set KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise SpecError(
            f"--set: {shown(text)} is not KEY=VALUE; allowed: for example zero.stage=3 or "
            "model.units[1].blocks=3"
        )
    if not value.strip():
        raise SpecError(f"--set: {key}: has no value; allowed: {key}=VALUE")
    made = yamltext.Reader(lambda line: f"--set: {key}").document(value)
    for _, node in _all(made):
        node.where = "--set"
    _put(root, key, made)


def _all(node: Node, path: Path = ()) -> list[tuple[Path, Node]]:
    """Return a node and all below it, each with its path."""
    value = node.value
    pairs = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [
        (path, node),
        *(found for key, b in pairs for found in _all(b, (*path, key))),
    ]


# ---- checks between sections


def _batch(keys: SpecKeys, root: Node) -> None:
    """Require that micro_batch x ranks divides global_batch. W: ranks with samples of their own."""
    G, B, N = (
        keys.train.global_batch,
        keys.train.micro_batch,
        keys.cluster.context_parallel,
    )
    W = max(1, keys.cluster.ranks // N)
    if G % (B * W) == 0:
        return
    step = B * W
    found = [g for g in (G // step * step, -(-G // step) * step) if g]
    good = {"train.global_batch": found}
    micro_batches = G // B
    if G % B == 0:
        ranks = [
            w
            for w in near(min(W, micro_batches), lambda w: micro_batches % w == 0)
            if w <= micro_batches
        ]
        good["cluster.ranks"] = [w * N for w in ranks]
    if G % W == 0:
        sizes = near(min(B, G // W), lambda b: G // W % b == 0)
        fits = [b for b in sizes if b <= G // W]
        good["train.micro_batch"] = fits
    paths = (
        ("cluster", "ranks"),
        ("train", "micro_batch"),
        ("train", "global_batch"),
    )
    path = next((p for p in paths if root.at(p).where == "--set"), paths[2])
    raise fail(
        root,
        path,
        f"train.micro_batch {B} x cluster.ranks {keys.cluster.ranks}"
        + (f" / cluster.context_parallel {N}" if N > 1 else "")
        + f" = {step} does not divide train.global_batch {G}"
        + ", and ranks do not share samples (cluster.context_parallel)"
        * (N == 1 < keys.train.sequence_blocks),
        ", or ".join(
            f"{key} {' or '.join(map(str, good[key]))}" for key in sorted(good)
        ),
    )


def _optimizer(keys: SpecKeys, root: Node) -> Optimizer:
    o = typed(keys.train.optimizer, KeyPlace(root, ("train", "optimizer")))
    if o.nesterov and not o.momentum:
        raise fail(
            root,
            ("train", "optimizer", "nesterov"),
            "needs a momentum",
            "momentum > 0",
        )
    for i, g in enumerate(o.groups):
        if g.frozen and (g.lr_factor, g.weight_decay) != (1.0, None):
            raise fail(
                root,
                ("train", "optimizer", "groups", i, "frozen"),
                "a frozen group has no learning rate or weight decay",
                "only match and frozen",
            )
    return replace(o, groups=(*o.groups, *alone(keys.train.lora)))


def _schedule(keys: SpecKeys, root: Node) -> LrSchedule:
    path = ("train", "schedule")
    s = typed(keys.train.schedule, KeyPlace(root, path))
    falls = ("linear", "cosine", "cosine_with_restarts")
    if s.type in falls and s.steps <= s.warmup:
        raise fail(
            root,
            (*path, "steps"),
            f"{s.steps} steps leave none for the decay after a warmup of {s.warmup}",
            "steps > warmup",
        )
    if s.cycles and s.steps - s.warmup < s.cycles:
        raise fail(
            root,
            (*path, "cycles"),
            f"{s.cycles} cycles do not fit into the {s.steps - s.warmup} steps after the warmup",
            f"1 to {s.steps - s.warmup}",
        )
    if s.type == "wsd" and s.steps < s.warmup + s.decay:
        raise fail(
            root,
            (*path, "steps"),
            f"{s.steps} steps are too few for a warmup of {s.warmup} "
            f"and a decay of {s.decay}",
            f"at least {s.warmup + s.decay}",
        )
    if s.total_num_steps is not None and s.total_num_steps <= max(
        2, s.warmup_num_steps
    ):
        raise fail(
            root,
            (*path, "total_num_steps"),
            f"{s.total_num_steps} steps end before the decay begins",
            f"more than {max(2, s.warmup_num_steps)}",
        )
    if s.type == "OneCycle" and s.cycle_min_lr > s.cycle_max_lr:
        raise fail(
            root,
            (*path, "cycle_min_lr"),
            f"{s.cycle_min_lr:g} is above cycle_max_lr {s.cycle_max_lr:g}",
            f"0 to {s.cycle_max_lr:g}",
        )
    return s


def _beside(s: LrSchedule, o: Optimizer, root: Node) -> None:
    """Refuse settings of a schedule that contradict the optimizer."""
    path = ("train", "schedule")
    if s.type != "constant" and (s.min_lr or 0.0) > o.lr:
        raise fail(
            root,
            (*path, "min_lr"),
            f"{s.min_lr:g} is above the lr {o.lr:g} given at "
            f"{root.at(('train', 'optimizer', 'lr')).where}",
            f"0 to {o.lr:g}",
        )
    if (
        s.cycle_momentum
        and o.type not in kinds.CYCLED
        and root.at((*path, "cycle_momentum")).value is True
    ):
        raise fail(
            root,
            (*path, "cycle_momentum"),
            f"{o.type} has no betas",
            "false",
        )


def _idle(root: Node, path: Path, why: str) -> str:
    """Return a note about a key without effect."""
    return f"{root.at(path).where}: {dotted(path)}: has no effect{why}"


def _held(keys: SpecKeys, root: Node) -> Iterator[str]:
    """Yield notes about schedule keys that this type does not use."""
    s = keys.train.schedule
    path = ("train", "schedule")
    for key in ("steps", "min_lr") if s.type == "constant" else ():
        if root.at(path).value.get(key) is not None:
            at = (*path, key)
            yield _idle(root, at, ": a constant schedule stays at lr")


def _filed(keys: SpecKeys, root: Node) -> Iterator[str]:
    """Require one folder for a rank's file. Yield notes about keys without effect."""
    z = keys.zero
    paths: dict[str, Path] = {}
    there = [
        p
        for p in ("offload_optimizer", "offload_param")
        if getattr(z, p).device == "nvme"
    ]
    for part in ("offload_optimizer", "offload_param"):
        path, at = getattr(z, part).nvme_path, ("zero", part, "nvme_path")
        if path is not None and part in there:
            paths.setdefault(path, at)
        elif path is not None:
            yield _idle(root, at, " unless the device is nvme")
    if z.offload_optimizer.ratio < 1 and z.offload_optimizer.device == "none":
        at = ("zero", "offload_optimizer", "ratio")
        yield _idle(root, at, " while the device is none")
    if z.offload_param.max_in_cpu and "offload_param" not in there:
        at = ("zero", "offload_param", "max_in_cpu")
        yield _idle(root, at, " unless the device is nvme")
    if len(paths) > 1:
        first, second = list(paths)[:2]
        raise fail(
            root,
            paths[second],
            f"a rank has one file, and the optimizer's nvme_path is {first}",
            "the same path, or only one of the two",
        )
    if there and not paths:
        raise fail(
            root,
            ("zero", there[0], "nvme_path"),
            "is missing; device nvme requires it",
            "a folder on a disk",
        )
    if not there and z.aio != Aio():
        yield _idle(root, ("zero", "aio"), ": nothing is offloaded to nvme")


def _products(keys: SpecKeys, root: Node) -> None:
    order, real = keys.train.products, keys.train.precision
    if order == "auto":
        return
    if real != "bf16":
        raise fail(
            root,
            ("train", "products"),
            f"{order} applies to bf16 only; {real} has a single order",
            "auto, or with train.precision bf16",
        )
    if "cpu" not in keys.targets:
        raise fail(
            root,
            ("train", "products"),
            f"{order} applies to CPUs only; GPUs have an order of their own",
            "auto, or with the target cpu added",
        )


def _reduction(keys: SpecKeys, root: Node) -> None:
    if keys.train.reduction == "fast" and "cpu" in keys.targets:
        raise fail(
            root,
            ("train", "reduction"),
            "fast sums with NCCL, which the target cpu does not have",
            "exact, or `targets` with GPUs only",
        )


def _margin(keys: SpecKeys, root: Node) -> Iterator[str]:
    """Yield a note if a margin of SMs gains nothing."""
    said = f"{root.at(('train', 'sm_margin')).where}: train.sm_margin"
    alone = (
        "there are no collectives with one rank"
        if keys.cluster.ranks == 1
        else ""
        if keys.zero.overlap_comm
        else "without overlap_comm no GEMM runs during a collective"
    )
    if keys.train.sm_margin and keys.targets == ("cpu",):
        yield f"{said}: has no effect on the target cpu"
    elif keys.train.sm_margin and alone:
        yield f"{said}: leaves SMs unused without a gain in speed (the bits are the same): {alone}"


def _loss_scale(keys: SpecKeys, root: Node) -> Iterator[str]:
    """Yield notes about keys without effect."""
    if keys.train.precision != "f16" and keys.train.loss_scale != LossScale():
        raise fail(
            root,
            ("train", "loss_scale"),
            f"{keys.train.precision} uses no loss scale",
            "train.precision f16, or leave it out",
        )
    s = keys.train.loss_scale
    if not s.scale and s.min > 2.0**s.initial_scale_power:
        raise fail(
            root,
            ("train", "loss_scale", "min"),
            f"{s.min:g} is above the initial scale, 2^{s.initial_scale_power}",
            f"up to {2.0**s.initial_scale_power:g}",
        )
    if s.scale:
        for key in root.at(("train", "loss_scale")).value:
            if key != "scale":
                at = ("train", "loss_scale", key)
                yield _idle(root, at, ": train.loss_scale.scale makes the scale static")


# Checks that yield notes, and the keys that each reads.
NOTED = (
    (_filed, ("zero",)),
    (_held, ("train.schedule",)),
    (_loss_scale, ("train.precision", "train.loss_scale")),
    (
        _margin,
        ("train.sm_margin", "cluster.ranks", "zero.overlap_comm", "targets"),
    ),
)


def _offload(s: Spec) -> None:
    z = s.zero
    optimizer, params = (
        f"zero.offload_{part}.device" for part in ("optimizer", "param")
    )
    if z.offload_optimizer.device != "none" and z.stage == 0:
        raise s.wrong(
            optimizer,
            "at stage 0 every rank updates all parameters, so there is nothing to offload",
            "none, or with zero.stage 1, 2 or 3",
        )
    if z.offload_param.device != "none" and z.stage < 3:
        raise s.wrong(
            params,
            f"at stage {z.stage} parameters are not sharded",
            "none, or with zero.stage 3",
        )
    if z.offload_optimizer.device != "none" and not z.offload_optimizer.ratio:
        raise s.wrong(
            "zero.offload_optimizer.ratio",
            "0 offloads nothing",
            "above 0, or zero.offload_optimizer.device none",
        )


def _masters(s: Spec) -> None:
    z, o = s.zero, s.train.optimizer
    where = "train.optimizer.masters"
    why = {
        "f32": "f32 parameters are their own masters",
        "f16": "f16 parameters need f32 masters",
    }
    if not o.masters and s.train.precision in why:
        raise s.wrong(
            where,
            why[s.train.precision],
            "true, or with train.precision bf16",
        )
    if (
        not o.masters
        and not z.offload_optimizer.device == z.offload_param.device == "none"
    ):
        raise s.wrong(
            where,
            "offloading needs masters",
            "true, or "
            "with zero.offload_optimizer.device and zero.offload_param.device none",
        )


def _activations(s: Spec) -> None:
    if s.train.offload_activations and s.train.accumulate == "layers":
        raise s.wrong(
            "train.offload_activations",
            "train.accumulate layers keeps the activations of all micro-batches on the device",
            "false, or train.accumulate micro_batches",
        )


def _layout(s: Spec) -> None:
    layout.agree(s.cluster, s.zero, s.places, s.wrong)


AGREE = (
    (_offload, ("zero.stage", "zero.offload_optimizer", "zero.offload_param")),
    (
        _masters,
        (
            "train.optimizer.masters",
            "train.precision",
            "zero.offload_optimizer",
            "zero.offload_param",
        ),
    ),
    (_activations, ("train.offload_activations", "train.accumulate")),
    (_layout, ("cluster.ranks", "cluster.local", "zero")),
    *context.AGREE,
)


def agree(s: Spec) -> None:
    """Raise SpecError for contradictory keys, among those that may be changed to fit a memory."""
    for check, _ in AGREE:
        check(s)


# ---- files and their changes


def _changed(
    root: Node, sets: Sequence[str], zero: str | None, mistakes: Mistakes
) -> Names:
    """Apply KEY=VALUE texts and a DeepSpeed config to a spec. Return notes."""
    for said in sets:
        path = tuple(said.partition("=")[0].split("."))
        mistakes.at(path, _set, root, said)
    if zero is None:
        return ()
    config = mistakes.of(lambda: dsconfig.read(_deepspeed(zero), root))
    if config is None:
        mistakes.bad |= {("train",), ("zero",), ("cluster",)}
        return ()
    for key, node in config.changes:
        mistakes.of(_put, root, key, node)
    for said in sets:
        mistakes.of(_set, root, said)
    return config.notes


def _effective(
    path: str | None,
    sets: Sequence[str],
    zero: str | None,
    folder: str | None,
    vocab: int | None,
    mistakes: Mistakes,
) -> tuple[Node, Names]:
    """Return the nodes of a spec, and notes. A file and a folder's model come first, then a
    DeepSpeed config, then KEY=VALUE texts; the last one wins."""
    notes: Names = ()
    found = mistakes.of(hf.load, folder, vocab) if folder is not None else None
    if folder is not None and found is None:
        mistakes.bad |= {("model",), ("train", "sequence")}
    if path is not None:
        root = mistakes.of(_document, path, mistakes)
    else:
        assert folder, "a path or a folder"
        root = hf.usual(folder, found.context if found else 1)
    if root is None:
        raise several(mistakes.lines)
    if found:
        mistakes.of(hf.adopt, root, found)
        notes = found.notes
    notes = (*notes, *_changed(root, sets, zero, mistakes))
    if found:
        hf.ends(root, found)
        keys = [(dotted(key), node) for key, node in _all(root)]
        told = hf.taken(keys, found.folder)
        notes = (*told, *notes, *hf.unlike(root, found))
    return root, (*notes, *old.spelt(root))


def text(
    path: str | None,
    sets: Sequence[str] = (),
    zero: str | None = None,
    folder: str | None = None,
    vocab: int | None = None,
) -> str:
    """Return the spec that `load` reads, as the text of one file."""
    mistakes = Mistakes()
    root, _ = _effective(path, sets, zero, folder, vocab, mistakes)
    mistakes.end()
    return yamltext.text(root)


def _listed(
    part: Callable[[SpecKeys, Node], Iterator[str]], keys: SpecKeys, root: Node
) -> Names:
    return tuple(part(keys, root))


def _checked(
    keys: SpecKeys, root: Node, model: Model | None, mistakes: Mistakes
) -> tuple[Train, Names]:
    """Return the training settings with their defaults, and notes about keys without effect."""
    t, check = keys.train, mistakes.check
    reads: Names = ("train.global_batch", "train.micro_batch", "cluster.ranks")
    check(reads, _batch, keys, root)
    told = [check(at, _listed, part, keys, root) for part, at in NOTED]
    reads = ("train.micro_batch", "train.sequence", "train.precision")
    chunks = ("train.head_chunk", "train.mlp_chunk")
    check((*reads, *chunks), chunk.divides, keys, root, model)
    check(("train.products", "train.precision", "targets"), _products, keys, root)
    check(("train.reduction", "targets"), _reduction, keys, root)
    words = ("type", "momentum", "nesterov", "groups")
    reads = tuple(f"train.optimizer.{word}" for word in words)
    optimizer = check((*reads, "train.lora"), _optimizer, keys, root)
    reads = ("train.schedule",)
    schedule = check(reads, _schedule, keys, root)
    if schedule:
        reads = (*reads, "train.optimizer.lr", "train.optimizer.type")
        check(reads, _beside, schedule, keys.train.optimizer, root)
    train = replace(
        t,
        optimizer=optimizer or t.optimizer,
        schedule=schedule or t.schedule,
    )
    return train, tuple(note for notes in told for note in notes or ())


def load(
    path: str | None,
    sets: Sequence[str] = (),
    zero: str | None = None,
    folder: str | None = None,
    vocab: int | None = None,
) -> Spec:
    """Return the spec of a file with its changes, or raise SpecError with every mistake. sets:
    KEY=VALUE texts; zero: path of a ds_config.json; folder: a Hugging Face folder with the model;
    vocab: its rows by token, if it grows. At least one of path and folder is given."""
    mistakes = Mistakes()
    root, notes = _effective(path, sets, zero, folder, vocab, mistakes)
    keys = speckeys.read(root, mistakes)
    if keys is None:
        raise several(mistakes.lines)
    built = build(keys, root, mistakes)
    model, grouped, linears = built or (None, (), {})
    lora = named(keys, model, linears)
    keys = keys.model_copy(update={"train": replace(keys.train, lora=lora)})
    train, told = _checked(keys, root, model, mistakes)
    data, m = keys.data, keys.model
    given = root.at(("data",)).value
    if not isinstance(given, dict) or "ignore" not in given:
        data = replace(data, ignore=TOKEN if m.vocab <= TOKEN else None)
    places = {dotted(key) if key else "": node.where for key, node in _all(root)}
    made = Spec(
        name=keys.name,
        model=model or Model(m.vocab, m.width, m.names, ()),
        zero=keys.zero,
        train=train,
        cluster=keys.cluster,
        targets=keys.targets,
        data=data,
        notes=(*notes, *grouped, *told),
        places=places,
    )
    for check, reads in AGREE:
        mistakes.check(reads, check, made)
    mistakes.end()
    return made
