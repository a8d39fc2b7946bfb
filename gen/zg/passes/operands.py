"""operands.py -- decides which buffers the functions of units read and write.

Classes `x` and `save` have one slot per value n and micro-batch g, at index n * together + g.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..facts import ops
from ..facts.between import BETWEEN, SAVED, operand_of
from ..graph.graph import BodyPart, Graph, UnitKind
from ..plan.operand import Names
from ..plan.plan import Ref, Refs
from ..plan.size import Size
from ..read.spec import Spec
from . import exchanges
from .flats import PAGE, persists, stem
from .place import Bodies
from .rings import Gradient, Use
from .shard import Shards
from .stores import Kept

# Names of a function's ins and outs, and (name, flat) of its parameters.
Formals = tuple[Names, Names, tuple[tuple[str, str], ...]]


def formal(kind: UnitKind, flat: str) -> str:
    """Return the name of a flat's parameters in a function: p for `persistent`, else w; w1 for the
    flat of the second part of a split unit, w.frozen for frozen parameters."""
    name, dot, part = flat.partition(".")
    number = name.rpartition("_")[2] if kind.flats else ""
    return ("p" if persists(flat) else f"w{number}") + dot + part


HEAD_CLASSES = {b.cls for b in BETWEEN.values() if b.heads}


def near_slots(spec: Spec, cls: str, count: int) -> int:
    """Return how many of a class's `count` values are on the device at once."""
    return (
        min(count, 3 if cls == "x" else 2) if spec.train.offload_activations else count
    )


def by_sample(cls: str) -> bool:
    """Return whether values of a class that is kept for backward are of whole samples."""
    return cls.partition(".")[0] in HEAD_CLASSES


def slots_of_value(spec: Spec, cls: str) -> int:
    """Return the slots of a value of such a class: one for each block, or for each sample, that
    goes through a unit together with others."""
    return spec.together // (spec.own_blocks if by_sample(cls) else 1)


@dataclass
class Operands:
    """Names and slots of the operands of unit functions."""

    spec: Spec
    graph: Graph
    shards: Shards
    kept: Kept
    real: int  # bytes of the stored type
    places: Bodies
    # slots of each class of gradients; 0 for a flat whose gradients are in another's class
    grad: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flats = {f.name: f for f in self.shards.flats}
        self.sums = self.shards.sums
        # flats whose gradients several units write
        shared = ("persistent", "embed") if self.graph.tied else ("persistent",)
        single = [
            f.name
            for f in self.shards.flats
            if f.count == 1 and f.trainable and f.name not in shared
        ]
        self.ring_of = self.ring_classes(
            [f.name for f in self.shards.flats if f.gathered]
        )
        self.grad_class = {
            **{f: f for f in self.flats},
            **self.by_size(single),
        }
        self.together = self.spec.together
        # leading values that backward does not need
        self.unsaved = max(0, self.graph.still - 1)
        self.offloaded = self.offloaded_classes()
        self.formals = {
            (k.name, body, part.number): self.operand_names(k, body, part)
            for k in self.graph.kinds
            for body in k.bodies
            for part in k.parts(body)
        }
        self.host_places = {c: self.offloaded_places(c) for c in self.offloaded}

    def by_size(self, names: list[str]) -> dict[str, str]:
        """Map each flat to the first one with shards of the same size: these share a class."""
        first: dict[int, str] = {}
        return {n: first.setdefault(self.flats[n].shard, n) for n in names}

    def ring_classes(self, names: list[str]) -> dict[str, str]:
        """Map each flat to the ring that it is gathered to.

        All parts of a split unit share the ring of the largest, because the bound holds only one of
        them at a time and a ring per size would add up to the whole unit. Their frozen parts share
        a ring of their own in the same way.
        """
        cut = {
            f: kind.name for kind in self.graph.kinds for f, _ in kind.flats.values()
        }
        like = self.by_size(names)
        sharing: dict[tuple[str, bool], list[str]] = {}
        out = {}
        for f in names:
            if stem(f) in cut:
                sharing.setdefault((cut[stem(f)], stem(f) == f), []).append(f)
            else:
                out[f] = like[f]
        for group in sharing.values():
            largest = max(group, key=lambda f: self.flats[f].shard)
            out |= dict.fromkeys(group, like[largest])
        return out

    def reads(self, part: BodyPart) -> set[str]:
        """Return the flats whose parameters a function reads."""
        return {self.shards.place[n][0] for n in part.params}

    def writes(self, part: BodyPart) -> set[str]:
        """Return the flats whose gradients a function writes."""
        return {self.shards.place[n][0] for n in part.grads}

    def instance(self, flat: str, u: Use) -> int:
        """Return the instance of a flat that a use reads."""
        return (
            u.index * u.kind.slices(flat) + u.slice if self.flats[flat].count > 1 else 0
        )

    def slot(self, f: str, n: int, g: int) -> int:
        """Return the slot of a flat's n-th gradient for micro-batch g: slots are used in turn."""
        return (n * self.together + g) % self.grad[self.grad_class[f]]

    def grad_slot(self, x: Gradient, g: int) -> Ref:
        """Return the buffer of a gradient. It is the sum itself if nothing is added up."""
        f, l, n = x
        if not self.sums.phases:
            return Ref(f"sum.{f}", l)
        cls = self.grad_class[f]
        at = self.slot(f, n, g)
        return Ref(f"grad.{cls}", at)

    def operands(self, u: Use, g: int) -> tuple[Refs, Refs]:
        """Return the buffers that a function reads and writes for micro-batch g of those that go
        through the unit together, in the order of `formals`."""
        kind = u.kind
        first = g * self.spec.own_blocks if u.part.sample else g
        named = {
            "x": self.value(u.x, g),
            "y": self.value(u.y, g),
            **self.between(u, g, g),
            "dy": self.value_grad(u.y, g),
            "dx": self.value_grad(u.x, g),
            "tokens": Ref("tokens", g),
            "targets": Ref("targets", g),
            "positions": Ref("positions", g),
            "keys": Ref("keys", g),
            **{c: Ref(c, first) for c in ops.OF_SAMPLES.values()},
            "acc": Ref("acc", g),
        }
        for f in self.reads(u.part):
            at = self.instance(f, u)
            param = Ref(f"param.{f}", at, self.offset(f, u))
            named[formal(kind, f)] = param
        for x in u.gathered:
            named[formal(kind, x.flat)] = x.ref
        for gradient in u.gradients:
            f = gradient[0]
            grad = replace(self.grad_slot(gradient, g), at=self.offset(f, u))
            named[f"d{formal(kind, f)}"] = grad
        ins, outs, _ = self.formals[kind.name, u.body, u.part.number]
        return tuple(named[n] for n in ins), tuple(named[n] for n in outs)

    def value(self, n: int, g: int) -> Ref:
        """Return the buffer of value n. Values with negative numbers are not kept for backward, so
        they take turns in class `dx`."""
        return (
            self.value_slot("x", n, g)
            if n >= 0
            else Ref("dx", (g - n) % (self.together + 1))
        )

    def between(self, u: Use, block: int, sample: int) -> dict[str, Ref]:
        """Return the buffers of a unit's values between functions, of a block and of its sample."""
        out = {}
        for name, b in BETWEEN.items():
            g = sample if b.heads else block
            if b.saved:
                out[name] = self.value_slot(f"{b.cls}.{u.kind.name}", u.index, g)
            else:
                out[name] = Ref(b.cls, g)
        return out

    def value_slot(self, cls: str, n: int, g: int) -> Ref:
        """Return the buffer of value n of a class that is kept for backward, for block or sample
        g."""
        each = slots_of_value(self.spec, cls)
        if cls in self.offloaded:
            return Ref(f"near.{cls}", n % self.offloaded[cls][0] * each + g)
        return Ref(cls, n * each + g)

    def host_place(self, cls: str, n: int, g: int) -> Ref:
        """Return the place of the same on the host."""
        at = self.host_places[cls][n] * slots_of_value(self.spec, cls)
        return Ref(f"far.{cls}", at + g)

    def offloaded_classes(self) -> dict[str, tuple[int, int, Size]]:
        """Return (values on the device, values, bytes of a value) of each class that holds fewer
        values than there are."""
        dims = self.graph.dims
        units = sum(k.count for k in self.graph.kinds) - 1 - self.unsaved
        all_ = {"x": (units, dims["M"] * dims["C"] * self.real)}
        all_ |= {
            f"{BETWEEN[name].cls}.{k.name}": (k.count, size)
            for k in self.graph.kinds
            for name in SAVED
            if (size := self.places.size(name, k.name))
        }
        return {
            c: (
                near_slots(self.spec, c, n),
                n,
                Size.of(f"slot.near.{c}", ops.up(size, PAGE)),
            )
            for c, (n, size) in all_.items()
            if near_slots(self.spec, c, n) < n
        }

    def offloaded_places(self, cls: str) -> dict[int, int]:
        """Map each value of a class that goes to the host to its place there. Values that no
        backward reads and the last ones stay on the device."""
        device_slots, count, _ = self.offloaded[cls]
        read = [n for n in range(count - device_slots) if self.is_read_back(cls, n)]
        return {n: place for place, n in enumerate(read)}

    def is_read_back(self, cls: str, n: int) -> bool:
        """Return whether backward reads value n. x is read by the unit that takes it or by the one
        that made it. Saved values are always read."""
        if cls != "x":
            return True
        kinds = [k for k in self.graph.kinds for _ in range(k.count)]
        made, takes = kinds[n + self.unsaved], kinds[n + self.unsaved + 1]
        return self.backward_reads(takes, "x") or self.backward_reads(made, "y")

    def backward_reads(self, kind: UnitKind, name: str) -> bool:
        """Return whether a kind's backward reads its input 'x' or its output 'y'."""
        return any(
            name in ins
            for (k, body, _), (ins, _, _) in self.formals.items()
            if (k, body) == (kind.name, "bwd")
        )

    def value_grad(self, n: int, g: int) -> Ref:
        """Return the buffer of the gradient of value n. It takes the slot in which the previous
        micro-batch had the gradient of value n + 1, so one slot more than micro-batches is
        enough."""
        return Ref("dx", (n + g) % (self.together + 1))

    def offset(self, flat: str, u: Use) -> int:
        """Return the bytes from the start of a flat's instance to the unit's own parameters."""
        step = self.shards.step.get((u.kind.name, flat), 0)
        if not step:
            return 0
        each = Size.of(f"{flat}.{u.kind.name}", step, flat, each=True)
        return each.many(u.index).bytes(self.real)

    def operand_names(self, kind: UnitKind, body: str, part: BodyPart) -> Formals:
        """Return the names of the operands that a function reads and writes, and their flats."""
        args = [(k, str(a)) for c in part.calls for k, a in c.args]
        values = {a for k, a in args if k == "value"}
        fixed = {a for k, a in args if k == "fixed"} if self.together > 1 else set()
        saved = {v.name for v in kind.saved}
        reads, writes = self.reads(part), self.writes(part)
        flats = sorted(reads | writes, key=lambda f: (persists(f), f))
        formals = {formal(kind, f): f for f in flats}
        has = {
            **{w: f in reads for w, f in formals.items()},
            "x": "x" in values,
            "dy": "dy" in values,
            **dict.fromkeys(BETWEEN, False),
            "s": bool(values & saved) and body == "bwd",
            "y": "y" in values and body == "bwd",
            "tokens": "token" in fixed,
            "targets": "target" in fixed,
            "positions": "position" in fixed,
            "keys": "key" in fixed,
            "documents": "document" in fixed,
            "sample_keys": "sample_key" in fixed,
            "sample_targets": "sample_target" in fixed,
        }
        made = {
            "y": "y" in values and body == "fwd",
            **dict.fromkeys(BETWEEN, False),
            "s": bool(values & saved) and body == "fwd",
            "dx": "dx" in values,
            **{f"d{w}": f in writes for w, f in formals.items()},
            "acc": "acc" in fixed and bool(self.graph.tied),
        }
        if body in kind.between:
            bases = self.bases(kind, body)
            for side, names in zip((has, made), exchanges.used(part), strict=True):
                of = {bases[name] for name in names if name in bases}
                side |= {base: base in of for base in BETWEEN}
        return (
            tuple(n for n, yes in has.items() if yes),
            tuple(n for n, yes in made.items() if yes),
            tuple(sorted(formals.items())),
        )

    def bases(self, kind: UnitKind, body: str) -> dict[str, str]:
        """Map the values of a body that several of its functions use to their operands."""
        saved = {v.name for v in kind.saved}
        return {
            name: operand_of(heads=name in kind.heads, saved=name in saved)
            for name in saved | kind.between[body]
        }
