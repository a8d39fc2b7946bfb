"""report.py -- writes docs/performance.md from the files of bench/results/.

.venv/bin/python bench/report.py > docs/performance.md
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import results

FOLDER = Path(__file__).resolve().parent / "results"
HEAD = """\
# Performance

Made by `.venv/bin/python bench/report.py > docs/performance.md` from the files of `bench/results/`;
a test compares. Each table is one machine on one day: compare ratios, not times. The comment behind
a command has the date, of the run or of the commit that first had its numbers, and the load.

Unless a section says otherwise, the machine is an AMD EPYC (Zen 5, AVX-512) with 2 cores, the
compiler gcc 12.2 with `-O3 -march=x86-64-v4`, and the model GPT-2 124M with 1024 tokens a step. A
step is forward, backward, clipping and AdamW. FLOPs count 6 a parameter and token, and causal
attention. Programs run in turns, and figures are medians. "Others" is the share of processor time
that other processes took.
"""
# That machine, as results name it.
USUAL = (
    "AMD EPYC, 2 cores; gcc (Debian 12.2.0-14+deb12u1) 12.2.0; -std=gnu11 -Wall -Wextra -Werror "
    "-Wno-unused-function -Wno-psabi -O3 -fPIC -g1 -ffp-contract=off -fno-math-errno "
    "-fno-trapping-math -pthread  -march=x86-64-v4 -mprefer-vector-width=512 -DZK_SUFFIX=_avx512"
)
# Sections in their order, each with those below it.
ORDER: dict[str, tuple[str, ...]] = {
    "bench": (),
    "peers": ("peers_memory", "peers_start", "peers_models"),
    "saving": (),
    "file_tier": (),
    "sums": (),
    "precision": (),
    "loading": (),
    "checkpoint": (),
    "mpi": ("levels",),
    "shared_samples": (),
    "lora": (),
    "data": (),
    "tiles": (),
    "predicted": (),
    "decisions": (),
    "gpu": (),
}


def ran(result: results.Result) -> str:
    """Return a section's command as code, with a comment on its run."""
    machine = "" if USUAL.startswith(result.machine) else result.machine
    said = ", ".join(filter(None, [result.date, result.load, machine]))
    lines = [f"    {line}" for line in result.command.splitlines()]
    if said and lines and len(f"{lines[-1]}  # {said}") <= results.WIDTH:
        lines[-1] += f"  # {said}"
    elif said:
        lines.append(f"    # {said}")
    return "\n".join(lines)


def section(name: str, level: int) -> str:
    result = results.read(FOLDER / f"{name}.yaml")
    parts = [f"{'#' * level} {result.title}", ran(result), result.before.strip("\n")]
    parts += [results.text(result.found), result.after.strip("\n")]
    return "\n\n".join(filter(None, parts))


def sections() -> Iterator[str]:
    for name, below in ORDER.items():
        yield section(name, 2)
        yield from (section(other, 3) for other in below)


def page() -> str:
    return "\n\n".join([HEAD.strip("\n"), *sections()]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
