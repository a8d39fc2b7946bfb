"""gpu_devices.py -- writes the device files of NVIDIA's GPUs, gen/zg/devices, for our program.

    gpu_devices.py          writes them all
    gpu_devices.py steps    prints the steps that were measured on an H200, as predicted

H200's rates of kernels are those of bench/results/h200.csv, by the same count of work as in
predictions. Attention got faster after that table was made: its times are scaled by those of the
profiler before and after (docs/performance.md, "On a GPU"). A step that was measured before is
predicted with the rates from before.

Another GPU has H200's rates times a ratio of published numbers: of products the best measured rates
or the peaks, of other kernels the bandwidths of memory. Only Hopper has the new attention kernels;
the others have the old ones' rates times the ratio of their SMs, and of clocks where they are
published.
"""

from __future__ import annotations

import csv
import functools
import math
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import gpu_cases
import results
from gpu_cases import ROOT

sys.path.append(str(ROOT / "gen"))
from zg import build
from zg.plan.plan import Plan
from zg.predict import device, play
from zg.predict.device import Curve, Device, class_of
from zg.predict.seconds import Clock, Work, work
from zg.read import spec

CSV = ROOT / "bench" / "results" / "h200.csv"
CASES = [c for c in gpu_cases.MEASURED if c.card in ("", "140")]
SERIAL = {"zk_loss_sum"}  # by one block: no other kernel is as slow
# Shares of the rate of large calls that small ones have, by FLOPs and by bytes (calculon).
SMALL = {
    "products": ((1e8, 0.1 / 0.95), (1e9, 0.6 / 0.95), (1.6e10, 0.9 / 0.95)),
    "others": ((1e5, 0.3 / 0.9), (1e6, 0.6 / 0.9), (1e7, 0.75 / 0.9)),
}
# Sizes from which calls have the whole rate (calculon).
LARGE = {"products": 1.28e11, "others": 1e8}
# The size of attention is that of one head, of which a call has about a hundred.
SMALL["attention"] = tuple((w / 100, part) for w, part in SMALL["products"])


@dataclass(frozen=True)
class Gpu:
    """A GPU. products, others: its rates over H200's, with the reason; old: over H200's before
    Hopper's attention, 0 for Hopper; peers, network: bytes per second that a rank, and a host,
    receives; host: bytes per second to and from the host."""

    name: str
    about: str
    target: str
    memory: float
    peak: tuple[float, float]  # of bf16, f32
    products: tuple[float, str]
    old: tuple[float, str]
    others: tuple[float, str]
    peers: tuple[float, str]
    network: tuple[float, str]
    host: tuple[float, str]
    update: float


HOPPER = {
    "target": "sm_90",
    "peak": (989e12, 67e12),
    "old": (0.0, ""),
    "network": (
        3.23e11,
        "NCCL's all-gather of 4 hosts with 3.2 Tb/s, git.onestrm.cn/aigatech/vpbenchmarking",
    ),
    "host": (5.5e10, "PCIe 5, measured, git.onestrm.cn/aigatech/vpbenchmarking"),
    "update": 7.6e10,
}
AMPERE = {
    "target": "sm_80",
    "peak": (312e12, 19.5e12),
    "products": (
        271.2 / 794.5,
        "best of A100 and H100, 271.2 and 794.5 TFLOP/s, stas00/ml-engineering",
    ),
    "old": (
        108 * 1.41 / (132 * 1.83),
        "SMs and clocks: 108 of 1.41 GHz, 132 of 1.83 GHz",
    ),
    "peers": (2.35e11, "NCCL's all-reduce by rings, stas00/ml-engineering"),
    "network": (1.8e11, "90 % (calculon) of 1.6 Tb/s a host"),
    "host": (2.7e10, "PCIe 4: half of PCIe 5's"),
    "update": 5.1e10,
}
GPUS = (
    Gpu(
        name="h200",
        about="NVIDIA H200 SXM 141 GB",
        memory=141e9,
        products=(1.0, "measured"),
        others=(1.0, "measured"),
        peers=(3.61e11, "NCCL's all-gather, stas00/ml-engineering"),
        **HOPPER,
    ),
    Gpu(
        name="h100",
        about="NVIDIA H100 SXM5 80 GB",
        memory=80e9,
        products=(1.0, "H200's, unchanged"),
        others=(3350 / 4800, "memory of 3350 and 4800 GB/s"),
        peers=(3.6e11, "NCCL's all-gather, github.com/NVIDIA/nccl-tests/issues/326"),
        **HOPPER,
    ),
    Gpu(
        name="a100-80gb",
        about="NVIDIA A100 SXM4 80 GB",
        memory=80e9,
        others=(2039 / 4800, "memory of 2039 and 4800 GB/s"),
        **AMPERE,
    ),
    Gpu(
        name="a100-40gb",
        about="NVIDIA A100 SXM4 40 GB",
        memory=40e9,
        others=(1555 / 4800, "memory of 1555 and 4800 GB/s"),
        **AMPERE,
    ),
    Gpu(
        name="b200",
        about="NVIDIA B200 180 GB",
        target="sm_100",
        memory=180e9,
        peak=(2250e12, 80e12),
        products=(2250 / 989, "peaks of 2250 and 989 TFLOP/s"),
        old=(148 / 132, "SMs: 148 and 132"),
        others=(7672 / 4800, "memory of 7672 and 4800 GB/s"),
        peers=(6.82e11, "NCCL's all-reduce by rings, stas00/ml-engineering"),
        network=(3.82e11, "NCCL's all-reduce of 4 hosts, stas00/ml-engineering"),
        host=(5.5e10, "PCIe 5, as H100's"),
        update=8.9e10,
    ),
)
FILE = """\
{head}
about: {g.about}
target: {g.target}
memory: {g.memory:.0f}
peak: {{bf16: {g.peak[0]:.3e}, f16: {g.peak[0]:.3e}, f32: {g.peak[1]:.3e}}}
launch: 2.0e-6
copy: {copy:.3g}
update: {g.update:.2g}
peers: {{bandwidth: {g.peers[0]:.3g}, latency: 8.4e-6, hop: 3.4e-6, takes: 0.15}}
network: {{bandwidth: {g.network[0]:.3g}, latency: 8.4e-6, hop: 4.7e-6, takes: 0.02}}
host: {{bandwidth: {g.host[0]:.2g}, latency: 1.0e-5}}
read: {{bandwidth: 7.0e+9, latency: 1.0e-4}}
write: {{bandwidth: 7.0e+9, latency: 1.0e-4}}
rates:
- precision: bf16
  cold:
{bf16}
- precision: f32
  cold:
{f32}
"""
HEAD = """\
# {g.name}.yaml -- {g.about}, for our kernels; written by bench/gpu_devices.py.
# rates: those measured on an H200 (bench/results/h200.csv) times a factor, of
#   products {g.products[0]:.3g}: {g.products[1]}
#   attention {attention[0]:.3g}: {attention[1]}
#   other kernels, and copy, {g.others[0]:.3g}: {g.others[1]}
#   small calls: the shares of large calls' rates of calculon, systems/h100_80g_nvl8.json
#   products in f32: the share of the peak that those of 8192^3 have in bf16 on the H200, 0.806
# peers: {g.peers[1]}
# network: {g.network[1]}
# latency, hop: a ring's with the simple protocol, NCCL's src/graph/tuning.cc; between hosts the
#   mean of 7 hops within a host and one to another
# takes: calculon
# host: {g.host[1]}
# launch: of a kernel in a graph, 1 to 4 us on the H200
# update: an eighth of the memory's bandwidth of a host with two processors, by data sheets
# read, write: a drive's data sheet"""


# ---- kernels of the H200


def plan(case: gpu_cases.Case, micro_batches: int = 1) -> Plan:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(case.source.text())
        file.flush()
        batch = f"train.global_batch={micro_batches * case.batch}"
        keys = [*case.source.keys, batch, "targets=[sm_90]"]
        return build.build(spec.load(file.name, keys)).plan


def works(p: Plan) -> Iterator[tuple[str, str, Work]]:
    """Yield kernel, shape as in the table, and work of the first call of each launch: the one that
    was timed."""
    shapes = {row.name: " ".join(map(str, row.shape)) for row in p.launches}
    fns, seen = {f.name: f for f in p.fns}, set()
    for step in (s for section in p.step for s in section.steps if s.op in fns):
        for call in fns[step.op].calls:
            if call.launch in seen:
                continue
            seen.add(call.launch)
            yield call.kernel, shapes[call.launch], work(p, step, call)


@functools.cache
def tables() -> list[list[list[str]]]:
    """Return the rows of the results' tables: steps, in the order of CASES; attention kernels."""
    blocks = results.read(CSV.with_name("gpu.yaml")).found
    return [block.rows for block in blocks if isinstance(block, results.Table)]


def sooner(kernel: str, shape: str) -> float:
    """Return the time of an attention kernel after its change, over the time before."""
    if class_of(kernel) != "attention":
        return 1.0
    _, rows = tables()
    wide = shape.split()[-1] == "128"  # the first four rows have heads of 64 elements
    forward, *backward = rows[4:] if wide else rows[:4]
    some = backward if kernel.endswith("bwd") else [forward]
    before, after = (sum(float(row[n]) for row in some) for n in (2, 3))
    return after / before


def curve(points: Iterable[tuple[Work, float]], group: str) -> Curve:
    """Return the curve of (work, seconds): a point for each power of four of sizes, and smaller
    calls."""
    near: dict[int, list[tuple[Work, float]]] = defaultdict(list)
    for of, seconds in points:
        near[int(math.log(of.size, 4))].append((of, seconds))
    found = []
    for _, calls in sorted(near.items()):
        size = sum(w.size for w, _ in calls) / len(calls)
        found.append((size, sum(w.amount for w, _ in calls) / sum(s for _, s in calls)))
    first, top = found[0]
    return (*((w, part * top) for w, part in SMALL[group] if w < first), *found)


@functools.cache
def measured(new: bool) -> Mapping[str, Curve]:
    """Return the H200's curves by class and by kernel. new: with the new attention."""
    with CSV.open() as file:
        times = {
            (row["model"], row["kernel"], row["shape"]): 1e-6 * float(row["us"])
            for row in csv.DictReader(file)
        }
    by_kernel: dict[str, list[tuple[Work, float]]] = defaultdict(list)
    for case in CASES:
        # The table is of programs that added the only gradient to an f32 sum.
        for kernel, shape, of in works(plan(case, 2)):
            if of.amount:
                seconds = times[case.name, kernel, shape]
                seconds *= sooner(kernel, shape) if new else 1.0
                by_kernel[kernel].append((of, seconds))
    by_class: dict[str, list[tuple[Work, float]]] = defaultdict(list)
    for kernel, points in by_kernel.items():
        if kernel not in SERIAL:
            by_class[class_of(kernel)] += points
    classes = {name: curve(by_class[name], name) for name in device.CLASSES}
    own = {name: curve(points, class_of(name)) for name, points in by_kernel.items()}
    return classes | own


def before() -> Device:
    """Return the H200 with the attention of the measured steps."""
    h200 = device.load("h200")
    bf16, *rest = h200.rates
    return replace(h200, rates=(replace(bf16, cold=measured(False)), *rest))


def steps() -> Iterator[tuple[str, float, float]]:
    """Yield the measured steps: name, predicted and measured seconds."""
    rows, _ = tables()
    for case, row in zip(CASES, rows, strict=True):
        predicted = play.step(Clock(plan(case), before())).seconds
        yield case.name, predicted, 1e-3 * float(row[2])


def steps_table() -> results.Table:
    rows = [
        f"{name} | {1e3 * real:.1f} | {1e3 * took:.1f} | {took / real - 1:+.1%}"
        for name, took, real in steps()
    ]
    return results.table("model | measured, ms | predicted, ms | error", rows)


# ---- files


def lines(curves: Mapping[str, Curve]) -> str:
    made = []
    for name, points in curves.items():
        said = ", ".join(f"[{w:.2e}, {r:.2e}]" for w, r in points)
        made += textwrap.wrap(
            f"{name}: [{said}]", 96, initial_indent=4 * " ", subsequent_indent=6 * " "
        )
    return "\n".join(made)


def text(g: Gpu) -> str:
    """Return the device file of a GPU."""
    rates = {}
    for name, points in measured(not g.old[0]).items():
        group = class_of(name) if name not in device.CLASSES else name
        scale = {
            "products": g.products[0],
            "attention": g.old[0] or 1.0,
            "others": g.others[0],
        }[group]
        rates[name] = tuple((w, scale * r) for w, r in points)
    top = 0.806 * g.peak[1]
    f32 = {
        "products": (
            *((w, part * top) for w, part in SMALL["products"]),
            (LARGE["products"], top),
        ),
        "others": rates["others"],
    }
    new = g.products[1]
    if g.name == "h200":
        new = "the old kernels', scaled by profiled times of old and new (results/gpu.yaml)"
    attention = (g.old[0], "old kernels; " + g.old[1]) if g.old[0] else (1.0, new)
    return FILE.format(
        g=g,
        head=HEAD.format(g=g, attention=attention),
        copy=1.35e12 * g.others[0],  # 2.7 TB/s read and written on the H200
        bf16=lines(rates),
        f32=lines(f32),
    )


def main(argv: list[str]) -> int:
    if argv not in ([], ["steps"]):
        print(__doc__, file=sys.stderr)
        return 2
    if argv:
        print(results.markdown(steps_table()))
        return 0
    for g in GPUS:
        (device.FOLDER / f"{g.name}.yaml").write_text(text(g))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
