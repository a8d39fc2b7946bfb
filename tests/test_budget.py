"""test_budget.py -- train.memory_budget: what is chosen fits, is the cheapest that does, and is the
plan of train.recompute with the same words."""
import re

import pytest

import trainer
from plans import planned
from zg import budget, build, spec
from zg.schema import RECOMPUTE


def loaded(name: str, *keys: str) -> spec.Spec:
    return spec.load(f'{trainer.ROOT}/model_specs/{name}.yaml', keys)


def found(name: str, *keys: str) -> tuple[budget.Choice, ...]:
    s = loaded(name, *keys)
    return budget.choices(s, build.build(s).plan)


def words(c: budget.Choice) -> str:
    return f"train.recompute=[{', '.join(c.words)}]"


@pytest.mark.parametrize('name,keys', [
    ('gpt-tiny', ()), ('qwen3-tiny', ('targets=[cpu]', 'train.precision=bf16')),
    ('llama3-8b', ()), ('gpt2-1558m', ('zero.stage=1',))])
def test_arenas_are_those_of_the_plans(name: str, keys: tuple[str, ...]) -> None:
    """To the byte, on the target that holds most."""
    every = found(name, *keys)
    assert len(every) > 3
    for c in every:
        p = planned(name, *keys, words(c))
        assert c.arena == max(p.arena(t) for t in p.head.targets)


def test_more_is_dearer() -> None:
    """Less memory for more time, from nothing to the least there is."""
    every = found('llama3-8b')
    assert every[0].words == () and every[0].cost == 0 and every[-1].words == RECOMPUTE
    for a, b in zip(every, every[1:]):
        assert a.cost <= b.cost and a.arena > b.arena
    least = planned('llama3-8b', 'train.recompute=full')
    assert every[-1].arena == max(least.arena(t) for t in least.head.targets)


def test_all_again_costs_less_than_a_forward() -> None:
    """Of three parts forward and twice backward one, without the last product of each block; on a
    CPU, whose products take longer than their bytes, by flops."""
    keys = ('targets=[cpu]', 'train.sequence=4096')
    last = found('llama3-8b', *keys)[-1]
    fns = {f.name: f.flops for f in planned('llama3-8b', *keys, 'train.recompute=full').fns}
    again = 32 * (fns['bwd.block'] - 2 * fns['fwd.block'])
    once = 3 * 32 * fns['fwd.block'] + fns['train.head']
    assert last.cost == pytest.approx(again / once, rel=.1)
    assert .2 < last.cost < 1 / 3


@pytest.mark.parametrize('name', ['gpt-tiny', 'qwen3-tiny'])
def test_the_cheapest_that_fits(name: str) -> None:
    """A budget of just its arena chooses a row, a byte less the next one, and the plan is that of
    the words; below the least, the least is named, and works."""
    every = found(name)
    for n, c in enumerate(every):
        built = build.build(loaded(name, f'train.memory_budget={c.arena}'))
        assert built.plan == planned(name, words(c))
        assert f'* {100 * c.cost:>7.2f}%{c.arena:>22,}  {c.name}\n' in built.choices
        assert built.choices.count('\n') == len(every) + 2
        assert any(f'[{c.name}], arena {c.arena:,} bytes' in note for note in built.notes)
        if n + 1 < len(every):
            less = build.build(loaded(name, f'train.memory_budget={c.arena - 1}'))
            assert less.plan == planned(name, words(every[n + 1]))
    with pytest.raises(spec.SpecError, match='^--set: train.memory_budget: .*hold no plan') as e:
        build.build(loaded(name, f'train.memory_budget={every[-1].arena - 1}'))
    least = re.search(r'allowed: at least (\d+)$', str(e.value))[1]
    assert build.build(loaded(name, f'train.memory_budget={least}')).plan == \
        planned(name, words(every[-1]))


def test_what_is_named_is_always_made_again() -> None:
    every = found('gpt-tiny', 'train.recompute=[attention]')
    assert every[0].words == ('attention',) and all('attention' in c.words for c in every)
    assert len(every) > 1


@pytest.mark.parametrize('text,size', [
    ('8GiB', 8 * 2 ** 30), ('500MB', 5 * 10 ** 8), ('1.5TB', 15 * 10 ** 11),
    ('"80 GiB"', 80 * 2 ** 30),
    ('123456789', 123456789), ('7kB', 7000), ('0.5KiB', 512), ('12B', 12)])
def test_sizes(text: str, size: int) -> None:
    assert loaded('gpt-tiny', f'train.memory_budget={text}').train.memory_budget == size


@pytest.mark.parametrize('text', ['0', '-1', '8 G', '8gib', 'GiB', '1.5', '1e9.', 'true', '[1]',
                                  '0.1B'])
def test_no_sizes(text: str) -> None:
    with pytest.raises(spec.SpecError, match='train.memory_budget: .* is no size; allowed'):
        loaded('gpt-tiny', f'train.memory_budget={text}')
