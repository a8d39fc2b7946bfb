"""drawn.py -- hypothesis strategies for small specs with every kind of op. A spec is the mapping of
a YAML file. Shapes are small and seldom round."""

import pathlib
import re
from collections.abc import Sequence
from random import Random

import yaml
from hypothesis import strategies as st
from zg.facts import kinds
from zg.read.keytypes import RECOMPUTE, TARGETS
from zg.read.spec import SpecError

from tests.lib import trainer

Mapping = dict[str, object]
flag = st.booleans()
odd = st.integers(1, 24)
LENGTHS = st.integers(1, 40)


@st.composite
def ropes(draw, width: int) -> Mapping:
    """Draw rotary positions of so many elements of a head."""
    rope: Mapping = {"theta": draw(st.sampled_from([10000, 500000]))}
    context = {"original_context": draw(st.integers(4, 64))}
    scalings: dict[str, Mapping] = {
        "linear": {},
        **({"dynamic": context} if width > 2 else {}),
        "llama3": {
            "low_freq_factor": 1,
            "high_freq_factor": draw(st.sampled_from([2, 4])),
            **context,
        },
        "yarn": {
            "beta_fast": draw(st.sampled_from([2, 32])),
            "truncate": draw(flag),
            **context,
        },
        "longrope": {
            "short_factor": [1 + i / 8 for i in range(width // 2)],
            "long_factor": [1 + i for i in range(width // 2)],
            **context,
        },
    }
    if draw(flag):
        kind = draw(st.sampled_from(sorted(scalings)))
        factor = draw(st.sampled_from([2, 8]))
        rope["scaling"] = {"type": kind, "factor": factor, **scalings[kind]}
    return rope


@st.composite
def turns(draw, head: int, windows: bool, layers: int) -> Mapping:
    """Draw the keys of an attention's rotary positions."""
    width = draw(st.sampled_from([head, 2 * draw(st.integers(1, head // 2))]))
    rope = {**draw(ropes(width)), "interleaved": draw(flag)}
    args = {"rope": rope if width == head else {**rope, "width": width}}
    if windows and draw(flag):
        args["local_rope"] = draw(ropes(width))
    if draw(flag):
        args["rope_layers"] = draw(st.lists(flag, min_size=layers, max_size=layers))
    return args


@st.composite
def attentions(draw, name: str, layers: int) -> Mapping:
    groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    turned = draw(flag)
    args: Mapping = {
        "name": name,
        "heads": groups * per_group,
        "kv_heads": groups,
        "head_dim": draw(st.integers(1, 10)) * (2 if turned else 1),
        "bias": draw(flag),
        "out_bias": draw(flag),
        "qk_norm": draw(st.sampled_from([False, True, "whole"])),
    }
    if draw(flag):
        args["scale"] = 0.2
    if draw(flag):
        args["softcap"] = 1.5
    if draw(flag):
        some = st.integers(1, 24)
        args["window"] = draw(
            some | st.lists(st.none() | some, min_size=layers, max_size=layers)
        )
    if args["qk_norm"] is True:
        args["one_plus"] = draw(flag)
    if turned:
        args |= draw(turns(args["head_dim"], "window" in args, layers))
    return {"attention": args}


@st.composite
def norms(draw, name: str) -> Mapping:
    args: Mapping = {
        "name": name,
        "eps": draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
    }
    if draw(flag):
        return {"rmsnorm": {**args, "one_plus": draw(flag)}}
    return {"layernorm": {**args, "bias": draw(flag), "weight": draw(flag)}}


@st.composite
def mlps(draw, name: str, width: int, family: str) -> list[Mapping]:
    """Draw up, a nonlinearity and down. GPT-2's layout has one tensor per linear, so no gate beside
    up."""
    inner, bias = draw(odd), draw(flag)
    if family != "gpt2" and draw(flag):
        up: list[Mapping] = [
            {
                "linear": {
                    "name": [name + ".gate", name + ".up"],
                    "out": [inner, inner],
                    "bias": bias,
                }
            },
            draw(st.sampled_from([{"swiglu": {}}, {"geglu": {}}])),
        ]
    else:
        up = [
            {"linear": {"name": name + ".up", "out": inner, "bias": bias}},
            draw(st.sampled_from([{"gelu": "tanh"}, {"gelu": "erf"}, {"relu2": {}}])),
        ]
    return [
        *up,
        {"linear": {"name": name + ".down", "out": width, "bias": draw(flag)}},
    ]


@st.composite
def branches(draw, name: str, width: int, family: str, layers: int) -> list[Mapping]:
    ops = [draw(norms(name + ".norm"))] if draw(flag) else []
    kind = draw(st.integers(0, 4))
    if kind == 4:  # a purely linear branch has few values that backward reads
        made = {"name": name + ".plain", "out": width, "bias": draw(flag)}
        return [*ops, {"linear": made}]
    if kind > 1:
        return [*ops, draw(attentions(name + ".attn", layers))]
    return [*ops, *draw(mlps(name + ".mlp", width, family))]


@st.composite
def blocks(draw, name: str, width: int, family: str) -> Mapping:
    ops: list[Mapping] = []
    layers = draw(st.integers(1, 3))
    for i in range(draw(st.integers(1, 3))):
        branch = draw(branches(f"part{i}", width, family, layers))
        branch += [{"scale": 0.5}] * draw(flag)
        if draw(st.integers(0, 4)) == 0:
            beside = draw(branches(f"beside{i}", width, family, layers))
            branch = [{"parallel": [branch, beside]}]
        ops += branch if draw(st.integers(0, 4)) == 0 else [{"residual": branch}]
    return {
        "blocks": layers,
        "name": name + ".{l}",
        "ops": ops,
    }


@st.composite
def models(draw, lengths: st.SearchStrategy = LENGTHS) -> tuple[Mapping, int]:
    """Draw a model and the length of its samples."""
    family, width = (
        draw(st.sampled_from(["gpt2", "llama"])),
        draw(st.integers(4, 40)),
    )
    vocab, T = draw(st.integers(2, 300)), draw(lengths)
    embedding: Mapping = {"tokens": "tokens"}
    if draw(flag):
        embedding |= {
            "positions": "positions",
            "context": T + draw(st.integers(0, 3)),
        }
    if draw(flag):
        embedding["scale"] = 3.0
    last = {"tied": "tokens"} if draw(flag) else {"name": "out", "out": vocab}
    if draw(flag):
        last["softcap"] = 2.0
    head = [*([draw(norms("last"))] if draw(flag) else []), {"linear": last}]
    middle = [
        draw(blocks(name, width, family))
        for name in ("h", "g")[: draw(st.integers(1, 2))]
    ]
    return {
        "vocab": vocab,
        "width": width,
        "names": family,
        "units": [{"embedding": embedding}, *middle, {"head": head}],
    }, T


@st.composite
def specs(draw) -> Mapping:
    """Draw a whole spec for one rank. Adam's eps is far above the rounding noise of float32
    gradients, so that updates are smooth in them."""
    model, T = draw(models())
    optimizer = {
        "type": "AdamW",
        "lr": 0.01,
        "betas": [0.9, 0.95],
        "eps": 0.01,
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "clip": draw(st.sampled_from([0.0, 0.5])),
    }
    schedule = {
        "type": draw(st.sampled_from(["constant", "linear", "cosine"])),
        "warmup": draw(st.integers(0, 3)),
        "steps": draw(st.integers(4, 9)),
        "min_lr": 0.001,
    }
    packed = model["vocab"] > 16 and draw(flag)
    return {
        "name": "drawn",
        "data": {"documents": "mask", "end": 1} if packed else {},
        "model": model,
        "zero": {"stage": 0},
        "train": {
            "global_batch": 2 * draw(st.integers(1, 2)),
            "micro_batch": draw(st.integers(1, 2)),
            "sequence": T,
            "precision": "f32",
            "optimizer": optimizer,
            "schedule": schedule,
            "seed": 1,
            "dropout": 0.0 if packed else draw(st.sampled_from([0.0, 0.3])),
            "attention_dropout": 0.0
            if packed or "softcap" in str(model["units"])
            else draw(st.sampled_from([0.0, 0.3])),
            "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
            "z_loss": draw(st.sampled_from([0.0, 0.01])),
            "loss_mean": draw(st.sampled_from(["tokens", "micro_batch"])),
        },
        "cluster": {"ranks": 1},
        "targets": ["cpu"],
    }


# ---- keys of a spec except its model: the values that each is drawn from

FLAG = (False, True)
FEW = range(10)
SIZES = (1, 1024, 5000, 30_000, 10**6, 10**9)  # in elements
BYTES = ("4KiB", "60kB", "200kB", "1MB", "4MB", "1GB")
SHARES = (0.0, 0.2, 0.5, 0.9)
RATES = (0.0, 0.001, 0.01)
DEVICES = ("none", "cpu", "nvme")
_OPTIMIZER: dict[str, Sequence] = {
    "lr": (0.01,),
    "type": sorted(kinds.OPTIMIZERS),
    "betas": [[a, b] for a in SHARES for b in SHARES],
    "eps": (1e-8, 0.01),
    "momentum": SHARES,
    "nesterov": FLAG,
    "weight_decay": (0.0, 0.1),
    "decay": ("matrices", "all"),
    "clip": (0.0, 0.5),
    "moments": ("f32", "bf16"),
    "masters": FLAG,
}
_GROUP: dict[str, Sequence] = {
    "lr_factor": (0.0, 0.1, 2.0),
    "weight_decay": (0.0, 0.3),
    "frozen": (True,),
}
_SCHEDULE: dict[str, Sequence] = {
    "type": sorted(kinds.SCHEDULES),
    "warmup": FEW,
    "steps": range(10, 30),
    "min_lr": RATES,
    "decay": range(1, 10),
    "cycles": range(1, 10),
    "warmup_min_lr": RATES,
    "warmup_max_lr": RATES,
    "warmup_num_steps": FEW,
    "warmup_type": ("log", "linear"),
    "total_num_steps": (10, 20, 2000),
    "warmup_min_ratio": SHARES,
    "cos_min_ratio": SHARES,
    "cycle_min_lr": (0.0, 0.001),
    "cycle_max_lr": (0.001, 0.01),
    "decay_lr_rate": SHARES,
    "cycle_first_step_size": range(1, 10),
    "cycle_second_step_size": FEW,
    "cycle_first_stair_count": FEW,
    "cycle_second_stair_count": FEW,
    "decay_step_size": FEW,
    "cycle_momentum": FLAG,
    "cycle_min_mom": SHARES,
    "cycle_max_mom": SHARES,
    "decay_mom_rate": (0.0,),
}
_TRAIN: dict[str, Sequence] = {
    "micro_batch": range(1, 5),
    "sequence_blocks": (1, 1, 1, 2, 4),
    "precision": ("f32", "bf16", "f16"),
    "loss_scale.scale": (0.0, 1.0, 1024.0),
    "loss_scale.initial_scale_power": range(20),
    "loss_scale.window": range(1, 10),
    "loss_scale.hysteresis": range(1, 4),
    "loss_scale.consecutive_hysteresis": FLAG,
    "loss_scale.min": (0.5, 1.0),
    "max_skips": range(1, 20),
    "seed": (0, 1, 2**64 - 1),
    "sum": ("tree", "fold", *({"block": 2**n} for n in range(6))),
    "head_chunk": ("auto", 1, 5, 32, 64),
    "mlp_chunk": ("auto", 5, 32, 64),
    "recompute": (
        "none",
        "full",
        *RECOMPUTE,
        *([a, b] for a in RECOMPUTE for b in RECOMPUTE if a < b),
    ),
    "products": ("auto", "auto", "auto", "pairs", "tiles"),
    "reduction": ("exact", "fast"),
    "sm_margin": (0, 2, 64),
    "accumulate": ("micro_batches", "layers"),
    "offload_activations": FLAG,
    "memory_budget": BYTES,
    "lora.rank": range(1, 10),
    "lora.alpha": (1, 6),
    "lora.rslora": FLAG,
    "lora.base": ("int8", "nf4"),
    "lora.dropout": (0.0, 0.3),
    "dropout": (0.0, 0.3),
    "attention_dropout": (0.0, 0.3),
    "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 1e-3),
    "loss_mean": ("tokens", "micro_batch"),
}
_ZERO: dict[str, Sequence] = {
    "stage": (0, 1, 2, 3, 3, 3),
    "reduce_bucket_size": SIZES,
    "allgather_bucket_size": SIZES,
    "overlap_comm": FLAG,
    "stage3_prefetch_bucket_size": ("auto", 0, *SIZES),
    "stage3_param_persistence_threshold": (0, *SIZES),
    "stage3_max_live_parameters": (0, *SIZES),
    "stage3_max_reuse_distance": (0, *SIZES),
    "replicate": (["*"], ["*.bias"], ["*.weight"]),
    "shard_size": (0, 1, 2, 2, 4),
    "states": ("all", "shard"),
    "mics_shard_size": (-1, 0, 0, 0, 2),
    "hpz_partition_size": (0, 0, 0, 1, 2),
    "sub_group_size": (0, *SIZES),
    "offload_optimizer.device": DEVICES,
    "offload_optimizer.buffer_count": range(1, 6),
    "offload_optimizer.ratio": (0.0, 0.01, 0.3, 0.99, 1.0),
    "offload_optimizer.nvme_path": ("/tmp",),
    "offload_param.device": DEVICES,
    "offload_param.nvme_path": ("/tmp",),
    "offload_param.max_in_cpu": (0, *SIZES),
    "aio.block_size": (4096, 1 << 20),
    "aio.queue_depth": range(1, 10),
}
KEYS: dict[str, Sequence] = {
    **{f"train.{key}": values for key, values in _TRAIN.items()},
    **{f"train.optimizer.{key}": values for key, values in _OPTIMIZER.items()},
    **{f"train.schedule.{key}": values for key, values in _SCHEDULE.items()},
    **{f"zero.{key}": values for key, values in _ZERO.items()},
    "cluster.ranks": (1, 2, 2, 3, 4, 8),
    "cluster.local": (0, 1, 2, 4),
    "cluster.context_parallel": (1, 1, 2, 4),
    "cluster.device": ("cpu", "h100"),
    **{
        f"cluster.links.{link}.{key}": values
        for link in ("peers", "network")
        for key, values in (
            ("bandwidth", (1.0, 1e11)),
            ("latency", (0.0, 1e-3)),
            ("hop", (0.0, 1e-5)),
        )
    },
    "cluster.memory.device": BYTES,
    "cluster.memory.host": BYTES,
    "cluster.memory.file": BYTES,
    "data.ignore": range(300),
    "data.shuffle": FLAG,
    "data.documents": ("join", "mask"),
    "data.end": range(20),
    "targets": (["cpu"], [*TARGETS], ["sm_90"], ["sm_80", "sm_100"]),
}
# Drawn together with the model, by whole_specs.
BY_MODEL = (
    "train.global_batch",
    "train.sequence",
    "train.lora.match",
    "train.lora.whole",
    "train.lora.groups.match",
    "train.lora.groups.rank",
    "train.lora.groups.alpha",
    "train.optimizer.groups.match",
    *(f"train.optimizer.groups.{key}" for key in _GROUP),
)
NEEDED = ("train.optimizer.lr", "train.micro_batch", "cluster.ranks")
TYPED = (
    ("train.optimizer", kinds.OPTIMIZERS),
    ("train.schedule", kinds.SCHEDULES),
)
ALWAYS = (
    *NEEDED,
    "train.precision",
    "train.optimizer.type",
    "train.schedule.type",
    "zero.stage",
    "zero.offload_optimizer.nvme_path",
    "zero.offload_param.nvme_path",
)
SELDOM = ("train.memory_budget", "cluster.memory")  # a search takes long


def nested(given: Mapping) -> Mapping:
    """Return nested mappings from a mapping of dotted keys."""
    out: dict = {}
    for key, value in given.items():
        *path, last = key.split(".")
        there = out
        for part in path:
            there = there.setdefault(part, {})
        there[last] = value
    return out


def named(ops: object, kind: str = "") -> list[str]:
    """Return the names of a model's ops, or of those of one kind."""
    if isinstance(ops, list):
        return [name for op in ops for name in named(op, kind)]
    if not isinstance(ops, dict):
        return []
    out = []
    for key, below in ops.items():
        said = below.get("name", []) if isinstance(below, dict) else []
        if kind in ("", key):
            out += [said] if isinstance(said, str) else said
        out += named(below, kind)
    return out


def group(rng: Random, names: Sequence[str]) -> Mapping:
    patterns = ["*", "*.weight", "tokens.*", "h.*", "h.0.*", "*.lora_B.weight"]
    patterns += [f"*.{name}.*" for name in names]
    given = {key: rng.choice(_GROUP[key]) for key in _GROUP if rng.random() < 0.5}
    if "frozen" in given:  # which excludes the others
        given = {"frozen": True}
    return {"match": rng.sample(patterns, rng.randint(1, 2)), **given}


@st.composite
def whole_specs(draw) -> Mapping:
    """Draw dotted keys of a spec, `model` among them, some of which may contradict each other.

    Hypothesis draws only the model, which seeds the rest: with so many draws hypothesis would make
    most of them the first value.
    """
    model, T = draw(models(st.sampled_from([1, 5, 16, 32, 40])))
    rng = Random(repr((model, T, draw(st.integers(0, 2**32)))))

    def given_by_chance(key: str) -> bool:
        share = 1 if key in ALWAYS else 0.02 if key.startswith(SELDOM) else 0.5
        return rng.random() < share

    given = {key: rng.choice(KEYS[key]) for key in filter(given_by_chance, KEYS)}
    for at, rows in TYPED:
        row = rows[given[f"{at}.type"]]
        for key in {key for keys in rows.values() for key in keys} - {*row}:
            given.pop(f"{at}.{key}", None)
        for key in [key for key in row if row[key] is kinds.NEEDED]:
            given.setdefault(f"{at}.{key}", rng.choice(KEYS[f"{at}.{key}"]))
    adapted = rng.random() < 0.25
    for key in ("train.lora.rank", "train.lora.alpha"):
        given.pop(key, None)
        if adapted:
            given[key] = rng.choice(KEYS[key])
    if not adapted:
        given = {k: x for k, x in given.items() if not k.startswith("train.lora.")}
    words = {n.rpartition(".")[2] for n in named(model["units"], "linear")}
    if adapted and words:
        match = rng.sample(sorted(words), 1)
        given["train.lora.match"] = match
        if rng.random() < 0.5:
            given["train.lora.groups"] = [{"match": match, "rank": rng.randint(1, 9)}]
    if adapted and rng.random() < 0.5:
        given["train.lora.whole"] = rng.sample(["tokens", "positions", "out"], 1)
    if rng.random() < 0.5:
        names = named(model["units"])
        given["train.optimizer.groups"] = [
            group(rng, names) for _ in range(rng.randint(1, 3))
        ]
    each = given["train.micro_batch"] * given["cluster.ranks"]
    return {
        "name": "drawn",
        "model": model,
        **given,
        "train.global_batch": each * rng.randint(1, 5),
        "train.sequence": T,
    }


# file:line: key: mistake; ... allowed: ...
REFUSAL = re.compile(r"\S+:\d+: ([\w.\[\]]+): .+; .*allowed: .+", re.S)
STAYS = ("name", "model", "train.global_batch", "train.sequence", *NEEDED)


def without(given: Mapping, message: str) -> Mapping:
    """Return the keys without those that a refusal names: the keys below the named one, above it,
    or else beside it. Nothing is removed if it names no key that can be left out."""
    found = REFUSAL.fullmatch(message)
    at = re.sub(r"\[\d+\]", "", found[1]) if found else ""
    named: set[str] = set()
    while at and not named:
        near = {
            key
            for key in given
            if f"{key}.".startswith(f"{at}.") or at.startswith(f"{key}.")
        }
        named, at = near - {*STAYS}, at.rpartition(".")[0]
    return {key: x for key, x in given.items() if key not in named}


def settled(given: Mapping, path: pathlib.Path) -> str:
    """Return train.c of a spec, written to `path`. As long as zgen refuses a key, the spec is
    retried without it; a refusal that names no key is a failure, and so is any other error."""
    while True:
        path.write_text(yaml.safe_dump(nested(given)))
        try:
            return trainer.generate(path)
        except SpecError as refusal:
            fewer = without(given, str(refusal))
            assert fewer.keys() < given.keys(), refusal
            given = fewer
