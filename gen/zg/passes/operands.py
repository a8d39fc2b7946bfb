"""operands.py -- what functions read and write: which flats, and the slots of a use's operands.

Of a class with a slot for each micro-batch of a unit (x, save), micro-batch g of slot n has n *
together + g.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..facts import ops
from ..graph.graph import Graph, Kind, Part
from ..plan.operand import Names
from ..plan.plan import Ref, Refs
from ..plan.size import Size
from ..read.spec import Spec
from .flats import PAGE, persists, stem
from .rings import Leaf, Use
from .shard import Shards
from .stores import Kept

# A function's inputs and outputs, and the flats of those that are parameters.
Formals = tuple[Names, Names, tuple[tuple[str, str], ...]]


def formal(kind: Kind, flat: str) -> str:
    """What a function calls the parameters of a flat: p is `persistent`, w1 the first of a unit
    that is cut, w.frozen what of its flat does not train."""
    name, dot, part = flat.partition(".")
    number = name.rpartition("_")[2] if kind.flats else ""
    return ("p" if persists(flat) else f"w{number}") + dot + part


def near_slots(spec: Spec, cls: str, count: int) -> int:
    """Of a class with so many values, on the device."""
    return (
        min(count, 3 if cls == "x" else 2)
        if spec.train.offload_activations
        else count
    )


@dataclass
class Operands:
    spec: Spec
    graph: Graph
    shards: Shards
    kept: Kept
    real: int  # bytes of a real
    saves: Mapping[str, int] = field(
        default_factory=dict
    )  # bytes that a kind saves
    # slots of each flat's gradients
    grad: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.flats = {f.name: f for f in self.shards.flats}
        self.sums = self.shards.sums
        # leaves that more than one unit writes
        long = ("persistent", "embed") if self.graph.tied else ("persistent",)
        once = [
            f.name
            for f in self.shards.flats
            if f.count == 1 and f.moves and f.name not in long
        ]
        self.ring_of = self.rings(
            [f.name for f in self.shards.flats if f.gathered]
        )
        self.leaves = {**{f: f for f in self.flats}, **self.alike(once)}
        self.together = self.spec.together
        self.passing = max(
            0, self.graph.still - 1
        )  # values that backward does not need
        self.near = self.moving()
        self.formals = {
            (k.name, body, part.number): self.names(k, body, part)
            for k in self.graph.kinds
            for body in k.bodies
            for part in k.parts(body)
        }
        self.far = {c: self.going(c) for c in self.near}

    def alike(self, names: list[str]) -> dict[str, str]:
        """Flats whose units have one size share a class, named after the first of them."""
        first: dict[int, str] = {}
        return {n: first.setdefault(self.flats[n].shard, n) for n in names}

    def rings(self, names: list[str]) -> dict[str, str]:
        """The class of each flat's slots. Parts of a unit that is cut share that of the largest: at
        the bound one is gathered at a time, and slots of each size would hold the whole unit. So
        do those of them that are frozen."""
        cut = {
            f: kind.name
            for kind in self.graph.kinds
            for f, _ in kind.flats.values()
        }
        like = self.alike(names)
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

    def reads(self, part: Part) -> set[str]:
        """The flats whose parameters a function reads."""
        names = {str(a) for c in part.calls for k, a in c.args if k == "param"}
        return {self.shards.place[n][0] for n in names}

    def writes(self, part: Part) -> set[str]:
        names = {str(a) for c in part.calls for k, a in c.args if k == "grad"}
        return {self.shards.place[n][0] for n in names}

    def instance(self, flat: str, u: Use) -> int:
        return (
            u.index * u.kind.slices(flat) + u.slice
            if self.flats[flat].count > 1
            else 0
        )

    def slot(self, f: str, n: int, g: int) -> int:
        """Of a flat's leaf: they take turns."""
        return (n * self.together + g) % self.grad[self.leaves[f]]

    def grad_slot(self, x: Leaf, g: int) -> Ref:
        f, l, n = x
        if not self.sums.phases:
            return Ref(f"sum.{f}", l)
        leaf = self.leaves[f]
        at = self.slot(f, n, g)
        return Ref(f"grad.{leaf}", at)

    def operands(self, u: Use, g: int) -> tuple[Refs, Refs]:
        """ins and outs of a function on micro-batch g of those together, in the order of
        `formals`."""
        kind = u.kind
        named = {
            "x": self.value(u.x, g),
            "y": self.value(u.y, g),
            "s": self.saved(u, g),
            "dy": self.change(u.y, g),
            "dx": self.change(u.x, g),
            "tokens": Ref("tokens", g),
            "targets": Ref("targets", g),
            "positions": Ref("positions", g),
            "keys": Ref("keys", g),
            "acc": Ref("acc", g),
        }
        for f in self.reads(u.part):
            at = self.instance(f, u)
            param = Ref(f"param.{f}", at, self.begin(f, u))
            named[formal(kind, f)] = param
        for x in u.gathered:
            named[formal(kind, x.flat)] = x.ref
        for leaf in u.leaves:
            f = leaf[0]
            grad = replace(self.grad_slot(leaf, g), at=self.begin(f, u))
            named[f"d{formal(kind, f)}"] = grad
        ins, outs, _ = self.formals[kind.name, u.body, u.part.number]
        return tuple(named[n] for n in ins), tuple(named[n] for n in outs)

    def value(self, n: int, g: int) -> Ref:
        """Below those that backward needs, values take turns in the slots of gradients."""
        return (
            self.placed("x", n, g)
            if n >= 0
            else Ref("dx", (g - n) % (self.together + 1))
        )

    def saved(self, u: Use, g: int) -> Ref:
        return self.placed(f"save.{u.kind.name}", u.index, g)

    def placed(self, cls: str, n: int, g: int) -> Ref:
        """Value n of a class that backward reads, in its own slot or one that several take in
        turn."""
        if cls in self.near:
            return Ref(f"near.{cls}", n % self.near[cls][0])
        return Ref(cls, n * self.together + g)

    def moving(self) -> dict[str, tuple[int, int, Size]]:
        """Of each class with fewer slots than values: slots, values, bytes."""
        dims = self.graph.dims
        units = sum(k.count for k in self.graph.kinds) - 1 - self.passing
        all_ = {"x": (units, dims["M"] * dims["C"] * self.real)}
        all_ |= {
            f"save.{k.name}": (k.count, self.saves[k.name])
            for k in self.graph.kinds
            if self.saves.get(k.name)
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

    def going(self, cls: str) -> dict[int, int]:
        """Places in the host arena of the values of a class that backward reads, but for the last,
        which stay on the device."""
        near, count, _ = self.near[cls]
        read = [n for n in range(count - near) if self.needed(cls, n)]
        return {n: place for place, n in enumerate(read)}

    def needed(self, cls: str, n: int) -> bool:
        """A backward reads value n: of x, that of the unit that takes it or of the one that made
        it. What is saved is read."""
        if cls != "x":
            return True
        kinds = [k for k in self.graph.kinds for _ in range(k.count)]
        made, takes = kinds[n + self.passing], kinds[n + self.passing + 1]
        return self.read_back(takes, "x") or self.read_back(made, "y")

    def read_back(self, kind: Kind, name: str) -> bool:
        """A unit's backward reads its input x, or its output y."""
        return any(
            name in ins
            for (k, body, _), (ins, _, _) in self.formals.items()
            if (k, body) == (kind.name, "bwd")
        )

    def change(self, n: int, g: int) -> Ref:
        """The gradient of value n: it takes the slot that the micro-batch before left with value n
        + 1's, so one slot more than micro-batches will do."""
        return Ref("dx", (n + g) % (self.together + 1))

    def begin(self, flat: str, u: Use) -> int:
        """Bytes of an instance of a flat before a unit's own."""
        step = self.shards.step.get((u.kind.name, flat), 0)
        if not step:
            return 0
        each = Size.of(f"{flat}.{u.kind.name}", step, flat, each=True)
        return (each * u.index).bytes(self.real)

    def names(self, kind: Kind, body: str, part: Part) -> Formals:
        """Of the operands a function really has."""
        args = [(k, str(a)) for c in part.calls for k, a in c.args]
        values = {a for k, a in args if k == "value"}
        fixed = (
            {a for k, a in args if k == "fixed"}
            if self.together > 1
            else set()
        )
        saved = {v.name for v in kind.saved}
        reads, writes = self.reads(part), self.writes(part)
        flats = sorted(reads | writes, key=lambda f: (persists(f), f))
        formals = {formal(kind, f): f for f in flats}
        has = {
            **{w: f in reads for w, f in formals.items()},
            "x": "x" in values,
            "dy": "dy" in values,
            "s": bool(values & saved) and body == "bwd",
            "y": "y" in values and body == "bwd",
            "tokens": "token" in fixed,
            "targets": "target" in fixed,
            "positions": "position" in fixed,
            "keys": "key" in fixed,
        }
        made = {
            "y": "y" in values and body == "fwd",
            "s": bool(values & saved) and body == "fwd",
            "dx": "dx" in values,
            **{f"d{w}": f in writes for w, f in formals.items()},
            "acc": "acc" in fixed and bool(self.graph.tied),
        }
        return (
            tuple(n for n, yes in has.items() if yes),
            tuple(n for n, yes in made.items() if yes),
            tuple(sorted(formals.items())),
        )
