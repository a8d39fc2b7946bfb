"""taken.py -- recognizes files that are mistaken for a spec or a ds_config.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from .node import Names, Node, SpecError, printable


class FileKind(NamedTuple):
    """A kind of file.

    keys: one of them identifies it; a * stands for any ending; shared: keys that a spec or a
    ds_config.json may have, too; spec, zero: the file to use in its place, '' if it is allowed
    itself.
    """

    what: str
    keys: Names
    shared: Names
    spec: str
    zero: str


_ZERO = "a DeepSpeed config for --zero"
_NAMED = "the ds_config.json named by its key {}"
_STAGES = (
    "FULL_SHARD is --set zero.stage=3, SHARD_GRAD_OP --set zero.stage=2, NO_SHARD "
    "--set zero.stage=0"
)
_OWN = (
    f"{_NAMED.format('deepspeed_config_file')}, or, if it names none, one with "
    "zero_optimization.stage set to its zero_stage"
)
KINDS = (
    FileKind("a spec", ("model", "train", "cluster", "zero"), (), "", _ZERO),
    FileKind(
        "arguments for a Hugging Face Trainer",
        (
            "output_dir",
            "num_train_epochs",
            "model_name_or_path",
            "base_model",
            "lr_scheduler_type",
            "deepspeed",
        ),
        (
            "model",
            "data",
            "seed",
            "bf16",
            "fp16",
            "optimizer",
            "learning_rate",
            "max_grad_norm",
            "gradient_accumulation_steps",
            "per_device_train_batch_size",
        ),
        f"a spec, with --zero {_NAMED.format('deepspeed')}",
        _NAMED.format("deepspeed"),
    ),
    FileKind(
        "an FSDP config",
        (
            "fsdp_*",
            "transformer_layer_cls_to_wrap",
            "sharding_strategy",
            "backward_prefetch",
            "limit_all_gathers",
        ),
        ("activation_checkpointing",),
        f"a spec; {_STAGES}",
        f"a DeepSpeed config, or none: {_STAGES}",
    ),
    FileKind(
        "an Accelerate config",
        (
            "compute_environment",
            "distributed_type",
            "deepspeed_config",
            "mixed_precision",
            "num_machines",
            "num_processes",
        ),
        (),
        f"a spec, with --zero {_OWN}",
        _OWN,
    ),
    FileKind(
        "a torchtitan config",
        ("[job]", "[training]", "[parallelism]", "[lr_scheduler]"),
        (),
        "a spec",
        "a DeepSpeed config",
    ),
    FileKind(
        "a DeepSpeed config",
        (
            "zero_optimization",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "bf16",
            "fp16",
        ),
        (),
        "a spec, with this file as --zero FILE",
        "",
    ),
    FileKind(
        "a Hugging Face model config",
        ("architectures", "model_type", "hidden_size", "n_embd"),
        (),
        "a spec, or its folder as --from DIR",
        "a DeepSpeed config, and its folder as --from DIR",
    ),
    FileKind(
        "a PEFT adapter config",
        ("peft_type", "lora_alpha"),
        (),
        "a spec with train.lora",
        "a DeepSpeed config, and train.lora in the spec",
    ),
)
_KEY = re.compile(
    r"""^([ \t]*)["']?([A-Za-z_]\w*)["']?[ \t]*:|^()(\[[A-Za-z_]\w*\])""", re.M
)


def refuse(found: Mapping[str, str], own: Iterable[str], role: str) -> None:
    """Refuse a file with a key of another kind and without a key of its `role` alone. found: its
    keys with their locations."""
    for kind in KINDS:
        allowed = {"spec": kind.spec, "zero": kind.zero}[role]
        keys = [
            key
            for k in kind.keys
            for key in found
            if key == k or k[-1] == "*" and key.startswith(k[:-1])
        ]
        mine = set(own) & set(found) - set(kind.shared) - set(keys)
        if allowed and keys and not mine:
            raise SpecError(
                f"{found[keys[0]]}: the file is {kind.what}: it has "
                f"{printable(', '.join(keys))}; allowed: {allowed}"
            )


def read(
    text: str,
    place: Callable[[int], str],
    parse: Callable[[str], Node],
    own: Iterable[str],
    role: str,
) -> Node:
    """Return a file's text as Nodes. If it cannot be parsed, its least indented keys may still
    identify its kind.

    Raises SpecError.
    """
    try:
        root = parse(text)
    except SpecError:
        lines = [
            (m[1] or m[3] or "", m[2] or m[4], text.count("\n", 0, m.end()))
            for m in _KEY.finditer(text)
        ]
        least = min((len(space) for space, _, _ in lines), default=0)
        refuse(
            {
                key: place(line)
                for space, key, line in reversed(lines)
                if len(space) == least
            },
            own,
            role,
        )
        raise
    keys = root.value if isinstance(root.value, dict) else {}
    refuse({key: node.where for key, node in keys.items()}, own, role)
    return root
