"""gpu_report.py -- collects the results of all parts in one JSON file, and prints bench/gpu.sh's
summary.

    gpu_report.py FOLDER OUT.json STATUS [WHY]
    gpu_report.py FOLDER OUT.json every SECONDS     again and again with status `running`, until it
                                                    is ended or bench/gpu.sh is gone

For each part FOLDER has NAME.status (exit code, seconds), NAME.log, and NAME.json if it has
results. Unless the status is `running`, OUT.tar.gz takes whole logs, traces and tables. Needs only
the standard library.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

LINES = 60
ROOT = Path(__file__).resolve().parent.parent
STATUS = {"0": "ok", "124": "took too long", "137": "took too long"}
KEPT = (
    "*.gemms",
    "profile.json",
    "offload.json",
    "nccl.*.txt",
    "*.ncu-rep",
)  # of out/bench


def write(path: Path | str, found: object) -> None:
    """Write JSON that is whole at any time."""
    new = Path(f"{path}.{os.getpid()}")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.rename(path)


def part(folder: Path, name: str) -> dict[str, object]:
    state = folder / f"{name}.status"
    status, seconds = state.read_text().split("\n")[:2]
    if status == "running":
        seconds = f"{time.time() - state.stat().st_mtime:.0f}"
    log, found = folder / f"{name}.log", folder / f"{name}.json"
    word = status if status in ("running", "left out") else f"failed: {status}"
    made: dict[str, object] = {
        "status": STATUS.get(status, word),
        "seconds": int(seconds),
        "said": log.read_text(errors="replace").splitlines()[-LINES:]
        if log.exists()
        else [],
    }
    try:
        made["found"] = json.loads(found.read_text()) if found.exists() else None
    except ValueError:  # it was ended while it wrote
        made["found"] = None
    return made


def git(*words: str) -> str:
    command = ("git", "-C", str(ROOT), *words)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@functools.cache
def commit() -> str:
    """Return the commit of the sources and the number of changed files: from git, or else from the
    note of `--prepare`."""
    try:
        changed = git("status", "--porcelain").splitlines()
        return f"{git('rev-parse', 'HEAD').strip()}, {len(changed)} files changed"
    except (OSError, subprocess.CalledProcessError):
        note = Path(os.environ.get("ZR_BENCH_FROM", "")) / "commit"
        return note.read_text().strip() if note.exists() else "unknown"


def profile(parts: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Return each model's step by its kernels, with the sum of their times and the measured step.
    The rest is gaps between launches, copies, and interference between overlapping commands."""
    made = {}
    for part_name, part_ in parts.items():
        case, name = part_["found"], part_name.removeprefix("table-")
        if name == part_name or "rows" not in (case or {}):
            continue
        speed = parts.get(f"speed-{name}", {}).get("found") or {}
        step = speed.get("ours", {}).get("step")
        by: dict[str, float] = {}
        for row in case["rows"]:
            by[row["kernel"]] = by.get(row["kernel"], 0) + 1e-6 * row["step_us"]
        made[name] = {
            "kernels": case["step"],
            "step": step,
            "rest": step - case["step"] if step and part_["status"] == "ok" else None,
            "by_kernel": dict(sorted(by.items(), key=lambda pair: -pair[1])),
        }
    return made


def shown(parts: dict[str, dict], steps: dict[str, dict]) -> None:
    """Print a short table, the most important line last."""
    for name, p in steps.items():
        by = ", ".join(
            f"{k[3:]} {1e3 * s:.2f}" for k, s in list(p["by_kernel"].items())[:8]
        )
        print(
            f"{name}: kernels {1e3 * p['kernels']:.2f} ms of a step of "
            f"{1e3 * (p['step'] or 0):.2f} ms: {by}"
        )
    for name, p in parts.items():
        found = p["found"] or {}
        if name.startswith("speed-") and "ours" in found:
            for who in ("ours", "torch"):
                f = found[who]
                if f["step"]:
                    print(
                        f"{name[6:]:14} {who:5} {1e3 * f['step']:9.2f} ms "
                        f"{f['tokens_per_s']:10.0f} "
                        f"tokens/s {f['tflops_causal']:6.1f} {f['tflops_full']:6.1f} TFLOP/s "
                        f"{f['peak'] / 1e9:6.1f} GB"
                    )
            print(f"{'':14} ratio {found.get('ratio')}")
    print(
        *(f"{name}: {p['status']} ({p['seconds']} s)" for name, p in parts.items()),
        sep="; ",
    )


def report(folder: Path, out: Path, status: str, why: str = "") -> dict[str, object]:
    """Write the results of all parts, and return them."""
    order = sorted(folder.glob("*.status"), key=lambda path: path.stat().st_mtime_ns)
    parts = {path.stem: part(folder, path.stem) for path in order}
    clocks = folder / "clocks.csv"
    made = {
        "status": status,
        "why": why,
        "commit": commit(),
        "target": os.environ.get("ZR_TEST_DEVICE", ""),
        "kind": os.environ.get("ZR_BENCH_KIND"),
        "card": os.environ.get("ZR_BENCH_CARD", ""),
        "parts": parts,
        "profile": profile(parts),
        "clocks": clocks.read_text().splitlines() if clocks.exists() else [],
    }
    write(out, made)
    return made


def keep(folder: Path, out: Path) -> None:
    """Write whole logs, traces and tables beside the JSON."""
    made = ROOT / "out" / "bench"
    files = [*folder.iterdir(), *(path for name in KEPT for path in made.glob(name))]
    with tarfile.open(out.with_suffix(".tar.gz"), "w:gz") as archive:
        for path in sorted(files):
            archive.add(path, f"{out.stem}/{path.name}")


def main(argv: list[str]) -> int:
    folder, out, status = Path(argv[0]), Path(argv[1]), argv[2]
    if status == "every":
        parent = os.getppid()
        while os.getppid() == parent:
            report(folder, out, "running")
            time.sleep(float(argv[3]))
        return 0
    made = report(folder, out, status, " ".join(argv[3:]))
    if status != "running":
        keep(folder, out)
        shown(made["parts"], made["profile"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
