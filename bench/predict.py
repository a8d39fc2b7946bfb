"""predict.py -- compares predicted step times with measured ones, on this machine.

    bench/predict.py --device FILE [--profile] [WORD...]

FILE is one that `./run calibrate` wrote, before and from none of these programs. A program's time
is the median of its steps after the first. WORD: only programs whose names contain one. --profile:
the parts of each step, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "gen"), str(ROOT / "bench")]
from tests.lib import trainer
from zg.predict import clock
from zg.read import spec
from zg.search import search
from zg.write import times

STEPS = 6
LLAMA = """
name: llama-52m
model:
  vocab: 32000
  width: 512
  names: llama
  units:
  - embedding: {tokens: model.embed_tokens}
  - blocks: 8
    name: model.layers.{l}
    ops:
    - residual:
      - rmsnorm: {name: input_layernorm}
      - attention: {name: self_attn, heads: 8, kv_heads: 4, rope: {theta: 10000.0}}
    - residual:
      - rmsnorm: {name: post_attention_layernorm}
      - linear: {name: [mlp.gate_proj, mlp.up_proj], out: [1376, 1376]}
      - swiglu: {}
      - linear: {name: mlp.down_proj, out: 512}
  - head: [rmsnorm: {name: model.norm}, linear: {name: lm_head, out: 32000}]
zero: {stage: 3}
train:
  global_batch: 4
  micro_batch: 2
  sequence: 512
  optimizer: {type: AdamW, lr: 3.0e-4}
cluster: {ranks: 2}
targets: [cpu]
"""
GPT2, QWEN = "gpt2-124m", "qwen3-tiny"


@dataclass(frozen=True)
class Case:
    """A program to predict and to measure. model: of model_specs, or `llama`."""

    name: str
    model: str
    keys: tuple[str, ...]


def case(name: str, model: str, ranks: int, real: str, stage: int, *keys: str) -> Case:
    fixed = (f"cluster.ranks={ranks}", f"train.precision={real}", f"zero.stage={stage}")
    return Case(name, model, (*fixed, "targets=[cpu]", *keys))


NARROW = "model.width=384"
HOST, DISK = (f"zero.offload_optimizer.device={d}" for d in ("cpu", "nvme"))
FULL, MANY = "train.recompute=full", "train.global_batch=8"
LONG = ("train.sequence=512", "train.micro_batch=1", "train.global_batch=2")
CASES = (
    case("gpt2, 1 rank, f32", GPT2, 1, "f32", 0),
    case("gpt2, 1 rank, bf16", GPT2, 1, "bf16", 0),
    case("gpt2, 2 ranks, f32, stage 0", GPT2, 2, "f32", 0),
    case("gpt2, 2 ranks, f32, stage 3", GPT2, 2, "f32", 3),
    case("gpt2, 2 ranks, bf16, stage 3", GPT2, 2, "bf16", 3),
    case("gpt2, 2 ranks, f32, stage 1, accumulates", GPT2, 2, "f32", 1, MANY),
    case("gpt2, 2 ranks, bf16, stage 2, recomputes", GPT2, 2, "bf16", 2, FULL),
    case("gpt2, 2 ranks, f32, stage 3, optimizer on the host", GPT2, 2, "f32", 3, HOST),
    case("gpt2, 2 ranks, bf16, stage 3, long", GPT2, 2, "bf16", 3, *LONG),
    case("llama, 1 rank, f32", "llama", 1, "f32", 0),
    case("llama, 1 rank, bf16, recomputes", "llama", 1, "bf16", 0, FULL),
    case("llama, 2 ranks, f32, stage 2", "llama", 2, "f32", 2),
    case("llama, 2 ranks, f32, stage 3, recomputes", "llama", 2, "f32", 3, FULL),
    case("llama, 2 ranks, bf16, stage 1, accumulates", "llama", 2, "bf16", 1, MANY),
    case("qwen3, 1 rank, f32", "qwen", 1, "f32", 0),
    case("qwen3, 2 ranks, bf16, stage 3", "qwen", 2, "bf16", 3),
)


def source(model: str, folder: Path) -> Path:
    """Return the path of a model's spec."""
    if model == "llama":
        path = folder / "llama.yaml"
        path.write_text(LLAMA)
        return path
    if model == "qwen":  # of four blocks
        path = folder / "qwen.yaml"
        text = (ROOT / "model_specs" / "qwen3-0.6b.yaml").read_text()
        text = re.sub(r"blocks: \d+", "blocks: 4", text)
        text = re.sub(r"global_batch: \d+", "global_batch: 2", text)
        text = re.sub(r"micro_batch: \d+", "micro_batch: 1", text)
        path.write_text(re.sub(r"sequence: \d+", "sequence: 256", text))
        return path
    return ROOT / "model_specs" / f"{model}.yaml"


@dataclass(frozen=True)
class Row:
    """A program's predicted and measured seconds of a step, and the parts of both."""

    name: str
    predicted: float
    measured: float
    parts: dict[str, tuple[float, float]]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def words_of(profile: str) -> dict[str, float]:
    """Return the seconds of queue main by part, of a profile's table."""
    found = {}
    for line in profile.splitlines():
        if hit := re.match(
            r"(forward|head|backward|step|waits for \w+) +\d+ +([\d.]+)", line
        ):
            found[hit[1]] = 1e-3 * float(hit[2])
    return found


def row(c: Case, device: str, folder: Path, profile: bool) -> Row:
    path = source(c.model, folder)
    read = spec.load(str(path), [*c.keys, f"cluster.device={device}"], None, None)
    built = search.find(read)
    predicted = times.times(clock.of(read, built.plan))
    program = trainer.build(trainer.generate(path, *c.keys))
    tokens, log = folder / "tokens", folder / "log"
    log.unlink(missing_ok=True)
    np.random.default_rng(1).integers(0, 30000, 1 << 17).astype(np.uint16).tofile(
        tokens
    )
    words = ["--data", tokens, "--tokens", "uint16", "--steps", STEPS, "--log", log]
    if profile:
        words += ["--profile", folder / "trace", "--profile-steps", f"3-{STEPS}"]
    done = subprocess.run(
        [program, *map(str, words)], check=True, capture_output=True, text=True
    )
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [x["seconds"] for x in lines if "step" in x and "seconds" in x]
    found = words_of(done.stdout)
    e = predicted.exposed
    parts = {
        name: (e.get(of, 0.0), found.get(word, 0.0))
        for name, of, word in (
            ("forward", "forward", "forward"),
            ("head", "head and loss", "head"),
            ("backward", "backward", "backward"),
        )
    }
    return Row(c.name, predicted.seconds, statistics.median(steps[1:]), parts)


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--device", required=True, metavar="FILE")
    p.add_argument("--profile", action="store_true")
    p.add_argument("words", nargs="*")
    args = p.parse_args(argv)
    device, rows = os.path.abspath(args.device), []
    with tempfile.TemporaryDirectory(dir=ROOT / "out") as name:
        for c in CASES:
            if args.words and not any(w in c.name for w in args.words):
                continue
            r = row(c, device, Path(name), args.profile)
            rows.append(r)
            print(
                f"{r.name:52} predicted {r.predicted:7.3f} s, measured {r.measured:7.3f} s, "
                f"{r.error:+6.1%}",
                flush=True,
            )
            for part, (a, b) in r.parts.items() if args.profile else ():
                print(f"{'':8}{part:44} predicted {a:7.3f} s, measured {b:7.3f} s")
    errors = [abs(r.error) for r in rows]
    print(f"mean error {statistics.mean(errors):.1%}, greatest {max(errors):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
