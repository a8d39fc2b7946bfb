"""names.py -- names the parameters and values of units, in the plan and in train.c.

A parameter is named after the last words of its tensor's name that no other layer of the unit has:
`c_attn_w`. A value is named after the layer or kernel that makes it, with the operand's name if it
is not the layer's output: `attention`, `ln_1_stat`. A gradient is d_ and its value's name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from ..facts.kernels import DEQUANTIZE, KERNELS, Formal
from ..graph import mlps, quantize
from ..graph.graph import Call, UnitKind

ENDS = {"weight": "_w", "bias": "_b"}
RESIDUAL = {"zk_add", "sum"}  # a kernel and an operand of norms
MADE = ">^+"  # modes of operands that a kernel writes
OUTSIDE = {"in": "x", "x": "x", "y": "y"}


def layer(tensor: str) -> tuple[str, str]:
    """Return the layer of a tensor and the suffix of the tensor in it."""
    name, _, end = tensor.rpartition(".")
    return (name, ENDS[end]) if end in ENDS else (tensor, "")


def words(name: str, depth: int) -> str:
    """Return the last `depth` words of a layer's name. Layers that share a linear are joined:
    q_proj, k_proj -> q_k_proj."""
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


def layers(kind: UnitKind) -> dict[str, str]:
    """Return the name of each layer of a unit."""
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


def tensors(kind: UnitKind) -> dict[str, str]:
    """Return the name of each tensor that a unit reads."""
    called, out = layers(kind), {}
    for name in [
        *(t.name for t in kind.tensors),
        *[kind.tied] * bool(kind.tied),
    ]:
        of, end = layer(name)
        out[name] = called[of] + end
    return out


def _calls(kind: UnitKind) -> Iterator[Call]:
    """Yield the calls of a unit's bodies and of their parts."""
    for name, body in kind.bodies.items():
        yield from body.calls
        for part in kind.parts(name):
            yield from part.calls


def _outputs(kind: UnitKind) -> Iterator[tuple[Call, Formal, str]]:
    """Yield the values that calls write: call, operand, value."""
    for call in _calls(kind):
        row = KERNELS[call.kernel]
        pairs = zip(row.formals, call.args, strict=True)
        for formal, (what, name) in pairs:
            if what == "value" and formal.mode in MADE:
                yield call, formal, str(name)


def _made(called: dict[str, str], call: Call, formal: Formal) -> str:
    """Return the name of a value that a call writes. called: names of layers."""
    if formal.name in RESIDUAL or call.kernel in RESIDUAL:
        return "residual"
    params = [
        str(name) if what == "param" else quantize.tensor(str(name))
        for what, name in call.args
        if what == "param" or what == "value" and quantize.tensor(str(name))
    ]
    of = call.kernel.removeprefix("zk_").removesuffix("_fwd")
    if params:
        name, _ = layer(params[0])
        of = called[name]
    if call.kernel == DEQUANTIZE:
        return f"{of}_dequantized"
    if formal.name == "y":
        return of
    outputs = {f.name for f in KERNELS[call.kernel].formals}
    return f"{of}_{formal.name}" if "y" in outputs else formal.name


def _forward(kind: UnitKind) -> dict[str, str]:
    """Return the names of forward's values. A value of an op ends with the op's number; others have
    a name of their own."""
    out: dict[str, str] = {}
    called = layers(kind)
    for call, formal, name in _outputs(kind):
        if name in out or name in OUTSIDE or name.startswith("d"):
            continue
        base = _made(called, call, formal) if name[-1].isdigit() else name
        numbered = (f"{base}_{n}" for n in itertools.count(2))
        taken = out.values()
        out[name] = next(
            text for text in itertools.chain([base], numbered) if text not in taken
        )
    for call in _calls(kind):
        at = KERNELS[call.kernel].at.get("logits")
        if at is not None:
            out[str(call.args[at][1])] = "logits"
    return out


def values(kind: UnitKind) -> dict[str, str]:
    """Return the name of each value of a unit."""
    out = {**OUTSIDE, **_forward(kind)}
    for _, _, name in _outputs(kind):
        if name in out:
            continue
        plain = name.rstrip("'")
        times = 1 + len(name) - len(plain)
        number = f"_{times}" if times > 1 else ""
        of = out.get(plain[1:])
        out[name] = f"d_{of}{number}" if of else re.sub(r"\W+", "_", name)
    return out | {mlps.total(t): f"d_{name}_sum" for t, name in tensors(kind).items()}
