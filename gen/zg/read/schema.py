"""schema.py -- what a spec may hold: the records that the passes read, each key's type and range.

Invariants
 1. A record that exists is in range: nothing after the reader checks a number's sign or size again.
 2. A key's type says what is allowed in words that stand in the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
)

from ..facts import kinds, ops
from ..facts.families import FAMILIES
from .keytypes import (
    DIM,
    ELEMS,
    LAYERS,
    RANKS,
    TARGETS,
    Auto,
    Bytes,
    Choice,
    Count,
    Elems,
    ElemsOrNone,
    Flag,
    Folder,
    Integer,
    Layered,
    Name,
    Pattern,
    Real,
    Tiny,
    Title,
    Unsaid,
    Windows,
    again,
    as_list,
    margin,
    normed,
    pages,
    rule,
    some,
    target,
    two,
    unique,
    windows,
)
from .node import Ints, Names, SpecError

# ---- what the passes read


@dataclass(frozen=True)
class Weight:
    """A tensor of an op; parts: the (name, rows) that it has in the weights' file, more than one
    where several lie side by side. Names are without the unit's. Rows of `shape` beyond the parts'
    are zeros: the vocabulary's last."""

    name: str
    parts: tuple[tuple[str, int], ...]
    shape: Ints


@dataclass(frozen=True)
class Row:
    """A row of the op table (facts/ops.py) in a model: its dims, and its tensors by the table's
    words. tied: the embedding's tensor that is its w. adapters: of a linear, each as two rows: from
    its input to a few columns, and from these to what is added to its output. logits: it makes
    these, in chunks of rows."""

    name: str
    dims: Mapping[str, Any]
    weights: Mapping[str, Weight] = field(default_factory=dict)
    tied: str = ""
    adapters: tuple[tuple[Row, Row], ...] = ()
    logits: bool = False

    @property
    def order(self) -> tuple[Row, ...]:
        """It and its adapters' rows as they run: before chunks what has few columns."""
        if not self.logits:
            return (self, *(row for pair in self.adapters for row in pair))
        downs, ups = (
            zip(*self.adapters, strict=True) if self.adapters else ((), ())
        )
        return (*downs, self, *ups)


@dataclass(frozen=True)
class Op:
    """kind and args as in the spec, defaults filled in; ops: of a residual, and rows what follows
    its last; rows: what any other op is made of, in order."""

    kind: str
    args: Mapping[str, Any]
    ops: tuple[Op, ...] = ()
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Unit:
    """kind: embedding, blocks or head; name holds {l} in blocks, else it is ''."""

    kind: str
    repeat: int
    name: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Model:
    """vocab V, width C; names: a family (facts/families.py)."""

    vocab: int
    width: int
    names: str
    units: tuple[Unit, ...]


# The default of a key that the reader fills in, from the row of the section's type (kinds.py): in a
# Spec it is None only where the type does not take the key, or its row says so.
UNSAID: Any = None

_Steps = Annotated[int, Integer(0, 2**53)]
_Rate = Annotated[float, Real(0.0, 1e3)]
_Share = Annotated[float, Real(0.0, 0.999999999)]
_Stairs = Annotated[int, Integer(0, 2**20)]
_Ratio = Annotated[float, Real(0.0, 1.0)]
_Size = Annotated[int, Integer(0, DIM)]
_Factor = Annotated[float, Real(1e-9, 1e9)]
_Device = Annotated[str, Choice("none", "cpu", "nvme")]

_KEYS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@dataclass(frozen=True)
class OffloadOptimizer:
    """Where the optimizer's states lie: its step runs on the host; buffer_count: tiles on their
    way. ratio: the share of each shard that this is so for, the rest stays on the device.
    nvme_path: the directory of a rank's file."""

    __pydantic_config__ = _KEYS
    device: _Device = "none"
    buffer_count: Annotated[int, Integer(1, 64)] = 4
    ratio: _Ratio = 1.0
    nvme_path: Folder | None = None


@dataclass(frozen=True)
class OffloadParam:
    """Where parameters lie that no rank keeps whole; max_in_cpu: of a rank's, so many elements stay
    on the host though the device is nvme, whole flats in the plan's order."""

    __pydantic_config__ = _KEYS
    device: _Device = "none"
    nvme_path: Folder | None = None
    max_in_cpu: ElemsOrNone = 0


@dataclass(frozen=True)
class Aio:
    """How the file is read and written: in blocks of bytes, so many at once."""

    __pydantic_config__ = _KEYS
    block_size: Annotated[int, PlainValidator(pages)] = 1_048_576
    queue_depth: Annotated[int, Integer(1, 4096)] = 8


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's names, defaults and meaning; sizes in elements. replicate: tensors' patterns.
    shard_size: ranks that share parameters at stage 3, 0: all; states: whether all ranks share
    masters, moments and sums, or those of a shard."""

    __pydantic_config__ = _KEYS
    stage: Annotated[int, Integer(0, 3)] = 0
    reduce_bucket_size: Elems = 500_000_000
    allgather_bucket_size: Elems = 500_000_000
    overlap_comm: Flag = True
    stage3_prefetch_bucket_size: Annotated[int | None, Auto(0, ELEMS)] = (
        None  # auto: one unit ahead
    )
    stage3_param_persistence_threshold: ElemsOrNone = 100_000
    stage3_max_live_parameters: ElemsOrNone = 1_000_000_000
    stage3_max_reuse_distance: ElemsOrNone = (
        0  # 0: every unit is gathered for each use
    )
    replicate: tuple[Pattern, ...] = ()
    sub_group_size: ElemsOrNone = (
        4_194_304  # of a shard, updated at a time; 0: that default
    )
    shard_size: Annotated[int, Integer(0, RANKS)] = 0
    states: Annotated[str, Choice("all", "shard")] = "all"
    mics_shard_size: Annotated[int, Integer(-1, RANKS)] = 0
    hpz_partition_size: Annotated[int, Integer(0, RANKS)] = 0
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()
    aio: Aio = Aio()

    @property
    def shared(self) -> int:
        """Ranks that share parameters at stage 3; 0: all. A secondary copy (hpZ) is the parameters
        themselves."""
        copy = self.hpz_partition_size * (self.hpz_partition_size > 1)
        return self.shard_size or max(0, self.mics_shard_size) or copy

    @property
    def replicates(self) -> bool:
        """Each set of ranks that shares parameters has all states, too."""
        return self.states == "shard" or self.mics_shard_size > 0


@dataclass(frozen=True)
class Group:
    """Tensors by patterns of their names: a factor of lr, a weight decay of their own (None: the
    optimizer's), or frozen."""

    __pydantic_config__ = _KEYS
    match: Annotated[tuple[Pattern, ...], AfterValidator(some)]
    lr_factor: _Rate = 1.0
    weight_decay: Unsaid[_Rate] = None
    frozen: Flag = False


@dataclass(frozen=True)
class Optimizer:
    """clip 0: none. decay: which tensors weight_decay applies to. moments: how they are stored;
    bf16 is rounded stochastically, so that small steps add up. masters: f32 copies of what is
    stored in less; without them parameters are rounded so, too. groups: the first that matches a
    tensor has it. None: a key that the type does not take."""

    __pydantic_config__ = _KEYS
    lr: _Rate
    type: Annotated[str, Choice(*kinds.OPTIMIZERS)] = "AdamW"
    betas: Annotated[
        tuple[_Share, ...],
        AfterValidator(two),
    ] = UNSAID
    eps: Tiny = UNSAID
    momentum: _Share = UNSAID
    nesterov: Flag = UNSAID
    weight_decay: _Rate = 0.0
    decay: Annotated[str, Choice("matrices", "all")] = "matrices"
    clip: Annotated[float, Real(0.0, 1e30)] = 1.0
    moments: Annotated[str, Choice("f32", "bf16")] = "f32"
    masters: Flag = True
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """All steps are training steps that were applied. warmup: from 0 to lr; steps: where a decay
    meets min_lr; decay: how many steps wsd's takes. The others are DeepSpeed's, as it means them.
    None: the type does not take it, or warmup_max_lr is lr, and a cycle's second half its first."""

    __pydantic_config__ = _KEYS
    type: Annotated[str, Choice(*kinds.SCHEDULES)] = "constant"
    warmup: _Steps = UNSAID
    steps: _Steps = UNSAID
    min_lr: _Rate = UNSAID
    decay: Annotated[int, Integer(1, 2**53)] = UNSAID
    warmup_min_lr: _Rate = UNSAID
    warmup_max_lr: _Rate = UNSAID
    warmup_num_steps: _Size = UNSAID  # 0 and 1 mean 2
    warmup_type: Annotated[str, Choice("log", "linear")] = UNSAID
    total_num_steps: Count = UNSAID
    warmup_min_ratio: _Ratio = UNSAID
    cos_min_ratio: _Ratio = UNSAID
    cycle_min_lr: _Rate = UNSAID
    cycle_max_lr: _Rate = UNSAID
    decay_lr_rate: Annotated[float, Real(0.0, 1e9)] = UNSAID
    cycle_first_step_size: Count = UNSAID
    cycle_second_step_size: _Size = UNSAID
    cycle_first_stair_count: _Stairs = UNSAID
    cycle_second_stair_count: _Stairs = UNSAID
    decay_step_size: _Size = UNSAID
    cycle_momentum: Flag = UNSAID
    cycle_min_mom: _Share = UNSAID
    cycle_max_mom: _Share = UNSAID
    decay_mom_rate: Annotated[float, Real(0.0, 0.0)] = UNSAID


@dataclass(frozen=True)
class Scaling:
    """Of rotary positions, for a context that is longer than the original one."""

    __pydantic_config__ = _KEYS
    type: Annotated[str, Choice(*kinds.SCALINGS)]
    factor: Annotated[float, Real(1.0, 1e9)]
    low_freq_factor: _Factor = UNSAID
    high_freq_factor: _Factor = UNSAID
    original_context: Count = UNSAID
    beta_fast: _Factor = UNSAID
    beta_slow: _Factor = UNSAID
    attention_factor: _Factor = UNSAID
    truncate: Flag = UNSAID


# A section's types, the keys that each takes and their defaults
TYPES: Mapping[type, kinds.Rows] = {
    Optimizer: kinds.OPTIMIZERS,
    Schedule: kinds.SCHEDULES,
    Scaling: kinds.SCALINGS,
}


@dataclass(frozen=True)
class LossScale:
    """What f16 multiplies gradients by, as DeepSpeed's fp16: `scale` in every step, or, where it is
    0, from 2 ^ initial_scale_power on what overflows and `window` steps without make of it."""

    __pydantic_config__ = _KEYS
    scale: Annotated[float, Real(0.0, 2.0**127)] = 0.0
    initial_scale_power: Annotated[int, Integer(0, 127)] = 16
    window: Count = 1000
    hysteresis: Count = 2  # that many overflows before it is halved
    consecutive_hysteresis: Flag = (
        False  # every step without one makes hysteresis whole
    )
    min: Annotated[float, Real(2.0**-126, 2.0**127)] = 1.0


ADAPTERS = "*.lora_[AB].weight"  # a pattern of their tensors


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank: the linears of blocks whose names end in one of `match` (None: the
    family's) have alpha / rank * B A beside their weight, which alone trains."""

    __pydantic_config__ = _KEYS
    rank: Count
    alpha: Annotated[float, Real(1e-9, 1e9)]
    match: Unsaid[Annotated[tuple[Name, ...], AfterValidator(some)]] = None


@dataclass(frozen=True)
class Train:
    """global_batch G and micro_batch B in samples of `sequence` T tokens. recompute: the ops of
    blocks whose values backward recomputes; memory_budget: bytes of the arena on each target, for
    which more of them may be, and more may lie on the host. sum: of leaves, one tree, a fold, or
    trees of so many in a row, folded. head_chunk: tokens of a chunk in which
    the head and the loss go through a micro-batch, None: as the shape asks for. accumulate: a
    rank's micro-batches of a step go through the model one after the other (micro_batches), or all
    of them through each layer. offload_activations: what backward needs lies in the host arena
    until then.
    max_skips: skipped steps in a row that end a run, but for those that lower a dynamic loss scale,
    which ends it at its least. sm_margin: SMs of a GPU that GEMMs leave to NCCL, which takes no
    more; 0: neither is bounded."""

    __pydantic_config__ = _KEYS
    global_batch: Count
    micro_batch: Count
    sequence: Count
    optimizer: Optimizer
    precision: Annotated[str, Choice("f32", "bf16", "f16")] = "f32"
    loss_scale: LossScale = LossScale()
    max_skips: Count = 20
    schedule: Schedule = field(default_factory=Schedule)
    seed: Annotated[int, Integer(0, 2**64 - 1)] = 1
    sum: Annotated[str | dict[str, int], PlainValidator(rule)] = field(
        default_factory=lambda: {"block": 16}
    )
    head_chunk: Annotated[int | None, Auto(1, DIM)] = None
    recompute: Annotated[Names, PlainValidator(again)] = ()
    products: Annotated[str, Choice("auto", "pairs", "tiles")] = "auto"
    reduction: Annotated[str, Choice("exact", "fast")] = "exact"
    sm_margin: Annotated[int, PlainValidator(margin)] = 0
    accumulate: Annotated[str, Choice("micro_batches", "layers")] = (
        "micro_batches"
    )
    offload_activations: Flag = False
    memory_budget: Bytes | None = None
    lora: Lora | None = None
    dropout: Annotated[float, Real(0.0, 0.99)] = 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank may take: of its device, of its host, of its disk. None: as many as it
    needs."""

    __pydantic_config__ = _KEYS
    device: Bytes | None = None
    host: Bytes | None = None
    file: Bytes | None = None


@dataclass(frozen=True)
class Cluster:
    __pydantic_config__ = _KEYS
    ranks: Annotated[int, Integer(1, RANKS)] = 1
    local: Annotated[int, Integer(0, RANKS)] = 0
    memory: Memory = Memory()


@dataclass(frozen=True)
class Data:
    """ignore: the token that is never a target; None: every token is one. end: of a document, its
    last token."""

    __pydantic_config__ = _KEYS
    ignore: Annotated[int, Integer(0, 2**32 - 1)] | None = None
    shuffle: Flag = False
    documents: Annotated[str, Choice("join", "mask")] = "join"
    end: Annotated[int, Integer(0, 2**32 - 1)] | None = None

    @property
    def packed(self) -> bool:
        """Attention and positions end where documents do."""
        return self.documents == "mask"


@dataclass(frozen=True)
class Spec:
    """notes: what the user should hear though nothing is wrong. places: where each key that is
    given stands."""

    name: str
    model: Model
    zero: Zero
    train: Train
    cluster: Cluster
    targets: Names
    data: Data
    notes: Names = ()
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """Of a rank in a step: how often it accumulates."""
        return self.train.global_batch // (
            self.train.micro_batch * self.cluster.ranks
        )

    @property
    def block(self) -> int:
        """Leaves in a row that are summed by a tree, a power of two; trees are added in order. 1 is
        a fold, as many as there are or more one tree."""
        every = 1 << (self.micro_batches * self.cluster.ranks - 1).bit_length()
        words, said = {"tree": every, "fold": 1}, self.train.sum
        return min(
            words[said] if isinstance(said, str) else said["block"], every
        )

    @property
    def keyed(self) -> bool:
        """A step draws random numbers for each sample."""
        return self.train.dropout > 0

    @property
    def batch(self) -> Names:
        """The classes that a micro-batch comes into."""
        return ops.batch(self.data.packed, self.keyed)

    @property
    def together(self) -> int:
        """Micro-batches that go through a unit before the next one's turn."""
        return self.micro_batches if self.train.accumulate == "layers" else 1

    def wrong(
        self, key: str, what: str, allowed: str, hint: str = ""
    ) -> SpecError:
        """An error about a key that only a later pass can see."""
        near = key
        while near and near not in self.places:
            near = near.rpartition(".")[0]
        return SpecError(
            f"{self.places[near]}: {key}: {what}; {hint}allowed: {allowed}"
        )


# ---- the model's keys, before their shapes are checked (shapes.py)


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Embedding(_Keys):
    tokens: Name
    positions: Name | None = None
    context: Count | None = None


class LayerNorm(_Keys):
    name: Name
    eps: Tiny = 1e-5
    bias: Flag = True


class RmsNorm(_Keys):
    name: Name
    eps: Tiny = 1e-6


class Rope(_Keys):
    theta: Annotated[float, Real(1.0, 1e12)]
    scaling: Scaling | None = None


class Attention(_Keys):
    name: Name
    heads: Count
    kv_heads: Unsaid[Count] = None
    head_dim: Unsaid[Count] = None
    bias: Flag = False
    out_bias: Unsaid[Flag] = None
    rope: Rope | None = None
    window: Annotated[int | Windows | None, PlainValidator(windows)] = None
    qk_norm: Annotated[bool | str, PlainValidator(normed)] = False
    eps: Tiny = 1e-6


class Linear(_Keys):
    name: Annotated[
        tuple[Name, ...], BeforeValidator(as_list), AfterValidator(some)
    ] = ()
    out: Annotated[
        tuple[Count, ...], BeforeValidator(as_list), AfterValidator(some)
    ] = ()
    bias: Flag = False
    tied: Unsaid[Name] = None


class Bare(_Keys):
    """Of an op without settings: {}."""


class OpKeys(_Keys):
    """One of these."""

    residual: Unsaid[Annotated[tuple[OpKeys, ...], AfterValidator(some)]] = (
        None
    )
    layernorm: Unsaid[LayerNorm] = None
    rmsnorm: Unsaid[RmsNorm] = None
    attention: Unsaid[Attention] = None
    linear: Unsaid[Linear] = None
    gelu: Unsaid[Annotated[str, Choice("tanh", "erf")]] = None
    relu2: Unsaid[Bare] = None
    swiglu: Unsaid[Bare] = None


Ops = Annotated[tuple[OpKeys, ...], AfterValidator(some)]


class UnitKeys(_Keys):
    """embedding, or blocks with name and ops, or head."""

    embedding: Unsaid[Embedding] = None
    blocks: Annotated[int, Integer(1, LAYERS)] = UNSAID
    name: Layered = UNSAID
    ops: Ops = UNSAID
    head: Unsaid[Ops] = None


class ModelKeys(_Keys):
    vocab: Annotated[int, Integer(2, DIM)]
    width: Count
    names: Annotated[str, Choice(*FAMILIES)]
    units: tuple[UnitKeys, ...]

    @property
    def embedding(self) -> Embedding:
        """The first unit, once it is known to be one."""
        (found,) = [unit.embedding for unit in self.units if unit.embedding]
        return found


class SpecKeys(_Keys):
    """A whole file."""

    name: Title = "model"
    model: ModelKeys
    zero: Zero = Zero()
    train: Train
    cluster: Cluster = Cluster()
    targets: Annotated[
        tuple[Annotated[str, PlainValidator(target)], ...],
        AfterValidator(some),
        AfterValidator(unique),
    ] = TARGETS
    data: Data = Data()
