"""cuda_budget.py -- lists the resources of every GPU kernel, as ptxas reports them.

    .venv/bin/python tests/cuda_budget.py > tests/cuda_budget.txt     writes the table anew

The table's first line names the compiler. The logs are those of the objects of out/train-cuda. The
largest number of threads per block (__launch_bounds__) is in PTX alone; objects made for tests
contain it.
"""

import os
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "cuda_budget.txt"
TARGETS = ("sm_80", "sm_90a", "sm_100")
MOST = 1024  # threads of any block


@dataclass(frozen=True, order=True)
class Use:
    kernel: str  # with its template's arguments
    target: str
    registers: int  # per thread
    shared: int  # static bytes per block
    threads: int  # largest number per block
    stack: int  # bytes per thread in memory
    spilled: int  # bytes per thread written for lack of registers


def names(mangled: set[str]) -> dict[str, str]:
    """Return mangled -> name<arguments>, without parameters and nameless namespaces."""
    listed = sorted(mangled)
    done = subprocess.run(
        ["c++filt", "-p"],
        input="\n".join(listed),
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        old: new.removeprefix("void ")
        .replace("(anonymous namespace)::", "")
        .replace(" ", "")
        for old, new in zip(listed, done.stdout.splitlines(), strict=True)
    }


def bounds(ptx: str) -> dict[str, int]:
    """Return the largest number of threads per block by mangled name, for kernels with a bound."""
    heads = re.findall(r"\.entry (\w+)\(.*?\)([^{]*)\{", ptx, re.S)
    said = {name: re.search(r"\.maxntid (\d+)", head) for name, head in heads}
    return {name: int(bound[1]) for name, bound in said.items() if bound}


def uses(log: str, ptx: str) -> list[Use]:
    """Return every kernel of a log of nvcc -Xptxas -v."""
    bound = bounds(ptx)
    found = []
    for part in log.split("Compiling entry function ")[1:]:
        name, target = re.match(r"'(\w+)' for '(\w+)'", part).groups()
        stack, spilled = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores", part
        ).groups()
        registers = re.search(r"Used (\d+) registers", part)[1]
        shared = re.search(r"(\d+) bytes smem", part)
        found.append(
            Use(
                name,
                target,
                int(registers),
                int(shared[1]) if shared else 0,
                bound.get(name, MOST),
                int(stack),
                int(spilled),
            )
        )
    known = names({use.kernel for use in found})
    return [Use(known[use.kernel], *list(use.__dict__.values())[1:]) for use in found]


def compiler() -> str:
    text = subprocess.run(
        [ROOT / "out/cuda/root/bin/nvcc", "--version"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return re.search(r"release .*", text)[0]


def table(found: list[Use]) -> str:
    rows = [
        f"# kernel, target, registers, shared, threads, stack, spilled; nvcc {compiler()}"
    ]
    rows += [
        f"{use.kernel} {use.target} {use.registers} {use.shared} {use.threads} "
        f"{use.stack} {use.spilled}"
        for use in sorted(found)
    ]
    return "\n".join(rows) + "\n"


def read(text: str) -> list[Use]:
    rows = [line.rsplit(" ", 6) for line in text.splitlines()[1:]]
    return [Use(row[0], row[1], *map(int, row[2:])) for row in rows]


def objects() -> list[pathlib.Path]:
    """Return the object of each source of kernels."""
    stems = sorted(path.stem for path in (ROOT / "kernels" / "cuda").glob("*.cu"))
    return [ROOT / f"out/o/cuda/{stem}.o" for stem in stems]


def ptx(made: pathlib.Path) -> str:
    """Return the PTX of an object."""
    raw = made.read_bytes()
    at = raw.index(b"\n.version ")
    return raw[at : raw.index(b"\0", at)].decode()


def all_uses() -> list[Use]:
    """Return the uses of all kernels that ninja has built."""
    return [
        use
        for made in objects()
        for use in uses(made.with_suffix(".o.log").read_text(), ptx(made))
    ]


def wanted() -> list[str]:
    """Return the targets for ninja to build."""
    return [str(made.relative_to(ROOT)) for made in objects()]


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "gen")]
    from tests.lib import trainer

    subprocess.run(
        ["ninja", *wanted()],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "ZR_GENCODE": trainer.processors(*TARGETS)},
    )
    print(table(all_uses()), end="")
