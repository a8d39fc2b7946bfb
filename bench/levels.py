"""levels.py -- measures steps between hosts, reduced in one level and in two.

Hosts are namespaces whose interfaces send at a fixed rate (tbf), with four ranks each, all on this
machine's processors. Layouts: flat (one level, as without cluster.local), two levels of ZeRO-3, and
parameters shared inside a host (HFSDP). Beside a step stands its floor: the longer of the same
program's step with all ranks on one host, and a host's planned bytes at the link's rate. The
measured bytes are those that an interface receives in all steps except the first: the difference of
two runs of different length. Programs run in turns; figures are medians.

Tables go to stdout and to --out (results.py), all figures to out/levels.json. bench.py says when a
run is invalid.
Namespaces need root, or unshare -r.
"""

from __future__ import annotations

import ctypes
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bench
import mpi
import results
from bench import ROOT
from mpi import hosts  # of the tests
from results import Block
from zg.plan.text import parse
from zg.predict import cost

LOCAL = 4
RATE = 1e9  # bits a second
LAYOUTS: dict[str, tuple[str, ...]] = {
    "flat": (),
    "two levels": (f"cluster.local={LOCAL}",),
    "HFSDP": (f"cluster.local={LOCAL}", f"zero.shard_size={LOCAL}"),
}


@dataclasses.dataclass
class Layout:
    """A program of a layout. sent: planned bytes that a host sends in a step."""

    name: str
    count: int  # hosts
    precision: str
    runs: mpi.Runs
    sent: int
    near: list[float]
    far: list[float]
    counted: list[float]


def keys(name: str, count: int, precision: str) -> list[str]:
    ranks = count * LOCAL
    return [
        f"cluster.ranks={ranks}",
        f"train.global_batch={ranks}",
        "train.micro_batch=1",
        "zero.stage=3",
        f"train.precision={precision}",
        "targets=[cpu]",
        *LAYOUTS[name],
    ]


def sent(spec: Path, name: str, count: int, precision: str) -> int:
    """Return the bytes that a host sends, also for a flat plan, by the place of its ranks."""
    said = (w for key in keys(name, count, precision) for w in ("--set", key))
    p = parse(bench.sh("gen/zgen", spec, *said, "--emit", "plan"))
    head = dataclasses.replace(p.head, local=LOCAL)
    return cost.sent_by_host(dataclasses.replace(p, head=head))


def layouts(folder: Path, spec: Path) -> Iterator[Layout]:
    for count in (2, 4):
        for precision in ("f32", "bf16"):
            for name in LAYOUTS:
                own = folder / f"{name.replace(' ', '-')}-{count}-{precision}"
                own.mkdir()
                made = keys(name, count, precision)
                yield Layout(
                    name,
                    count,
                    precision,
                    mpi.Runs(own, spec, *made, ranks=count * LOCAL),
                    sent(spec, name, count, precision),
                    [],
                    [],
                    [],
                )


def run(x: Layout, steps: int) -> None:
    """Run one round: on one host, then between hosts one step and many."""
    x.runs.on_one_host(steps + 1)
    x.near.append(x.runs.step())
    got = []
    for n in (1, steps + 1):
        with hosts.network(x.count) as there:
            for host in there:
                host.slow_down(RATE)
            x.runs.over_mpi(n, hosts=there, folder=x.runs.folder)
            got.append(statistics.mean(h.received() for h in there))
        mpi.adopted()
    x.far.append(x.runs.step())
    x.counted.append((got[1] - got[0]) / steps)


def row(x: Layout) -> dict[str, float | str]:
    near = statistics.median(x.near)
    return {
        "name": x.name,
        "hosts": x.count,
        "precision": x.precision,
        "step": statistics.median(x.far),
        "near": near,
        "floor": max(near, 8 * x.sent / RATE),
        "sent": x.sent,
        "counted": statistics.median(x.counted),
    }


def tables(result: dict) -> list[Block]:
    return [
        results.table(
            f"{Path(result['spec']).stem}, ZeRO-3, {LOCAL} ranks a host, {1e-9 * RATE:g} Gbit/s "
            "| step, s | floor, s | of the floor | one host, s | MB a host sends | counted",
            (
                f"{x['hosts']} hosts, {x['precision']}, {x['name']} | {x['step']:.3f} "
                f"| {x['floor']:.3f} | {x['step'] / x['floor']:.2f} | {x['near']:.3f} "
                f"| {1e-6 * x['sent']:.1f} | {x['counted'] / x['sent']:.3f}"
                for x in result["layouts"]
            ),
        )
    ]


def main() -> int:
    given = bench.options(__doc__, 5, 3).parse_args()
    ctypes.CDLL(None).prctl(mpi.SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as name:
        made = list(layouts(Path(name), ROOT / given.spec))
        for _ in range(given.rounds):
            for x in made:
                run(x, given.steps)
        result = {"spec": given.spec, "layouts": [row(x) for x in made]}
    return bench.finish(result, "levels", tables, given.out)


if __name__ == "__main__":
    sys.exit(main())
