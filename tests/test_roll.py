"""test_roll.py -- loops: nothing is lost by rolling, little is left of a deep model, and train.c,
in loops or flat, does what the plan says, line by line."""
import pathlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer
from plans import NAMES, WAYS, keys, planned
from zg.plan import roll
from zg.plan.plan import Event, Int, Plan, Ref, Step
from zg.write import cost, emit, explain, view

# Of a train.c for a CPU, whatever the depth and the ranks. Stage 3 has more to say: three lines to
# gather a unit before each use, the last round of each direction written out, for no unit or another
# follows it, and a flat buffer more, of what is kept whole, with a line for each of its states.
LINES = {0: 511, 1: 511, 2: 511, 3: 563}
STAYING = 40                    # more where some units stay gathered: loops of those and of others
TOGETHER = 85                   # more where grains go through a unit together: loops over grains at each
                                # use, the last grain's written out, for its slot's contents die with
                                # it, and an evaluation's forward of its own
TINY = [name for name in NAMES if 'tiny' in name]


def source(p: Plan, flat: bool = False) -> str:
    return emit.train(view.view(p, cost.summary(p), explain.memory_line(p), flat))


# ---- nothing is lost

@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('name', NAMES)
def test_every_section_comes_back(name: str, way: str) -> None:
    for section in planned(name, *keys(name, way)).sections:
        assert roll.unroll(roll.roll(section.steps)) == section.steps


small = st.integers(0, 3)
refs = st.lists(st.builds(Ref, st.sampled_from(['x', 'ring.a']), small, st.sampled_from([0, 64]),
                          st.booleans()), max_size=2).map(tuple)
events = st.lists(st.builds(Event, st.sampled_from(['full', 'new']), small), max_size=2).map(tuple)
units = st.one_of(st.sampled_from(['', 'head']), st.builds('block[{}]'.format, small))
ints = st.lists(st.builds(Int, st.just('n'), st.integers(-2, 3), small), max_size=1).map(tuple)
steps = st.builds(Step, st.sampled_from(['main', 'gather']), st.sampled_from(['fwd', 'done']),
                  units, refs, refs, ints, events, events)


@st.composite
def lists(draw) -> list[Step]:
    """Windows of steps that come again, with numbers that grow evenly or nearly so."""
    out: list[Step] = []
    for _ in range(draw(st.integers(0, 3))):
        window = draw(st.lists(steps, min_size=1, max_size=7))
        grow = draw(st.integers(0, 2))
        for turn in range(draw(st.integers(1, 5))):
            for s in window:
                values = [v + turn * grow for v in roll.numbers(s)]
                out.append(roll.rebuild(s, values))
        if draw(st.booleans()):
            out.append(draw(steps))
    return out


@settings(max_examples=300)
@given(lists())
def test_any_list_comes_back(made: list[Step]) -> None:
    nodes = roll.roll(made)
    assert roll.unroll(nodes) == tuple(made)
    assert sum(1 for _ in lines(nodes)) <= len(made)


def lines(nodes: tuple[roll.Node, ...]) -> Iterator[roll.Line]:
    for node in nodes:
        yield from [node] if isinstance(node, roll.Line) else lines(node.body)


def test_a_run_becomes_a_loop() -> None:
    """The control: equal steps that grow evenly are rolled, one odd number and they are not."""
    run = [Step('main', 'fwd', f'block[{n}]', ins=(Ref('x', n),), outs=(Ref('x', n + 1),))
           for n in range(9)]
    assert roll.roll(run) == (roll.Loop(9, (roll.Line(run[0], (0,) * 5, ((1, 1, 0, 1, 0),)),)),)
    odd = [replace(s, outs=(Ref('x', 0),)) if n == 4 else s for n, s in enumerate(run)]
    assert len(list(lines(roll.roll(odd)))) == 3


def test_slots_in_turn_are_found_whatever_their_name() -> None:
    """Those that come round have a modulus, also where they go down; those that do not have none."""
    up = [Step('main', 'fwd', '', ins=(Ref('any', n % 3),), recs=(Event('e', (8 - n) % 4),))
          for n in range(9)]
    assert roll.roll(up) == (roll.Loop(9, (roll.Line(up[0], (0, 3, 0, 4), ((0, 1, 0, 3),)),)),)
    down = [Step('main', 'bwd', '', ins=(Ref('any', 8 - n),)) for n in range(9)]
    assert roll.roll(down) == (roll.Loop(9, (roll.Line(down[0], (0,) * 3, ((0, -1, 0),)),)),)


def test_loops_nest_no_deeper_than_they_have_names() -> None:
    """Four loops in one another, each with a growth of its own."""
    steps = [Step('main', 'mark', '', recs=(Event('e', 1000 * a + 100 * b + 10 * c + d),))
             for a in range(4) for b in range(4) for c in range(4) for d in range(4)]
    depth = lambda n: 1 + max(map(depth, n.body)) if isinstance(n, roll.Loop) else 0
    rolled = roll.roll(steps)
    assert max(map(depth, rolled)) == roll.DEPTH == len(view.VARS) == 3
    assert roll.unroll(rolled) == tuple(steps)


# ---- little is left

def deep(tmp_path: pathlib.Path, name: str, layers: int) -> pathlib.Path:
    text = (trainer.ROOT / 'model_specs' / f'{name}.yaml').read_text()
    count = next(line for line in text.splitlines() if '- blocks:' in line)
    path = tmp_path / f'{name}-{layers}.yaml'
    path.write_text(text.replace(count, f'  - blocks: {layers}'))
    return path


def length(text: str) -> int:
    return len(text.splitlines())


@pytest.mark.parametrize('stage', [0, 1, 2, 3])
@pytest.mark.parametrize('name', ['gpt2-124m', 'llama3-8b'])
def test_length_is_of_the_kinds(name: str, stage: int, tmp_path: pathlib.Path) -> None:
    """Four times the blocks, 2,048 times the ranks: the same lines, but where a number's width
    decides whether a function stands on one line or on six, as in four at most; flat, a line for
    every step."""
    def made(layers: int, ranks: int) -> Plan:
        return planned(str(deep(tmp_path, name, layers)), f'zero.stage={stage}',
                       f'cluster.ranks={ranks}', 'train.micro_batch=1',
                       f'train.global_batch={ranks * 2}')
    base = length(source(made(24, 8)))
    for layers, ranks in ((96, 8), (96, 16384)):
        p = made(layers, ranks)
        text = source(p)
        assert abs(length(text) - base) <= 24 and len(text) < 100_000
        assert length(source(p, True)) > sum(len(s.steps) for s in p.sections)


@pytest.mark.parametrize('stage', [0, 1, 2, 3])
@pytest.mark.parametrize('ranks,again', [(1, 'none'), (8, 'full'), (16384, 'none')])
def test_a_deep_gpt_is_short(stage: int, ranks: int, again: str, tmp_path: pathlib.Path) -> None:
    """96 blocks; GPUs add their columns of the launch table and their names, no other line."""
    def made(targets: str) -> tuple[str, str, str]:
        p = planned(str(deep(tmp_path, 'gpt2-124m', 96)), f'zero.stage={stage}',
                    f'cluster.ranks={ranks}', 'train.micro_batch=1', f'train.recompute={again}',
                    f'train.global_batch={ranks * 2}', f'targets=[{targets}]')
        text = source(p)
        before, _, rest = text.partition('/* ---- launches')
        return text, before, rest.partition('/* ---- tensors')[2]
    text, before, after = made('cpu')
    _, before_more, after_more = made('cpu, sm_80, sm_90, sm_100')
    assert length(text) <= LINES[stage]
    assert (length(before), length(after)) == (length(before_more), length(after_more) - 3)


@pytest.mark.parametrize('near', [0.2, 1.1, 100])
@pytest.mark.parametrize('ranks', [8, 16384])
def test_a_deep_gpt_some_of_which_stays(ranks: int, near: float, tmp_path: pathlib.Path) -> None:
    """near: the distance, as a part of all elements"""
    path = str(deep(tmp_path, 'gpt2-124m', 96))
    keys = ('zero.stage=3', f'cluster.ranks={ranks}', 'train.micro_batch=1', 'targets=[cpu]',
            f'train.global_batch={ranks * 2}', 'zero.stage3_max_live_parameters=1000000000000')
    size = planned(path, *keys).head.params
    p = planned(path, *keys, f'zero.stage3_max_reuse_distance={int(near * size)}')
    assert 0 < cost.staying(p) <= 97
    assert length(source(p)) <= LINES[3] + STAYING


@pytest.mark.parametrize('ranks', [8, 16384])
def test_a_deep_gpt_all_grains_of_which_go_through_a_unit(ranks: int, tmp_path: pathlib.Path
                                                          ) -> None:
    """Four times the grains are the same lines, but where a number's width cuts some in two."""
    path = str(deep(tmp_path, 'gpt2-124m', 96))
    texts = [source(planned(path, 'zero.stage=3', f'cluster.ranks={ranks}', 'train.micro_batch=1',
                            'targets=[cpu]', f'train.global_batch={ranks * grains}',
                            'train.accumulate=layers')) for grains in (4, 16)]
    few, more = map(length, texts)
    assert max(few, more) <= LINES[3] + TOGETHER and abs(few - more) <= 8


# ---- train.c does what the plan says

def said(p: Plan) -> Iterator[str]:
    """The lines that trace.c prints of a program of this plan."""
    queues = {'main': 0, 'gather': 1, 'reduce': 2, 'sum': 3}
    first, n = {}, 0
    for e in p.events:
        first[e.name], n = n, n + e.index
    at = lambda r: p.cls(r.cls).at + r.index * p.cls(r.cls).stride + r.at + (r.last << 62)
    fns = {f.name: f for f in p.fns}
    for section in p.sections:
        for g in range(section.repeat):
            for s in section.steps:
                q, ints = queues[s.queue], {i.name: i.value + g * i.per for i in s.ints}
                yield from (f'wait {q} {first[e.name] + e.index}' for e in s.waits)
                if s.op in fns:
                    values = [at(r) for r in (*s.ins, *s.outs)]
                    values += [ints[name] for name in fns[s.op].ints]
                    yield ' '.join(map(str, [s.op.replace('.', '_'), q, *(values or [0])]))
                elif s.op != 'mark':
                    group = ['', *(x.name for x in p.groups)].index(s.group) - 1
                    values = {
                        'batch': lambda: [ints['of_rank'] + ints['grain'], *(
                            [s.outs[0].index * p.cls('tokens').stride] if p.together > 1 else [])],
                        'gather': lambda: [group, at(s.ins[0]), ints['from_step'], at(s.outs[0]),
                                           ints['step'], ints['bytes']],
                        'alltoall': lambda: [group, at(s.ins[0]), ints['step'], at(s.outs[0]),
                                             ints['bytes']],
                        'reducescatter': lambda: [group, at(s.ins[0]), ints['step'], at(s.outs[0]),
                                                  ints['bytes'], ints['width']],
                        'allreduce': lambda: [group, at(s.ins[0]), at(s.outs[0]), ints['count']],
                        'done': lambda: [group, at(s.ins[0]), at(s.ins[1])]}[s.op]()
                    yield ' '.join(map(str, [s.op, q, *values]))
                yield from (f'rec {q} {first[e.name] + e.index}' for e in s.recs)


def traced(text: str, folder: pathlib.Path) -> list[str]:
    """What a train.c asks of the runtime."""
    (folder / 'train.c').write_text(text)
    trace = trainer.ROOT / 'tests' / 'trace'
    trainer.sh('gcc', '-std=gnu11', '-O1', '-Wall', '-Wextra', '-Werror', '-Wno-unused-function',
               '-Wno-unused-const-variable', '-Iruntime', '-Ikernels', f'-I{trace}', '-include',
               trace / 'trace.h', folder / 'train.c', trace / 'trace.c', '-static',
               '-Wl,--unresolved-symbols=ignore-all', '-o', folder / 'traced')
    return trainer.sh(folder / 'traced').splitlines()


@pytest.mark.parametrize('flat', [False, True], ids=['in loops', 'flat'])
@pytest.mark.parametrize('name,way', [
    ('gpt-tiny', 'as it stands'), ('llama-tiny', 'stage 1, 4 grains a rank'),
    ('qwen3-tiny', 'stage 3, none kept, far ahead'), ('gpt-tiny', 'stage 2 in bf16, pieces'),
    ('llama-tiny', 'stage 3, all made again'), ('gpt-tiny', 'stage 3, units stay'),
    ('gpt-tiny', 'stage 3, three grains through a unit'),
    ('llama-tiny', 'stage 3, four grains through a unit'),
    ('gpt2-124m', 'stage 0, 2 ranks'), ('llama3-405b', 'as it stands')])
def test_train_c_says_the_plan(name: str, way: str, flat: bool, tmp_path: pathlib.Path) -> None:
    p = planned(name, *keys(name, way))
    got, want = traced(source(p, flat), tmp_path), list(said(p))
    assert len(got) > 50
    assert got == want


@pytest.mark.parametrize('name', TINY)
def test_flat_and_in_loops_give_the_same_weights(name: str, tmp_path: pathlib.Path) -> None:
    p = planned(name)
    trainer.write_tokens(tmp_path / 'tokens.bin', np.arange(33 * 60) * 7919 % 251)
    out = [trainer.sh(trainer.build(source(p, flat)), '--data', tmp_path / 'tokens.bin',
                      '--steps', 3, '--hash') for flat in (False, True)]
    told = [[x for x in text.splitlines() if x.startswith(('weights', 'loss', 'wire'))]
            for text in out]
    assert told[0] == told[1] and len(told[0]) == 3
