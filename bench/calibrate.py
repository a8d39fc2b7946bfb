"""calibrate.py -- measures the processor that it runs on and writes a device's file, by which zgen
predicts step times (`cluster.device`).

    ./run calibrate [-o FILE]

Each kernel of some small plans is timed alone, on all cores and on one core of a rank while the
other cores do the same: with operands from memory (cold: many sets of them in turn) and from the
cache (hot: one set again and again). Copies are timed by the gathers of a program with `--profile`.
The disk, the network, latencies and the smallest command are round numbers.

A curve has sizes of calls and rates (predict/seconds.py tells the size of a call).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gpu_kernels as timing
import numpy as np
from gpu_kernels import ROOT
from kernels import processor

sys.path[:0] = [str(ROOT), str(ROOT / "gen")]
from tests.lib import trainer, zk
from zg import build, output
from zg.plan import plan
from zg.predict import seconds
from zg.predict.device import class_of
from zg.read import spec

COLD = 128 << 20  # bytes of operands between two uses of the same one
LEAST, TURNS = 0.012, 3  # seconds and calls of a measurement, at least
NEAR = 1.25  # points of a curve whose work is closer become one

# ---- plans whose kernels are timed

GPT = """
name: gpt
model:
  vocab: {vocab}
  width: {width}
  names: gpt2
  units:
  - embedding: {{tokens: wte, positions: wpe, context: {tokens}}}
  - blocks: 1
    name: h.{{l}}
    ops:
    - residual: [layernorm: {{name: ln_1}}, attention: {{name: attn, heads: {heads}, bias: true}}]
    - residual:
      - layernorm: {{name: ln_2}}
      - linear: {{name: mlp.c_fc, out: {inner}, bias: true}}
      - gelu: tanh
      - linear: {{name: mlp.c_proj, out: {width}, bias: true}}
  - head: [layernorm: {{name: ln_f}}, linear: {{tied: wte}}]
"""
LLAMA = """
name: llama
model:
  vocab: {vocab}
  width: {width}
  names: llama
  units:
  - embedding: {{tokens: model.embed_tokens}}
  - blocks: 1
    name: model.layers.{{l}}
    ops:
    - residual:
      - rmsnorm: {{name: input_layernorm}}
      - attention: {{name: self_attn, heads: {heads}, kv_heads: {half}, head_dim: 64, qk_norm: true,
          rope: {{theta: 10000.0}}}}
    - residual:
      - rmsnorm: {{name: post_attention_layernorm}}
      - linear: {{name: [mlp.gate_proj, mlp.up_proj], out: [{inner}, {inner}]}}
      - swiglu: {{}}
      - linear: {{name: mlp.down_proj, out: {width}}}
  - head: [rmsnorm: {{name: model.norm}}, linear: {{name: lm_head, out: {vocab}}}]
"""
REST = """
zero: {{stage: 3}}
train:
  global_batch: {batch}
  micro_batch: {batch}
  sequence: {tokens}
  precision: {real}
  optimizer: {{type: AdamW, lr: 1.0e-3}}
cluster: {{ranks: 1}}
targets: [cpu]
"""
# (model, width, samples, tokens of a sample): no model that bench/predict.py predicts
SIZES = (
    (GPT, 320, 2, 96),
    (LLAMA, 448, 1, 384),
    (GPT, 640, 4, 160),
    (LLAMA, 1152, 2, 320),
    (GPT, 1408, 1, 512),
)


def text(model: str, width: int, batch: int, tokens: int, real: str) -> str:
    heads = width // 64 or 1
    return (model + REST).format(
        vocab=12 * width,
        width=width,
        tokens=tokens,
        heads=heads // 2 * 2 if model is LLAMA else heads,
        half=heads // 2,
        inner=3 * width if model is LLAMA else 4 * width,
        batch=batch,
        real=real,
    )


def planned(words: str) -> plan.Plan:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(words)
        file.flush()
        return build.build(spec.load(file.name, [], None, None)).plan


def work(p: plan.Plan) -> dict[str, seconds.Work]:
    """Return the work of each launch of a training step, as predictions count it."""
    fns, found = {f.name: f for f in p.fns}, {}
    for step in (s for x in p.step for s in x.steps if s.op in fns):
        for call in fns[step.op].calls:
            found.setdefault(call.launch, seconds.work(p, step, call))
    return found


# ---- a kernel


class Memory:
    """This process's memory as a device: tests/lib/device.py has the methods."""

    def __init__(self) -> None:
        self.kept: dict[int, np.ndarray] = {}

    def take(self, size: int) -> int:
        room = np.zeros(size + 256, np.uint8)
        at = room.ctypes.data + -room.ctypes.data % 256
        self.kept[at] = room
        return at

    def copy(self, to: int, start: int, size: int, way: int) -> None:
        ctypes.memmove(to, start, size)


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Return the median seconds of a call; the calls take turns."""
    for call in calls:
        call()
    found: list[float] = []
    begun = time.perf_counter()
    while len(found) < TURNS or time.perf_counter() - begun < LEAST:
        for call in calls:
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def kernels(threads: int, real: str) -> Iterator[tuple[str, str, int, float]]:
    """Yield (kernel, cold or hot, size, rate) for every kernel of the plans."""
    order = zk.TILED if real == "bf16" else None
    objects = zk.Kernels(dtype=zk.REALS[real], threads=threads, order=order)
    for size in SIZES:
        p = planned(text(*size, real))
        amount, listed = work(p), timing.kernels(p)
        most = max(timing.need(k, timing.dims(p, k)) for k in listed)
        operands = timing.Operands(Memory(), "cpu", real, max(most, COLD))
        for k in listed:
            todo = amount[k.launch.name]
            if not todo.amount:
                continue
            run = getattr(objects, k.launch.kernel)
            need = timing.need(k, timing.dims(p, k))
            sets = max(1, min(32, operands.size // need))
            # The last kernel left its results there, and some numbers are slower than others.
            operands.used = 0
            operands.fill(operands.room, min(operands.size, sets * need))
            calls = []
            for _ in range(sets):
                call = timing.words_of(operands, p, k, operands.take)

                def once(call: timing.Call = call, run: Callable = run) -> None:
                    objects.launch = call.launch
                    run(*call.words)

                calls.append(once)
            for name, some in ("cold", calls), ("hot", calls[:1]):
                yield k.launch.kernel, name, todo.size, todo.amount / timed(some)


def _one(threads: int, real: str, cores: Sequence[int], send: object) -> None:
    os.sched_setaffinity(0, cores)
    send.send([*kernels(threads, real)])


def measured(threads: int, real: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return cold and hot -> kernel -> points (size, rate), while every core is busy."""
    allowed = sorted(os.sched_getaffinity(0))
    runs = []
    for n in range(len(allowed) // threads):
        get, send = multiprocessing.Pipe(False)
        cores = allowed[n * threads : (n + 1) * threads]
        child = multiprocessing.Process(target=_one, args=(threads, real, cores, send))
        child.start()
        send.close()  # so that the end of a child ends its pipe
        runs.append((child, get))
    rows = []
    for child, get in runs:
        try:
            rows.append(get.recv())
        except EOFError:
            child.join()
            sys.exit(
                f"calibrate: a process that timed kernels ended with {child.exitcode}"
            )
        child.join()
    found: dict[str, dict[str, list[tuple[int, float]]]] = {"cold": {}, "hot": {}}
    for same in zip(*rows, strict=True):
        kernel, name, size, _ = same[0]
        rate = statistics.median(r for *_, r in same)
        found[name].setdefault(kernel, []).append((size, rate))
    return found


def curve(points: Sequence[tuple[int, float]]) -> list[list[float]]:
    """Return points in order, of which those with nearly the same work are one."""
    groups: list[list[tuple[int, float]]] = []
    for point in sorted(points):
        if groups and point[0] <= NEAR * groups[-1][0][0]:
            groups[-1].append(point)
        else:
            groups.append([point])
    return [
        [
            float(f"{statistics.geometric_mean(x for x, _ in g):.4g}"),
            float(f"{statistics.geometric_mean(r for _, r in g):.4g}"),
        ]
        for g in groups
    ]


def group(curves: dict[str, list[tuple[int, float]]], of: str) -> list[list[float]]:
    """Return the curve of a class: of all its kernels' points."""
    return curve([x for name, xs in curves.items() if class_of(name) == of for x in xs])


def rates(threads: int, real: str) -> dict[str, object]:
    found = measured(threads, real)
    out: dict[str, object] = {"precision": real, "threads": threads}
    for name, curves in found.items():
        out[name] = {
            of: group(curves, of) for of in ("products", "attention", "others")
        }
        out[name] |= {kernel: curve(points) for kernel, points in curves.items()}
    return out


# ---- copies


def gathers(folder: Path, ranks: int) -> float:
    """Return the bytes per second that all-gathers copy, the rank's own included, with a rank per
    core: those of the larger half, in a profiled program of the middle size."""
    name = folder / "moves.yaml"
    name.write_text(text(*SIZES[2], "f32").replace("blocks: 1", "blocks: 4"))
    words = [
        f"--set={key}"
        for key in (
            "zero.overlap_comm=false",
            f"cluster.ranks={ranks}",
            f"train.global_batch={4 * ranks}",
        )
    ]
    subprocess.run(
        [ROOT / "gen/zgen", name, *words, "-o", folder / "train.c"], check=True
    )
    program = trainer.build((folder / "train.c").read_text())
    tokens = folder / "tokens"
    np.random.default_rng(1).integers(0, 7000, 1 << 16).astype(np.uint16).tofile(tokens)
    subprocess.run(
        [program, "--data", tokens, "--tokens", "uint16", "--steps", "5"]
        + ["--profile", folder / "trace", "--profile-steps", "3-5"],
        check=True,
        capture_output=True,
    )
    events = json.loads((folder / "trace").read_text())
    rows = sorted(
        (e["args"]["bytes"], e["dur"] * 1e-6) for e in events if e["name"] == "gather"
    )
    large = rows[len(rows) // 2 :]
    received = sum(b for b, _ in large) / sum(s for _, s in large)
    return received * ranks / (ranks - 1)


# ---- the file


def written(device: dict[str, object]) -> str:
    """Return the text of a device's file."""
    lines = [
        "# Written by ./run calibrate; docs/prediction.md tells what each number is."
    ]
    for key, value in device.items():
        if key != "rates":
            lines.append(f"{key}: {json.dumps(value)}")
    lines.append("rates:")
    for r in device["rates"]:
        lines.append(f"- precision: {r['precision']}\n  threads: {r['threads']}")
        for name in ("cold", "hot"):
            lines.append(f"  {name}:")
            lines += [f"    {k}: {json.dumps(points)}" for k, points in r[name].items()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(
        prog="./run calibrate", description=__doc__.split("\n\n")[0]
    )
    p.add_argument(
        "-o", metavar="FILE", default="device.yaml", help="default: device.yaml"
    )
    args = p.parse_args(argv)
    if missing := output.nowhere(args.o):
        p.error(f"-o {args.o}: there is no folder {missing}; allowed: {output.FOLDERS}")
    cores, begun = len(os.sched_getaffinity(0)), time.monotonic()
    isa = zk.Kernels().isa
    found = []
    for real in ("f32", "bf16"):
        for threads in sorted({1, cores}):
            print(
                f"kernels in {real}, {threads} threads a rank",
                file=sys.stderr,
                flush=True,
            )
            found.append(rates(threads, real))
    print("copies", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=ROOT / "out") as folder:
        # One core has no peers to copy from: two ranks share it.
        gather = gathers(Path(folder), max(2, cores))
    update = next(r for r in found if r["threads"] == cores)["cold"]["zk_update"][-1][1]
    device = {
        "about": f"{processor()}, {cores} cores, {isa}",
        "target": "cpu",
        "cores": cores,
        "cache": cache(),
        "launch": 3e-6,
        "copy": round(gather),
        "update": round(update),
        "peers": {"bandwidth": round(gather), "latency": 2e-5},
        "network": {"bandwidth": 1.25e9, "latency": 1e-4},
        "host": {"bandwidth": round(gather)},
        "read": {"bandwidth": 2e9, "latency": 1e-4},
        "write": {"bandwidth": 1e9, "latency": 1e-4},
        "rates": found,
    }
    output.write(written(device), args.o)
    print(f"{args.o}: written after {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return 0


def cache() -> int:
    """Return the bytes of numbers that are read again from the cache: up to where the rate has
    fallen by half of its whole fall."""
    numbers = np.ones(1 << 27, np.float32)
    sizes = [1 << n for n in range(18, 28)]
    found = []
    for size in sizes:
        part, times = numbers[:size], max(1, sizes[-1] // size // 4)

        def read(part: np.ndarray = part, times: int = times) -> None:
            for _ in range(times):
                part.sum()

        found.append(size * times / timed([read]))
    half = (max(found) + found[-1]) / 2
    return 4 * max(
        size for size, rate in zip(sizes, found, strict=True) if rate >= half
    )


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    sys.exit(main(sys.argv[1:]))
