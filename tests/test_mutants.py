"""test_mutants.py -- broken plans: the checker refuses them, or they are no worse than the plan.

A mutant is refused, or the same program (canonical form: mutants.py), or harmless: its program
gives the same losses and the same weights in eager, late and SHUFFLES shuffled runs, where what is
dead is filled with NaN. There is no list of exceptions, and fewer than SHARE may be harmless."""
import os
import pathlib
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

import mutants
import trainer
from zg import build, check, cost, emit, explain, spec, view
from zg.plan import Plan

SHUFFLES, SHARE = 20, 0.05
PIECES = ('zero.reduce_bucket_size=20000', 'zero.allgather_bucket_size=20000')
SMALL = ('llama-tiny', 'zero.stage=3', 'train.global_batch=4',
         'zero.stage3_param_persistence_threshold=0')
UNDER = 'train.optimizer.groups=[{match: [model.embed*, model.layers.*], frozen: true}]'
PART = 'train.optimizer.groups=[{match: [wte.weight, "*.attn.*", "*ln_1*"], frozen: true}]'
PLANS = {
    'stage 3 in pieces': ('gpt-tiny', 'zero.stage=3', *PIECES),
    'stage 3, nothing ahead': ('qwen3-tiny', 'zero.stage=3', 'zero.stage3_prefetch_bucket_size=0'),
    'stage 3, units stay': ('gpt-tiny', 'zero.stage=3', 'zero.stage3_max_reuse_distance=60000'),
    'stage 2': ('gpt-tiny', 'zero.stage=2', *PIECES),
    'stage 1, own grains first': ('gpt-tiny', 'zero.stage=1', *PIECES),
    'stage 0': ('gpt-tiny', 'zero.stage=0', *PIECES),
    'one queue': ('gpt-tiny', 'zero.stage=3', 'zero.overlap_comm=false'),
    'the optimizer on the host': ('gpt-tiny', 'zero.stage=2', 'train.precision=bf16',
                                  'zero.offload_optimizer.device=cpu', 'zero.sub_group_size=20000'),
    'the optimizer on both': ('gpt-tiny', 'zero.stage=2', 'zero.offload_optimizer.device=cpu',
                              'zero.offload_optimizer.ratio=0.5', 'zero.sub_group_size=20000'),
    'the optimizer on both, parameters on the host': (
        *SMALL, 'train.precision=bf16', 'zero.offload_optimizer.device=nvme',
        'zero.offload_optimizer.nvme_path=/tmp', 'zero.offload_optimizer.ratio=0.3',
        'zero.offload_param.device=cpu', 'zero.sub_group_size=20000'),
    'one rank, sums on the host': ('gpt-tiny', 'zero.stage=2', 'cluster.ranks=1',
                                   'zero.offload_optimizer.device=cpu',
                                   'zero.sub_group_size=20000'),
    'all in a file': (*SMALL, 'train.precision=bf16', 'zero.offload_optimizer.device=nvme',
                      'zero.offload_optimizer.nvme_path=/tmp', 'zero.offload_param.device=nvme',
                      'zero.sub_group_size=40000'),
    'parameters on the host': ('gpt-tiny', 'zero.stage=3', 'zero.offload_optimizer.device=cpu',
                               'zero.offload_param.device=cpu', 'zero.sub_group_size=20000'),
    'all grains through a unit': (*SMALL, 'train.accumulate=layers', 'cluster.ranks=2'),
    'all grains through a unit, sums on the host': (
        *SMALL, 'train.accumulate=layers', 'cluster.ranks=2', 'zero.offload_optimizer.device=cpu',
        'zero.reduce_bucket_size=40000'),
    'three grains through a unit': ('gpt-tiny', 'zero.stage=3', 'train.accumulate=layers',
                                    'cluster.ranks=2', 'train.global_batch=6',
                                    'train.precision=bf16', 'train.micro_batch=1'),
    'parameters alone on the host': ('gpt-tiny', 'zero.stage=3', 'train.precision=bf16',
                                     'zero.offload_param.device=cpu'),
    'activations on the host': ('gpt-tiny', 'zero.stage=3', 'train.offload_activations=true'),
    'f16': (*SMALL, 'train.precision=f16'),
    'the head alone moves': (*SMALL, UNDER),
    'the head alone moves, all grains through a unit': (*SMALL, UNDER, 'train.accumulate=layers',
                                                        'cluster.ranks=2'),
    'a table and attention are frozen': ('gpt-tiny', 'zero.stage=2', PART),
    'a table and norms are frozen, activations on the host': (
        'gpt-tiny', 'zero.stage=3', 'train.offload_activations=true', PART),
    'trees of two leaves, folded': ('gpt-tiny', 'zero.stage=3', 'train.sum.block=2'),
    'bf16, tied': ('gpt-tiny', 'zero.stage=3', 'train.precision=bf16', *PIECES),
}


def planned(name: str, *keys: str) -> Plan:
    return build.build(spec.load(f'{trainer.ROOT}/model_specs/{name}.yaml', keys)).plan


def source(p: Plan) -> str:
    return emit.train(view.view(p, cost.summary(p), explain.memory_line(p), False))


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp('mutants') / 'tokens.bin'
    trainer.write_tokens(path, np.arange(33 * 60) * 7919 % 251)
    return path


def told(program: pathlib.Path, data: pathlib.Path, queue: str) -> list[str]:
    """Losses and the weights' hash of three steps; how the run ended where it did not."""
    done = subprocess.run([program, '--data', data, '--val', data, '--steps', '3', '--hash',
                           '--queue', queue, '--threads', '1'],
                          capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stdout.splitlines()
             if line.startswith(('weights', 'loss', 'val loss'))]
    return lines if done.returncode == 0 else [f'exit code {done.returncode}']


def runs(p: Plan, data: pathlib.Path, shuffles: int = SHUFFLES) -> list[list[str]]:
    program = trainer.build(source(p))
    queues = ['eager', 'late', *(f'shuffled:{n}' for n in range(shuffles))]
    return [told(program, data, queue) for queue in queues]


def judge(p: Plan, made: Iterable[mutants.Mutant], data: pathlib.Path) -> None:
    """Every mutant is refused, the same program or harmless."""
    refused, works = mutants.refusal(p), mutants.played(p)
    pairs = mutants.forced(works)
    count, open_ = Counter(), []
    for m in made:
        if refused(m.plan):
            count['refused'] += 1
        elif mutants.same(m.plan, works, pairs):
            count['the same'] += 1
        else:
            open_.append(m)
    total = count['refused'] + len(open_)
    print(f"{total} mutants: {count['refused']} refused, {len(open_)} harmless "
          f"({100 * len(open_) / total:.2f} %); {count['the same']} more are the same program")
    assert len(open_) < SHARE * total, [m.what for m in open_]
    want = told(trainer.build(source(p)), data, 'eager')
    assert want[-1].startswith('weights')
    for m in open_:
        got = runs(m.plan, data)
        assert got == [want] * (2 + SHUFFLES), f'not refused, and not harmless: {m.what}'


@pytest.mark.slow
@pytest.mark.parametrize('name', PLANS)
def test_steps(name: str, data: pathlib.Path) -> None:
    p = planned(*PLANS[name])
    judge(p, mutants.mutants(p), data)


@pytest.mark.slow
@pytest.mark.parametrize('name', PLANS)
def test_steps_done_twice(name: str) -> None:
    """Right away; no harm comes of what writes only what it does not read."""
    p, harmless = planned(*PLANS[name]), {'mark', 'batch', 'copy', 'cast', 'allreduce', 'turn'}
    twice = [(x.op.partition('.')[0], changed) for section in p.sections
             for n, x in enumerate(section.steps)
             for changed in [mutants.changed(p, section, [*section.steps[:n + 1],
                                                          *section.steps[n:]])]]
    kept = {op for op, changed in twice if not mutants.refused(changed)}
    assert {op for op, _ in twice} - harmless and kept <= harmless


@pytest.mark.slow
@pytest.mark.parametrize('name', ['stage 2', 'the optimizer on both', 'all in a file',
                                  'the optimizer on both, parameters on the host'])
def test_nothing_is_updated_twice(name: str) -> None:
    """Anywhere in the section."""
    p = planned(*PLANS[name])
    section, = (x for x in p.sections if x.name == 'update')
    updates = [x for x in section.steps if 'update.' in x.op]
    assert updates and all(
        mutants.refused(mutants.changed(p, section, [*section.steps[:n], x, *section.steps[n:]]))
        for x in updates for n in range(len(section.steps) + 1))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gpt-tiny', 'llama-tiny', 'qwen3-tiny'])
@pytest.mark.parametrize('precision', ['f32', 'bf16'])
def test_calls(name: str, precision: str, data: pathlib.Path) -> None:
    p = planned(name, f'train.precision={precision}')
    judge_calls(p, mutants.of_calls(p), data)


@pytest.mark.parametrize('name,groups', [('llama-tiny', UNDER), ('gpt-tiny', PART)])
def test_calls_of_what_is_frozen(name: str, groups: str, data: pathlib.Path) -> None:
    p = planned(name, groups, 'zero.stage3_param_persistence_threshold=0')
    judge_calls(p, mutants.of_calls(p), data)


def judge_calls(p: Plan, made: Iterable[mutants.Mutant], data: pathlib.Path) -> None:
    """As `judge`; calls have no canonical form."""
    all_ = list(made)
    open_ = [m for m in all_ if not mutants.refused(m.plan)]
    print(f'{len(all_)} mutants: {len(open_)} harmless ({100 * len(open_) / len(all_):.2f} %)')
    assert len(open_) < SHARE * len(all_), [m.what for m in open_]
    want = told(trainer.build(source(p)), data, 'eager')
    for m in open_:
        assert [want] * 3 == runs(m.plan, data, 1), f'not refused, and not harmless: {m.what}'


@pytest.mark.parametrize('keys', [
    (), ('zero.stage=0',), ('zero.stage=1', 'train.precision=bf16'),
    ('zero.stage=3', 'train.precision=bf16', 'train.accumulate=layers', 'cluster.ranks=2',
     'train.micro_batch=1', 'train.global_batch=8'),
    ('zero.stage=3', 'train.precision=bf16', 'zero.offload_optimizer.device=cpu',
     'zero.offload_param.device=cpu', 'zero.sub_group_size=20000'),
    ('zero.stage=3', 'train.precision=bf16', 'zero.offload_optimizer.device=cpu',
     'zero.offload_optimizer.ratio=0.5', 'zero.offload_param.device=cpu',
     'zero.sub_group_size=1024'),
    ('zero.stage=2', 'zero.offload_optimizer.device=cpu', 'zero.offload_optimizer.ratio=0.3')])
def test_tables(keys: tuple[str, ...]) -> None:
    """A wrong size, offset or key of a class, flat or tensor is refused, without exception."""
    p = planned('gpt-tiny', *keys)
    assert [m.what for m in mutants.of_tables(p) if not mutants.refused(m.plan)] == []


@pytest.mark.parametrize('keys', [
    (), ('zero.stage3_max_reuse_distance=1000000', 'train.recompute=full'),
    ('train.accumulate=layers', 'train.recompute=full', 'cluster.ranks=2'),
    ('train.precision=f16',), (UNDER,)],
    ids=['', 'units stay', 'all grains through a unit', 'f16', 'the head alone moves'])
def test_steps_of_a_small_plan(keys: tuple[str, ...], data: pathlib.Path) -> None:
    """Every third mutant of a plan of two blocks: the quick part of `test_steps`."""
    p = planned(*SMALL, *keys)
    judge(p, [m for n, m in enumerate(mutants.mutants(p)) if n % 3 == 0], data)


@pytest.mark.parametrize('keys', [('zero.stage=3', 'train.precision=bf16', *PIECES),
                                  ('zero.stage=1',)])
def test_reductions_that_nccl_sums(keys: tuple[str, ...]) -> None:
    """No CPU runs these plans: every mutant of a reduction, what sums it and what says of which sort
    it is, is refused or the same program."""
    p = planned('gpt-tiny', *keys, 'train.reduction=fast', 'targets=[sm_90]')
    exact = planned('gpt-tiny', *keys, 'targets=[sm_90]')
    check.check(p)
    works = mutants.played(p)
    pairs = mutants.forced(works)
    all_ = [m for n, m in enumerate(mutants.mutants(p)) if n % 5 == 0 or 'reducescatter' in m.what]
    assert sum('reducescatter' in m.what for m in all_) > 50
    assert [m.what for m in all_ if 'reducescatter' in m.what and not mutants.refused(m.plan)
            and not mutants.same(m.plan, works, pairs)] == []
    for head, of in ((p.head, exact), (exact.head, p)):
        assert mutants.refused(replace(of, head=replace(of.head, reduction=head.reduction)))
    for section in p.sections:
        for n, s in enumerate(section.steps):
            if s.op == 'reducescatter':
                other = replace(s, op='alltoall', ints=s.ints[:2])
                steps = [*section.steps[:n], other, *section.steps[n + 1:]]
                assert mutants.refused(mutants.changed(p, section, steps))


def test_runs_see_a_race(data: pathlib.Path) -> None:
    """The control: a backward that does not wait for its weights gives other weights in some run,
    so that equal runs mean something."""
    p = planned(*SMALL)
    grain = p.section('grain')
    n, s = next((n, s) for n, s in enumerate(grain.steps) if s.op == 'bwd.block')
    rest = tuple(e for e in s.waits if not e.name.startswith('full.'))
    assert rest != s.waits
    steps = list(grain.steps)
    steps[n] = mutants.replace(s, waits=rest)
    mutant = mutants.changed(p, grain, steps)
    assert mutants.refused(mutant)
    works = mutants.played(p)
    assert not mutants.same(mutant, works, mutants.forced(works))
    want = told(trainer.build(source(p)), data, 'eager')
    assert any(got != want for got in runs(mutant, data, 6))


def test_what_is_the_same_program() -> None:
    """The canonical form knows a commuting pair, a wait that another implies, and a real change."""
    p = planned(*SMALL)
    works = mutants.played(p)
    pairs = mutants.forced(works)
    same = {m.what: mutants.same(m.plan, works, pairs) for m in mutants.mutants(p)
            if m.what.startswith('grain') and m.what.endswith(('deleted', 'next'))}
    steps = p.section('grain').steps
    pair = next(n for n in range(len(steps)) if [s.op for s in steps[n:n + 2]] == ['drop', 'drop'])
    assert same[f'grain {pair} main drop {steps[pair].unit}: swapped with the next']
    gone = [yes for what, yes in same.items() if what.endswith('deleted') and ' mark ' not in what]
    assert gone and not any(gone)
    assert 0 < sum(same.values()) < len(same) / 3


def test_checking_is_quick() -> None:
    """405B on 16,384 ranks: generating takes less than 3 s, of which checking may take half."""
    p = planned('llama3-405b', 'cluster.ranks=16384', 'zero.stage=3')
    before = os.times()
    check.check(p)
    after = os.times()
    assert after.user - before.user < 1.5
