"""mpi.py -- compares out/train-mpi with out/train: collectives of one host, and steps over a link.

Collectives: a flat of 128 MiB on two ranks of one host. Its all-gather and reduce-scatter go
through shared memory (out/train), and over MPI (out/train-mpi, ZR_RANKS_PER_HOST=1). They are timed
by --profile, from the last rank's start to the last rank's end, in turns; figures are medians.
Beside them stand the same bytes, read and written, at the rate of two processes that copy at the
same time.

Links: GPT-2 124M under ZeRO-3 on two ranks of one thread, 1024 tokens a step, each on a host of
namespaces, whose interface sends at a fixed rate (tbf). Beside a step stands its floor: the longer
of out/train's step and the time of the planned bytes, plus the first gather and the last reduction,
which nothing hides. The first step is left out; programs run in turns.

Tables go to stdout and to --out (results.py), all figures to out/mpi.json. bench.py says when a run
is invalid.
Namespaces need root, or unshare -r.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench
import numpy as np
import results
from bench import COPY, ROOT
from results import Block

sys.path.append(str(ROOT))
from tests.lib import hosts, trainer  # noqa: E402
from zg.plan.plan import Plan  # noqa: E402
from zg.plan.text import parse  # noqa: E402
from zg.predict import cost  # noqa: E402

ROWS, WIDTH = 65536, 512  # of f32: 128 MiB
FLAT = f"""
name: flat
model:
  vocab: {ROWS}
  width: {WIDTH}
  names: gpt2
  units:
  - embedding: {{tokens: wte, positions: wpe, context: 8}}
  - blocks: 1
    name: h.{{l}}
    ops: [{{residual: [{{layernorm: {{name: ln}}}}]}}]
  - head: [{{linear: {{tied: wte}}}}]
zero: {{stage: 1, overlap_comm: false, reduce_bucket_size: 1e9, allgather_bucket_size: 1e9}}
train:
  global_batch: 2
  micro_batch: 1
  sequence: 8
  optimizer: {{type: AdamW, lr: 1.0e-3}}
cluster: {{ranks: 2}}
"""
RATES = (1e9, 10e9)  # bits a second


class Runs:
    """Programs of one train.c, and their runs on a file of tokens."""

    def __init__(self, folder: Path, spec: Path, *keys: str, ranks: int = 2) -> None:
        self.folder, self.ranks = folder, ranks
        source = trainer.generate(spec, *keys)
        self.near = trainer.build(source)
        self.far = trainer.build(source, trainer.MPI)
        tokens = np.random.default_rng(1).integers(0, 256, 100000)
        trainer.write_tokens(folder / "tokens", tokens)

    def words(self, steps: int) -> tuple[object, ...]:
        (self.folder / "log").unlink(missing_ok=True)
        said = ("--data", self.folder / "tokens", "--steps", steps)
        return *said, "--threads", 1, "--log", self.folder / "log"

    def on_one_host(self, steps: int, *more: object) -> None:
        words = [self.near, *self.words(steps), *more]
        subprocess.run([*map(str, words)], check=True, capture_output=True)

    def over_mpi(self, steps: int, *more: object, **where) -> None:
        words = (*self.words(steps), *more)
        done = hosts.ended(hosts.mpirun(self.far, self.ranks, *words, **where))
        if done.returncode:
            sys.exit(done.stderr)

    def step(self) -> float:
        """Return the seconds of a step of the last run."""
        lines = (self.folder / "log").read_text().splitlines()
        steps = [json.loads(line) for line in lines if '"loss"' in line]
        return statistics.median(step["seconds"] for step in steps[1:])


# ---- collectives of one host


@dataclasses.dataclass(frozen=True)
class Kind:
    first: str  # its first command
    last: str  # its last command
    pieces: int  # halves of the flat that a rank reads and writes


KINDS = {
    # the peer's half read, and written
    "all-gather": Kind("gather", "gather", 2),
    # two halves read, one written
    "reduce-scatter": Kind("alltoall", "done", 3),
}


def span(events: list[dict[str, Any]], kind: Kind) -> tuple[float, float]:
    """Return the start and end of a rank's largest collective in a step, in microseconds."""
    firsts = [e for e in events if e["name"] == kind.first]
    first = max(firsts, key=lambda e: e["args"]["bytes"])
    last = next(e for e in events if e["name"] == kind.last and e["ts"] >= first["ts"])
    return first["ts"], last["ts"] + last["dur"]


def seconds(events: list[dict[str, Any]], kind: Kind) -> float:
    """Return the median over a profile's steps, from the last rank's start of the largest
    collective to the last rank's end."""
    of_rank: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] == "X" and "step" in e.get("args", {}):
            of_rank.setdefault((e["args"]["step"], e["pid"]), []).append(e)
    steps = {step for step, _ in of_rank}
    spans = [[span(of_rank[step, r], kind) for r in (0, 1)] for step in steps]
    return 1e-6 * statistics.median(
        max(end for _, end in ranks) - max(begin for begin, _ in ranks)
        for ranks in spans
    )


def collectives(folder: Path, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    (folder / "flat.yaml").write_text(FLAT)
    runs = Runs(folder, folder / "flat.yaml")
    profile = folder / "profile.json"
    near: dict[str, list[float]] = {kind: [] for kind in KINDS}
    far: dict[str, list[float]] = {kind: [] for kind in KINDS}
    words = (steps + 1, "--profile", profile)
    rates = []
    for _ in range(rounds):
        rates.append(sum(bench.together([sys.executable, "-c", COPY], 2, {})))
        runs.on_one_host(*words)
        events = json.loads(profile.read_text())
        for kind, x in KINDS.items():
            near[kind].append(seconds(events, x))
        runs.over_mpi(*words, ZR_RANKS_PER_HOST=1)
        events = json.loads(profile.read_text())
        for kind, x in KINDS.items():
            far[kind].append(seconds(events, x))
    rate, piece = 1e9 * statistics.median(rates), 4 * ROWS * WIDTH / 2
    return {
        kind: {
            "copy": 2 * x.pieces * piece / rate,  # of two ranks
            "shared memory": statistics.median(near[kind]),
            "MPI": statistics.median(far[kind]),
        }
        for kind, x in KINDS.items()
    }


# ---- links

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def adopted() -> None:
    """Wait for mpirun's daemons, which detach from it: their time and their ranks' is not that of
    other processes."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def unhidden(p: Plan) -> int:
    """Return the bytes that a rank receives in a step's first gather and its last reduction."""
    moves = [s for section in p.step for s in section.steps]
    gather = next(s for s in moves if s.queue == "gather")
    reduce = [s for s in moves if s.op == "alltoall"][-1]
    return sum(cost.wire_of(p, s).bytes for s in (gather, reduce))


def links(folder: Path, spec: Path, steps: int, rounds: int) -> list[dict[str, float]]:
    keys = bench.spread(2, 3)
    runs = Runs(folder, spec, *keys)
    said = (word for key in keys for word in ("--set", key))
    p = parse(bench.sh("gen/zgen", spec, *said, "--emit", "plan"))
    near: list[float] = []
    far: dict[float, list[float]] = {rate: [] for rate in RATES}
    for _ in range(rounds):
        runs.on_one_host(steps + 1)
        near.append(runs.step())
        for rate in RATES:
            with hosts.network(2) as two:
                for host in two:
                    host.slow_down(rate)
                runs.over_mpi(steps + 1, hosts=two, folder=folder)
            far[rate].append(runs.step())
            adopted()
    whole, open_ = cost.training_wire(p).bytes, unhidden(p)
    compute = statistics.median(near)
    return [
        {
            "rate": rate,
            "step": statistics.median(far[rate]),
            "near": compute,
            "bytes": whole,
            "floor": max(compute, 8 * whole / rate) + 8 * open_ / rate,
        }
        for rate in RATES
    ]


def tables(result: dict) -> list[Block]:
    rows = []
    for kind, x in result["collectives"].items():
        copy, near, far = x["copy"], x["shared memory"], x["MPI"]
        rows.append(
            f"{kind} | {copy:.4f} | {near:.4f} | {near / copy:.2f} | {far:.4f} "
            f"| {far / near:.2f}"
        )
    return [
        results.table(
            "128 MiB, 2 ranks of a host | copy of its bytes, s | shared memory, s | of a copy "
            "| MPI, s | of shared memory",
            rows,
        ),
        results.table(
            f"{Path(result['spec']).stem}, ZeRO-3, 2 hosts | step, s | floor, s | ratio "
            "| out/train, s | MB a step",
            (
                f"{1e-9 * x['rate']:g} Gbit/s | {x['step']:.2f} | {x['floor']:.2f} "
                f"| {x['step'] / x['floor']:.2f} | {x['near']:.2f} | {1e-6 * x['bytes']:.0f}"
                for x in result["links"]
            ),
        ),
    ]


def main() -> int:
    given = bench.options(__doc__, 3, 3).parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            "spec": given.spec,
            "collectives": collectives(folder, given.steps, given.rounds),
            "links": links(folder, ROOT / given.spec, given.steps, given.rounds),
        }
    return bench.finish(result, "mpi", tables, given.out)


if __name__ == "__main__":
    sys.exit(main())
