"""law.py -- shared parts of the tests of the bitwise law: tokens, weights, ways to spread one
recipe, and the results of a run.

Bits may depend on the recipe, and may not depend on the way. Nothing here uses a library's random
stream that could change: the tokens belong to the committed hashes.
"""

import itertools
import json
import pathlib
import random
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

from tests.lib import program, trainer

FAMILIES = ["gpt", "qwen3", "llama"]
STEPS = 20
HOLE = 65535  # in a file of tokens: never a target, read as 0
KEPT = {
    "gpt": {
        "norms": ["*.ln_*", "ln_f.*"],
        "a matrix": ["h.*.attn.c_attn.weight", "wpe.*"],
    },
    "qwen3": {"norms": ["*norm*"], "a matrix": ["*.mlp.down_proj.weight"]},
    "llama": {
        "norms": ["*norm*"],
        "a matrix": ["*.self_attn.o_proj.weight", "lm_head*"],
    },
}

# f32 weights after STEPS steps of an unchanged tiny spec, on tokens(256, 40 * SAMPLES + 1): the
# same on every processor and from every compiler. They change only with the meaning of the recipe.
SAMPLES = 161
KNOWN = {
    "gpt": "530116059c36313f416edae028515400",
    "qwen3": "f45efd770e421b72ab876f32a15067fb",
    "llama": "3d6c55031f174023182f1e4fd68f3c89",
}

# Documents end with a token that is often drawn, not with 0, because holes are read as 0.
_ATTENTION = "model.units[1].ops[0].residual[1].attention"
# Keys of qwen3-tiny: ops of Gemma, Cohere, GLM, OLMo and Granite.
OPS = (
    f"{_ATTENTION}.rope.width=8",
    f"{_ATTENTION}.rope.interleaved=true",
    f"{_ATTENTION}.local_rope={{theta: 50}}",
    f"{_ATTENTION}.window=[8, null]",
    f"{_ATTENTION}.one_plus=true",
    f"{_ATTENTION}.scale=0.2",
    f"{_ATTENTION}.softcap=1.5",
    "model.units[2].head[1].linear.softcap=2",
    "train.label_smoothing=0.1",
    "train.z_loss=0.001",
    "model.units[0].embedding.scale=3",
    "model.units[1].ops[0].residual[0].rmsnorm.one_plus=true",
    "model.units[1].ops[1].residual[2]={geglu: {}}",
    "model.units[1].ops[1].residual[0]={parallel: [[{rmsnorm: {name: post_attention_layernorm}}], "
    "[{scale: 0.5}]]}",
)
PACKED = ("data.documents=mask", "data.end=1")

# train.recompute: nothing, some of each family's ops, all
AGAIN = ["none", "[attention, gelu, swiglu, layernorm, rmsnorm]", "full"]

Way = Mapping[str, object]


# ---- input


def mixed(n: int, salt: int) -> np.ndarray:
    """Return uint64 [n]: splitmix64 of salt * 2^32 + i."""
    x = np.arange(n, dtype=np.uint64) + np.uint64(salt << 32)
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def tokens(vocab: int, n: int, holes: bool = False) -> np.ndarray:
    """Return int64 [n], with small tokens more frequent than large ones. With holes, one token in
    32 is no target, and so are 150 consecutive ones: whole micro-batches without a target."""
    a, b = mixed(n, 1), mixed(n, 2)
    made = (a % (b % np.uint64(vocab) + np.uint64(1))).astype(np.int64)
    if holes:
        made[mixed(n, 3) % np.uint64(32) == 0] = HOLE
        made[n // 3 : n // 3 + 150] = HOLE
    return made


def path(family: str) -> pathlib.Path:
    return trainer.ROOT / "model_specs" / f"{family}-tiny.yaml"


def changed(
    family: str, folder: pathlib.Path, blocks: int, sizes: Mapping[int, int]
) -> pathlib.Path:
    """Return a tiny spec with another number of blocks, and other vocabulary, width and linears.
    sizes: old -> new."""

    def walk(x: object) -> object:
        if isinstance(x, dict):
            return {
                key: resized(y) if key in ("vocab", "width", "out") else walk(y)
                for key, y in x.items()
            }
        return [walk(y) for y in x] if isinstance(x, list) else x

    def resized(x: int | list[int]) -> int | list[int]:
        return [resized(y) for y in x] if isinstance(x, list) else sizes.get(x, x)

    spec = yaml.safe_load(path(family).read_text())
    spec["model"] = walk(spec["model"])
    spec["model"]["units"][1]["blocks"] = blocks
    made = folder / f"{family}.yaml"
    made.write_text(yaml.safe_dump(spec, sort_keys=False))
    return made


def uneven(family: str, folder: pathlib.Path, *keys: str) -> pathlib.Path:
    """Return initial weights scaled by powers of two, so that gradients span many decades. Norms
    before the first block's linears scale these gradients down, its last linears those before them,
    and the last norm scales all of them up."""
    made = folder / family
    if not made.exists():
        trainer.sh(
            trainer.build(trainer.generate(path(family), *keys)),
            "--steps",
            0,
            "--save",
            made,
        )
        params = load_file(made / "model.safetensors")
        save_file(
            {name: x * np.float32(scale(name)) for name, x in params.items()},
            made / "model.safetensors",
        )
    return made


def scale(name: str) -> float:
    if re.search(r"\.0\.(ln_[12]|.*_layernorm)\.weight", name):
        return 2.0**-14
    if re.search(r"\.0\..*(c_proj|o_proj|down_proj)\.weight", name):
        return 2.0**-10
    return 2.0**5 if name in ("ln_f.weight", "model.norm.weight") else 1.0


# ---- runs


# fields of a step's record that depend on time
CLOCK = (
    "seconds",
    "tokens_per_second",
    "share_of_peak",
)


@dataclass(frozen=True)
class Result:
    """Result of a run. weights: the hash; steps: the log's lines without times; val: the last
    validation."""

    weights: str
    steps: tuple[str, ...]
    val: str


def run(
    binary: pathlib.Path,
    *options: object,
    log: pathlib.Path,
    under: Sequence[str] = (),
    **settings: object,
) -> Result:
    """Run a program. under: the command that starts it."""
    log.unlink(missing_ok=True)
    command = [*map(pathlib.Path, under[:1]), *under[1:], binary]
    done = program.run(*command, "--hash", "--log", log, *options, **settings)
    assert done.code == 0, (
        f"{options} {settings} gave {done.code}\n{done.out}{done.err}"
    )
    assert "Sanitizer" not in done.err and "runtime error" not in done.err, done.err
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = tuple(
        json.dumps({key: x for key, x in line.items() if key not in CLOCK})
        for line in lines
        if "loss" in line
    )
    val = [json.dumps(line) for line in lines if "val_loss" in line]
    return Result(done.line("weights ").split()[1], steps, val[-1] if val else "")


# ---- ways


def covering(
    factors: Mapping[str, Sequence],
    seed: int,
    fits: Callable[[dict], bool] = lambda row: True,
) -> list[dict]:
    """Return rows that fit, so that any two values of any two factors occur together in some row if
    they can. Each row is the best of some drawn ones, which start with a pair that is still
    missing."""
    rng, names = random.Random(seed), list(factors)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []

    def met(row: dict) -> set:
        return {pair for pair in itertools.combinations(row.items(), 2) if pair in left}

    sizes = [len(choices) for choices in factors.values()]

    def drawn(pair: tuple) -> dict:
        row = dict(zip(names, [int(rng.random() * n) for n in sizes], strict=True))
        row.update(pair)
        return row

    def values(row: dict) -> dict:
        return {name: factors[name][i] for name, i in row.items()}

    while left:
        first = min(left)
        fitting = (
            row for row in (drawn(first) for _ in range(10_000)) if fits(values(row))
        )
        some = list(itertools.islice(fitting, 40))
        if not some:
            left.remove(first)
            continue
        row = max(some, key=lambda r: len(met(r)))
        left -= met(row)
        rows.append(values(row))
    return rows


def fits(way: Way) -> bool:
    """Return whether a way's hosts and its sets of ranks that share parameters fit its ranks.
    Offloaded state is shared by all ranks."""
    ranks, shard = way["ranks"], way.get("shard", 0)
    local = way.get("local", 0) or ranks
    if ranks % local or not shard:
        return not ranks % local and way.get("states", "all") == "all"
    if way["stage"] == 0 or ranks % shard or shard % local and local % shard:
        return False
    if way["stage"] == 3 and way.get("params", "none") != "none":
        return way["states"] == "all" and shard == ranks
    return way["states"] == "all" or way.get("offload", "none") == "none"


def keys(way: Way) -> list[str]:
    """Return a way's settings of the generator."""
    kept = KEPT[way["family"]].get(way.get("kept", ""), [])
    quoted = ", ".join(f'"{pattern}"' for pattern in kept)
    named = {
        "zero.stage": way["stage"],
        "cluster.ranks": way["ranks"],
        "cluster.local": way.get("local", 0),
        "cluster.context_parallel": way.get("context", 1),
        "zero.shard_size": way.get("shard", 0),
        "zero.states": way.get("states", "all"),
        "zero.reduce_bucket_size": way["reduce"],
        "zero.allgather_bucket_size": way["gather"],
        "zero.stage3_param_persistence_threshold": way["small"],
        "zero.stage3_prefetch_bucket_size": way["prefetch"],
        "zero.overlap_comm": str(way["overlap"]).lower(),
        "zero.replicate": f"[{quoted}]",
        "train.recompute": way["again"],
        "train.accumulate": way.get("accumulate", "micro_batches"),
        "zero.stage3_max_reuse_distance": way.get("reuse", 0),
        "zero.offload_optimizer.device": way.get("offload", "none"),
        "zero.offload_param.device": way.get("params", "none")
        if way["stage"] == 3
        else "none",
        "train.offload_activations": str(
            way.get("values", False) and way.get("accumulate") != "layers"
        ).lower(),
        "zero.offload_optimizer.ratio": way.get("ratio", 1),
        "zero.sub_group_size": way.get("tile", 4096),
        "zero.offload_optimizer.buffer_count": way.get("turns", 1),
    }
    return [f"{key}={value}" for key, value in named.items()] + [
        f"{key.replace('device', 'nvme_path')}={tempfile.gettempdir()}"
        for key, value in named.items()
        if value == "nvme"
    ]


def known(
    kind: trainer.Kind, family: str, folder: pathlib.Path, **settings: object
) -> str:
    """Compute the hash of KNOWN anew."""
    trainer.write_tokens(folder / "tokens", tokens(256, 40 * SAMPLES + 1))
    return run(
        trainer.build(trainer.generate(path(family)), kind),
        "--data",
        folder / "tokens",
        "--steps",
        STEPS,
        log=folder / "log",
        **settings,
    ).weights
