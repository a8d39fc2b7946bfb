"""parameters.py -- counts a model's parameters by the formulas of papers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zg.read.schema import Op
from zg.read.spec import Spec


def inner(ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the ops that have no other ops inside."""
    for op in ops:
        yield from inner(op.ops) if op.ops else (op,)


def elements(spec: Spec) -> int:
    """Return the parameters by the formulas of the papers, independent of the reader's own
    count."""
    C, total = spec.model.width, 0
    for unit in spec.model.units:
        x = C
        for op in inner(unit.ops):
            a = op.args
            if op.kind == "embedding":
                total += C * (spec.model.vocab + (a["context"] or 0))
            elif op.kind in ("layernorm", "rmsnorm"):
                total += unit.repeat * x * (1 + a.get("bias", False))
            elif op.kind == "attention":
                q, kv = (
                    a["heads"] * a["head_dim"],
                    a["kv_heads"] * a["head_dim"],
                )
                norms = {False: 0, True: 2 * a["head_dim"], "whole": q + kv}
                total += unit.repeat * (x * (q + 2 * kv) + q * C + norms[a["qk_norm"]])
                total += unit.repeat * ((q + 2 * kv) * a["bias"] + C * a["out_bias"])
                x = C
            elif op.kind == "linear":
                out = sum(a["out"])
                total += unit.repeat * out * (x + a["bias"]) * (a["tied"] is None)
                x = out
            elif op.kind in ("swiglu", "geglu"):
                x //= 2
    return total
