"""file_tier.py -- an optimizer in a file, beside a disk of a stated rate.

A model (GPT-2 124M), one rank with all cores, f32. The update of a step is what follows the norm's
factor: it cannot begin before all gradients are known, so the file's reads, the updates of its
tiles and the file's writes have only one another to run beside. With the optimizer in the host's
memory that phase takes some time; with it in a file, on a disk that serves one request after the
other at a rate, it should take little more than the longer of that time and bytes / rate: BOUND.
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
RATES = (0.5e9, 1e9, 2e9)       # bytes a second
HOST = ('zero.stage=1', 'zero.offload_optimizer.device=cpu')
FILE = ('zero.stage=1', 'zero.offload_optimizer.device=nvme',
        'zero.offload_optimizer.nvme_path=/dev/shm')


def phases(trace: Path) -> list[float]:
    """seconds from the factor to the end, of each step of a profile"""
    events = [e for e in json.loads(trace.read_text()) if e['pid'] == 0 and e['ph'] == 'X']
    end = lambda e: 1e-6 * (e['ts'] + e['dur'])
    factors = {e['args']['step']: end(e) for e in events if e['name'] == 'factor'}
    ends = {int(e['name'].split()[1]): end(e) for e in events if e['name'].startswith('step ')}
    return [ends[step] - factors[step] for step in sorted(factors)]


def run(case: Case, data: Path, steps: int, *options: str, **env: str) -> list[float]:
    trace = MADE / f'{case.name}.trace.json'
    bench.sh('env', *(f'{k}={v}' for k, v in env.items()), MADE / case.name,
             '--data', data, '--steps',
             steps + 1, '--profile', trace, '--profile-steps', f'2-{steps + 1}', *options)
    return phases(trace)


def table(result: dict) -> str:
    moved = result['moved']
    lines = [*bench.head(result['machine']),
             f'{Path(result["spec"]).stem}, f32, update with the optimizer on the host '
             f'{result["update"]:.3f} s; the file moves {moved / 1e9:.2f} GB a step', '',
             '| rate, GB/s | bytes / rate, s | update, s | of the longer | bound |',
             '|---|---|---|---|---|']
    lines += [f'| {row["rate"] / 1e9:g} | {moved / row["rate"]:.3f} | {row["took"]:.3f} | '
              f'{row["took"] / row["limit"]:.2f} | {BOUND} |' for row in result['rows']]
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
    host, file = (Case(given.spec, name, (*bench.spread(1, 0), *keys))
                  for name, keys in (('host', HOST), ('file', FILE)))
    plans = {case: bench.build(case) for case in (host, file)}
    moved = sum(cost.moved(plans[file]))
    data = bench.tokens(plans[host], given.steps)
    found: dict[float, list[float]] = {rate: [] for rate in (0.0, *RATES)}
    for turn in range(given.rounds):
        print(f'round {turn + 1} of {given.rounds}', file=sys.stderr)
        found[0.0] += run(host, data, given.steps)
        for rate in RATES:
            found[rate] += run(file, data, given.steps, '--nvme', given.dir,
                               LD_PRELOAD=str(library), ZR_DISK_RATE=str(rate))
    update = statistics.median(found[0.0])
    rows = [{'rate': rate, 'took': statistics.median(found[rate]),
             'limit': max(update, moved / rate)} for rate in RATES]
    result = {'spec': given.spec, 'machine': bench.machine(load),
              'update': update, 'moved': moved, 'rows': rows}
    return bench.finish(result, 'file_tier', table(result))


if __name__ == '__main__':
    sys.exit(main())
