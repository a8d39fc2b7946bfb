"""formulas.py -- bounds of a candidate that are known before it is planned: bytes of device memory
and seconds of a step that it needs at least."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..facts import ops, reserve
from ..facts.kernels import total
from ..graph.graph import Graph, UnitKind
from ..passes import operands, place, shard, slices
from ..passes.launch import FIXED
from ..plan import plan
from ..plan.operand import Layers, Operand
from ..predict import cost
from ..predict.device import Device
from ..predict.seconds import Clock
from ..read.schema import Spec


@dataclass(frozen=True)
class Saved:
    """Consequences of a set of ops to recompute. tmp: bytes of temporary space; saved: for each
    kind of unit, the number of units and the bytes that each saves; params, trained: the model's
    parameters, and those that are trained; forward, backward: seconds of a micro-batch's functions;
    again: FLOPs that they compute twice; cut: a unit has several functions in place of one."""

    tmp: int
    saved: tuple[tuple[int, int], ...]
    params: int
    trained: int
    forward: float
    backward: float
    again: int
    cut: bool


@dataclass
class Formulas:
    """Bounds of the candidates of a search. p: the plan of one of them, which gives types and the
    model's FLOPs."""

    p: plan.Plan
    device: Device
    _known: dict[object, Saved] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._flops = cost.flops(self.p)

    def saved(self, spec: Spec) -> Saved:
        """Return the numbers of the spec's ops to recompute."""
        t, z = spec.train, spec.zero
        apart = z.stage == 3 and z.stage3_param_persistence_threshold
        shares = spec.cluster.context_parallel
        key = t.micro_batch, t.accumulate, t.recompute, shares, z.stage == 3, apart
        if key not in self._known:
            graph = slices.graph(spec)
            bodies = place.bodies(graph, ops.BYTES[t.precision])
            every = [(t, k.count) for k in graph.kinds for t in k.tensors]
            self._known[key] = Saved(
                ops.up(max(x.size for x in bodies.tmp.values()), place.PAGE),
                tuple((k.count, bodies.size("s", k.name)) for k in graph.kinds),
                sum(n * min(t.params, t.elems) for t, n in every),
                sum(n * t.params for t, n in every if not t.group[2]),
                *self._functions(graph),
                any(kind.cuts for kind in graph.kinds),
            )
        return self._known[key]

    def activations(self, spec: Spec) -> int:
        """Return the bytes of the device arena that recomputation changes."""
        s = self.saved(spec)
        return s.tmp + spec.together * sum(
            operands.near_slots(spec, "save", count) * ops.up(size, place.PAGE)
            for count, size in s.saved
        )

    def least(self, spec: Spec) -> int:
        """Return bytes of device memory that a plan needs at least."""
        return self.states(spec) + self.activations(spec)

    def states(self, spec: Spec) -> int:
        """Return bytes of device memory that a plan needs at least besides its activations: for
        parameters, optimizer states and the libraries of a GPU."""
        z, W, model = spec.zero, spec.cluster.ranks, self.saved(spec)
        part = (
            1 - z.offload_optimizer.ratio
            if z.offload_optimizer.device != "none"
            else 1.0
        )
        states = shard.update_states(spec, False, False)
        width = sum(
            4 if s == "master" else ops.BYTES[spec.train.optimizer.moments]
            for s in states
        )
        owners = min(W, z.shared if z.replicates else W) if z.stage else 1
        sharers = min(W, z.shared or W) if z.stage == 3 else 1
        here = z.offload_param.device == "none"
        return (
            here * model.params * ops.BYTES[spec.train.precision] // sharers
            + int(part * width * model.trained) // owners
            + reserve.LIBRARIES * (self.p.head.targets != ("cpu",))
        )

    def far(self, spec: Spec, page: int = 1) -> int:
        """Return the bytes of saved values on the host, each rounded up to whole pages."""
        return sum(
            (count - operands.near_slots(spec, "save", count)) * ops.up(size, page)
            for count, size in self.saved(spec).saved
        )

    def work(self, spec: Spec) -> float:
        """Return the seconds of a step's functions of units. Forward and backward take as long as
        their copies of saved values and inputs over the host's link, if these take longer."""
        s, t = self.saved(spec), spec.train
        x = ops.BYTES[t.precision] * spec.rows * spec.model.width
        inputs = sum(n - operands.near_slots(spec, "x", n) for n, _ in s.saved)
        copies = (self.far(spec) + x * inputs) / self.device.host.bandwidth
        return spec.micro_batches * (max(s.forward, copies) + max(s.backward, copies))

    def soonest(self, spec: Spec) -> float:
        """Return seconds that a step takes at least, 0 if they depend on the whole plan: which
        bytes come from a cache, and how units are cut."""
        apart = self.device.cache or self.saved(spec).cut
        return 0.0 if apart else self.work(spec)

    def again(self, spec: Spec) -> float:
        """Return the FLOPs that are computed twice, as a share of the model's."""
        more = self.saved(spec).again * spec.micro_batches * spec.cluster.ranks
        return more / self._flops

    def _functions(self, graph: Graph) -> tuple[float, float, int]:
        """Return the seconds of a micro-batch's forward and backward, and the FLOPs that are
        computed twice."""
        made = [
            (kind, _function(kind, name))
            for kind in graph.kinds
            for name in kind.bodies
            if name != "eval"
        ]
        clock = Clock(replace(self.p, fns=tuple(fn for _, fn in made)), self.device)
        seconds, again = {True: 0.0, False: 0.0}, 0
        for kind, fn in made:
            each = range(kind.count if isinstance(fn.flops, Layers) else 1)
            for l in each:
                step = plan.Step("main", fn.name, "", ints=(plan.Int("l", l),))
                took = clock.seconds(step) * (kind.count // len(each))
                seconds[fn.body == "fwd"] += took
                if fn.body == "bwd":
                    again += sum(cost.forward(fn, l)) * (kind.count // len(each))
        return seconds[True], seconds[False], again


def _function(kind: UnitKind, name: str) -> plan.Fn:
    """Return a function of a unit whose operands have no places yet."""
    calls = tuple(
        plan.Call(
            c.kernel,
            "",
            tuple(
                value
                if what in ("number", "round", "int")
                else FIXED.get(str(value), Operand(str(value)))
                for what, value in c.args
            ),
            c.rounds,
        )
        for c in kind.bodies[name].calls
    )
    flops = total([c.flops for c in kind.bodies[name].calls])
    return plan.Fn(f"{name}.{kind.name}", (), (), (), flops=flops, calls=calls)
