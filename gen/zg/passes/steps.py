"""steps.py -- builds the steps that the passes of the schedule share: copies, all-gathers in
pieces, norms."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..facts import ops
from ..facts.kernels import EXCHANGES
from ..graph.graph import Call
from ..plan.plan import ALL, Event, Int, Ref, Step
from ..plan.size import Size, plus
from . import exchanges, pieces, rings
from .flats import BLOCK, PAGE
from .grid import Level
from .hops import Hop, Ring, end, plain_hop
from .operands import Operands
from .pieces import Span, Transfer
from .rings import Gathered, Use
from .shard import Flat

# Names of the piece sizes of keys of `zero`.
PIECES = {
    "allgather_bucket_size": "gather",
    "reduce_bucket_size": "reduce",
    "sub_group_size": "tile",
}
SUMS = Size.of("sums", ops.SUMS)  # integers of the sums for norm and loss
CTL = Size.of("ctl", ops.CTL)  # bytes of a step's constants
REDUCES = {"exact": "alltoall", "fast": "reducescatter"}


Instance = tuple[Flat, int]


@dataclass
class Steps(Operands):
    """The steps of a section so far, and the turns of ring slots. ahead: prefetch distance; ring,
    staging: slots per ring."""

    ahead: int = 0
    ring: dict[str, int] = field(default_factory=dict)
    staging: dict[str, int] = field(default_factory=dict)
    # gathers from offloaded parameters so far, by ring
    staging_turn: dict[str, int] = field(default_factory=dict)
    fetch_started: bool = False  # a shard was read from the file already
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.W = self.spec.cluster.ranks
        self.offload = self.spec.zero.offload_optimizer.device != "none"
        slots = 2 if self.spec.zero.overlap_comm else 1
        self.inbox = Ring("inbox", slots)
        # One level reads sums of the level before while it writes its own.
        inner = max(len(self.sums.per_micro_batch), len(self.sums.per_step)) - 1
        self.intra = Ring("intra", max(slots, min(2, inner)))
        self.inter = Ring("inter", slots)
        # Uses so far of slots of intra, inter, inbox (in a section), and of those on the way down.
        self.intra_turn = self.inter_turn = 0
        self.inbox_turn = self.down_turn = 0
        self.cuts: dict[object, list[Span]] = {}
        # Ranks update more than their own shard, so they need more sums than the last level leaves.
        self.gathers_sums = self.shards.states < self.sums.result_depth and self.W > 1
        self.reduces = REDUCES[self.spec.train.reduction if self.W > 1 else "exact"]

    def instances(self) -> list[Instance]:
        """Return all instances of all flats."""
        return [(f, l) for f in self.shards.flats for l in range(f.count)]

    def trainable_instances(self) -> list[Instance]:
        """Return the instances of flats with trainable parameters."""
        return [(f, l) for f, l in self.instances() if f.trainable]

    def offloads_params(self, f: Flat) -> bool:
        """Return whether a flat's parameters are offloaded."""
        return f.name in self.shards.offloaded

    def arena(self, c: str, f: Flat) -> str:
        """Return the arena of a state of a flat: device, host or file."""
        return self.kept.of(c, f).arena

    def masters_off_device(self, yes: bool = True) -> list[Instance]:
        """Return the instances whose master weights are offloaded, or with `yes` False the
        others."""
        return [
            (f, l)
            for f, l in self.instances()
            if self.kept.masters_off_device(f) == yes
        ]

    def tiles(self, f: Flat) -> list[Span]:
        """Return (offset, elements) of the tiles of a shard that the host updates. With a file they
        are whole pages, even in a type of two bytes."""
        filed = "nvme" in (
            self.spec.zero.offload_optimizer.device,
            self.spec.zero.offload_param.device,
        )
        unit = PAGE // 2 if filed else BLOCK
        cut = self.cut(f.far, "sub_group_size", unit=unit)
        return [(plus(f.near, at), n) for at, n in cut]

    # ---- uses

    def uses(self, head: str) -> list[Use]:
        """Return the uses of a micro-batch in order: forward, the head (`train` or `eval`),
        backward. Unit n reads value n - 1 and writes value n. Slot 0 of class x holds the first
        value that backward needs."""
        units = [(kind, l) for kind in self.graph.kinds for l in range(kind.count)]
        out = []

        def add(n: int, body: str) -> None:
            kind, l = units[n]
            for part in kind.parts(body):
                for s in range(part.slices):
                    out.append(
                        Use(
                            kind=kind,
                            index=l,
                            body=body,
                            x=n - 1 - self.unsaved,
                            part=part,
                            slice=s,
                        )
                    )

        for n, (kind, _) in enumerate(units):
            add(n, "fwd" if "fwd" in kind.bodies else head)
        if head == "train":
            for n in reversed(range(self.graph.still, len(units) - 1)):
                add(n, "bwd")
        return out

    def bind(self, uses: list[Use]) -> list[Use]:
        """Return the uses with the flat instances that they need gathered and the gradients that
        they write."""
        # By flat: instances in order of their first gradient.
        order: dict[str, list[int]] = {}
        out = []
        for u in uses:
            gathered = [
                Gathered(f, self.instance(f, u), self.ring_of[f])
                for f in sorted(self.reads(u.part))
                if self.flats[f].gathered
            ]
            gradients = []
            for f in sorted(self.writes(u.part)):
                l, seen = self.instance(f, u), order.setdefault(f, [])
                seen += [l] * (l not in seen[-1:])
                gradients.append((f, l, len(seen) - 1))
            out.append(replace(u, gathered=tuple(gathered), gradients=tuple(gradients)))
        return rings.through(out)

    # ---- steps

    def add(self, queue: str, op: str, unit: str = "", **rest: Any) -> None:
        """Append a step."""
        self.steps.append(Step(queue, op, unit, **rest))

    def follow(self, queue: str, other: str) -> None:
        """Order all further work on a queue after all earlier work on another."""
        self.add(other, "mark", recs=(end(other),))
        self.add(queue, "mark", waits=(end(other),))

    def copy(
        self,
        hop: Hop,
        unit: str,
        size: int,
        from_rank: int = 0,
        to_rank: int = 0,
    ) -> None:
        """Add a copy of `size` bytes. from_rank, to_rank: bytes from one rank's part to the next,
        if that side holds the parts of all ranks."""
        ints = (
            Int("from_rank", from_rank),
            Int("to_rank", to_rank),
            Int("bytes", size),
        )
        self.add(
            hop.queue,
            "copy",
            unit,
            ins=(hop.src,),
            outs=(hop.dst,),
            ints=ints,
            waits=hop.waits,
            recs=hop.recs,
        )

    def norms(self, queue: str) -> None:
        """Add the gradient norm of every trainable instance."""
        for f, l in self.trainable_instances():
            self.add(
                queue,
                f"norm.{f.name}",
                f"{f.name}[{l}]",
                ins=(Ref(f"sum.{f.name}", l),),
                ints=(Int("l", l),),
            )

    def exchange(self, u: Use, micro_batches: int) -> None:
        """Exchange rows for heads, or heads for rows, after a use: of all blocks of a rank, between
        the ranks of a context group."""
        batch, ranks = self.spec.train.micro_batch, self.spec.cluster.context_parallel
        samples = range(micro_batches // self.spec.own_blocks)
        for call, sample in itertools.product(u.part.then, samples):
            for move in exchanges.moves(call, batch, ranks, self.real):
                self.move(u, call, sample, move)

    def move(self, u: Use, call: Call, sample: int, move: exchanges.Move) -> None:
        """Add one transfer of an exchange: a copy if a rank has whole samples."""
        g = sample * self.spec.own_blocks + move.slot
        rows, heads = self.sides(u, call, g, sample)
        rows = replace(rows, at=rows.at + move.rows)
        heads = replace(heads, at=heads.at + move.heads)
        sides = [(rows, move.rows_step), (heads, move.heads_step)]
        if not EXCHANGES[call.kernel]:
            sides.reverse()
        (source, from_step), (to, step) = sides
        if self.spec.cluster.context_parallel == 1:
            self.copy(plain_hop("main", source, to), u.unit, move.bytes)
            return
        self.add(
            "main",
            "exchange",
            u.unit,
            ins=(source,),
            outs=(to,),
            ints=(
                Int("from_step", from_step),
                Int("step", step),
                Int("bytes", move.bytes),
            ),
            group=self.shards.grid.samples,
        )

    def sides(self, u: Use, call: Call, g: int, sample: int) -> tuple[Ref, Ref]:
        """Return the buffers of an exchange: that of the rows of a block, and that of the heads of
        its sample."""
        bases, refs = self.bases(u.kind, u.body), []
        places = self.places.operands(u.kind.name, u.body)
        named = {**self.between(u, g, sample), "tmp": Ref("tmp", 0)}
        for name in exchanges.values(call):
            base = bases.get(name, "tmp")
            refs.append(replace(named[base], at=places[base].at[name]))
        to, source = refs
        return (source, to) if EXCHANGES[call.kernel] else (to, source)

    # ---- collectives, in pieces of at most a bucket

    def cut(
        self,
        share: Size,
        key: str,
        level: Level | None = None,
        unit: int = BLOCK,
        name: str = "",
    ) -> list[Span]:
        """Return (offset, elements) of the pieces of a rank's share, limited by a key of `zero`.

        level: where ranks meet, None for a transfer of one rank; name: of the piece's size in C, if
        it is not the key's. Raises SpecError if there are too many pieces.
        """
        of = self.transfer(level) if level else Transfer()
        word = name or PIECES[key]
        if level and self.shards.grid.axes:
            word += f".{level.group}"
        asked = share, share.flat, key, of, unit, word
        if asked not in self.cuts:
            others = self.transfers.get(key, ())
            self.cuts[asked] = pieces.cut(
                self.spec,
                self.shards.flats,
                share,
                key,
                of,
                unit,
                word,
                others,
            )
        return self.cuts[asked]

    @cached_property
    def transfers(self) -> dict[str, set[Transfer]]:
        """All transfers that each bucket size limits."""
        s, grid = self.shards, self.shards.grid
        depths = {(self.sums.depth, self.sums.result_depth)}
        for f in s.flats:
            depths |= {(0, f.depth), (f.depth, s.states)}
        levels = [x for d in depths if d[0] < d[1] for x in grid.gathers(*d)]
        summed = [x.level for x in self.sums.phases if x.level]
        return {
            "allgather_bucket_size": {self.transfer(x) for x in levels},
            "reduce_bucket_size": {self.transfer(x) for x in summed},
        }

    def transfer(self, level: Level) -> Transfer:
        """Return the transfer at a level. Its shards are those of the level's outer depth."""
        return Transfer(level.ranks, self.shards.grid.parts(level.hi))

    def gather(
        self,
        hop: Hop,
        unit: str,
        level: Level,
        share: Size,
        width: int,
        from_step: int = 0,
    ) -> None:
        """Add an all-gather over one level, a step per piece. Each rank contributes `share`
        elements: its part of the target if `hop` is in place, its part of the source at a stride of
        `from_step` bytes, or with from_step 0 all of the source."""
        cut = self.cut(share, "allgather_bucket_size", level)
        step = share.bytes(width)
        if hop.src == hop.dst:
            from_step = step
        for n, (o, size) in enumerate(cut):
            ints = (
                Int("from_step", from_step),
                Int("step", step),
                Int("bytes", size.bytes(width)),
            )
            at = o.bytes(width)
            self.add(
                hop.queue,
                "gather",
                unit,
                ins=(replace(hop.src, at=at),),
                outs=(replace(hop.dst, at=at),),
                ints=ints,
                group=level.group,
                waits=hop.waits if n == 0 else (),
                recs=hop.recs if n == len(cut) - 1 else (),
            )

    def all_gather(
        self, hop: Hop, unit: str, f: Flat, width: int, high: int, low: int
    ) -> None:
        """Add an all-gather from depth `high` to depth `low`: between hosts into slots of class
        `inter`, then inside each host. In place, the source has room for all of depth `low`."""
        *outer, inner = self.shards.grid.gathers(low, high)
        for x in outer:
            there = self.inter.slot(self.inter_turn)
            self.inter_turn += 1
            share, src = self.shards.share(f, x.hi), hop.src
            from_step = 0
            if src == hop.dst:
                from_step = share.bytes(width)
                over = self.shards.grid.group(low, x.lo)
                lower = self.shards.share(f, x.lo).bytes(width)
                by_rank = lower if over else 0
                src = replace(src, by_rank=by_rank, group=over)
            now = replace(hop, src=src, dst=there, fills=True, then=())
            self.gather(now, unit, x, share, width, from_step)
            hop = replace(hop, src=there, takes=True, after=())
        self.gather(hop, unit, inner, self.shards.share(f, inner.hi), width)

    def gathers_updates(self, f: Flat) -> bool:
        """Return whether each rank updates only a part of the parameters that it keeps."""
        return f.depth < self.shards.states

    def gather_updated(self, f: Flat, l: int, *after: Event) -> None:
        """All-gather an instance's updated parts to all ranks that keep it, after the given
        events."""
        if self.gathers_updates(f):
            ref = Ref(f"param.{f.name}", l)
            hop = Hop("gather", ref, ref, takes=False, after=after)
            states = self.shards.states
            self.all_gather(hop, f"{f.name}[{l}]", f, self.real, states, f.depth)

    def own_shard(self, f: Flat, ref: Ref, depth: int, width: int) -> tuple[Ref, int]:
        """Return the buffer of a rank's own shard at a depth, and the bytes from one rank's shard
        to the next if shards are in order of rank."""
        grid = self.shards.grid
        group = grid.group(depth, grid.depth)
        step = f.shard.bytes(width)
        if group in ("", ALL):
            return ref, step if group else 0
        return replace(ref, by_rank=step, group=group), 0
