"""cuda_budget.py -- what every GPU kernel takes of a processor, as ptxas tells it.

    .venv/bin/python tests/cuda_budget.py > tests/cuda_budget.txt     writes the table anew

The table's first line names the compiler. The logs are those of the objects of out/train-cuda.
"""
import pathlib
import re
import subprocess
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / 'tests' / 'cuda_budget.txt'
TARGETS = ('sm_80', 'sm_90a', 'sm_100')


@dataclass(frozen=True, order=True)
class Use:
    kernel: str                           # with its template's arguments
    target: str
    registers: int                        # of a thread
    shared: int                           # bytes of a block, known to the compiler
    stack: int                            # bytes of a thread in memory
    spilled: int                          # bytes of a thread written for want of registers


def names(mangled: set[str]) -> dict[str, str]:
    """mangled -> name<arguments>, without the parameters and nameless namespaces"""
    listed = sorted(mangled)
    done = subprocess.run(['c++filt', '-p'], input='\n'.join(listed), capture_output=True,
                          text=True, check=True)
    return {old: new.removeprefix('void ').replace('(anonymous namespace)::', '').replace(' ', '')
            for old, new in zip(listed, done.stdout.splitlines(), strict=True)}


def uses(log: str) -> list[Use]:
    """every kernel of a log of nvcc -Xptxas -v"""
    found = []
    for part in log.split('Compiling entry function ')[1:]:
        name, target = re.match(r"'(\w+)' for '(\w+)'", part).groups()
        stack, spilled = re.search(r'(\d+) bytes stack frame, (\d+) bytes spill stores',
                                   part).groups()
        registers = re.search(r'Used (\d+) registers', part)[1]
        shared = re.search(r'(\d+) bytes smem', part)
        found.append(Use(name, target, int(registers), int(shared[1]) if shared else 0,
                         int(stack), int(spilled)))
    known = names({use.kernel for use in found})
    return [Use(known[use.kernel], *list(use.__dict__.values())[1:]) for use in found]


def compiler() -> str:
    text = subprocess.run([ROOT / 'out/cuda/root/bin/nvcc', '--version'], capture_output=True,
                          text=True, check=True).stdout
    return re.search(r'release .*', text)[0]


def table(all_uses: list[Use]) -> str:
    rows = [f'# kernel, target, registers, shared, stack, spilled; nvcc {compiler()}']
    rows += [f'{use.kernel} {use.target} {use.registers} {use.shared} {use.stack} {use.spilled}'
             for use in sorted(all_uses)]
    return '\n'.join(rows) + '\n'


def read(text: str) -> list[Use]:
    rows = [line.rsplit(' ', 5) for line in text.splitlines()[1:]]
    return [Use(row[0], row[1], *map(int, row[2:])) for row in rows]


def logs() -> list[pathlib.Path]:
    """of the objects of out/train-cuda, which are there"""
    sources = sorted((ROOT / 'kernels' / 'cuda').glob('*.cu'))
    return [ROOT / 'out' / 'o' / 'cuda' / f'{path.stem}.o.log' for path in sources]


if __name__ == '__main__':
    subprocess.run(['ninja', *(str(log.relative_to(ROOT)).removesuffix('.log') for log in logs())],
                   cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    print(table([use for log in logs() for use in uses(log.read_text())]), end='')
