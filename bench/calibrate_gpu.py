"""calibrate_gpu.py -- measures the GPUs of this machine and writes a device's file, by which zgen
predicts step times (`cluster.device`). `./run calibrate --gpu -o FILE` calls it.

    calibrate_gpu.py FILE

Each kernel of some plans is timed on the first GPU, with operands from its memory. Links are
timed by programs with `--profile`: gathers between GPUs, copies and the file of an offloaded
optimizer, which lies in out/. The rate of an optimizer on the host is that of the processor's
kernel while the ranks of all GPUs share the cores. Peaks and the network cannot be measured here,
nor can gathers on one GPU: they are those of the device that zgen takes for the target.

With ZR_BENCH_KIND=emulated tiny plans and two ranks run in the emulation, to test this file.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
from pathlib import Path

import gpu_found
from gpu_cases import REHEARSAL

GPUS = [gpu_found.Gpu(90, 1 << 34, "emulated")] * 2 if REHEARSAL else gpu_found.gpus()
if GPUS and not REHEARSAL:  # before tests/lib/zk.py is imported
    os.environ["ZR_TEST_DEVICE"] = GPUS[0].column

import calibrate
import gpu_kernels
from calibrate import GPT, LLAMA, Curves, Size
from gpu_kernels import ROOT
from tests.lib import trainer
from zg import output
from zg.predict.device import DEFAULT, load
from zg.read.keytypes import TARGETS

# (model, width, samples, tokens of a sample)
SIZES: tuple[Size, ...] = (
    (GPT, 128, 1, 128),
    (LLAMA, 512, 1, 512),
    (GPT, 768, 8, 1024),
    (LLAMA, 2048, 2, 2048),
    (GPT, 1600, 8, 1024),
    (LLAMA, 4096, 4, 2048),
)
MOVED: Size = (GPT, 1600, 1, 512)  # of the programs whose profiles tell the links
if REHEARSAL:
    SIZES, MOVED = ((GPT, 128, 1, 32), (LLAMA, 128, 1, 32)), (GPT, 128, 1, 32)


def kernels(real: str, target: str) -> tuple[Curves, float]:
    """Return the points of each kernel, and the seconds of the one that takes least."""
    found: Curves = {"cold": {}}
    least = 1.0
    for size in SIZES:
        p = calibrate.planned(calibrate.text(size, real, target))
        amount, listed = calibrate.work(p), gpu_kernels.kernels(p)
        most = max(gpu_kernels.need(k, gpu_kernels.dims(p, k)) for k in listed)
        bench = gpu_kernels.Bench(real, max(2 * gpu_kernels.CACHE, most))
        for k in listed:
            todo = amount[k.launch.name]
            if not todo.amount:
                continue
            seconds = gpu_kernels.seconds_of(bench, p, k)
            least = min(least, seconds)
            point = todo.size, todo.amount / seconds
            found["cold"].setdefault(k.launch.kernel, []).append(point)
        bench.close()
    return found, least


def links(folder: Path, target: str) -> dict[str, object]:
    """Return the numbers of the links that this machine has."""
    kind = trainer.EMULATED if REHEARSAL else trainer.CUDA
    words = calibrate.text(MOVED, "bf16", target)
    programs = calibrate.Programs(folder, len(GPUS), words, kind)
    offloads = programs.near(
        "zero.offload_optimizer.device=nvme",
        f"zero.offload_optimizer.nvme_path={folder}",
    )
    found = calibrate.tiers(offloads)
    if len(GPUS) > 1:
        gathers = programs.near("zero.overlap_comm=false")
        found["peers"] = calibrate.link(gathers.moved("main", "gather"))
    return found


def update() -> int:
    """Return the bytes a second of an optimizer's kernel on the host."""
    threads = max(1, len(os.sched_getaffinity(0)) // len(GPUS))
    curves, passes = calibrate.measured(threads, "f32", ("zk_update",))
    return round(curves["cold"]["zk_update"][-1][1] / statistics.median(passes))


def main(path: str) -> int:
    if not GPUS:
        print(
            "calibrate: CUDA's driver shows no GPU; without --gpu the processor is measured",
            file=sys.stderr,
        )
        return 3
    gpu = GPUS[0]
    target = gpu.column
    if target not in TARGETS:
        print(
            f"calibrate: the first GPU, {gpu.name}, is of sm_{gpu.code}; allowed: those of zgen's "
            f"targets, {', '.join(x for x in TARGETS if x != 'cpu')}",
            file=sys.stderr,
        )
        return 3
    usual = load(DEFAULT[target])
    found, launches = {}, []
    for real in ("bf16", "f32"):
        calibrate.tell(f"kernels in {real}")
        found[real], least = kernels(real, target)
        launches.append(least)
    calibrate.tell("copies")
    copy = gpu_kernels.copying() / 2
    calibrate.tell("links")
    with tempfile.TemporaryDirectory(dir=ROOT / "out") as folder:
        linked = links(Path(folder), target)
    peers = linked.pop("peers", {})
    calibrate.tell("the optimizer on the host")
    device: dict[str, object] = {
        "about": f"{gpu.name}, one of {len(GPUS)}",
        "target": target,
        "memory": gpu.memory,
        "peak": dict(usual.peak),
        "launch": float(f"{min(launches):.2g}"),
        "copy": float(f"{copy:.4g}"),
        "update": update(),
        "peers": dataclasses.asdict(usual.peers) | peers,
        "network": dataclasses.asdict(usual.network),
        **linked,
        "rates": [
            {"precision": real} | calibrate.rates(curves, 1.0)
            for real, curves in found.items()
        ],
    }
    notes = {key: f"not measured, of {DEFAULT[target]}" for key in ("peak", "network")}
    part = "hop and takes" if peers else "one GPU:"
    notes["peers"] = f"{part} not measured, of {DEFAULT[target]}"
    output.write(calibrate.written(device, notes), path)
    calibrate.tell(f"{path} written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
