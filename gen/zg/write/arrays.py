"""arrays.py -- writes operands that are arrays of pointers: a function of C takes the first
pointer, and the others lead to the slots after it."""

from __future__ import annotations

from dataclasses import replace

from ..plan.operand import Names, elements
from ..plan.plan import Fn, Plan, Step
from .words import lower, upper


def _others(fn: Fn) -> Names:
    """Return a function's operands that are elements of an array, but not its first."""
    words = [a for call in fn.calls for a in call.args if isinstance(a, str)]
    return tuple(name for word in words for name in elements(word)[1:])


def of_first(p: Plan) -> Plan:
    """Return a plan whose functions take the first pointer of each array. Its calls still name all
    of them."""
    dropped = {fn.name: _others(fn) for fn in p.fns}
    kept = {
        fn.name: [n for n, name in enumerate(fn.ins) if name not in dropped[fn.name]]
        for fn in p.fns
        if dropped[fn.name]
    }

    if not kept:
        return p

    def step(s: Step) -> Step:
        ins = kept.get(s.op)
        return replace(s, ins=tuple(s.ins[n] for n in ins)) if ins else s

    return replace(
        p,
        fns=tuple(
            replace(fn, ins=tuple(fn.ins[n] for n in kept[fn.name]))
            if fn.name in kept
            else fn
            for fn in p.fns
        ),
        sections=tuple(replace(x, steps=tuple(map(step, x.steps))) for x in p.sections),
    )


def expression(p: Plan, fn: Fn, names: Names) -> str:
    """Return an array of pointers in C."""
    first, n = lower(names[0]), len(names)
    if n == 1:
        return f"ONE({first})"
    at = fn.ins.index(names[0])
    steps = [s for x in p.sections for s in x.steps if s.op == fn.name]
    (cls,) = {s.ins[at].cls for s in steps}
    slot = upper(cls)
    step = f"{slot}(1) - {slot}(0)"
    return f"zr_spaced((const void *[{n}]){{0}}, {first}, {step}, {n})"
