"""test_stated.py -- tests numbers that shapes do not determine: the plan states each, straight from
the spec, and the checker compares calls, tensors and tables with it. Every number of a kernel's row
is checked in every call."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from zg.check import check
from zg.check.kernels import UNITS
from zg.check.stated import OF_CALLS
from zg.facts import ops
from zg.facts.kernels import BACK, FORWARD, KERNELS, kernel
from zg.plan.operand import Arg, Index, Layers
from zg.plan.plan import Call, Plan
from zg.plan.recipe import Stated, Turn

from tests.lib import mutants
from tests.lib.law import OPS, PACKED
from tests.lib.plans import planned

LAYERS = (
    'train.optimizer.groups=[{match: ["*.layers.1.*_proj.weight"], lr_factor: 0.5}, '
    '{match: ["*norm*"], weight_decay: 0.2}, {match: ["*embed*"], frozen: true}]'
)
BOTH = (
    "zero.stage=3",
    "zero.offload_optimizer.device=cpu",
    "zero.offload_optimizer.ratio=0.5",
)
SLICED = (
    "model.units[1].ops[1].residual[1].linear.out=[512, 512]",
    "zero.stage3_max_live_parameters=40000",
    "zero.stage3_param_persistence_threshold=64",
)
LORA = "train.lora={rank: 4, alpha: 6, dropout: 0.1}"
BARE = "model.units[2].head[0]={layernorm: {name: model.norm, weight: false}}"
SQUARED = "model.units[1].ops[1].residual[2]={relu2: {}}"
# On a CPU alone, where no grid reveals a shape, and in 16 bits, because in f32 some numbers make no
# difference.
HALVES = ("targets=[cpu]", "train.precision=bf16")
PLANS = {
    "gpt": ("gpt-tiny", *HALVES),
    "gpt, all recomputed": ("gpt-tiny", *HALVES, "train.recompute=full"),
    "gpt, squared ReLU, dropout": (
        "gpt-tiny",
        *HALVES,
        SQUARED,
        "train.dropout=0.1",
        "train.attention_dropout=0.1",
    ),
    "llama, shared samples": (
        "llama-tiny",
        *HALVES,
        "train.sequence_blocks=4",
        "cluster.ranks=4",
        "cluster.context_parallel=2",
    ),
    "llama in slices": ("llama-tiny", *HALVES, *SLICED),
    "llama in chunks": (
        "llama-tiny",
        *HALVES,
        "train.sequence=64",
        "train.head_chunk=32",
    ),
    "llama in chunks, capped": (
        "llama-tiny",
        *HALVES,
        "train.sequence=64",
        "train.head_chunk=32",
        "model.units[2].head[1].linear.softcap=2",
        "train.loss_mean=micro_batch",
    ),
    "llama, layers of their own": ("llama-tiny", *HALVES, LAYERS),
    "llama with adapters": ("llama-tiny", *HALVES, LORA),
    "llama over a base in 4 bits": (
        "llama-tiny",
        *HALVES,
        "train.lora={rank: 4, alpha: 6, base: nf4}",
    ),
    "gpt, packed": ("gpt-tiny", *HALVES, *PACKED),
    "llama, rows by head": (
        "llama-tiny",
        *HALVES,
        "model.names=neox",
        "model.units[1].ops[0].residual[1].attention.kv_heads=4",
        LORA,
    ),
    "qwen": ("qwen3-tiny", *HALVES),
    "qwen, norms of whole rows": (
        "qwen3-tiny",
        *HALVES,
        "model.units[1].ops[0].residual[1].attention.qk_norm=whole",
    ),
    "qwen, other ops": ("qwen3-tiny", *HALVES, *OPS, BARE),
    "qwen, packed": ("qwen3-tiny", *HALVES, *PACKED),
}


def proven(p: Plan) -> bool:
    """Return whether a plan's functions and tensors are proven."""
    return not mutants.rule(lambda: check.functions(p, check.units(p)))


# ---- one number changed in one place


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in PLANS
        if "recomputed" in name or not re.search("gpt|adapters|4 bits", name)
    ],
)
def test_a_number_in_one_place_is_refused(name: str) -> None:
    p = planned(*PLANS[name])
    assert proven(p)
    made = list(mutants.of_stated(p))
    for word in (
        " zk_linear_fwd: layout",
        "tensors ",
        ": values ",
        "without ",
        "eval.head",
    ):
        assert any(word in m.what for m in made), word
    assert [m.what for m in made if proven(m.plan)] == []


def test_all_of_a_plan_is_proven() -> None:
    """`check` includes these proofs: it refuses a mutant of each kind."""
    p = planned(*PLANS["qwen"])
    sorts = {m.what.split()[0].split(".")[0]: m for m in mutants.of_stated(p)}
    assert sorts.keys() >= {
        "fwd",
        "bwd",
        "train",
        "eval",
        "tensors",
        "tables",
        "stated",
        "without",
    }
    assert [m.what for m in sorts.values() if not mutants.refused(m.plan)] == []


def without(p: Plan, kernel: str, *bodies: str) -> Plan:
    """Return a plan whose functions of these bodies do not call a kernel."""
    fns = [
        replace(fn, calls=[c for c in fn.calls if c.kernel != kernel])
        if fn.name.split(".")[0] in bodies
        else fn
        for fn in p.fns
    ]
    return replace(p, fns=tuple(fns))


@pytest.mark.parametrize("bodies", [("train",), ("eval",), ("train", "eval")])
def test_a_cap_is_not_left_out(bodies: tuple[str, ...]) -> None:
    p = planned(*PLANS["llama in chunks, capped"])
    assert proven(p)
    assert not proven(without(p, "zk_softcap", *bodies))


def swapped(p: Plan, first: str, second: str, *bodies: str) -> Plan:
    """Return a plan whose functions of these bodies call two kernels in the other order."""
    fns = []
    for fn in p.fns:
        calls = list(fn.calls)
        names = [c.kernel for c in calls]
        if fn.name.split(".")[0] in bodies and first in names:
            a = names.index(first)
            b = names.index(second, a)
            calls[a : b + 1] = [*calls[a + 1 : b + 1], calls[a]]
        fns.append(replace(fn, calls=tuple(calls)))
    return replace(p, fns=tuple(fns))


@pytest.mark.parametrize("chunks", [(), ("train.sequence=64", "train.head_chunk=32")])
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_cap_is_the_losss(precision: str, chunks: tuple[str, ...]) -> None:
    """The loss has the cap of its logits. Neither a cap behind the loss nor an adapter behind the
    cap is proven, in training, in evaluation, or in both."""
    p = planned(
        *("llama-tiny", *HALVES, *chunks, f"train.precision={precision}"),
        "model.units[2].head[1].linear.softcap=2",
        "train.lora={rank: 4, alpha: 6, match: [q_proj, lm_head]}",
    )
    assert proven(p)
    for first, second in (
        ("zk_softcap", "zk_soft_cross_entropy"),
        ("zk_lora_fwd", "zk_softcap"),
    ):
        for bodies in (("train",), ("eval",), ("train", "eval")):
            assert not proven(swapped(p, first, second, *bodies)), (first, bodies)


# ---- one number changed everywhere, as a wrong pass would do

WAYS = (lambda v: v + 1, lambda v: v - 1, lambda v: 2 * v, lambda v: -v)


def other_word(was: Arg, how: Callable) -> Arg:
    if isinstance(was, Index):
        return replace(was, at=how(was.at))
    if isinstance(was, Layers):
        return Layers(tuple(map(how, was.values)))
    return 0 if isinstance(was, str) else how(was)


def everywhere(p: Plan, at: dict[str, int], how: Callable) -> Plan:
    """Return the plan with a number changed in all calls of units and in their launches. at: the
    number's place in each kernel."""

    def one(c: Call) -> Call:
        place = at.get(c.kernel)
        if place is None:
            return c
        other = other_word(c.args[place], how)
        return replace(c, args=mutants.put(c.args, place, other))

    fns = tuple(
        replace(fn, calls=tuple(map(one, fn.calls)), then=tuple(map(one, fn.then)))
        for fn in p.fns
        if fn.name.split(".")[0] in check.BODIES
    )
    shapes = {
        c.launch: tuple(a for a in c.args if isinstance(a, int))
        for fn in fns
        for c in fn.calls
    }
    launches = tuple(replace(l, shape=shapes.get(l.name, l.shape)) for l in p.launches)
    return replace(p, fns=fns, launches=launches)


def numbers() -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield each number of the kernels that units call, with its places in forward and backward
    together."""
    for root in dict.fromkeys(row.of or row.name for row in UNITS.values()):
        rows = [row for row in UNITS.values() if root in (row.name, row.of)]
        for name in dict.fromkeys(
            f.name for row in rows for f in row.formals if f.number
        ):
            yield (
                root,
                name,
                {row.name: row.at[name] for row in rows if name in row.at},
            )


@pytest.mark.slow
def test_a_number_that_is_wrong_everywhere_is_refused() -> None:
    """Every number of every kernel that units call is refused if it is wrong everywhere."""
    open_, tried = [], set()
    for plan, keys in PLANS.items():
        p = planned(*keys)
        for root, name, at in numbers():
            for n, how in enumerate(WAYS):
                other = everywhere(p, at, how)
                if other != everywhere(p, {}, how):
                    tried.add((root, name))
                    open_ += [(plan, root, name, n)] if proven(other) else []
    assert open_ == []
    assert tried == {(root, name) for root, name, _ in numbers()} and len(tried) > 50


@pytest.mark.parametrize(
    "name,turned",
    [
        (
            "qwen",
            {
                "zk_attention_fwd": {"B": 2, "T": 20},
                "zk_attention_bwd": {"B": 2, "T": 20},
            },
        ),
        ("qwen", {"zk_rope": {"B": 2, "T": 20}}),
        ("qwen", {"zk_rope": {"H": 2, "G": 3}}),
        (
            "gpt",
            {
                "zk_attention_fwd": {"H": 6, "G": 6, "D": 10},
                "zk_attention_bwd": {"H": 6, "G": 6, "D": 10},
            },
        ),
        (
            "qwen",
            {
                "zk_swiglu_fwd": {"M": 80, "F": 88},
                "zk_swiglu_bwd": {"M": 80, "F": 88},
            },
        ),
        (
            "gpt",
            {
                "zk_linear_fwd": {"layout": 1},
                "zk_linear_bwd_x": {"layout": 1},
                "zk_linear_bwd_w": {"layout": 1},
            },
        ),
    ],
)
def test_numbers_that_make_the_same_sizes_are_refused(name: str, turned: dict) -> None:
    p = planned(*PLANS[name])
    for n in range(max(map(len, turned.values()))):
        at = {k: KERNELS[k].at[list(of)[n]] for k, of in turned.items()}
        values = {k: list(of.values())[n] for k, of in turned.items()}
        (to,) = set(values.values())
        p = everywhere(p, at, lambda _, to=to: to)
    assert not proven(p)


OWN = (
    PLANS["llama in chunks"],
    (*PLANS["qwen"], *BOTH),
    (
        "gpt-tiny",
        *HALVES,
        "zero.stage=1",
        "cluster.ranks=2",
        "train.global_batch=8",
    ),
)


def of_own(p: Plan) -> Iterator[tuple[str, str, mutants.Mutant]]:
    """Yield mutants of the plan's own functions with a kernel's number changed in one call."""
    for f, fn in enumerate(p.fns):
        for n, c in enumerate(
            fn.calls if fn.name.split(".")[0] not in check.BODIES else ()
        ):
            for i, formal in enumerate(kernel(c.kernel).formals):
                for new in mutants.shifted(c.args[i]) if formal.number else ():
                    calls = mutants.put(
                        fn.calls,
                        n,
                        replace(c, args=mutants.put(c.args, i, new)),
                    )
                    other = replace(
                        p, fns=mutants.put(p.fns, f, replace(fn, calls=calls))
                    )
                    what = f"{fn.name} {c.kernel}: {formal.name} {c.args[i]} -> {new}"
                    yield c.kernel, formal.name, mutants.Mutant(what, other)


@pytest.mark.slow
def test_numbers_of_the_plans_own_functions_are_refused() -> None:
    """Each number of each kernel that only these functions call is checked, in the first function
    that has it."""
    have, open_ = set(), []
    for keys in OWN:
        tried: dict[tuple[str, str], list[mutants.Mutant]] = {}
        for name, number, m in of_own(planned(*keys)):
            tried.setdefault((name, number), []).append(m)
        have |= {(kernel(name).name, number) for name, number in tried}
        open_ += [
            m.what
            for made in tried.values()
            for m in made[:2]
            if not mutants.refused(m.plan)
        ]
    assert open_ == []
    assert have - {("zk_round", "n")} == {
        (row.name, f.name)
        for row in KERNELS.values()
        if row.own
        for f in row.formals
        if f.number
    }


# ---- rows and lines


def test_what_is_stated_of_forward_is_backwards_too() -> None:
    """A stated number of forward holds for backward, which must have the same number."""
    for name, back in BACK.items():
        row, first = KERNELS[name], KERNELS[back.of]
        both = {first.formals[n].name for _, n in back.numbers}
        mine = {f.name for f in row.formals if f.number and f.name in OF_CALLS}
        assert mine <= both or name.startswith("zk_slice"), name
    only = {op.fwd.split()[0] for op in ops.OPS.values() if not op.bwd}  # of the head
    for row in UNITS.values():
        points = {f.name for f in row.formals if f.mode == "."}
        assert points <= set(OF_CALLS)
        assert row.of or row.name in {*FORWARD, *only} or not points, row.name


def test_lines_of_a_plan() -> None:
    p = planned(*PLANS["llama, layers of their own"])
    of = {}
    for s in p.stated:
        of.setdefault(s.what, []).append(s)
    assert of["eps"] == [
        Stated("eps", 1, 2, (1e-6, 1e-6)),
        Stated("eps", 3, 1, (1e-6,)),
    ]
    assert of["scale"] == [Stated("scale", 1, 2, (0.25,))]
    assert of["table"] == [
        Stated("table", 1, 2, (Turn(16, 5e5, (8.0, 1.0, 4.0, 16.0)),))
    ]
    assert of["rate"][1:3] == [
        Stated("rate", 1, 1, (1.0,) * 6),
        Stated("rate", 2, 1, (1.0, 0.5, 0.5, 1.0, 0.5, 0.5)),
    ]
    assert of["decay"][1] == Stated("decay", 1, 2, (0.2, 0.1, 0.1, 0.2, 0.1, 0.1))
    assert of["frozen"][0] == Stated("frozen", 0, 1, (1,)) and len(of["frozen"]) == 3
