"""test_budget.py -- train.memory_budget: what is chosen fits, is the cheapest that does, and is the
plan of a spec with the same keys."""
import re
from dataclasses import replace

import pytest

import trainer
from plans import planned
from zg import budget, build, reserve, spec
from zg.schema import RECOMPUTE


def loaded(name: str, *keys: str) -> spec.Spec:
    return spec.load(f'{trainer.ROOT}/model_specs/{name}.yaml', keys)


STAY = tuple(f'{key}={off}' for key, off in (('train.offload_activations', 'false'),
             ('zero.offload_optimizer.device', 'none'), ('zero.offload_param.device', 'none')))


def found(name: str, *keys: str) -> tuple[budget.Choice, ...]:
    return budget.choices(loaded(name, *keys), lambda changed: build.build(changed).plan)


@pytest.mark.parametrize('name,keys', [
    ('gpt-tiny', ()), ('gpt-tiny', ('zero.stage=3', 'cluster.ranks=2', 'targets=[cpu]')),
    ('qwen3-tiny', ('targets=[cpu]', 'train.precision=bf16', 'zero.stage=2')),
    ('qwen3-tiny', ('zero.stage=3', 'train.accumulate=layers')),
    ('gpt-tiny', ('zero.stage=3', 'train.offload_activations=true')),
    ('llama3-8b', STAY), ('gpt2-1558m', ('zero.stage=1', STAY[0]))])
def test_arenas_are_those_of_the_plans(name: str, keys: tuple[str, ...]) -> None:
    """To the byte, on the target that holds most; the host's, too."""
    every = found(name, *keys)
    assert len(every) > 3
    for c in every:
        p = planned(name, *keys, *c.keys)
        assert c.device == max(p.arena(t) + reserve.bytes_of(t, p.head.ranks)
                               for t in p.head.targets)
        assert c.host == (p.host if len(p.head.targets) > 1 else p.end('hosted'))


@pytest.mark.parametrize('keys', [(), STAY])
def test_more_is_dearer(keys: tuple[str, ...]) -> None:
    """Less memory for more time, from nothing to the least there is."""
    every = found('llama3-8b', *keys)
    assert every[0].words == every[0].moved == () and every[0].cost == 0
    assert every[-1].words == RECOMPUTE and len(every[-1].moved) == (0 if keys else 3)
    for a, b in zip(every, every[1:]):
        assert a.cost <= b.cost and a.device > b.device
    least = planned('llama3-8b', *keys, *every[-1].keys)
    assert every[-1].device == reserve.most(least)


def test_what_the_spec_says_stays() -> None:
    """No choice puts on the host what a key keeps away, or takes from it what a key puts there."""
    for n, ((key, _), _) in enumerate(budget.MOVES):
        others = [c.moved for c in found('gpt-tiny', 'zero.stage=3', STAY[n])]
        assert any(others) and not any(n in moved for moved in others)
        for c in found('gpt-tiny', 'zero.stage=3', key):
            assert n not in c.moved and key not in c.keys
            assert loaded('gpt-tiny', 'zero.stage=3', key, *c.keys).train == c.spec.train


def test_only_what_there_is_moves() -> None:
    """At stage 0 no optimizer, below 3 no parameters, of all grains at once no activations."""
    rows = lambda *keys: {n for c in found('gpt-tiny', *keys) for n in c.moved}
    assert rows('zero.stage=0') == {0} and rows('zero.stage=2') == {0, 1}
    assert rows('zero.stage=3') == {0, 1, 2}
    assert rows('zero.stage=3', 'train.accumulate=layers') == {1, 2}


def test_the_host_has_an_end() -> None:
    """Choices that the host does not hold are none."""
    every = found('gpt-tiny', 'zero.stage=3')
    most = max(c.host for c in every)
    fewer = found('gpt-tiny', 'zero.stage=3', f'cluster.memory.host={most - 1}')
    assert 1 < len(fewer) and all(c.host < most for c in fewer)
    assert {c.keys for c in every if c.host < most} <= {c.keys for c in fewer}


def test_a_host_that_holds_no_choice() -> None:
    """Its own least is named, and works."""
    keys = ('targets=[cpu]', 'zero.stage=1', 'zero.offload_optimizer.device=cpu',
            'train.memory_budget=1GiB')
    with pytest.raises(spec.SpecError, match='cluster.memory.host: 4096 bytes hold no plan') as e:
        build.build(loaded('gpt-tiny', *keys, 'cluster.memory.host=4096'))
    least = int(re.search(r'allowed: at least (\d+)$', str(e.value))[1])
    assert build.build(loaded('gpt-tiny', *keys, f'cluster.memory.host={least}')).plan.end(
        'hosted') == least


@pytest.mark.parametrize('key', ['zero.stage3_max_live_parameters=1000',
                                 'train.optimizer.groups=[{match: ["*"], frozen: true}]'])
def test_what_no_choice_mends_is_said(key: str) -> None:
    with pytest.raises(spec.SpecError) as e:
        build.build(loaded('gpt-tiny', key, 'zero.stage=3', 'train.memory_budget=1GiB'))
    with pytest.raises(spec.SpecError) as alone:
        build.build(loaded('gpt-tiny', key, 'zero.stage=3'))
    assert str(e.value) == str(alone.value)


def test_what_a_slow_link_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is as long as its copies where these are slow, and hides their link where it is not."""
    def cost(link: float) -> float:
        monkeypatch.setitem(budget.PEAKS, 'cpu', replace(budget.PEAKS['cpu'], link=link))
        return next(c.cost for c in found('gpt2-124m', 'targets=[cpu]', 'train.recompute=full',
                                          *STAY[1:]) if c.moved)
    assert 0 < cost(1e12) == cost(1e10) < .05
    assert (1 + cost(1e5)) / (1 + cost(2e5)) == pytest.approx(2, rel=.01)


def test_only_what_moves_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host's memory is all that counts, an update is as long as the gradients, masters and
    moments that it reads and writes: of flats that move, and of shards what is not the device's."""
    monkeypatch.setitem(budget.PEAKS, 'cpu', replace(budget.PEAKS['cpu'], host=1e-9))
    def seconds(*keys: str) -> float:
        s = loaded('llama-tiny', 'targets=[cpu]', 'zero.stage=1', 'train.global_batch=4',
                   'zero.offload_optimizer.device=cpu', 'train.accumulate=layers', *keys)
        p = build.build(s).plan
        ways = {section.name: budget._way(section) for section in p.step}
        return budget._step(s, p, ways, 'cpu', 0, 0) * 1e-9
    p = planned('llama-tiny', 'zero.stage=1')
    size = lambda *names: sum(f.count * f.shard for f in p.flats if f.name in names)
    assert seconds() == pytest.approx(28 * size('embed', 'block', 'head'))
    frozen = 'train.optimizer.groups=[{match: ["model.layers.*"], frozen: true}]'
    assert seconds(frozen) == pytest.approx(28 * size('embed', 'head'))
    assert seconds('zero.offload_optimizer.ratio=0.25') < seconds() * .3


def test_all_again_costs_less_than_a_forward() -> None:
    """Of three parts forward and twice backward one, without the last product of each block; on a
    CPU, whose products take longer than their bytes, by flops."""
    keys = ('targets=[cpu]', 'train.sequence=4096', *STAY)
    last = found('llama3-8b', *keys)[-1]
    fns = {f.name: f.flops for f in planned('llama3-8b', *keys, 'train.recompute=full').fns}
    again = 32 * (fns['bwd.block'] - 2 * fns['fwd.block'])
    once = 3 * 32 * fns['fwd.block'] + fns['train.head']
    assert last.cost == pytest.approx(again / once, rel=.1)
    assert .2 < last.cost < 1 / 3


@pytest.mark.parametrize('name', ['gpt-tiny', 'qwen3-tiny'])
def test_the_cheapest_that_fits(name: str) -> None:
    """A budget of just its arena chooses a row, a byte less the next one, and the plan is that of
    its keys; below the least, the least is named, and works."""
    every = found(name)
    for n, c in enumerate(every):
        built = build.build(loaded(name, f'train.memory_budget={c.device}'))
        assert built.plan == planned(name, *c.keys)
        assert f'* {100 * c.cost:>7.2f}%{c.device:>22,}{c.host:>22,}  {c.away}; {c.name}\n' \
            in built.choices
        assert built.choices.count('\n') == len(every) + 2
        assert any(f'chose {" ".join(c.keys)}, {c.device:,} bytes' in note
                   for note in built.notes)
        if n + 1 < len(every):
            less = build.build(loaded(name, f'train.memory_budget={c.device - 1}'))
            assert less.plan == planned(name, *every[n + 1].keys)
    with pytest.raises(spec.SpecError, match='^--set: train.memory_budget: .*hold no plan') as e:
        build.build(loaded(name, f'train.memory_budget={every[-1].device - 1}'))
    least = re.search(r'allowed: at least (\d+)(; with other bits |$)', str(e.value))[1]
    assert build.build(loaded(name, f'train.memory_budget={least}')).plan == \
        planned(name, *every[-1].keys)


def test_a_budget_that_another_rule_of_sums_holds() -> None:
    """Is refused: the rule is the recipe's. It is named."""
    keys = ('targets=[cpu]', 'zero.stage=3', 'train.micro_batch=1', 'train.global_batch=512',
            'zero.offload_optimizer.device=none')
    least = found('gpt-tiny', *keys)[-1].device
    with pytest.raises(spec.SpecError) as e:
        build.build(loaded('gpt-tiny', *keys, f'train.memory_budget={least - 1}'))
    assert str(e.value).endswith(f'at least {least}; with other bits train.sum=fold, whose sums of '
                                 'gradients take less')
    build.build(loaded('gpt-tiny', *keys, f'train.memory_budget={least - 1}', 'train.sum=fold'))


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
