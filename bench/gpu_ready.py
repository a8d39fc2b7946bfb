"""gpu_ready.py -- makes the files that a machine with a GPU is spared, or may be unable to make.

    gpu_ready.py losses      writes ROOM/losses.json: the CPU's losses of tiny models
    gpu_ready.py programs    writes ROOM/ready: built objects that any train.c is linked with, the
                             kernels' library, and tiny programs

Programs are built for H100 and H200, or for the processors of ZR_GENCODE.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from gpu_cases import LOOKED_AT, ROOM, ROOT, tiny
from gpu_check import CPUS_LOSSES, FEW_TOKENS, KIND, STEPS, run, tokens
from gpu_report import write

from tests.lib import trainer


def losses() -> None:
    data, found = tokens(FEW_TOKENS, 40000), {}
    for row in LOOKED_AT:
        source = tiny(*row, "plain")
        ran = run(source, trainer.GCC, data, STEPS, "--threads", 1)
        assert ran.code == 0, ran.said
        found["-".join(row)] = ran.losses
    write(CPUS_LOSSES, found)


def programs() -> None:
    os.environ.setdefault("ZR_GENCODE", " ".join(trainer.flags("sm_90")))
    folder, library = ROOM / "ready", f"{KIND.program}-kernels.so"
    trainer.sh("ninja", library)
    made = {
        f"{Path(KIND.program).name}.o": trainer.joined(KIND),
        Path(library).name: ROOT / library,
    }
    for family, real in LOOKED_AT:
        if real == "bf16":
            source = tiny(family, real, "plain")
            made[source.name] = trainer.build(source.read(".c"), KIND)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, path in made.items():
        shutil.copy(path, folder / name)


COMMANDS = {"losses": losses, "programs": programs}


def main(argv: list[str]) -> int:
    if len(argv) != 1 or argv[0] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    COMMANDS[argv[0]]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
