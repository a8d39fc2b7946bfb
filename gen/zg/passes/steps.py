"""steps.py -- what the passes of the schedule write steps with: copies, gathers, reductions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..facts import ops
from ..plan.plan import ALL, Event, Int, Ref, Step
from ..plan.size import Size
from . import pieces
from .flats import BLOCK, PAGE
from .grid import Level
from .hops import Hop, Ring, end
from .operands import Operands
from .pieces import Moved, Span
from .rings import Gathered, Use
from .shard import Flat

# Of keys of `zero`: the names of their pieces.
PIECES = {
    "allgather_bucket_size": "gather",
    "reduce_bucket_size": "reduce",
    "sub_group_size": "tile",
}
SUMS = Size.of("sums", ops.SUMS)  # integers of a step's exact sums
CTL = Size.of("ctl", ops.CTL)  # bytes of a step's constants
REDUCES = {"exact": "alltoall", "fast": "reducescatter"}


Instance = tuple[Flat, int]


@dataclass
class Steps(Operands):
    """The steps so far of a section, and the turns that slots take."""

    ahead: int = 0
    ring: dict[str, int] = field(default_factory=dict)
    staging: dict[str, int] = field(default_factory=dict)
    # so far, to each ring's staging buffers
    fetched: dict[str, int] = field(default_factory=dict)
    loaded: bool = False  # anything by queue fetch so far
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.W = self.spec.cluster.ranks
        self.offload = self.spec.zero.offload_optimizer.device != "none"
        slots = 2 if self.spec.zero.overlap_comm else 1
        self.inbox = Ring("inbox", slots)
        self.intra = Ring("intra", slots)
        self.inter = Ring("inter", slots)
        self.level = self.brought = 0  # so far, to slots of intra, and inter
        self.cuts: dict[object, list[Span]] = {}
        # An update needs more of the sums than the last level leaves a rank.
        self.sums_spread = self.shards.states < self.sums.ends and self.W > 1
        self.reduces = REDUCES[
            self.spec.train.reduction if self.W > 1 else "exact"
        ]
        self.turn = self.came = (
            0  # leaves that went down so far; pieces, in a section
        )

    def each(self) -> list[Instance]:
        return [(f, l) for f in self.shards.flats for l in range(f.count)]

    def moved(self) -> list[Instance]:
        return [(f, l) for f, l in self.each() if f.moves]

    def away(self, f: Flat) -> bool:
        """Its parameters do not lie on the device."""
        return f.name in self.shards.away

    def arena(self, c: str, f: Flat) -> str:
        return self.kept.of(c, f).arena

    def low(self, yes: bool = True) -> list[Instance]:
        """The shards of which masters are off the device; or those of which they are on it."""
        return [(f, l) for f, l in self.each() if self.kept.low(f) == yes]

    def tiles(self, f: Flat) -> list[Span]:
        """(offset, elements) of what an update on the host takes at a time; in the file its bytes
        are whole pages, of two bytes each, too."""
        filed = "nvme" in (
            self.spec.zero.offload_optimizer.device,
            self.spec.zero.offload_param.device,
        )
        unit = PAGE // 2 if filed else BLOCK
        cut = self.cut(f.far, "sub_group_size", unit=unit)
        return [(f.near + at, n) for at, n in cut]

    # ---- uses

    def chain(self, head: str) -> list[Use]:
        """The uses of a micro-batch in order: forward to the head (`train` or `eval`), then
        backward. Unit n reads value n-1 and writes value n; of class x the first slot is for the
        first value that backward needs."""
        units = [
            (kind, l) for kind in self.graph.kinds for l in range(kind.count)
        ]
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
                            x=n - 1 - self.passing,
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
        """What is gathered for each use; what it writes of leaves."""
        leaves: dict[
            str, list[int]
        ] = {}  # instances in order of their first use
        out = []
        for u in uses:
            gathered = [
                Gathered(f, self.instance(f, u), self.ring_of[f])
                for f in sorted(self.reads(u.part))
                if self.flats[f].gathered
            ]
            made = []
            for f in sorted(self.writes(u.part)):
                l, seen = self.instance(f, u), leaves.setdefault(f, [])
                seen += [l] * (l not in seen[-1:])
                made.append((f, l, len(seen) - 1))
            out.append(
                replace(u, gathered=tuple(gathered), leaves=tuple(made))
            )
        return out

    # ---- steps

    def add(self, queue: str, op: str, unit: str = "", **rest: Any) -> None:
        self.steps.append(Step(queue, op, unit, **rest))

    def follow(self, queue: str, other: str) -> None:
        """All on a queue from here on comes after all on another until here."""
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
        """Bytes from one arena to another. from_rank, to_rank: from one rank's part to the next
        where one side is whole."""
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
        for f, l in self.moved():
            self.add(
                queue,
                f"norm.{f.name}",
                f"{f.name}[{l}]",
                ins=(Ref(f"sum.{f.name}", l),),
                ints=(Int("l", l),),
            )

    # ---- collectives, in pieces of at most a bucket

    def cut(
        self,
        share: Size,
        key: str,
        level: Level | None = None,
        unit: int = BLOCK,
        name: str = "",
    ) -> list[Span]:
        """(offset, elements) of each piece of a share, by a key of `zero`: at a level, or on one
        rank. name: the piece's, where it is not the key's."""
        of = self.across(level) if level else Moved()
        word = name or PIECES[key]
        if level and self.shards.grid.axes:
            word += f".{level.group}"
        asked = share, share.flat, key, of, unit, word
        if asked not in self.cuts:
            others = self.traffic.get(key, ())
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
    def traffic(self) -> dict[str, set[Moved]]:
        """All that moves in pieces of a key of `zero`."""
        s, grid = self.shards, self.shards.grid
        depths = {(self.sums.depth, self.sums.ends)}
        for f in s.flats:
            depths |= {(0, f.depth), (f.depth, s.states)}
        levels = [x for d in depths if d[0] < d[1] for x in grid.gathers(*d)]
        summed = [x.level for x in self.sums.phases if x.level]
        return {
            "allgather_bucket_size": {self.across(x) for x in levels},
            "reduce_bucket_size": {self.across(x) for x in summed},
        }

    def across(self, level: Level) -> Moved:
        """Of what comes from, or goes to, the depth at which a level ends."""
        return Moved(level.ranks, self.shards.grid.parts(level.hi))

    def gather(
        self,
        hop: Hop,
        unit: str,
        level: Level,
        share: Size,
        width: int,
        from_step: int = 0,
    ) -> None:
        """Shares of so many elements from all ranks of a level; in place (src is dst), or from the
        part of src that is this rank's (from_step), or from all of src."""
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

    def descend(
        self, hop: Hop, unit: str, f: Flat, width: int, high: int, low: int
    ) -> None:
        """A gather from depth `high` to `low`: first between hosts, into a slot of class `inter`;
        then inside them. In place, src has room for all of depth `low`."""
        *outer, inner = self.shards.grid.gathers(low, high)
        for x in outer:
            there = self.inter.slot(self.brought)
            self.brought += 1
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

    def spreads(self, f: Flat) -> bool:
        """Each rank updates a part of what it keeps."""
        return f.depth < self.shards.states

    def spread(self, f: Flat, l: int, *after: Event) -> None:
        """Owners' new parts to all ranks that keep them."""
        if self.spreads(f):
            ref = Ref(f"param.{f.name}", l)
            hop = Hop("gather", ref, ref, takes=False, after=after)
            states = self.shards.states
            self.descend(hop, f"{f.name}[{l}]", f, self.real, states, f.depth)

    def own_part(
        self, f: Flat, ref: Ref, depth: int, width: int
    ) -> tuple[Ref, int]:
        """A rank's own shard within what is shared at a depth: its place, and the bytes from one
        rank's to the next where ranks own shards in order of rank."""
        grid = self.shards.grid
        group = grid.group(depth, grid.depth)
        step = f.shard.bytes(width)
        if group in ("", ALL):
            return ref, step if group else 0
        return replace(ref, by_rank=step, group=group), 0
