"""predict.py -- compares predicted step times with measured ones, on this machine.

    bench/predict.py --device FILE [--profile] [--out FILE] [WORD...]

The device is a file that `./run calibrate` wrote, before and from none of these programs. A
program's time is the median of its steps after the first. Ranks on two hosts are processes of
namespaces whose interfaces send at a fixed rate (levels.py), and share this machine's cores.

The yardstick (yardstick.py) is timed before and after each program. Where it takes 1.2 times as
long as in the calibration, the machine has become that much slower. `error` compares the prediction
with the measured time as it is; `at its speed` compares it times that factor.

WORD: only programs whose names contain one. --profile: another run of each program, with a profile;
seconds of each kind of command in it, of the rank that took the least time, beside those of the
predicted step. In both, commands share the cores with others that run at that time.
Namespaces need root, or unshare -r.
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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bench
import calibrate
import numpy as np
import results
from bench import ROOT
from results import Block
from yardstick import Yardstick

from tests.lib import hosts, trainer
from zg.plan.plan import Plan
from zg.predict import clock
from zg.predict.seconds import Clock
from zg.read import spec
from zg.read.schema import Spec
from zg.search import search
from zg.write import times
from zg.write.timeline import OTHER, WORDS, kind_of

STEPS = 6
YARDSTICK = 0.5  # seconds of passes before and after a program
LEAST = 0.01  # smallest share of a step for which a part is printed
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
GPT2 = "gpt2-124m"


@dataclass(frozen=True)
class Case:
    """A program to predict and to measure. model: of model_specs, or `llama` or `qwen`; rate: bits
    a second that each of two hosts sends, 0 for one host."""

    name: str
    model: str
    keys: tuple[str, ...]
    rate: float = 0.0


def case(
    model: str, ranks: int, real: str, stage: int, more: str = "", *keys: str
) -> Case:
    fixed = (f"cluster.ranks={ranks}", f"train.precision={real}", f"zero.stage={stage}")
    name = f"{model}, {ranks} ranks, {real}, stage {stage}"
    if ranks == 1:
        name = f"{model}, 1 rank, {real}"
    return Case(
        f"{name}, {more}" if more else name, model, (*fixed, "targets=[cpu]", *keys)
    )


HOST, DISK = (f"zero.offload_optimizer.device={d}" for d in ("cpu", "nvme"))
FULL, MANY = "train.recompute=full", "train.global_batch=8"
LONG = ("train.sequence=512", "train.micro_batch=1", "train.global_batch=2")
FOUR = ("train.micro_batch=1", "train.global_batch=4")


def apart(gbit: int) -> Case:
    """Return a case of two hosts with two ranks each, reduced in two levels."""
    two = (
        "cluster.local=2",
        f"cluster.links.network.bandwidth={gbit * 1e9 / 8:.4g}",
    )
    c = case("llama", 4, "f32", 3, f"2 hosts, {gbit} Gbit/s", *FOUR, *two)
    return replace(c, rate=gbit * 1e9)


CASES = (
    case(GPT2, 1, "f32", 0),
    case(GPT2, 1, "bf16", 0),
    case(GPT2, 2, "f32", 0),
    case(GPT2, 2, "f32", 3),
    case(GPT2, 2, "bf16", 3),
    case(GPT2, 4, "bf16", 3, "", *FOUR),
    case(GPT2, 2, "f32", 1, "accumulates", MANY),
    case(GPT2, 2, "bf16", 2, "recomputes", FULL),
    case(GPT2, 2, "f32", 3, "optimizer on the host", HOST),
    case(GPT2, 2, "bf16", 3, "optimizer in a file", DISK),
    case(GPT2, 2, "bf16", 3, "long", *LONG),
    case("llama", 1, "f32", 0),
    case("llama", 1, "bf16", 0, "recomputes", FULL),
    case("llama", 2, "f32", 2),
    case("llama", 2, "bf16", 1, "accumulates", MANY),
    case("llama", 4, "f32", 3, "", *FOUR),
    apart(1),
    apart(10),
    case("qwen", 1, "f32", 0),
    case("qwen", 2, "bf16", 3),
    case("qwen", 2, "f32", 3, "optimizer in a file", DISK),
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
    """A program's predicted and measured seconds of a step, and how much slower the machine was
    than in the calibration. parts: both times of each kind of command."""

    name: str
    predicted: float
    measured: float
    slower: float
    parts: dict[str, tuple[float, float]]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def steady(self) -> float:
        """Return the error of the prediction for a machine of this speed."""
        return self.predicted * self.slower / self.measured - 1


# ---- predicted


def clock_of(read: Spec, p: Plan, count: int) -> Clock:
    """Return the clock of a plan for `count` hosts that share this machine."""
    device = clock.device_of(read)
    shared = replace(
        device, cores=max(1, device.cores // count), cache=device.cache // count
    )
    return Clock(p, shared)


def kind(queue: str, name: str) -> str:
    """Return the kind of a command: its part of the step and its queue."""
    first = kind_of(name)
    part = WORDS.get(first, (OTHER,))[0]
    return f"{part} ({first} on {queue})"


def predicted_parts(t: times.Times) -> Counter[str]:
    found: Counter[str] = Counter()
    for b, n in t.played.counted():
        found[kind(b.step.queue, b.step.op)] += (b.end - b.begin) * n
    return found


# ---- measured


class Programs:
    """Runs of cases in a folder, on a device."""

    def __init__(self, folder: Path, device: str, profile: bool) -> None:
        self.folder, self.device, self.profile = folder, device, profile
        self.yardstick = Yardstick(len(os.sched_getaffinity(0)))
        numbers = np.random.default_rng(1).integers(0, 30000, 1 << 17)
        trainer.write_tokens(folder / "tokens", numbers)

    def run(self, c: Case, code: str, *more: object) -> None:
        """Run a program, with options."""
        (self.folder / "log").unlink(missing_ok=True)
        said = ["--data", self.folder / "tokens", "--tokens", "uint16", *more]
        said += ["--steps", STEPS, "--log", self.folder / "log"]
        if c.rate:
            program = trainer.build(code, trainer.MPI)
            with hosts.network(2) as two:
                for host in two:
                    host.slow_down(c.rate)
                words = (*said, "--threads", 1)
                run = hosts.mpirun(program, 4, *words, hosts=two, folder=self.folder)
                done = hosts.ended(run)
        else:
            words = [trainer.build(code), *said]
            done = subprocess.run(
                [*map(str, words)], capture_output=True, text=True, check=False
            )
        if done.returncode:
            sys.exit(f"{c.name}: {done.stderr}")

    def measured(self, c: Case, code: str) -> float:
        """Return the seconds of a step."""
        self.run(c, code)
        lines = map(json.loads, (self.folder / "log").read_text().splitlines())
        steps = [x["seconds"] for x in lines if "step" in x and "seconds" in x]
        return statistics.median(steps[1:])

    def parts(self, c: Case, code: str) -> Counter[str]:
        """Return the seconds of a step's commands by kind, of a run with a profile."""
        path = self.folder / "trace"
        self.run(c, code, "--profile", path, "--profile-steps", f"3-{STEPS}")
        found: Counter[str] = Counter()
        trace = calibrate.profile(path)
        for (queue, name), calls in trace.commands.items():
            found[kind(queue, name)] += sum(s for _, s in calls.values()) / (STEPS - 2)
        return found

    def row(self, c: Case) -> Row:
        path = source(c.model, self.folder)
        keys = [*c.keys]
        if DISK in keys:
            keys.append(f"zero.offload_optimizer.nvme_path={self.folder}")
        read = spec.load(
            str(path), [*keys, f"cluster.device={self.device}"], None, None
        )
        timed = clock_of(read, search.find(read).plan, 2 if c.rate else 1)
        told = times.times(timed)
        code = trainer.generate(path, *keys)
        before = self.yardstick.seconds(YARDSTICK)
        took = self.measured(c, code)
        now = (before + self.yardstick.seconds(YARDSTICK)) / 2
        parts = {}
        if self.profile:
            ours, theirs = predicted_parts(told), self.parts(c, code)
            parts = {
                x: (ours[x], theirs[x])
                for x in sorted({*ours, *theirs}, key=lambda x: -theirs[x])
                if max(ours[x], theirs[x]) >= LEAST * took
            }
        slower = now / timed.device.yardstick if timed.device.yardstick else 1.0
        return Row(c.name, told.seconds, took, slower, parts)


# ---- told


def line(r: Row) -> str:
    return (
        f"{r.name} | {r.predicted:.3f} | {r.measured:.3f} | {r.error:+.1%} | {r.slower:.2f} "
        f"| {r.steady:+.1%}"
    )


def tables(rows: Sequence[Row]) -> list[Block]:
    def summary(errors: list[float]) -> str:
        sizes = [abs(e) for e in errors]
        return f"mean {statistics.mean(sizes):.1%}, greatest {max(sizes):.1%}"

    return [
        f"Errors of {len(rows)} programs: {summary([r.error for r in rows])}; at the machine's "
        f"speed, {summary([r.steady for r in rows])}.",
        results.table(
            "program | predicted, s | measured, s | error | yardstick, of the calibration's "
            "| error at its speed",
            map(line, rows),
        ),
    ]


def main(argv: Sequence[str]) -> int:
    p = bench.with_out(argparse.ArgumentParser(description=__doc__.split("\n\n")[0]))
    p.add_argument("--device", required=True, metavar="FILE")
    p.add_argument("--profile", action="store_true")
    p.add_argument("words", nargs="*")
    args = p.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(dir=ROOT / "out") as name:
        programs = Programs(Path(name), os.path.abspath(args.device), args.profile)
        for c in CASES:
            if args.words and not any(w in c.name for w in args.words):
                continue
            rows.append(programs.row(c))
            print(line(rows[-1]), flush=True)
            for part, (a, b) in rows[-1].parts.items():
                print(f"    {part:48} predicted {a:7.3f} s, measured {b:7.3f} s")
    machine = bench.machine()
    load = f"others {100 * machine['others']:.1f} %"
    results.finish(bench.head(machine), tables(rows), args.out, load)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
