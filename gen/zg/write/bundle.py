"""bundle.py -- writes a folder that make or ninja builds: train.c and all that it needs."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from .. import home

README = """\
# A trainer in C

`out/train.c` is a program made for one model and one way to spread its training; `runtime` and
`kernels` are what it links. Linux on x86-64 with gcc and make (or ninja) is enough:

    make -j
    out/train --data tokens.bin --steps 100
    out/train --help

For NVIDIA's GPUs, with a CUDA 13 toolkit and NCCL: `make -j out/train-cuda`.
For the CPUs of several hosts, with an MPI whose `mpicc` is found: `make -j out/train-mpi`.
"""
# Files written beside the runtime and the kernels.
FILES = {
    "README.md": README,
    "Makefile": "include runtime/program.mk\n",
    "build.ninja": "include runtime/program.ninja\n",
    "out/.gitignore": "*\n!.gitignore\n!train.c\n",
}


def write(source: str, path: str) -> None:
    """Write the folder of a train.c. Raises OSError if it cannot be written or is not empty;
    nothing new is left then."""
    there = Path(path)
    made = Path(tempfile.mkdtemp(prefix=".zgen.", dir=there.absolute().parent))
    try:
        for name in ("runtime", "kernels"):
            shutil.copytree(
                home.HOME / name,
                made / name,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        (made / "out").mkdir()
        files = {
            **FILES,
            "LICENSE": home.license(),
            "VERSION": f"{home.version()}\n",
            "out/train.c": source,
        }
        for name, text in files.items():
            (made / name).write_text(text)
        made.chmod(0o755)
        os.rename(made, there)  # onto nothing, or an empty folder
    except BaseException:
        shutil.rmtree(made)
        raise
