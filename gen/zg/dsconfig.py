"""dsconfig.py -- a DeepSpeed ds_config.json as changes to a spec, by one table of its keys.

A key of the table is honoured (it names the spec's key), or without effect here (a note says why),
or refused unless it holds a value that asks for nothing. A key that the table lacks is an error.
"auto" and null leave a key to the spec.
"""
from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import Mapping, Sequence

from .schema import Node, SpecError, number, printable, shown


@dataclass(frozen=True)
class Config:
    """changes: the spec's keys and their new values; batch: the three batch keys that are given."""
    changes: tuple[tuple[str, Node], ...] = ()
    batch: Mapping[str, Node] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


NONE = Config()


@dataclass(frozen=True)
class _Honour:
    key: str                    # of the spec


@dataclass(frozen=True)
class _Idle:
    why: str                    # it has no effect here


@dataclass(frozen=True)
class _Refuse:
    why: str
    unless: tuple[object, ...]  # values that ask for nothing


@dataclass(frozen=True)
class _Words:
    """A word of theirs is a word of ours."""
    key: str
    words: Mapping[object, object]


_LATER = "is not supported yet"
_OWNER = "gradients are always reduced to their owner"
_UNDIVIDED = "gradients are never divided before the optimizer's one factor"
_OFF = (False, None, "none")

TABLE: Mapping[str, _Honour | _Idle | _Refuse | _Words] = {
    "train_batch_size": _Honour("train.global_batch"),
    "train_micro_batch_size_per_gpu": _Honour("train.micro_batch"),
    "gradient_accumulation_steps": _Honour(""),         # follows from the others: batches()
    "gradient_clipping": _Honour("train.optimizer.clip"),

    "optimizer.type": _Words("train.optimizer.type", {"Adam": "AdamW", "AdamW": "AdamW"}),
    "optimizer.params.lr": _Honour("train.optimizer.lr"),
    "optimizer.params.betas": _Honour("train.optimizer.betas"),
    "optimizer.params.eps": _Honour("train.optimizer.eps"),
    "optimizer.params.weight_decay": _Honour("train.optimizer.weight_decay"),
    "optimizer.params.bias_correction": _Refuse("AdamW always corrects its bias", (True,)),
    "optimizer.params.adam_w_mode": _Refuse("the decay of AdamW is always decoupled", (True,)),
    "optimizer.params.amsgrad": _Refuse(_LATER, _OFF),
    "optimizer.params.torch_adam": _Idle("there is one AdamW"),
    "scheduler": _Refuse(f"{_LATER} from here: write train.schedule in the spec", (None, {})),

    "bf16.enabled": _Words("train.precision", {True: "bf16", False: "f32"}),
    "bfloat16.enabled": _Words("train.precision", {True: "bf16", False: "f32"}),
    "bf16.check_grad_overflow": _Refuse("non-finite gradients always skip the step", (True,)),
    "fp16.enabled": _Refuse(f"{_LATER}: use bf16", (False,)),
    **{f"fp16.{k}": _Idle("fp16 is off") for k in (
        "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
        "consecutive_hysteresis", "min_loss_scale", "auto_cast", "fp16_master_weights_and_grads")},
    "amp.enabled": _Refuse("amp is not a part of this: use bf16", (False,)),
    "communication_data_type": _Refuse(f"{_LATER}: gradients travel in the program's precision",
                                       (None,)),
    "prescale_gradients": _Refuse(_UNDIVIDED, (False,)),
    "gradient_predivide_factor": _Refuse(_UNDIVIDED, (1, 1.0)),
    "sparse_gradients": _Refuse(_LATER, _OFF),

    "zero_optimization.stage": _Honour("zero.stage"),
    "zero_optimization.reduce_bucket_size": _Honour("zero.reduce_bucket_size"),
    "zero_optimization.allgather_bucket_size": _Honour("zero.allgather_bucket_size"),
    "zero_optimization.overlap_comm": _Honour("zero.overlap_comm"),
    **{f"zero_optimization.{p}{k}": _Honour(f"zero.stage3_{k}") for p in ("stage3_", "") for k in (
        "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters")},
    **{f"zero_optimization.{p}max_reuse_distance": _Idle("units are gathered again backward")
       for p in ("stage3_", "")},
    "zero_optimization.contiguous_gradients": _Idle("gradients are always contiguous"),
    "zero_optimization.reduce_scatter": _Idle(_OWNER),
    "zero_optimization.allgather_partitions": _Idle("partitions are always gathered by all-gather"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _Idle(_OWNER),
    "zero_optimization.round_robin_gradients": _Idle("every rank owns an equal part of every unit"),
    "zero_optimization.sub_group_size": _Idle("the optimizer runs over the whole shard"),
    "zero_optimization.ignore_unused_parameters": _Idle("every parameter is used"),
    "zero_optimization.memory_efficient_linear": _Idle("nothing is patched"),
    "zero_optimization.override_module_apply": _Idle("nothing is patched"),
    "zero_optimization.load_from_fp32_weights": _Idle("masters are always restored in f32"),
    **{f"zero_optimization.stage3_gather_{b}_weights_on_model_save": _Idle("they are whole")
       for b in ("16bit", "fp16")},
    "zero_optimization.stage3_model_persistence_threshold": _Refuse(_LATER, (None,)),
    "zero_optimization.offload_optimizer.device": _Refuse(_LATER, _OFF),
    "zero_optimization.offload_param.device": _Refuse(_LATER, _OFF),
    **{f"zero_optimization.offload_{part}.{k}": _Idle("offload is off")
       for part in ("optimizer", "param") for k in (
           "pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read",
           "pipeline_write", "fast_init", "ratio")},
    "zero_optimization.cpu_offload": _Refuse(_LATER, _OFF),
    "zero_optimization.cpu_offload_params": _Refuse(_LATER, _OFF),
    "zero_optimization.zero_hpz_partition_size": _Refuse(_LATER, (1,)),
    "zero_optimization.zero_quantized_weights": _Refuse(_LATER, _OFF),
    "zero_optimization.zero_quantized_gradients": _Refuse(_LATER, _OFF),
    "zero_optimization.mics_shard_size": _Refuse(_LATER, (-1,)),

    "zero_allow_untested_optimizer": _Idle("there is one optimizer"),
    "zero_force_ds_cpu_optimizer": _Idle("offload is off"),
    "steps_per_print": _Idle("every step is shown and logged"),
    "wall_clock_breakdown": _Refuse(_LATER, _OFF),
    "memory_breakdown": _Idle("`zgen --emit memory` prints it"),
    "dump_state": _Idle("`zgen --emit plan` prints it"),
    "activation_checkpointing": _Refuse(f"{_LATER}: activations are kept", (None, {})),
    "flops_profiler.enabled": _Refuse(_LATER, _OFF),
    "comms_logger.enabled": _Refuse(_LATER, _OFF),
}

_SECTIONS = {key[:i] for key in TABLE for i, c in enumerate(key) if c == "."}
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def meant(word: str, keys: Sequence[str]) -> str:
    """`did you mean ...? ` where a key is close to the word."""
    near = difflib.get_close_matches(word, keys, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _unknown(key: str, node: Node) -> SpecError:
    """A key that the table lacks: perhaps misspelled, perhaps in the wrong section."""
    section, _, word = key.rpartition(".")
    start = f"{section}." if section else ""
    here = sorted({k[len(start):].split(".")[0] for k in TABLE if k.startswith(start)})
    elsewhere = [k for k in TABLE if k.rpartition(".")[2] == word]
    hint = f"did you mean {elsewhere[0]}? " if elsewhere else meant(word, here)
    ours = [k for k in here if not isinstance(TABLE.get(start + k), (_Idle, _Refuse))]
    return SpecError(f"{node.where}: {printable(key)}: is no key here; {hint}"
                     f"allowed: {', '.join(ours or here)}")


def _leaves(node: Node, prefix: str = "") -> list[tuple[str, Node]]:
    """Keys of the table, dotted; a section that the table has as one key stays whole."""
    found = []
    for word, below in node.value.items():
        key = f"{prefix}{word}"
        if key in TABLE:
            found.append((key, below))
        elif key not in _SECTIONS:
            raise _unknown(key, below)
        elif isinstance(below.value, dict):
            found += _leaves(below, f"{key}.")
        elif below.value is not None:
            raise SpecError(f"{below.where}: {key}: is {shown(below.value)}; "
                            "allowed: an object {...}")
    return found


def read(root: Node) -> Config:
    """The changes that a config asks for."""
    changes: dict[str, tuple[str, Node]] = {}
    batch: dict[str, Node] = {}
    notes = []
    for key, node in _leaves(root):
        row, value = TABLE[key], node.plain()
        if value == "auto" or value is None:
            continue
        if key in _BATCH:
            batch[key] = node
        elif isinstance(row, _Idle):
            notes.append(f"{node.where}: {key}: has no effect here: {row.why}")
        elif isinstance(row, _Refuse):
            if not any(value == u and type(value) is type(u) for u in row.unless):
                words = " or ".join(shown(u) for u in row.unless)
                raise SpecError(f"{node.where}: {key}: {row.why}; allowed: {words}")
        else:
            made = Node(node.value, node.where)
            if isinstance(row, _Words):
                made = _word(key, node, row.words)
            made.where += f": {key}"
            if row.key in changes and changes[row.key][1].plain() != made.plain():
                raise SpecError(f"{node.where}: {key}: says otherwise than {changes[row.key][0]}; "
                                "allowed: one of them")
            changes[row.key] = (key, made)
    return Config(tuple((k, n) for k, (_, n) in changes.items()), batch, tuple(notes))


def _word(key: str, node: Node, words: Mapping[object, object]) -> Node:
    if not isinstance(node.value, (str, bool)) or node.value not in words:
        raise SpecError(f"{node.where}: {key}: {shown(node.value)} is not known; allowed: "
                        + " or ".join(w if isinstance(w, str) else shown(w) for w in words))
    return Node(words[node.value], node.where)


# ---- batch keys: train_batch_size = micro x accumulation x ranks

def _count(key: str, node: Node) -> int:
    value = number(node.value) if isinstance(node.value, str) else node.value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < 2 ** 31 \
            or value != int(value):
        raise SpecError(f"{node.where}: {key}: {shown(node.value)} is no such number; "
                        "allowed: an integer from 1 to 2147483647")
    return int(value)


def batches(config: Config, root: Node) -> list[tuple[str, Node]]:
    """Two of the three keys determine the third; root is the spec with all other changes in it, and
    what --set has set stays."""
    given = {key: _count(key, node) for key, node in config.batch.items()
             if root.at(tuple(TABLE[key].key.split("."))).where != "--set"}
    G, B, A = (given.get(key) for key in _BATCH)
    at = {key: f"{config.batch[key].where}: {key}" for key in given}
    W = _spec(root, "cluster.ranks", 1)
    if W is None or A is None:
        return _given(given, at, root)
    if G is not None and B is None:
        if G % (A * W):
            raise _product(at[_BATCH[2]], f"{G} is no multiple of {A} steps x {W} ranks", A, W)
        B = G // (A * W)
    B = B or _spec(root, "train.micro_batch")
    if B is None:
        return _given(given, at, root)
    if G is not None and G != A * B * W:
        raise _product(at[_BATCH[2]],
                       f"train_batch_size {G} is not {B} a rank x {A} steps x {W} ranks", A * B, W)
    found = {_BATCH[0]: A * B * W, _BATCH[1]: B}
    return _given(found, {**dict.fromkeys(found, at[_BATCH[2]]), **at}, root)


def _given(found: Mapping[str, int], at: Mapping[str, str], root: Node) -> list[tuple[str, Node]]:
    """Values for the spec's keys; --set was later and stays."""
    made = [(TABLE[key].key, Node(n, at[key])) for key, n in found.items() if TABLE[key].key]
    return [(key, node) for key, node in made if root.at(tuple(key.split("."))).where != "--set"]


def _product(where: str, wrong: str, step: int, W: int) -> SpecError:
    return SpecError(f"{where}: {wrong}; allowed: train_batch_size a multiple of {step * W}")


def _spec(root: Node, key: str, default: int | None = None) -> int | None:
    """An integer of the spec as it stands; None where it is none (the schema will say so)."""
    node = root.at(tuple(key.split(".")))
    if isinstance(node.value, dict):
        return default
    try:
        return _count(key, node)
    except SpecError:
        return None
