"""recipe.py -- the optimizer and the schedule of a spec as the plan's Recipe."""
from __future__ import annotations

from . import plan
from .spec import Optimizer, Spec


def rule(o: Optimizer) -> str:
    """The row of the op table."""
    if o.type == "SGD" and o.momentum:
        return "Nesterov" if o.nesterov else "Momentum"
    return o.type


def made(spec: Spec) -> plan.Recipe:
    """beta1 is a momentum too; what an optimizer does not take is 0, and its eps 1."""
    o, s = spec.train.optimizer, spec.train.schedule
    beta1, beta2 = o.betas or (o.momentum or 0.0, 0.0)
    return plan.Recipe(rule(o), o.lr, s.min_lr, beta1, beta2, o.eps or 1.0, o.weight_decay, o.clip,
                       s.warmup, s.steps, s.type)
