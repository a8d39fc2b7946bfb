"""calibrate.py -- measures the processor that it runs on and writes a device's file, by which zgen
predicts step times (`cluster.device`).

    ./run calibrate [-o FILE]
    ./run calibrate --gpu [-o FILE]       this machine's GPUs instead: calibrate_gpu.py

Each kernel of some small plans is timed alone, on all cores and on one core of a rank while the
other cores do the same: with operands from memory (cold: many sets of them in turn) and from the
cache (hot: one set again and again). Links are timed by programs with `--profile`: gathers between
ranks, copies and the file of an offloaded optimizer, gathers over MPI between two hosts of
namespaces. The file lies in out/. A machine that becomes faster or slower in between is told by a
yardstick (yardstick.py) around the kernels of each plan.

A curve has sizes of calls and rates (predict/seconds.py tells the size of a call).
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import gpu_kernels as timing
import numpy as np
import pytest
from gpu_kernels import ROOT
from kernels import processor
from yardstick import Yardstick

sys.path[:0] = [str(ROOT), str(ROOT / "gen")]
from tests.lib import hosts, trainer, zk
from zg import build, output
from zg.plan import plan
from zg.predict import seconds
from zg.predict.device import class_of
from zg.read import spec

COLD = 128 << 20  # bytes of operands between two uses of the same one
# Seconds and calls of a measurement, at least, and seconds after which one call is enough.
LEAST, TURNS, MOST = 0.008, 3, 0.05
YARDSTICK = 0.3  # seconds of a yardstick's passes
ROUND = {"bandwidth": 1.25e9, "latency": 1e-4}  # of a network that cannot be measured
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
targets: [{target}]
"""
# (model, width, samples, tokens of a sample): no model that bench/predict.py predicts
SIZES = (
    (GPT, 320, 2, 96),
    (LLAMA, 448, 1, 384),
    (GPT, 640, 4, 160),
    (LLAMA, 896, 2, 320),
)


Size = tuple[str, int, int, int]


def text(size: Size, real: str, target: str = "cpu") -> str:
    model, width, batch, tokens = size
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
        target=target,
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
    """Return the median seconds of a call; the calls take turns, beginning after the first."""
    calls[0]()
    found: list[float] = []
    begun, spent = time.perf_counter(), 0.0
    for call in itertools.cycle((*calls[1:], calls[0])):
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        found.append(end - start)
        spent = end - begun
        if spent >= MOST or (spent >= LEAST and len(found) >= TURNS):
            return statistics.median(found)


Timed = tuple[str, str, int, float]  # kernel, cold or hot, size, rate


def chosen(threads: int, real: str) -> zk.Kernels:
    """Return the kernels of the object, and with the order of products, that a run here takes."""
    some = zk.Kernels(dtype=zk.REALS[real])
    isa = some.library.zk_object().decode()
    order = some.library.zk_products(some.context, -1)
    return zk.Kernels(isa, zk.REALS[real], threads, order=order)


Names = tuple[str, ...]


def kernels(
    threads: int, real: str, only: Names = ()
) -> Iterator[tuple[float, list[Timed]]]:
    """Yield the yardstick's seconds and the kernels, for each plan. only: names; (): all."""
    objects = chosen(threads, real)
    yardstick = Yardstick(threads)
    for size in SIZES:
        p = planned(text(size, real))
        amount, listed = work(p), timing.kernels(p)
        most = max(timing.need(k, timing.dims(p, k)) for k in listed)
        operands = timing.Operands(Memory(), "cpu", real, max(most, COLD))
        found: list[Timed] = []
        before = yardstick.seconds(YARDSTICK)
        for k in listed:
            todo = amount[k.launch.name]
            if not todo.amount or (only and k.launch.kernel not in only):
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
            cold = todo.amount / timed(calls)
            hot = todo.amount / timed(calls[:1]) if sets > 1 else cold
            for name, rate in ("cold", cold), ("hot", hot):
                found.append((k.launch.kernel, name, todo.size, rate))
        yield (before + yardstick.seconds(YARDSTICK)) / 2, found


def _one(
    threads: int, real: str, only: Names, cores: Sequence[int], send: object
) -> None:
    os.sched_setaffinity(0, cores)
    send.send([*kernels(threads, real, only)])


Curves = dict[
    str, dict[str, list[tuple[int, float]]]
]  # cold and hot -> kernel -> points


def measured(threads: int, real: str, only: Names = ()) -> tuple[Curves, list[float]]:
    """Return each kernel's points while every core is busy, and the yardstick's seconds beside each
    plan. A point's rate is the work that a kernel does in a pass of the yardstick."""
    allowed = sorted(os.sched_getaffinity(0))
    runs = []
    for n in range(len(allowed) // threads):
        get, send = multiprocessing.Pipe(False)
        cores = allowed[n * threads : (n + 1) * threads]
        child = multiprocessing.Process(
            target=_one, args=(threads, real, only, cores, send)
        )
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
    found: Curves = {"cold": {}, "hot": {}}
    passes = []
    for plans in zip(*rows, strict=True):
        passes.append(statistics.median(seconds for seconds, _ in plans))
        for same in zip(*(timed for _, timed in plans), strict=True):
            kernel, name, size, _ = same[0]
            rate = statistics.median(r for *_, r in same) * passes[-1]
            found[name].setdefault(kernel, []).append((size, rate))
    return found, passes


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


def rates(found: Curves, yardstick: float) -> dict[str, object]:
    """Return the curves of a device's file, for a machine on which a pass of the yardstick takes so
    many seconds."""
    out: dict[str, object] = {}
    for name, kernels in found.items():
        curves = {
            kernel: [(size, rate / yardstick) for size, rate in points]
            for kernel, points in kernels.items()
        }
        out[name] = {
            of: group(curves, of) for of in ("products", "attention", "others")
        }
        out[name] |= {kernel: curve(points) for kernel, points in curves.items()}
    return out


# ---- links

Moved = list[tuple[int, float]]  # bytes and seconds


@dataclass(frozen=True)
class Profile:
    """Commands of some profiled steps: (queue, name) -> (step, call) -> bytes and seconds, of the
    rank that took the least time, which is the one that waited for no other."""

    commands: dict[tuple[str, str], dict[tuple[int, int], tuple[int, float]]]

    def moved(self, queue: str, name: str) -> Moved:
        return [*self.commands[queue, name].values()]

    def shortest(self) -> float:
        """Return the seconds of the function of queue main that takes least."""
        return min(
            statistics.median(s for _, s in calls.values())
            for (queue, name), calls in self.commands.items()
            if queue == "main" and name in ("next", "factor", "count")
        )


def profile(path: Path) -> Profile:
    events = json.loads(path.read_text())
    queues = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[tuple[str, str], dict[tuple[int, int], tuple[int, float]]] = {}
    for e in events:
        if e["ph"] != "X" or "step" not in e.get("args", {}) or "for" in e["args"]:
            continue
        one = e["args"].get("bytes", 0), 1e-6 * e["dur"]
        calls = found.setdefault((queues[e["tid"]], e["name"]), {})
        at = e["args"]["step"], e["args"]["call"]
        calls[at] = min(calls.get(at, one), one, key=lambda x: x[1])
    return Profile(found)


def link(moved: Moved, whole: float = 1.0) -> dict[str, float]:
    """Return a link's bandwidth, by transfers of at least half the largest one's bytes, and its
    latency, by the fastest quarter of the others. whole: bytes moved for each that is counted."""
    most = max(b for b, _ in moved)
    large = [(b, s) for b, s in moved if 2 * b >= most]
    bandwidth = whole * sum(b for b, _ in large) / sum(s for _, s in large)
    rests = sorted(s - whole * b / bandwidth for b, s in moved if 2 * b < most)
    latency = max(0.0, rests[len(rests) // 4]) if rests else 0.0
    return {
        "bandwidth": float(f"{bandwidth:.4g}"),
        "latency": float(f"{latency:.3g}"),
    }


class Programs:
    """Programs of one model whose profiles tell the links. words: its spec, of one block."""

    def __init__(
        self, folder: Path, ranks: int, words: str, kind: trainer.Kind = trainer.GCC
    ) -> None:
        self.folder, self.ranks, self.kind = folder, ranks, kind
        self.spec, self.tokens = folder / "moves.yaml", folder / "tokens"
        self.spec.write_text(words.replace("blocks: 1", "blocks: 2"))
        numbers = np.random.default_rng(1).integers(0, 1000, 1 << 16)
        trainer.write_tokens(self.tokens, numbers)
        self.words = ("--data", self.tokens, "--steps", 4, "--profile-steps", "2-4")

    def source(self, ranks: int, *keys: str) -> str:
        layout = (f"cluster.ranks={ranks}", f"train.global_batch={4 * ranks}")
        return trainer.generate(self.spec, *layout, *keys)

    def near(self, *keys: str) -> Profile:
        """Return the profile of ranks on this host."""
        source = self.source(self.ranks, *keys)
        program, trace = trainer.build(source, self.kind), self._trace()
        words = [program, *self.words, "--profile", trace]
        done = subprocess.run([*map(str, words)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(
                f"calibrate: a program ended with {done.returncode}: {done.stderr[-500:]}"
            )
        return profile(trace)

    def far(self) -> Profile | None:
        """Return the profile of a rank on each of two hosts of namespaces, None if none can be
        made or mpirun is missing."""
        if not shutil.which("mpirun") or not shutil.which("mpicc"):
            return None
        try:
            source = self.source(2, "zero.overlap_comm=false")
            program, trace = trainer.build(source, trainer.MPI), self._trace()
            with hosts.network(2) as two:
                words = (*self.words, "--profile", trace)
                run = hosts.mpirun(program, 2, *words, hosts=two, folder=self.folder)
                done = hosts.ended(run)
        except (AssertionError, pytest.skip.Exception) as e:
            print(f"no hosts of namespaces: {e}", file=sys.stderr)
            return None
        if done.returncode:
            print(f"no MPI: {done.stderr[-300:]}", file=sys.stderr)
            return None
        return profile(trace)

    def _trace(self) -> Path:
        trace = self.folder / "trace"
        trace.unlink(missing_ok=True)
        return trace


def links(folder: Path, cores: int) -> dict[str, object]:
    """Return the numbers of a device's links."""
    ranks = max(2, cores)  # one core has no peers to copy from: two ranks share it
    own = ranks / (ranks - 1)  # a gather copies a rank's own piece, too
    programs = Programs(folder, ranks, text(SIZES[2], "f32"))
    gathers = programs.near("zero.overlap_comm=false")
    offloads = programs.near(
        "zero.offload_optimizer.device=nvme",
        f"zero.offload_optimizer.nvme_path={folder}",
    )
    far = programs.far()
    peers = link(gathers.moved("main", "gather"), own)
    return {
        "launch": float(f"{gathers.shortest():.2g}"),
        "copy": peers["bandwidth"],
        "peers": peers,
        "network": link(far.moved("main", "gather")) if far else ROUND,
        **tiers(offloads),
    }


def tiers(offloads: Profile) -> dict[str, object]:
    """Return the links to the host and to files, by the profile of an optimizer in a file."""
    return {
        "host": link(offloads.moved("up", "copy") + offloads.moved("down", "copy")),
        "read": link(offloads.moved("load", "copy")),
        "write": link(offloads.moved("store", "copy")),
    }


# ---- the file


def written(device: dict[str, object], notes: Mapping[str, str]) -> str:
    """Return the text of a device's file. notes: where numbers come from that were not measured, by
    their keys."""
    lines = [
        "# Written by ./run calibrate; docs/prediction.md tells what each number is.",
        *(f"# {key}: {note}" for key, note in notes.items()),
        "# all others: measured",
    ]
    for key, value in device.items():
        if key != "rates":
            lines.append(f"{key}: {json.dumps(value)}")
    lines.append("rates:")
    for r in device["rates"]:
        lines.append(f"- precision: {r['precision']}")
        lines += [f"  threads: {r['threads']}"] if "threads" in r else []
        for name in (n for n in ("cold", "hot") if n in r):
            lines.append(f"  {name}:")
            lines += [f"    {k}: {json.dumps(points)}" for k, points in r[name].items()]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    p = argparse.ArgumentParser(
        prog="./run calibrate",
        description="Measures this processor and writes a device's file, by which zgen predicts "
        "step times (cluster.device).",
    )
    p.add_argument(
        "-o", metavar="FILE", default="device.yaml", help="default: device.yaml"
    )
    p.add_argument(
        "--gpu",
        action="store_true",
        help="measure this machine's GPUs instead, by programs that nvcc compiles",
    )
    args = p.parse_args(argv)
    if missing := output.nowhere(args.o):
        p.error(f"-o {args.o}: there is no folder {missing}; allowed: {output.FOLDERS}")
    if args.gpu:  # in a process of its own: tests/lib/zk.py settles the device when it is imported
        gpu = [sys.executable, str(ROOT / "bench" / "calibrate_gpu.py"), args.o]
        return subprocess.run(gpu, env=with_driver()).returncode
    cores = len(os.sched_getaffinity(0))
    found, passes = [], []
    for real in ("f32", "bf16"):
        for threads in sorted({1, cores}):
            tell(f"kernels in {real}, {threads} threads a rank")
            curves, seconds = measured(threads, real)
            found.append((real, threads, curves))
            passes += seconds
    tell("links")
    with tempfile.TemporaryDirectory(dir=ROOT / "out") as folder:
        linked = links(Path(folder), cores)
    yardstick = statistics.median(passes)
    rows = [
        {"precision": real, "threads": threads} | rates(curves, yardstick)
        for real, threads, curves in found
    ]
    update = next(r for r in rows if r["threads"] == cores)["cold"]["zk_update"][-1][1]
    device = {
        "about": f"{processor()}, {cores} cores, {zk.Kernels().isa}",
        "target": "cpu",
        "cores": cores,
        "cache": cache(),
        "yardstick": float(f"{yardstick:.4g}"),
        "update": round(update),
        **linked,
        "rates": rows,
    }
    network = (
        "round numbers, not measured: MPI between namespaces did not run here"
        if device["network"] == ROUND
        else "MPI between namespaces of this machine, faster than most networks"
    )
    output.write(written(device, {"network": network}), args.o)
    tell(
        f"{args.o} written; the yardstick took {1e3 * min(passes):.1f} to "
        f"{1e3 * max(passes):.1f} ms"
    )
    return 0


def with_driver() -> dict[str, str]:
    """Return the environment, with the folder in which containers may have the driver."""
    paths = [os.environ.get("LD_LIBRARY_PATH", ""), "/usr/local/nvidia/lib64"]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(p for p in paths if p)}


BEGUN = time.monotonic()


def tell(part: str) -> None:
    print(f"{time.monotonic() - BEGUN:4.0f} s: {part}", file=sys.stderr, flush=True)


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
