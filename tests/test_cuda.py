"""test_cuda.py -- the program for GPUs on a machine without one: it compiles for every processor,
keeps within registers, links, and says what it lacks. What it computes is tested under emulation.
"""
import os
import re
import subprocess

import pytest

import cuda_budget
import trainer
from trainer import ROOT

SPEC = ROOT / 'model_specs' / 'gpt-tiny.yaml'
CUDA = ROOT / 'kernels' / 'cuda'


def code(path) -> str:
    """a source without its comments"""
    return re.sub(r'/\*.*?\*/|//[^\n]*', '', path.read_text(), flags=re.S)


# ---- rules

def test_launches_come_from_the_plan() -> None:
    """cuda.h alone launches, with the grid it is given: no other file has a size of its own."""
    kernels = sorted(CUDA.glob('*.cu'))
    assert '<<<' in code(CUDA / 'cuda.h') and len(kernels) >= 10
    for path in [*kernels, *CUDA.glob('*.h')]:
        if path.name != 'cuda.h':
            assert not re.search(r'<<<|\bdim3\b|cudaLaunchKernel', code(path)), path.name


def test_no_float_is_summed_in_an_order_of_chance() -> None:
    """atomicAdd works on integers alone, which its operands show by a type or a suffix."""
    for path in [*CUDA.glob('*.cu'), *CUDA.glob('*.h')]:
        for call in re.findall(r'atomicAdd\w*\([^;]*;', code(path)):
            assert re.search(r'unsigned long long|\bu?int\d*_t\b|\bint\b|\d+u', call), f'{path.name}: {call}'


def test_ptx_is_written_in_one_place() -> None:
    """Inline assembly stands where a plain C++ compiler does not look."""
    for path in CUDA.glob('*.cu'):
        assert not re.search(r'\basm\b', code(path)), path.name


# ---- the program

@pytest.fixture(scope='module')
def program():
    return trainer.build(trainer.generate(SPEC), trainer.CUDA)


def run(program, *args: object, **settings: str) -> subprocess.CompletedProcess:
    environment = os.environ | {'CUDA_VISIBLE_DEVICES': ''} | settings
    return subprocess.run([program, *map(str, args)], env=environment, capture_output=True,
                          text=True, timeout=120)


@pytest.mark.slow
def test_without_a_device(program, tmp_path) -> None:
    trainer.write_tokens(tmp_path / 'tokens.bin', [1, 2, 3] * 1000)
    done = run(program, '--data', tmp_path / 'tokens.bin', '--steps', 1)
    assert done.returncode == 3, done.stderr
    assert re.fullmatch(r'rank \d+: no CUDA device: [^;\n]+; run this where .*\n', done.stderr)
    assert done.stdout == ''


@pytest.mark.slow
def test_what_it_says_of_itself(program) -> None:
    done = run(program, '--version')
    assert done.returncode == 0 and '\nkernels none\n' in done.stdout
    text = run(program, '--help').stdout
    assert '--no-graph' in text and '\n  7  a device hangs' in text


@pytest.mark.slow
@pytest.mark.parametrize('name,value', [('ZR_TIMEOUT_S', 'soon'), ('ZR_TIMEOUT_S', '-1')])
def test_settings_are_checked(program, name: str, value: str) -> None:
    done = run(program, '--steps', 0, **{name: value})
    assert done.returncode == 2 and name in done.stderr


# ---- registers

@pytest.fixture(scope='module')
def uses(program) -> list[cuda_budget.Use]:
    return [use for log in cuda_budget.logs() for use in cuda_budget.uses(log.read_text())]


@pytest.mark.slow
def test_every_kernel_is_compiled_for_every_processor(uses) -> None:
    where = {}
    for use in uses:
        where.setdefault(use.kernel, set()).add(use.target)
    assert len(where) > 30
    assert {name for name, targets in where.items() if targets != set(cuda_budget.TARGETS)} == set()


@pytest.mark.slow
def test_no_kernel_spills(uses) -> None:
    assert [use for use in uses if use.spilled] == []


@pytest.mark.slow
def test_kernels_keep_to_their_budget(uses) -> None:
    """Equal to the table with the compiler that made it, and the same kernels with any other."""
    listed = cuda_budget.TABLE.read_text()
    if listed.splitlines()[0] == cuda_budget.table([]).splitlines()[0]:
        assert cuda_budget.table(uses) == listed
    assert {(use.kernel, use.target) for use in cuda_budget.read(listed)} == {
        (use.kernel, use.target) for use in uses}
