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
from zg.facts.kernels import spent
from zg.plan.operand import of_layer, whole
from zg.plan.plan import Plan
from zg.predict import device, play
from zg.predict.device import Curve, Device, class_of
from zg.predict.seconds import Clock, operands
from zg.read import spec

CSV = ROOT / "bench" / "results" / "h200.csv"
CASES = [c for c in gpu_cases.MEASURED if c.card in ("", "140")]
# Milliseconds of a step, measured (docs/performance.md)
STEPS = {
    "gpt2-124m": 124.3,
    "gpt2-1558m": 340.8,
    "llama3-8b-16": 489.5,
    "qwen3-0.6b": 231.2,
}
# Attention's microseconds before and after by the profiler, by elements of a head.
FORWARD = {64: (455, 420), 128: (1610, 1190)}
BACKWARD = {
    64: (272 + 671 + 511, 71 + 650 + 389),
    128: (83 + 3760 + 2390, 49 + 2400 + 1570),
}
# Shares of the rate of large calls that small ones have, by FLOPs and by bytes (calculon).
SMALL = {
    "products": ((1e8, 0.1 / 0.95), (1e9, 0.6 / 0.95), (1.6e10, 0.9 / 0.95)),
    "others": ((1e5, 0.3 / 0.9), (1e6, 0.6 / 0.9), (1e7, 0.75 / 0.9)),
}
SMALL["attention"] = SMALL["products"]


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
    "products": (1.0, "measured"),
    "old": (0.0, ""),
    "network": (
        3.23e11,
        "NCCL's all-gather of 4 hosts with 3.2 Tb/s each "
        "(git.onestrm.cn/aigatech/vpbenchmarking)",
    ),
    "host": (5.5e10, "PCIe 5, measured there"),
    "update": 7.6e10,
}
AMPERE = {
    "target": "sm_80",
    "peak": (312e12, 19.5e12),
    "products": (
        271.2 / 794.5,
        "best products of A100 and H100 in stas00/ml-engineering: 271.2 and 794.5 TFLOP/s",
    ),
    "old": (
        108 * 1.41 / (132 * 1.83),
        "SMs and clocks: 108 of 1.41 GHz, 132 of 1.83 GHz",
    ),
    "peers": (2.35e11, "NCCL's all-reduce by rings (stas00/ml-engineering)"),
    "network": (1.8e11, "90 % of 1.6 Tb/s a host (calculon's efficiency)"),
    "host": (2.7e10, "PCIe 4: half of PCIe 5's"),
    "update": 5.1e10,
}
GPUS = (
    Gpu(
        name="h200",
        about="NVIDIA H200 SXM 141 GB",
        memory=141e9,
        others=(1.0, "measured"),
        peers=(3.61e11, "NCCL's all-gather (stas00/ml-engineering)"),
        **HOPPER,
    ),
    Gpu(
        name="h100",
        about="NVIDIA H100 SXM5 80 GB",
        memory=80e9,
        others=(3350 / 4800, "memory of 3350 and 4800 GB/s"),
        peers=(3.6e11, "NCCL's all-gather (github.com/NVIDIA/nccl-tests/issues/326)"),
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
        peers=(6.82e11, "NCCL's all-reduce by rings (stas00/ml-engineering)"),
        network=(3.82e11, "NCCL's all-reduce of 4 hosts (stas00/ml-engineering)"),
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
{g.name}.yaml -- {g.about}, for our kernels; written by bench/gpu_devices.py.
Rates of kernels over those measured on an H200 (bench/results/h200.csv): products {g.products[0]:.3g}
({g.products[1]}); {attention}other kernels and copies
{g.others[0]:.3g} ({g.others[1]}). Small calls have the shares of these rates that
calculon's systems/h100_80g_nvl8.json gives them. Products in f32: 0.806 of the peak, as those of
8192^3 in bf16 on the H200; no other number of f32 was measured.
peers: {g.peers[1]}. network: {g.network[1]}.
Latencies: a ring's with the simple protocol in NCCL's src/graph/tuning.cc, of a hop to another host
averaged over 8 ranks a host. takes: calculon's. host: {g.host[1]}. launch: of a kernel in a graph,
1 to 4 us on the H200. update: an eighth of the memory bandwidth of a host with two processors.
read, write: a drive's data sheet."""


# ---- kernels of the H200


def plan(case: gpu_cases.Case) -> Plan:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(case.source.text())
        file.flush()
        keys = [*case.source.keys, "targets=[sm_90]"]
        return build.build(spec.load(file.name, keys)).plan


def works(p: Plan) -> Iterator[tuple[str, str, float]]:
    """Yield kernel, shape as in the table, and work of the first call of each launch: the one that
    was timed."""
    shapes = {row.name: " ".join(map(str, row.shape)) for row in p.launches}
    fns, seen = {f.name: f for f in p.fns}, set()
    for step in (s for section in p.step for s in section.steps if s.op in fns):
        for call in fns[step.op].calls:
            if call.launch in seen:
                continue
            seen.add(call.launch)
            flops = whole(of_layer(spent(call.kernel, call.args, 1), step.layer))
            moved = sum(o.bytes for o in operands(p, step, call))
            work = moved if class_of(call.kernel) == "others" else flops
            yield call.kernel, shapes[call.launch], work


def sooner(kernel: str, shape: str) -> float:
    """Return the time of an attention kernel after its change, over the time before."""
    by_head = {"zk_attention_fwd": FORWARD, "zk_attention_bwd": BACKWARD}.get(kernel)
    if by_head is None:
        return 1.0
    before, after = by_head[int(shape.split()[-1])]
    return after / before


def curve(points: Iterable[tuple[float, float]], group: str) -> Curve:
    """Return the curve of (work, seconds): a point for each power of two, and smaller calls."""
    octaves: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for work, seconds in points:
        octaves[int(math.log2(work))].append((work, seconds))
    found = []
    for _, near in sorted(octaves.items()):
        total = sum(w for w, _ in near)
        found.append((total / len(near), total / sum(s for _, s in near)))
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
    by_kernel: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for case in CASES:
        for kernel, shape, work in works(plan(case)):
            if work:
                seconds = times[case.name, kernel, shape]
                seconds *= sooner(kernel, shape) if new else 1.0
                by_kernel[kernel].append((work, seconds))
    by_class: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kernel, points in by_kernel.items():
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
    on = before()
    for case in CASES:
        predicted = play.step(Clock(plan(case), on)).seconds
        yield case.name, predicted, 1e-3 * STEPS[case.name]


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
            (1.28e11, top),
        ),
        "others": rates["others"],
    }
    attention = (
        f"attention {g.old[0]:.3g} of the old kernels' ({g.old[1]}); "
        if g.old[0]
        else ""
    )
    head = HEAD.format(g=g, attention=attention).replace("\n", " ").split(". ")
    wrapped = textwrap.wrap(". ".join(head), 98, break_on_hyphens=False)
    return FILE.format(
        g=g,
        head="\n".join(f"# {line}" for line in wrapped),
        copy=1.35e12 * g.others[0],  # 2.7 TB/s read and written on the H200
        bf16=lines(rates),
        f32=lines(f32),
    )


def main(argv: list[str]) -> int:
    if argv not in ([], ["steps"]):
        print(__doc__, file=sys.stderr)
        return 2
    if argv:
        rows = [
            f"{name} | {1e3 * took:.1f} | {1e3 * real:.1f} | {took / real - 1:+.1%}"
            for name, took, real in steps()
        ]
        print(
            results.text(
                [results.table("model | predicted, ms | measured, ms | error", rows)]
            )
        )
        return 0
    for g in GPUS:
        (device.FOLDER / f"{g.name}.yaml").write_text(text(g))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
