"""schema.py -- what a spec may hold: the records that the passes read, each key's type and range.

Invariants
 1. A record that exists is in range: nothing after the reader checks a number's sign or size again.
 2. A key's type says what is allowed in words that stand in the error.
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Mapping

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, PlainValidator
from pydantic_core import PydanticCustomError

from . import kinds, ops
from .node import SpecError, number, shown

DIM = 2 ** 31 - 1               # a dimension: kernels count rows and columns in 31 bits
ELEMS = 2 ** 48                 # elements of a model, of all values: byte offsets fit in 63 bits
TOKEN = 65535                   # the largest uint16 token
RECOMPUTE = tuple(ops.WORDS.values())
TARGETS = ("cpu", "sm_80", "sm_90", "sm_100")


# ---- types of keys: PydanticCustomError carries what is wrong and what is allowed

def refuse(wrong: str, allowed: str) -> PydanticCustomError:
    return PydanticCustomError("zg", "{wrong}; allowed: {allowed}",
                               {"wrong": wrong, "allowed": allowed})


def _numeric(value: object, kind: str, allowed: str) -> int | float:
    found = number(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise refuse(f"{shown(value)} is no {kind}", allowed)
    if not math.isfinite(found):
        raise refuse(f"{shown(value)} is not a finite number", allowed)
    return found


def Integer(low: int, high: int) -> object:
    """An integer; 5e8 and "1e8" are integers too, as DeepSpeed's users write them."""
    allowed = f"an integer from {low} to {high}"

    def check(value: object) -> int:
        found = _numeric(value, "integer", allowed)
        if found != int(found):
            raise refuse(f"{shown(value)} is no integer", allowed)
        if not low <= found <= high:
            raise refuse(f"{shown(value)} is out of range", allowed)
        return int(found)
    return Annotated[int, PlainValidator(check)]


def Auto(low: int, high: int) -> object:
    """An integer, or the word auto (None): what the generator chooses."""
    allowed = f"auto or an integer from {low} to {high}"

    def check(value: object) -> int | None:
        if value in ("auto", None):
            return None
        found = _numeric(value, "integer", allowed)
        if found != int(found) or not low <= found <= high:
            raise refuse(f"{shown(value)} is out of range or no integer", allowed)
        return int(found)
    return Annotated[int | None, PlainValidator(check)]


def Real(low: float, high: float) -> object:
    allowed = f"a number from {low:g} to {high:.9g}"

    def check(value: object) -> float:
        found = _numeric(value, "number", allowed)
        if not low <= found <= high:
            raise refuse(f"{shown(value)} is out of range", allowed)
        return float(found)
    return Annotated[float, PlainValidator(check)]


def Choice(*words: str) -> object:
    def check(value: object) -> str:
        if value not in words or not isinstance(value, str):
            raise refuse(f"{shown(value)} is not known", " or ".join(words))
        return value
    return Annotated[str, PlainValidator(check)]


def Text(pattern: str, allowed: str) -> object:
    def check(value: object) -> str:
        if not isinstance(value, str):
            raise refuse(f"{shown(value)} is no text",
                         f"{allowed} (in quotes where it looks like a number)")
        if not re.fullmatch(pattern, value):
            raise refuse(f"{shown(value)} does not fit", allowed)
        return value
    return Annotated[str, PlainValidator(check)]


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise refuse(f"{shown(value)} is neither", "true or false")
    return value


def _two(value: tuple) -> tuple:
    if len(value) != 2:
        raise refuse(f"has {len(value)} values", "a list of 2")
    return value


def _some(value: tuple) -> tuple:
    if not value:
        raise refuse("is empty", "a list of at least one")
    return value


def _target(value: object) -> str:
    if value not in TARGETS:
        raise refuse(f"{shown(value)} is no target", " or ".join(TARGETS))
    return str(value)


def _unique(value: tuple) -> tuple:
    if len(set(value)) < len(value):
        raise refuse("names a target twice", "each target once")
    return value


_UNITS = {"": 1, "B": 1, "kB": 10 ** 3, "KB": 10 ** 3, "MB": 10 ** 6, "GB": 10 ** 9, "TB": 10 ** 12,
          "KiB": 2 ** 10, "MiB": 2 ** 20, "GiB": 2 ** 30, "TiB": 2 ** 40}
_BYTES = re.compile(r"(\d{1,18}(?:\.\d{1,9})?) ?([kKMGT]i?B|B|)", re.ASCII)


def _bytes(value: object) -> int:
    """80GiB, 500 MB, 1.5TB, or bytes."""
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    found = _BYTES.fullmatch(text)
    if not found or found[2] not in _UNITS or not Decimal(found[1]) * _UNITS[found[2]] >= 1:
        raise refuse(f"{shown(value)} is no size", "bytes, or a number with kB, MB, GB, TB, KiB, "
                                                   "MiB, GiB or TiB")
    return int(Decimal(found[1]) * _UNITS[found[2]])


def _recompute(value: object) -> tuple[str, ...]:
    """The ops of a block whose values are made again."""
    named = {"none": [], "full": [*RECOMPUTE]}
    words = named.get(value, [value]) if isinstance(value, str) else value
    words = words if isinstance(words, list) else [words]
    for word in words:
        if word not in RECOMPUTE:
            raise refuse(f"{shown(word)} is no op of a block",
                         f"none, full or a list of {', '.join(RECOMPUTE)}")
    return tuple(dict.fromkeys(words))


def _as_list(value: object) -> object:
    return value if isinstance(value, list) else [value]


Count = Integer(1, DIM)
Flag = Annotated[bool, PlainValidator(_flag)]
Elems = Integer(1, ELEMS)
ElemsOrNone = Integer(0, ELEMS)
Tiny = Real(1e-30, 1.0)         # an epsilon: one that f32 would flush to 0 divides 0 by 0
_CHARS = "letters, digits, '_', '-' and single dots"
Name = Text(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", _CHARS)
Layered = Text(r"([A-Za-z0-9_-]+\.)*\{l\}(\.[A-Za-z0-9_-]+)*",
               f"a name with one part {{l}}, the layer; {_CHARS}")
Pattern = Text(r"[][A-Za-z0-9_.*?!-]+", "a pattern of tensor names, like '*.bias'")
Title = Text(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", "up to 64 letters, digits, '_', '.', '+', '-'")


# ---- what the passes read

@dataclass(frozen=True)
class Op:
    """kind and args as in the spec, defaults filled in; ops: of a residual; where: file:line."""
    kind: str
    args: Mapping[str, object]
    ops: tuple[Op, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Unit:
    """kind: embedding, blocks or head; name holds {l} in blocks, else it is ''."""
    kind: str
    repeat: int
    name: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Model:
    """vocab V, width C; names: gpt2 (weights [in,out]) or llama ([out,in])."""
    vocab: int
    width: int
    names: str
    units: tuple[Unit, ...]


_KEYS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)


@dataclass(frozen=True)
class OffloadOptimizer:
    """Where the optimizer's states lie and its step runs; buffer_count: tiles on their way."""
    __pydantic_config__ = _KEYS
    device: Choice("none", "cpu") = "none"
    buffer_count: Integer(1, 64) = 4


@dataclass(frozen=True)
class OffloadParam:
    """Where parameters lie that no rank keeps whole."""
    __pydantic_config__ = _KEYS
    device: Choice("none", "cpu") = "none"


@dataclass(frozen=True)
class Zero:
    """DeepSpeed's names, defaults and meaning; sizes in elements. replicate: tensors' patterns."""
    __pydantic_config__ = _KEYS
    stage: Integer(0, 3) = 0
    reduce_bucket_size: Elems = 500_000_000
    allgather_bucket_size: Elems = 500_000_000
    overlap_comm: Flag = True
    stage3_prefetch_bucket_size: Auto(0, ELEMS) = None      # auto: one unit ahead
    stage3_param_persistence_threshold: ElemsOrNone = 100_000
    stage3_max_live_parameters: ElemsOrNone = 1_000_000_000
    stage3_max_reuse_distance: ElemsOrNone = 0              # 0: every unit is gathered for each use
    replicate: tuple[Pattern, ...] = ()
    sub_group_size: ElemsOrNone = 4_194_304     # of a shard, updated at a time; 0: that default
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()


@dataclass(frozen=True)
class Optimizer:
    """clip 0: none. decay: which tensors weight_decay applies to. None: a key that the type does
    not take."""
    __pydantic_config__ = _KEYS
    lr: Real(0.0, 1e3)
    type: Choice(*kinds.OPTIMIZERS) = "AdamW"
    betas: Annotated[tuple[Real(0.0, 0.999999999), ...], AfterValidator(_two)] = None
    eps: Tiny = None
    momentum: Real(0.0, 0.999999999) = None
    nesterov: Flag = None
    weight_decay: Real(0.0, 1e3) = 0.0
    decay: Choice("matrices", "all") = "matrices"
    clip: Real(0.0, 1e30) = 1.0


_Steps = Integer(0, 2 ** 53)
_Rate = Real(0.0, 1e3)
_Share = Real(0.0, 0.999999999)
_Stairs = Integer(0, 2 ** 20)


@dataclass(frozen=True)
class Schedule:
    """All steps are training steps that were applied. warmup: from 0 to lr; steps: where a decay
    meets min_lr; decay: how many steps wsd's takes. The others are DeepSpeed's, as it means them.
    None: the type does not take it, or warmup_max_lr is lr, and a cycle's second half its first."""
    __pydantic_config__ = _KEYS
    type: Choice(*kinds.SCHEDULES) = "constant"
    warmup: _Steps = None
    steps: _Steps = None
    min_lr: _Rate = None
    decay: Integer(1, 2 ** 53) = None
    warmup_min_lr: _Rate = None
    warmup_max_lr: _Rate = None
    warmup_num_steps: Count = None
    warmup_type: Choice("log", "linear") = None
    total_num_steps: Count = None
    warmup_min_ratio: Real(0.0, 1.0) = None
    cos_min_ratio: Real(0.0, 1.0) = None
    cycle_min_lr: _Rate = None
    cycle_max_lr: _Rate = None
    decay_lr_rate: Real(0.0, 1e9) = None
    cycle_first_step_size: Count = None
    cycle_second_step_size: Integer(0, DIM) = None
    cycle_first_stair_count: _Stairs = None
    cycle_second_stair_count: _Stairs = None
    decay_step_size: Integer(0, DIM) = None
    cycle_momentum: Flag = None
    cycle_min_mom: _Share = None
    cycle_max_mom: _Share = None
    decay_mom_rate: Real(0.0, 0.0) = None


# A section's types, the keys that each takes and their defaults
TYPES = {Optimizer: kinds.OPTIMIZERS, Schedule: kinds.SCHEDULES}


@dataclass(frozen=True)
class Train:
    """global_batch G and micro_batch B in samples of `sequence` T tokens. recompute: the ops of
    blocks whose values backward makes again; memory_budget: bytes of the arena on each target, for
    which more of them may be."""
    __pydantic_config__ = _KEYS
    global_batch: Count
    micro_batch: Count
    sequence: Count
    optimizer: Optimizer
    precision: Choice("f32", "bf16") = "f32"
    schedule: Schedule = field(default_factory=Schedule)
    seed: Integer(0, 2 ** 64 - 1) = 1
    sum: Choice("tree", "fold") = "tree"
    recompute: Annotated[tuple[str, ...], PlainValidator(_recompute)] = ()
    reduction: Choice("exact", "fast") = "exact"
    memory_budget: Annotated[int, PlainValidator(_bytes)] | None = None


@dataclass(frozen=True)
class Cluster:
    __pydantic_config__ = _KEYS
    ranks: Integer(1, 2 ** 20) = 1


@dataclass(frozen=True)
class Data:
    """ignore: the token that is never a target; None: every token is one."""
    __pydantic_config__ = _KEYS
    ignore: Integer(0, TOKEN) | None = None


@dataclass(frozen=True)
class Spec:
    """notes: what the user should hear though nothing is wrong. places: where each key that is
    given stands."""
    name: str
    model: Model
    zero: Zero
    train: Train
    cluster: Cluster
    targets: tuple[str, ...]
    data: Data
    notes: tuple[str, ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def grains(self) -> int:
        """Of a rank in a step: how often it accumulates."""
        return self.train.global_batch // (self.train.micro_batch * self.cluster.ranks)

    def wrong(self, key: str, what: str, allowed: str) -> SpecError:
        """An error about a key that only a later pass can see."""
        near = key
        while near and near not in self.places:
            near = near.rpartition(".")[0]
        return SpecError(f"{self.places[near]}: {key}: {what}; allowed: {allowed}")


# ---- the model's keys, before their shapes are checked (units.py)

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


class Scaling(_Keys):
    type: Choice("llama3")
    factor: Real(1.0, 1e9)
    low_freq_factor: Real(1e-9, 1e9)
    high_freq_factor: Real(1e-9, 1e9)
    original_context: Count


class Rope(_Keys):
    theta: Real(1.0, 1e12)
    scaling: Scaling | None = None


class Attention(_Keys):
    name: Name
    heads: Count
    kv_heads: Count = None
    head_dim: Count = None
    bias: Flag = False
    out_bias: Flag = None
    rope: Rope | None = None
    qk_norm: Flag = False
    eps: Tiny = 1e-6


class Linear(_Keys):
    name: Annotated[tuple[Name, ...], BeforeValidator(_as_list), AfterValidator(_some)] = ()
    out: Annotated[tuple[Count, ...], BeforeValidator(_as_list), AfterValidator(_some)] = ()
    bias: Flag = False
    tied: Name = None


class Swiglu(_Keys):
    pass


class OpKeys(_Keys):
    """One of these."""
    residual: Annotated[tuple[OpKeys, ...], AfterValidator(_some)] = None
    layernorm: LayerNorm = None
    rmsnorm: RmsNorm = None
    attention: Attention = None
    linear: Linear = None
    gelu: Choice("tanh", "erf") = None
    swiglu: Swiglu = None


Ops = Annotated[tuple[OpKeys, ...], AfterValidator(_some)]


class UnitKeys(_Keys):
    """embedding, or blocks with name and ops, or head."""
    embedding: Embedding = None
    blocks: Integer(1, 65536) = None
    name: Layered = None
    ops: Ops = None
    head: Ops = None


class ModelKeys(_Keys):
    vocab: Integer(2, DIM)
    width: Count
    names: Choice("gpt2", "llama")
    units: tuple[UnitKeys, ...]


class SpecKeys(_Keys):
    """A whole file."""
    name: Title = "model"
    model: ModelKeys
    zero: Zero = Zero()
    train: Train
    cluster: Cluster = Cluster()
    targets: Annotated[tuple[Annotated[str, PlainValidator(_target)], ...], AfterValidator(_some),
                       AfterValidator(_unique)] = TARGETS
    data: Data = Data()
