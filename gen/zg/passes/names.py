"""names.py -- what a unit's parameters and values are called, in the plan and in train.c.

A parameter has the last words of its tensor's name that no other layer of the unit has: `c_attn_w`.
A value has those of the layer that makes it, or its kernel's name (`attention`), and behind it what
it is beside the layer's output (`ln_1_stat`). A gradient has d_ before the name of its value.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from ..facts.kernels import KERNELS, Formal
from ..graph.graph import Call, Kind

ENDS = {"weight": "_w", "bias": "_b"}
RESIDUAL = {"zk_add", "sum"}  # a kernel, and an operand of norms
MADE = ">^+"  # modes of what a kernel makes
OUTSIDE = {"in": "x", "x": "x", "y": "y"}


def layer(tensor: str) -> tuple[str, str]:
    """The layer of a tensor, and what of it the tensor is."""
    name, _, end = tensor.rpartition(".")
    return (name, ENDS[end]) if end in ENDS else (tensor, "")


def words(name: str, depth: int) -> str:
    """The last words of a layer's name; several that share a linear: q_proj, k_proj -> q_k_proj."""
    *others, last = name.split("+")
    plain = re.sub(r"\{.*?\}", "", last)
    *before, word = plain.split(".")[-depth:]
    own = [other.rpartition(".")[2] for other in others]
    _, _, end = word.rpartition("_")
    end = f"_{end}"
    if all(other.endswith(end) for other in own):
        own = [other.removesuffix(end) for other in own]
    text = "_".join([*before, *own, word])
    text = re.sub(r"\W+", "_", text).strip("_")
    return text.lower() or "layer"


def layers(kind: Kind) -> dict[str, str]:
    """What each layer of a unit is called."""
    found = dict.fromkeys(layer(t.name)[0] for t in kind.tensors)
    if kind.tied:
        found[layer(kind.tied)[0]] = None
    out = {}
    for name in found:
        for depth in range(1, 2 + name.count(".")):
            out[name] = words(name, depth)
            if sum(words(other, depth) == out[name] for other in found) == 1:
                break
    return out


def tensors(kind: Kind) -> dict[str, str]:
    """What each tensor that a unit reads is called there."""
    called, out = layers(kind), {}
    for name in [
        *(t.name for t in kind.tensors),
        *[kind.tied] * bool(kind.tied),
    ]:
        of, end = layer(name)
        out[name] = called[of] + end
    return out


def _calls(kind: Kind) -> Iterator[Call]:
    """Of a unit's bodies, and of their parts where it is cut."""
    for name, body in kind.bodies.items():
        yield from body.calls
        for part in kind.parts(name):
            yield from part.calls


def _outputs(kind: Kind) -> Iterator[tuple[Call, Formal, str]]:
    """Values that calls make."""
    for call in _calls(kind):
        row = KERNELS[call.kernel]
        pairs = zip(row.formals, call.args, strict=True)
        for formal, (what, name) in pairs:
            if what == "value" and formal.mode in MADE:
                yield call, formal, str(name)


def _made(called: dict[str, str], call: Call, formal: Formal) -> str:
    """called: what each layer of the unit is called."""
    if formal.name in RESIDUAL or call.kernel in RESIDUAL:
        return "residual"
    params = [str(name) for what, name in call.args if what == "param"]
    of = call.kernel.removeprefix("zk_").removesuffix("_fwd")
    if params:
        name, _ = layer(params[0])
        of = called[name]
    if formal.name == "y":
        return of
    outputs = {f.name for f in KERNELS[call.kernel].formals}
    return f"{of}_{formal.name}" if "y" in outputs else formal.name


def _forward(kind: Kind) -> dict[str, str]:
    """Of values that forward makes: those of an op end with its number, others have a name."""
    out: dict[str, str] = {}
    called = layers(kind)
    for call, formal, name in _outputs(kind):
        if name in out or name in OUTSIDE or name.startswith("d"):
            continue
        base = _made(called, call, formal) if name[-1].isdigit() else name
        numbered = (f"{base}_{n}" for n in itertools.count(2))
        taken = out.values()
        out[name] = next(
            text
            for text in itertools.chain([base], numbered)
            if text not in taken
        )
    for call in _calls(kind):
        at = KERNELS[call.kernel].at.get("logits")
        if at is not None:
            out[str(call.args[at][1])] = "logits"
    return out


def values(kind: Kind) -> dict[str, str]:
    """What each value of a unit is called."""
    out = {**OUTSIDE, **_forward(kind)}
    for _, _, name in _outputs(kind):
        if name in out:
            continue
        plain = name.rstrip("'")
        times = 1 + len(name) - len(plain)
        number = f"_{times}" if times > 1 else ""
        of = out.get(plain[1:])
        out[name] = f"d_{of}{number}" if of else re.sub(r"\W+", "_", name)
    return out
