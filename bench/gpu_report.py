"""gpu_report.py -- collects the results of all parts in one JSON file, and prints bench/gpu.sh's
summary.

    gpu_report.py FOLDER OUT.json STATUS [WHY]

For each part FOLDER has NAME.status (exit code, seconds), NAME.log, and NAME.json if it has
results. Needs only the standard library.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

LINES = 25


def part(folder: Path, name: str) -> dict[str, object]:
    status, seconds = (folder / f"{name}.status").read_text().split("\n")[:2]
    log, found = folder / f"{name}.log", folder / f"{name}.json"
    words = {
        "0": "ok",
        "124": "took too long",
        "137": "took too long",
        "left out": "left out",
    }
    made: dict[str, object] = {
        "status": words.get(status, f"failed: {status}"),
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


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def profile(parts: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Return each model's step by its kernels, with the sum of their times and the measured step.
    The rest is gaps between launches, copies, and interference between overlapping commands."""
    made, table = (
        {},
        (parts.get("table", {}).get("found") or {}).get("cases", {}),
    )
    for name, case in table.items():
        speed = parts.get(f"speed-{name}", {}).get("found") or {}
        step = speed.get("ours", {}).get("step")
        by: dict[str, float] = {}
        for row in case["rows"]:
            by[row["kernel"]] = by.get(row["kernel"], 0) + 1e-6 * row["step_us"]
        made[name] = {
            "kernels": case["step"],
            "step": step,
            "rest": step - case["step"] if step else None,
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
        if name.startswith("speed-") and found:
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


def main(argv: list[str]) -> int:
    folder, out, status = Path(argv[0]), Path(argv[1]), argv[2]
    order = sorted(folder.glob("*.status"), key=lambda path: path.stat().st_mtime_ns)
    parts = {path.stem: part(folder, path.stem) for path in order}
    steps = profile(parts)
    clocks = folder / "clocks.csv"
    made = {
        "status": status,
        "why": " ".join(argv[3:]),
        "commit": commit(),
        "target": os.environ.get("ZR_TEST_DEVICE", ""),
        "kind": os.environ.get("ZR_BENCH_KIND"),
        "parts": parts,
        "profile": steps,
        "clocks": clocks.read_text().splitlines() if clocks.exists() else [],
    }
    part_file = out.with_name(out.name + ".part")
    part_file.write_text(json.dumps(made, indent=1) + "\n")
    part_file.rename(out)
    if status == "done":
        shown(parts, steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
