"""schema.py -- the records of a spec that passes read, with the type and range of each key.

Invariants
 1. A record that exists is in range: later code never checks a number's sign or size again.
 2. A key's type describes its allowed values in the words of the error.
"""

from __future__ import annotations

import math
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
    DeviceName,
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

# ---- records that the passes read


@dataclass(frozen=True)
class Weight:
    """A tensor of an op.

    parts: its (name, rows) in the weights' file, several if linears are stored side by side. Names
    are without the unit's prefix. Rows of `shape` beyond the parts' are zeros: padding of the
    vocabulary. heads: number of heads if the file's rows are by head (Family.by_head), else 0.
    """

    name: str
    parts: tuple[tuple[str, int], ...]
    shape: Ints
    heads: int = 0


@dataclass(frozen=True)
class Row:
    """A row of the op table (facts/ops.py) in a model: its dims, and its tensors by the table's
    words.

    tied: the tensor of the embedding that is its w; adapters: of a linear, each the rows from its
    input to a few columns and, last, from these to the addend of its output; logits: it computes
    the logits, in chunks of rows; cap: of the logits, 0 for none.
    """

    name: str
    dims: Mapping[str, Any]
    weights: Mapping[str, Weight] = field(default_factory=dict)
    tied: str = ""
    adapters: tuple[tuple[Row, ...], ...] = ()
    logits: bool = False
    cap: float = 0.0

    @property
    def order(self) -> tuple[Row, ...]:
        """The row and its adapters' rows in execution order. All but the last rows of the adapters
        of logits run before the chunks, and the cap comes last."""
        if not self.logits:
            return (self, *(row for adapter in self.adapters for row in adapter))
        downs = (row for adapter in self.adapters for row in adapter[:-1])
        cap = [Row("softcap", {"cap": self.cap})] if self.cap else []
        return (*downs, self, *(adapter[-1] for adapter in self.adapters), *cap)


@dataclass(frozen=True)
class Op:
    """An op of a spec. kind, args: as in the spec, with defaults; ops: those of a residual, or the
    branches of a parallel, each an op of kind branch; rows: the rows of any other op in order, or
    those that follow a residual's last op."""

    kind: str
    args: Mapping[str, Any]
    ops: tuple[Op, ...] = ()
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Unit:
    """A unit of a spec. kind: embedding, blocks or head; name: holds {l} in blocks, otherwise
    ''."""

    kind: str
    repeat: int
    name: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Model:
    """The model of a spec. vocab: V; width: C; names: a family (facts/families.py); vocab_from:
    rows of a folder that --load grows to V, None if it has V; vocab_rows: the first values of the
    rows that it lacks."""

    vocab: int
    width: int
    names: str
    units: tuple[Unit, ...]
    vocab_from: int | None = None
    vocab_rows: str = "mean"

    @property
    def by_token(self) -> Names:
        """The tensors of the embedding and of the logits that have a row by token."""
        first, last = self.units[0].ops[0].rows[0], self.units[-1].ops[-1].rows[-1]
        weights = (first.weights["wte"], *last.weights.values())
        return tuple(name for weight in weights for name, _ in weight.parts)


# Default of a key that the reader fills in, from the row of the section's type (kinds.py). In a
# Spec it is None only if the type does not take the key, or its row says so.
UNSAID: Any = None

_Steps = Annotated[int, Integer(0, 2**53)]
_Rate = Annotated[float, Real(0.0, 1e3)]
_Share = Annotated[float, Real(0.0, 0.999999999)]
_Stairs = Annotated[int, Integer(0, 2**20)]
_Ratio = Annotated[float, Real(0.0, 1.0)]
_Dropout = Annotated[float, Real(0.0, 0.99)]
_Size = Annotated[int, Integer(0, DIM)]
_Factor = Annotated[float, Real(1e-9, 1e9)]
_Device = Annotated[str, Choice("none", "cpu", "nvme")]

_KEYS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@dataclass(frozen=True)
class OffloadOptimizer:
    """Offloading of the optimizer, whose step then runs on the host.

    buffer_count: tiles in flight; ratio: share of each shard that is offloaded; nvme_path: the
    folder of a rank's file.
    """

    __pydantic_config__ = _KEYS
    device: _Device = "none"
    buffer_count: Annotated[int, Integer(1, 64)] = 4
    ratio: _Ratio = 1.0
    nvme_path: Folder | None = None


@dataclass(frozen=True)
class OffloadParam:
    """Offloading of sharded parameters. max_in_cpu: elements of a rank that stay on the host though
    the device is nvme, whole flats in the plan's order."""

    __pydantic_config__ = _KEYS
    device: _Device = "none"
    nvme_path: Folder | None = None
    max_in_cpu: ElemsOrNone = 0


@dataclass(frozen=True)
class Aio:
    """Block size in bytes and queue depth of file access."""

    __pydantic_config__ = _KEYS
    block_size: Annotated[int, PlainValidator(pages)] = 1_048_576
    queue_depth: Annotated[int, Integer(1, 4096)] = 8


@dataclass(frozen=True)
class Zero:
    """ZeRO settings with DeepSpeed's names, defaults and meaning; sizes in elements.

    replicate: patterns of tensors; shard_size: ranks that share parameters at stage 3, 0 for all;
    states: whether masters, moments and sums are sharded over all ranks or those of a shard.
    """

    __pydantic_config__ = _KEYS
    stage: Annotated[int, Integer(0, 3)] = 0
    reduce_bucket_size: Elems = 500_000_000
    allgather_bucket_size: Elems = 500_000_000
    overlap_comm: Flag = True
    # auto: one unit ahead
    stage3_prefetch_bucket_size: Annotated[int | None, Auto(0, ELEMS)] = None
    stage3_param_persistence_threshold: ElemsOrNone = 100_000
    stage3_max_live_parameters: ElemsOrNone = 1_000_000_000
    # 0: every unit is gathered for each use
    stage3_max_reuse_distance: ElemsOrNone = 0
    replicate: tuple[Pattern, ...] = ()
    # elements of a shard that are updated at a time; 0: this default
    sub_group_size: ElemsOrNone = 4_194_304
    shard_size: Annotated[int, Integer(0, RANKS)] = 0
    states: Annotated[str, Choice("all", "shard")] = "all"
    mics_shard_size: Annotated[int, Integer(-1, RANKS)] = 0
    hpz_partition_size: Annotated[int, Integer(0, RANKS)] = 0
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()
    aio: Aio = Aio()

    @property
    def shared(self) -> int:
        """Ranks that share parameters at stage 3, 0 for all. A secondary copy (hpZ) is the
        parameters themselves."""
        copy = self.hpz_partition_size * (self.hpz_partition_size > 1)
        return self.shard_size or max(0, self.mics_shard_size) or copy

    @property
    def replicates(self) -> bool:
        """True if each set of ranks that shares parameters also has all states."""
        return self.states == "shard" or self.mics_shard_size > 0


@dataclass(frozen=True)
class ParamGroup:
    """Settings of tensors matched by patterns: a factor of lr, their own weight decay (None for the
    optimizer's), or frozen."""

    __pydantic_config__ = _KEYS
    match: Annotated[tuple[Pattern, ...], AfterValidator(some)]
    lr_factor: _Rate = 1.0
    weight_decay: Unsaid[_Rate] = None
    frozen: Flag = False


@dataclass(frozen=True)
class Optimizer:
    """Optimizer settings. A key that the type does not take is None.

    clip: 0 for none; decay: tensors that weight_decay applies to; moments: their stored type, where
    bf16 is rounded stochastically so that small steps add up; masters: f32 copies of parameters
    stored in less, without which parameters are rounded stochastically, too; groups: the first that
    matches a tensor applies.
    """

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
    groups: tuple[ParamGroup, ...] = ()


@dataclass(frozen=True)
class LrSchedule:
    """Schedule of the learning rate, in training steps that were applied.

    warmup: steps from 0 to lr; steps: step at which a decay reaches min_lr; decay: steps of wsd's
    decay; cycles: cosines until `steps`, each of which starts at lr. The other keys are
    DeepSpeed's. None: the type does not take the key; warmup_max_lr None is lr, and None for a
    cycle's second half means that it equals the first.
    """

    __pydantic_config__ = _KEYS
    type: Annotated[str, Choice(*kinds.SCHEDULES)] = "constant"
    warmup: _Steps = UNSAID
    steps: _Steps = UNSAID
    min_lr: _Rate = UNSAID
    decay: Annotated[int, Integer(1, 2**53)] = UNSAID
    cycles: Annotated[int, Integer(1, 1000)] = UNSAID  # times 2^53 is below 2^63
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
    """Scaling of rotary positions for a context longer than the original one."""

    __pydantic_config__ = _KEYS
    type: Annotated[str, Choice(*kinds.SCALINGS)]
    factor: Annotated[float, Real(1.0, 1e9)]
    low_freq_factor: _Factor = UNSAID
    high_freq_factor: _Factor = UNSAID
    original_context: Count = UNSAID
    beta_fast: _Factor = UNSAID
    beta_slow: _Factor = UNSAID
    short_factor: Annotated[tuple[_Factor, ...], AfterValidator(some)] = UNSAID
    long_factor: Annotated[tuple[_Factor, ...], AfterValidator(some)] = UNSAID
    attention_factor: _Factor = UNSAID
    truncate: Flag = UNSAID


# Types of a section, with the keys and defaults of each.
TYPES: Mapping[type, kinds.Rows] = {
    Optimizer: kinds.OPTIMIZERS,
    LrSchedule: kinds.SCHEDULES,
    Scaling: kinds.SCALINGS,
}


@dataclass(frozen=True)
class LossScale:
    """Factor of gradients in f16, as DeepSpeed's fp16.

    scale: a fixed factor. If it is 0, the factor starts at 2 ^ initial_scale_power, falls with
    overflows, and grows after `window` steps without one.
    """

    __pydantic_config__ = _KEYS
    scale: Annotated[float, Real(0.0, 2.0**127)] = 0.0
    initial_scale_power: Annotated[int, Integer(0, 127)] = 16
    window: Count = 1000
    hysteresis: Count = 2  # overflows before the factor is halved
    # Every step without an overflow restores hysteresis.
    consecutive_hysteresis: Flag = False
    min: Annotated[float, Real(2.0**-126, 2.0**127)] = 1.0


ADAPTERS = "*.lora_[AB].weight"  # pattern of their tensors
_Words = Annotated[tuple[Name, ...], BeforeValidator(as_list), AfterValidator(some)]
_Alpha = Annotated[float, Real(1e-9, 1e9)]


@dataclass(frozen=True)
class LoraGroup:
    """Rank and alpha of the adapters of linears whose names end in one of `match`. None: those of
    all adapters."""

    __pydantic_config__ = _KEYS
    match: _Words
    rank: Unsaid[Count] = None
    alpha: Unsaid[_Alpha] = None


@dataclass(frozen=True)
class Lora:
    """Adapters of low rank. Linears whose names end in one of `match` (None: the family's) get
    scale * B A beside their weight. Only the adapters are trained, and the modules whose names end
    in one of `whole`. rslora: the scale is alpha / sqrt(rank), in place of alpha / rank; base:
    format of the weights of blocks' linears (None: the stored type); dropout: probability with
    which an element of A's input is 0; groups: the first that matches a linear applies."""

    __pydantic_config__ = _KEYS
    rank: Count
    alpha: _Alpha
    match: Unsaid[_Words] = None
    rslora: Flag = False
    base: Unsaid[Annotated[str, Choice("int8", "nf4")]] = None
    dropout: _Dropout = 0.0
    groups: tuple[LoraGroup, ...] = ()
    whole: Annotated[tuple[Name, ...], BeforeValidator(as_list)] = ()

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class Train:
    """Training settings.

    global_batch G, micro_batch B: samples of `sequence` T tokens; sequence_blocks: equal parts of a
    sample that have gradients of their own; recompute: ops of blocks whose values backward
    recomputes; memory_budget: bytes of device memory on each target, for which the generator may
    recompute and offload more; sum: rule of the sum of gradients: one tree, a fold, or a fold of
    trees of consecutive ones; head_chunk: tokens of a chunk of the head and the loss, None to
    derive it from the shape; mlp_chunk: tokens that go through a block's MLP at a time, None for
    all; accumulate: a rank's micro-batches of a step run one after the other (micro_batches), or
    all of them layer by layer (layers); offload_activations: activations that backward needs wait
    in the host arena; max_skips: consecutive skipped steps that end a run, not counting those that
    lower a dynamic loss scale above its minimum; sm_margin: SMs of a GPU that GEMMs leave to NCCL,
    which uses no more; 0 bounds neither; loss_mean: tokens if a step's loss is the mean over its
    tokens, micro_batch if it is the mean of its micro-batches' means.
    """

    __pydantic_config__ = _KEYS
    global_batch: Count
    micro_batch: Count
    sequence: Count
    optimizer: Optimizer
    sequence_blocks: Count = 1
    precision: Annotated[str, Choice("f32", "bf16", "f16")] = "f32"
    loss_scale: LossScale = LossScale()
    max_skips: Count = 20
    schedule: LrSchedule = field(default_factory=LrSchedule)
    seed: Annotated[int, Integer(0, 2**64 - 1)] = 1
    sum: Annotated[str | dict[str, int], PlainValidator(rule)] = field(
        default_factory=lambda: {"block": 16}
    )
    head_chunk: Annotated[int | None, Auto(1, DIM)] = None
    mlp_chunk: Annotated[int | None, Auto(1, DIM)] = None
    recompute: Annotated[Names, PlainValidator(again)] = ()
    products: Annotated[str, Choice("auto", "pairs", "tiles")] = "auto"
    reduction: Annotated[str, Choice("exact", "fast")] = "exact"
    sm_margin: Annotated[int, PlainValidator(margin)] = 0
    accumulate: Annotated[str, Choice("micro_batches", "layers")] = "micro_batches"
    offload_activations: Flag = False
    memory_budget: Bytes | None = None
    lora: Lora | None = None
    dropout: _Dropout = 0.0
    attention_dropout: _Dropout = 0.0
    label_smoothing: Annotated[float, Real(0.0, 0.99)] = 0.0
    z_loss: Annotated[float, Real(0.0, 1.0)] = 0.0
    loss_mean: Annotated[str, Choice("tokens", "micro_batch")] = "tokens"


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes of its device, host and disk that a rank may use. None: no limit."""

    __pydantic_config__ = _KEYS
    device: Bytes | None = None
    host: Bytes | None = None
    file: Bytes | None = None


@dataclass(frozen=True)
class LinkKeys:
    """Numbers of a link that differ from the device's file: bytes per second, seconds of a
    transfer, and seconds for each further rank of a ring."""

    __pydantic_config__ = _KEYS
    bandwidth: Annotated[float, Real(1.0, 1e18)] | None = None
    latency: Annotated[float, Real(0.0, 1e3)] | None = None
    hop: Annotated[float, Real(0.0, 1e3)] | None = None


@dataclass(frozen=True)
class Links:
    """Links for predicted times. peers: between ranks of a host, into each; network: between hosts,
    into each host."""

    __pydantic_config__ = _KEYS
    peers: LinkKeys = LinkKeys()
    network: LinkKeys = LinkKeys()


@dataclass(frozen=True)
class Cluster:
    """Ranks and their memory. local: ranks of a host, 0 for all; context_parallel: ranks
    that share the tokens of a sample; device: for predicted times, a
    name that zgen knows or a file of `./run calibrate`, None for a usual device of the first
    target; links: numbers that differ from that file."""

    __pydantic_config__ = _KEYS
    ranks: Annotated[int, Integer(1, RANKS)] = 1
    local: Annotated[int, Integer(0, RANKS)] = 0
    context_parallel: Annotated[int, Integer(1, RANKS)] = 1
    memory: MemoryLimits = MemoryLimits()
    device: DeviceName | None = None
    links: Links = Links()


@dataclass(frozen=True)
class Data:
    """Data settings. ignore: token that is never a target, None if there is none; end: last token
    of a document."""

    __pydantic_config__ = _KEYS
    ignore: Annotated[int, Integer(0, 2**32 - 1)] | None = None
    shuffle: Flag = False
    documents: Annotated[str, Choice("join", "mask")] = "join"
    end: Annotated[int, Integer(0, 2**32 - 1)] | None = None

    @property
    def packed(self) -> bool:
        """True if attention and positions end where documents do."""
        return self.documents == "mask"


@dataclass(frozen=True)
class Spec:
    """A whole spec. notes: messages to the user that are not errors; places: location of each given
    key."""

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
    def loss(self) -> Row:
        """The row of the loss in training."""
        cap = self.model.units[-1].ops[-1].rows[-1].cap
        t = self.train
        if not (cap or t.label_smoothing or t.z_loss):
            return Row("loss", {})
        soft = {"smoothing": t.label_smoothing, "penalty": t.z_loss, "cap": cap}
        return Row("soft_loss", soft)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step (gradient accumulation steps). If samples are cut into
        blocks, each of its blocks counts as one."""
        samples = self.train.global_batch * self.train.sequence_blocks
        return samples // (self.train.micro_batch * self.cluster.ranks)

    @property
    def own_blocks(self) -> int:
        """Blocks of a sample on one rank."""
        return self.train.sequence_blocks // self.cluster.context_parallel

    @property
    def rows(self) -> int:
        """Tokens of a micro-batch, or of a block of it."""
        return (
            self.train.micro_batch * self.train.sequence // self.train.sequence_blocks
        )

    @property
    def block(self) -> int:
        """Consecutive gradients that are summed by a tree, a power of two. Trees are added in
        order: 1 is a fold, and at least all gradients is one tree."""
        every = 1 << (self.micro_batches * self.cluster.ranks - 1).bit_length()
        words, said = {"tree": every, "fold": 1}, self.train.sum
        return min(words[said] if isinstance(said, str) else said["block"], every)

    @property
    def keyed(self) -> bool:
        """True if a step draws random numbers for each sample."""
        train, lora = self.train, self.train.lora
        own = train.dropout > 0 or train.attention_dropout > 0
        return own or lora is not None and lora.dropout > 0

    @property
    def batch(self) -> Names:
        """Classes that hold a micro-batch."""
        means = self.train.loss_mean == "micro_batch"
        cut = self.train.sequence_blocks > 1
        return ops.batch(self.data.packed, self.keyed, means, cut)

    @property
    def together(self) -> int:
        """Micro-batches that go through a unit before the next unit runs."""
        layers = self.train.accumulate == "layers"
        return self.micro_batches if layers else self.own_blocks

    def wrong(self, key: str, what: str, allowed: str, hint: str = "") -> SpecError:
        """Return an error about a key that only a later pass detects."""
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
    scale: Unsaid[_Factor] = None


class LayerNorm(_Keys):
    name: Name
    eps: Tiny = 1e-5
    weight: Flag = True
    bias: Flag = True


class RmsNorm(_Keys):
    name: Name
    eps: Tiny = 1e-6
    one_plus: Flag = False


class LocalRope(_Keys):
    theta: Annotated[float, Real(1.0, 1e12)]
    scaling: Scaling | None = None


class Rope(LocalRope):
    width: Unsaid[Count] = None
    interleaved: Flag = False


class Attention(_Keys):
    name: Name
    heads: Count
    kv_heads: Unsaid[Count] = None
    head_dim: Unsaid[Count] = None
    bias: Flag = False
    out_bias: Unsaid[Flag] = None
    rope: Rope | None = None
    local_rope: LocalRope | None = None
    rope_layers: Unsaid[Annotated[tuple[Flag, ...], AfterValidator(some)]] = None
    window: Annotated[int | Windows | None, PlainValidator(windows)] = None
    qk_norm: Annotated[bool | str, PlainValidator(normed)] = False
    eps: Tiny = 1e-6
    one_plus: Flag = False
    scale: Unsaid[_Factor] = None
    softcap: Unsaid[_Factor] = None


class Linear(_Keys):
    name: Annotated[
        tuple[Name, ...], BeforeValidator(as_list), AfterValidator(some)
    ] = ()
    out: Annotated[
        tuple[Count, ...], BeforeValidator(as_list), AfterValidator(some)
    ] = ()
    bias: Flag = False
    tied: Unsaid[Name] = None
    softcap: Unsaid[_Factor] = None


class Bare(_Keys):
    """Keys of an op without settings: {}."""


Branches = Annotated[
    tuple[Annotated[tuple["OpKeys", ...], AfterValidator(some)], ...],
    AfterValidator(some),
]


class OpKeys(_Keys):
    """An op; exactly one key is set."""

    residual: Unsaid[Annotated[tuple[OpKeys, ...], AfterValidator(some)]] = None
    parallel: Unsaid[Branches] = None
    layernorm: Unsaid[LayerNorm] = None
    rmsnorm: Unsaid[RmsNorm] = None
    attention: Unsaid[Attention] = None
    linear: Unsaid[Linear] = None
    gelu: Unsaid[Annotated[str, Choice("tanh", "erf")]] = None
    relu2: Unsaid[Bare] = None
    scale: Unsaid[_Factor] = None
    swiglu: Unsaid[Bare] = None
    geglu: Unsaid[Bare] = None


Ops = Annotated[tuple[OpKeys, ...], AfterValidator(some)]


# Ops whose key holds one value, and its name among the args of an Op.
VALUES = {"gelu": "kind", "scale": "factor"}


class UnitKeys(_Keys):
    """A unit: embedding, or blocks with name and ops, or head."""

    embedding: Unsaid[Embedding] = None
    blocks: Annotated[int, Integer(1, LAYERS)] = UNSAID
    name: Layered = UNSAID
    ops: Ops = UNSAID
    head: Unsaid[Ops] = None


class ModelKeys(_Keys):
    vocab: Annotated[int, Integer(2, DIM)]
    vocab_from: Unsaid[Annotated[int, Integer(1, DIM)]] = None
    vocab_rows: Annotated[str, Choice("mean", "init")] = "mean"
    width: Count
    names: Annotated[str, Choice(*FAMILIES)]
    units: tuple[UnitKeys, ...]

    @property
    def embedding(self) -> Embedding:
        """The embedding of the model, whose units are already checked."""
        (found,) = [unit.embedding for unit in self.units if unit.embedding]
        return found


class SpecKeys(_Keys):
    """A whole spec file."""

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
