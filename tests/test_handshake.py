"""test_handshake.py -- what a program is built from, and what ranks that were started apart compare
before they work together: by hand, as a launcher does, under emulation."""
from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

import program
import test_cuda
import trainer
from trainer import ROOT

# ---- the digest of the sources

DIGESTS = ('cpu', 'cuda')
SHARED = [*ROOT.glob('runtime/*.[ch]'), *ROOT.glob('kernels/*.h'), *ROOT.glob('kernels/cpu/*')]
OF = {'cpu': [*SHARED, *ROOT.glob('runtime/cpu/*')],
      'cuda': [*SHARED, *ROOT.glob('runtime/cuda/*.[ch]'), *ROOT.glob('kernels/cuda/*.cu'),
               *ROOT.glob('kernels/cuda/*.h')]}


def digests(root: pathlib.Path) -> list[str]:
    files = [f'out/o/{name}.digest.c' for name in DIGESTS]
    subprocess.run(['ninja', '--quiet', *files], cwd=root, check=True, timeout=60)
    return [re.fullmatch(r'const char zr_digest\[\] = "([0-9a-f]{64})";\n',
                         (root / file).read_text())[1] for file in files]


@pytest.mark.slow
def test_a_change_of_any_source_is_another_program(tmp_path: pathlib.Path) -> None:
    root = trainer.checkout(tmp_path / 'sources')
    before = digests(root)
    assert len(OF['cpu']) > 40 and len(OF['cuda']) > 50
    for path in sorted({*OF['cpu'], *OF['cuda'], ROOT / 'build.ninja'}):
        copy = root / path.relative_to(ROOT)
        text = copy.read_bytes()
        copy.write_bytes(text + b'\n')
        now = digests(root)
        want = [path in OF[name] or path.name == 'build.ninja' for name in DIGESTS]
        assert [a != b for a, b in zip(before, now)] == want, path
        copy.write_bytes(text)
    assert digests(root) == before


def test_the_same_sources_are_the_same_program(tmp_path: pathlib.Path) -> None:
    """In any folder, and by any compiler; nothing is built anew for them."""
    root = trainer.checkout(tmp_path / 'sources')
    made = digests(root)
    stamp = (root / 'out/o/cpu.digest.c').stat().st_mtime_ns
    assert digests(root) == made and (root / 'out/o/cpu.digest.c').stat().st_mtime_ns == stamp
    assert digests(ROOT) == made
    source = trainer.generate(ROOT / 'model_specs/gpt-tiny.yaml')
    for kind in (trainer.GCC, trainer.CLANG):
        if shutil.which(kind.compiler):
            done = program.run(trainer.build(source, kind), '--version')
            assert done.line('sources ') == f'sources {made[0]}'


def test_a_programs_object_follows_its_sources(tmp_path: pathlib.Path) -> None:
    """What is linked has the new digest when a kernel's header has changed."""
    root = trainer.checkout(tmp_path / 'sources')
    header, held = root / 'kernels/update.h', []
    for text in (header.read_text(), header.read_text().replace('eps', 'eps * 3')):
        header.write_text(text)
        subprocess.run(['ninja', '--quiet', 'out/o/cc/digest.o'], cwd=root, check=True, timeout=60)
        held += re.findall(rb'[0-9a-f]{64}', (root / 'out/o/cc/digest.o').read_bytes())
        assert held[-1].decode() == digests(root)[0]
    assert len(set(held)) == len(held) == 2


# ---- ranks that were started apart

@pytest.fixture(scope='module')
def emulated() -> pathlib.Path:
    return trainer.build(trainer.generate(test_cuda.SPEC, *test_cuda.SMALL), trainer.EMULATED)


@pytest.fixture(scope='module')
def files(tmp_path_factory: pytest.TempPathFactory, emulated: pathlib.Path) -> pathlib.Path:
    """Tokens; the same at another place; others of that size; more of them; weights of this model,
    those again, and others."""
    folder = tmp_path_factory.mktemp('handshake')
    tokens = np.arange(2_000_000) ** 2 % 251
    trainer.write_tokens(folder / 'tokens', tokens)
    trainer.write_tokens(folder / 'again', tokens)
    trainer.write_tokens(folder / 'few', tokens[:500])
    trainer.write_tokens(folder / 'as-few', tokens[:500])
    trainer.write_tokens(folder / 'more', [*tokens, 1])
    tokens[1_000_000:1_100_000] = 7
    trainer.write_tokens(folder / 'other', tokens)
    for name, steps in (('weights', 0), ('same', 0), ('trained', 1)):
        trainer.sh(emulated, '--data', folder / 'tokens', '--steps', steps, '--save', folder / name)
    return folder


def together(programs: list[pathlib.Path], folder: pathlib.Path, *options: str,
             ) -> list[tuple[int, str]]:
    """Exit codes of ranks 0 and 1, each with options of its own, and what they say."""
    port = test_cuda.free_port()
    runs = [subprocess.Popen(
        [binary, *given.split()], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {k: str(v) for k, v in test_cuda.torchrun(port, rank).items()})
        for rank, (binary, given) in enumerate(zip(programs, options))]
    try:
        said = [run.communicate(timeout=120)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    return [(run.returncode, text) for run, text in zip(runs, said)]


STEP = '--data tokens --steps 1'
SAMPLES = r'samples [0-9a-f]{16}'
UNLIKE = {
    'steps': (STEP, '--data tokens --steps 2',
              'was started with --data --steps 2, rank 0 with --data --steps 1; start all ranks'),
    'hash': (STEP, f'{STEP} --hash', 'with --data --steps 1 --hash, rank 0 with --data --steps 1;'),
    'val': (f'{STEP} --val tokens', STEP, 'with --data --steps 1, rank 0 with .* --val;'),
    'val-every': (f'{STEP} --val tokens --val-every 3', f'{STEP} --val tokens --val-every 4',
                  '--val-every 4, rank 0 with .* --val-every 3;'),
    'load': (STEP, f'{STEP} --load weights', '--steps 1 --load, rank 0 with --data --steps 1;'),
    'save': (STEP, f'{STEP} --save unused', '--steps 1 --save, rank 0 with --data --steps 1;'),
    'queue': (STEP, f'{STEP} --queue shuffled:3', '--queue shuffled:3, rank 0 with'),
    'sample': (f'{STEP} --sample 3', f'{STEP} --sample 5', '--sample 5, rank 0 with .* --sample 3'),
    'graphs': (STEP, f'{STEP} --no-graph', '--no-graph, rank 0 with --data --steps 1;'),
    'profile': (STEP, f'{STEP} --profile unused', '--profile, rank 0 with --data --steps 1;'),
    'a token': (STEP, '--data other --steps 1',
                f'has --data of 1 file, 4000000 bytes, {SAMPLES}, rank 0 --data of 1 file, 4000000 '
                f'bytes, {SAMPLES}; give all ranks the same tokens'),
    'tokens': (STEP, '--data more --steps 1', 'has --data of 1 file, 4000002 bytes, .* 4000000 '),
    'tokens of val': (f'{STEP} --val tokens', f'{STEP} --val other', 'has --val of 1 file'),
    'weights': (f'{STEP} --load weights', f'{STEP} --load trained',
                r'has --load of 1 file, \d+ bytes, .*, rank 0 --load of .* the same weights'),
}


@pytest.mark.slow
@pytest.mark.parametrize('what', UNLIKE)
def test_ranks_that_were_told_otherwise_do_not_mix(emulated: pathlib.Path, files: pathlib.Path,
                                                   what: str) -> None:
    *given, said = UNLIKE[what]
    first, other = together([emulated, emulated], files, *given)
    assert other[0] == 4 and re.fullmatch(f'rank 1: .*{said}.*\n', other[1]), other
    assert first[0] == 5 and 'rank 1 has ended' in first[1]
    assert not (files / 'unused').exists()


@pytest.mark.slow
def test_ranks_may_have_places_and_threads_of_their_own(emulated: pathlib.Path,
                                                        files: pathlib.Path) -> None:
    ended = together([emulated, emulated], files,
                     '--data again --steps 1 --val few --load weights --threads 1 --log its-own',
                     f'{STEP} --val as-few --load same --threads 2')
    assert [code for code, _ in ended] == [0, 0], ended


@pytest.mark.slow
def test_ranks_of_other_sources_do_not_mix(emulated: pathlib.Path, files: pathlib.Path) -> None:
    digest = program.run(emulated, '--version').line('sources ').split()[1]
    assert digest == digests(ROOT)[1]
    mine, other = emulated.read_bytes(), files / 'program'
    assert mine.count(digest.encode()) == 1
    changed = digest[:-1] + '01'[digest[-1] == '0']
    other.write_bytes(mine.replace(digest.encode(), changed.encode()))
    other.chmod(0o755)
    first, second = together([emulated, other], files, STEP, STEP)
    assert second[0] == 4 and second[1] == (
        f'rank 1: is built from sources {changed}, rank 0 sources {digest}; build all ranks from '
        'the same sources\n')
    assert first[0] == 5


def test_a_file_that_is_missing_is_no_disagreement(tmp_path: pathlib.Path) -> None:
    source = trainer.generate(test_cuda.SPEC, *test_cuda.SMALL)
    trainer.write_tokens(tmp_path / 'tokens', [1, 2, 3] * 1000)
    for options in (('--data', 'none', '--steps', 1), ('--steps', 0, '--val', 'none'),
                    ('--steps', 0, '--load', 'none')):
        done = program.run(trainer.build(source), *options)
        assert done.code == 2 and 'none: No such file' in done.err, done.err
