"""quantize.py -- stores the frozen linears of blocks in few bits (train.lora.base), and dequantizes
a weight before each call that reads it.

A quantized tensor takes elements of the stored type like any other, so that shards, gathers and
places need not know of it (FSDP's quant_storage).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ..facts import ops
from ..facts.kernels import DEQUANTIZE
from ..plan.operand import Ints, Names
from ..plan.quantized import NUMBERS, Quantized
from ..read.spec import Spec
from .graph import Body, Call, Tensor, UnitKind, Value, Word


def format_of(spec: Spec, rows: Ints, shape: Ints, frozen: int) -> Quantized:
    """Return the format of a weight of a block with these rows of its parts."""
    lora = spec.train.lora
    if not lora or not lora.base or not frozen or len(shape) != 2:
        return Quantized()
    made = Quantized(lora.base, shape[1], rows)
    return made if made.whole else Quantized()


def tensor(name: str) -> str:
    """Return the tensor of which a value is the weights; '' for any other value."""
    word, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if word == "w" else ""


def _quantized(spec: Spec, t: Tensor) -> Tensor:
    """Return a tensor as it is stored."""
    rows = tuple(n for _, n in t.parts)
    made = format_of(spec, rows, t.shape, t.group[2])
    if not made.format:
        return t
    stored = made.stored(ops.BYTES[spec.train.precision])
    parts = tuple((name, n) for (name, _), n in zip(t.parts, stored, strict=True))
    size = (sum(stored),)
    return replace(t, parts=parts, shape=size, mean=0.0, std=0.0, quantized=made)


def _dequantized(body: Body, tensors: Mapping[str, Tensor]) -> Body:
    """Return a body whose calls read the values of quantized weights."""
    calls: list[Call] = []
    values = [*body.values]
    uses: Counter[str] = Counter()
    for c in body.calls:
        args: list[Word] = []
        for what, name in c.args:
            t = tensors.get(str(name)) if what == "param" else None
            if t:
                plain = Value(f"w.{t.name}.{uses[t.name]}", "real", t.quantized.elems)
                uses[t.name] += 1
                values.append(plain)
                numbers = plain.elems, t.elems, NUMBERS[t.quantized.format]
                calls.append(
                    Call(
                        DEQUANTIZE,
                        (
                            ("value", plain.name),
                            ("param", t.name),
                            *(("number", n) for n in numbers),
                        ),
                    )
                )
                what, name = "value", plain.name
            args.append((what, name))
        calls.append(replace(c, args=tuple(args)))
    return Body(tuple(calls), tuple(values))


def kind(spec: Spec, made: UnitKind) -> UnitKind:
    """Return a kind of block with quantized weights."""
    tensors = tuple(_quantized(spec, t) for t in made.tensors)
    few = {t.name: t for t in tensors if t.quantized.format}
    bodies = {name: _dequantized(body, few) for name, body in made.bodies.items()}
    return replace(made, tensors=tensors, bodies=bodies) if few else made


def notes(spec: Spec, kinds: tuple[UnitKind, ...]) -> Names:
    """Return a note for each frozen linear of a block that keeps its type."""
    lora = spec.train.lora
    return tuple(
        f"train.lora.base: {t.name} stays in {spec.train.precision}: a part of it ends within a "
        f"chunk of {lora.base}"
        for k in kinds
        for t in k.tensors
        if lora and lora.base and k.x and k.y and t.group[2] and len(t.shape) == 2
    )
