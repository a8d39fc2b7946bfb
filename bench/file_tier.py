"""file_tier.py -- an optimizer in a file, beside a disk of a stated rate.

A model (GPT-2 124M), one rank with all cores, f32. The update of a step is what follows the norm's
factor: it cannot begin before all gradients are known, so the file's reads, the updates of its
tiles and the file's writes have only one another to run beside. With the optimizer in the host's
memory that phase takes some time; with it in a file, on a disk that serves one request after the
other at a rate, it should take little more than the longer of that time and bytes / rate: BOUND.
The whole step is shown beside the longer of the step with the host's memory and bytes / rate: the
file waits for forward and backward, so where neither is much the longer it is above BOUND.
The disk is slow_disk.c, preloaded; the file lies in memory (--dir), which is faster than any rate.

The table goes to stdout, all figures to out/file_tier.json. A load average above 0.3 at the start
makes a run invalid.
"""
from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

import bench
from bench import MADE, Case
from zg import cost

BOUND = 1.15
# bytes a second, micro-batches a step
ROWS = ((0.5e9, 1), (1e9, 1), (2e9, 1), (4e9, 1), (1e9, 8))
HOST = ('zero.stage=1', 'zero.offload_optimizer.device=cpu')
FILE = ('zero.stage=1', 'zero.offload_optimizer.device=nvme',
        'zero.offload_optimizer.nvme_path=/dev/shm')
Times = list[tuple[float, float]]


def phases(trace: Path) -> Times:
    """seconds from the factor to the end, and of all, of each step of a profile"""
    events = [e for e in json.loads(trace.read_text()) if e['pid'] == 0 and e['ph'] == 'X']
    end = lambda e: 1e-6 * (e['ts'] + e['dur'])
    factors = {e['args']['step']: end(e) for e in events if e['name'] == 'factor'}
    steps = {int(e['name'].split()[1]): e for e in events if e['name'].startswith('step ')}
    return [(end(steps[n]) - factors[n], 1e-6 * steps[n]['dur']) for n in sorted(factors)]


def medians(times: Times) -> list[float]:
    return [statistics.median(column) for column in zip(*times)]


def run(case: Case, data: Path, steps: int, *options: str, **env: str) -> Times:
    trace = MADE / f'{case.name}.trace.json'
    bench.sh('env', *(f'{k}={v}' for k, v in env.items()), MADE / case.name,
             '--data', data, '--steps',
             steps + 1, '--profile', trace, '--profile-steps', f'2-{steps + 1}', *options)
    return phases(trace)


def table(result: dict) -> str:
    moved = result['moved']
    lines = [*bench.head(result['machine']),
             f'{Path(result["spec"]).stem}, f32; the file moves {moved / 1e9:.2f} GB a step; bound '
             f'of the update: {BOUND}', '',
             '| rate, GB/s | bytes / rate, s | update on the host, s | in the file, s | of the '
             'longer | micro-batches a step | step, host, s | file, s | of the longer |',
             '|' + '---|' * 9]
    for row in result['rows']:
        disk, (update, step), (took, whole) = moved / row['rate'], row['host'], row['file']
        lines.append(f'| {row["rate"] / 1e9:g} | {disk:.3f} | {update:.3f} | {took:.3f} | '
                     f'{took / max(update, disk):.2f} | {row["grains"]} | {step:.3f} | '
                     f'{whole:.3f} | {whole / max(step, disk):.2f} |')
    return '\n'.join(lines)


def main() -> int:
    parser = bench.options(__doc__, 3, 2)
    parser.add_argument('--dir', default='/dev/shm', help='where the file lies')
    given = parser.parse_args()
    load = os.getloadavg()[0]
    MADE.mkdir(parents=True, exist_ok=True)
    library = MADE / 'slow_disk.so'
    bench.sh('gcc', '-O1', '-Wall', '-Werror', '-shared', '-fPIC', 'bench/slow_disk.c',
             '-o', library)
    most = max(grains for _, grains in ROWS)
    samples = bench.TOKENS // bench.SEQUENCE
    cases = {(name, grains): Case(given.spec, f'{name}{grains}', (
        *bench.spread(1, 0), *keys, f'train.global_batch={grains * samples}'))
        for grains in sorted({grains for _, grains in ROWS})
        for name, keys in (('host', HOST), ('file', FILE))}
    plans = {key: bench.build(case) for key, case in cases.items()}
    moved = sum(cost.moved(plans['file', 1]))
    data = bench.tokens(plans['file', 1], most * (given.steps + 1) - 1)
    found: dict[tuple[str, float, int], Times] = {}
    for turn in range(given.rounds):
        print(f'round {turn + 1} of {given.rounds}', file=sys.stderr)
        for (name, grains), case in cases.items():
            for rate in [0.0] if name == 'host' else [r for r, n in ROWS if n == grains]:
                slow = {'LD_PRELOAD': str(library), 'ZR_DISK_RATE': str(rate)} if rate else {}
                where = ('--nvme', given.dir) if rate else ()
                found.setdefault((name, rate, grains), []).extend(
                    run(case, data, given.steps, *where, **slow))
    rows = [{'rate': rate, 'grains': grains, 'host': medians(found['host', 0.0, grains]),
             'file': medians(found['file', rate, grains])} for rate, grains in ROWS]
    result = {'spec': given.spec, 'machine': bench.machine(load), 'moved': moved, 'rows': rows}
    return bench.finish(result, 'file_tier', table(result))


if __name__ == '__main__':
    sys.exit(main())
