"""device.py -- a device and its links as a file states them: rates of kernels, latencies,
bandwidths.

Units are seconds, bytes, FLOPs and their ratios. Files that zgen brings are in gen/zg/devices; a
user's own comes from `./run calibrate`. A plan depends on these numbers only if a search chose it.

Invariants
 1. A curve's points have ascending sizes, so a rate can be looked up by bisection.
 2. Every device has rates for `products` and `others`, so every kernel has a rate.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)

from ..facts.kernels import KERNELS, kernel
from ..read.keytypes import TARGETS, Choice, Integer, Real, real, refuse
from ..read.node import Node, SpecError, dotted, meant, printable, several, shown
from ..read.yamltext import Reader

FOLDER = Path(__file__).resolve().parents[1] / "devices"
# The device of a target if `cluster.device` names none.
DEFAULT = {"cpu": "cpu", "sm_80": "a100-80gb", "sm_90": "h100", "sm_100": "b200"}

MOST = 1 << 20  # bytes of a file

Curve = tuple[tuple[float, float], ...]  # (size of a call, work per second), ascending
# Classes of kernels: a device gives a class one curve, or its kernels a curve each.
CLASSES = ("products", "attention", "others")

_KEYS = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
_Time = Annotated[float, Real(0.0, 1e3)]
_RATES = (1.0, 1e18)
_Rate = Annotated[float, Real(*_RATES)]
_Share = Annotated[float, Real(0.0, 0.9)]
_Size = Annotated[int, Integer(0, 2**50)]


def class_of(name: str) -> str:
    """Return the class of a kernel."""
    if name.startswith("zk_attention"):
        return "attention"
    return "products" if kernel(name).flops != "0" else "others"


def _curve(value: object) -> Curve:
    wrong = refuse(
        f"{shown(value)} is no curve", "a list of [size, rate], sizes ascending"
    )
    if not isinstance(value, (list, tuple)) or not value:
        raise wrong
    found: list[tuple[float, float]] = []
    for point in value:
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise wrong
        size, rate = (real(x, *_RATES) for x in point)
        if found and size <= found[-1][0]:
            raise wrong
        found.append((size, rate))
    return tuple(found)


def _curves(value: object) -> dict[str, Curve]:
    known = (*CLASSES, *KERNELS)
    allowed = f"a mapping from kernels, or {', '.join(CLASSES)}, to curves"
    if not isinstance(value, dict):
        raise refuse(f"{shown(value)} is no mapping", allowed)
    for name in value:
        if name not in known:
            raise refuse(
                f"{shown(name)} is no kernel", allowed, meant(str(name), known)
            )
    return {name: _curve(curve) for name, curve in value.items()}


def _peaks(value: object) -> dict[str, float]:
    if not isinstance(value, dict) or not value.keys() <= {"f32", "bf16", "f16"}:
        allowed = "a mapping from f32, bf16 or f16 to FLOP/s"
        raise refuse(f"{shown(value)} has no peaks of types", allowed)
    return {name: real(x, *_RATES) for name, x in value.items()}


def _about(value: object) -> str:
    if (
        not isinstance(value, str)
        or not 0 < len(value) <= 200
        or not value.isprintable()
    ):
        raise refuse(
            f"{shown(value)} is no name", "a line of up to 200 printable characters"
        )
    return value


def _least(value: Mapping[str, Curve]) -> Mapping[str, Curve]:
    missing = [name for name in ("products", "others") if name not in value]
    if missing:
        raise refuse(
            f"{missing[0]} is missing", "products and others, and kernels' own"
        )
    return value


def _least_or_none(value: Mapping[str, Curve]) -> Mapping[str, Curve]:
    return _least(value) if value else value


@dataclass(frozen=True)
class Rates:
    """Rates of kernels whose numbers have one type, while all cores are busy.

    threads: of a rank on a CPU; cold: curves of kernels whose operands come from memory, in FLOP/s
    of products and attention and in bytes/s of others; hot: the same with operands in the cache.
    """

    __pydantic_config__ = _KEYS
    precision: Annotated[str, Choice("f32", "bf16", "f16")]
    cold: Annotated[
        Mapping[str, Curve], PlainValidator(_curves), AfterValidator(_least)
    ]
    hot: Annotated[
        Mapping[str, Curve], PlainValidator(_curves), AfterValidator(_least_or_none)
    ] = field(default_factory=dict)
    threads: Annotated[int, Integer(1, 4096)] = 1

    def seconds(self, name: str, work: float, size: float, cold: float) -> float:
        """Return the seconds of a kernel's call. size: by which its rate is looked up; cold: the
        part of its bytes that come from memory."""
        slow = work / rate(self._of(self.cold, name), size)
        if cold == 1 or not self.hot:
            return slow
        fast = work / rate(self._of(self.hot or self.cold, name), size)
        return cold * slow + (1 - cold) * min(fast, slow)

    @staticmethod
    def _of(curves: Mapping[str, Curve], name: str) -> Curve:
        group = class_of(name)
        for key in (name, group, "products" if group == "attention" else group):
            if key in curves:
                return curves[key]
        return curves["others"]


def rate(curve: Curve, size: float) -> float:
    """Return the rate at a size: between points a straight line in logarithms, beyond the ends
    the end's rate."""
    at = bisect.bisect_left(curve, (size, 0.0))
    if at == 0:
        return curve[0][1]
    if at == len(curve):
        return curve[-1][1]
    small, slow = curve[at - 1]
    large, fast = curve[at]
    part = math.log(size / small) / math.log(large / small)
    return slow * math.pow(fast / slow, part)


@dataclass(frozen=True)
class Link:
    """A way for bytes.

    bandwidth: bytes per second that a rank receives; latency: seconds of a transfer, however small;
    hop: seconds for each further rank of a ring, or level of a tree; takes: share of the device's
    arithmetic that a transfer occupies.
    """

    __pydantic_config__ = _KEYS
    bandwidth: _Rate
    latency: _Time = 0.0
    hop: _Time = 0.0
    takes: _Share = 0.0


@dataclass(frozen=True)
class Device:
    """A device with its host's and cluster's links.

    peak: FLOP/s by type of numbers, of which MFU is a share; memory: bytes; cores: of a CPU that
    was measured, 0 for a GPU; cache: bytes that it keeps for the next kernel; launch: seconds of
    the smallest command; yardstick: seconds of bench/yardstick.py's pass when a CPU was measured, 0
    if unknown, by which no prediction changes; copy: bytes per second of a copy within memory;
    update: of an optimizer's kernels on the host, bytes per second; peers: between ranks of a host;
    network: into a host, whose ranks share it; host: between device and host; read, write: a rank's
    file.
    """

    __pydantic_config__ = _KEYS
    about: Annotated[str, PlainValidator(_about)]
    target: Annotated[str, Choice(*TARGETS)]
    rates: tuple[Rates, ...]
    copy: _Rate
    update: _Rate
    peers: Link
    network: Link
    host: Link
    read: Link
    write: Link
    peak: Annotated[Mapping[str, float], PlainValidator(_peaks)] = field(
        default_factory=dict
    )
    memory: _Size = 0
    cores: Annotated[int, Integer(0, 4096)] = 0
    cache: _Size = 0
    launch: _Time = 1e-6
    yardstick: _Time = 0.0

    def rates_of(self, precision: str, threads: int) -> Rates:
        """Return the rates for a type and for the nearest number of threads. A type that the file
        does not have takes those of another type of 16 bits, else of any."""

        def far(r: Rates) -> tuple[int, int, float]:
            half = "f32" not in (r.precision, precision)
            return (
                r.precision != precision,
                not half,
                abs(math.log(r.threads / threads)),
            )

        return min(self.rates, key=far)


_ADAPTER: TypeAdapter[Device] = TypeAdapter(Device)


def read(text: str, name: str) -> Device:
    """Return the device of a file's text. Raises SpecError with a line for each mistake."""
    reader = Reader(lambda line: f"{printable(name)}:{line + 1}")
    if not text.strip():
        raise reader.fail(0, "is empty", "a device as ./run calibrate writes it")
    root = reader.document(text)
    if not isinstance(root.value, dict):
        raise reader.fail(0, "is no mapping", "a device as ./run calibrate writes it")
    try:
        device = _ADAPTER.validate_python(root.plain())
    except ValidationError as e:
        raise several(
            _line(root, error) for error in e.errors(include_url=False)
        ) from None
    if not device.rates:
        raise SpecError(f"{root.where}: rates: is empty; allowed: at least one entry")
    return device


def _line(root: Node, error: Any) -> str:
    path = error["loc"]
    at = f"{root.at(path).where}: {dotted(path)}"
    if error["type"] == "zg":
        return f"{at}: {error['msg']}"
    if error["type"] == "missing":
        return f"{at}: is missing; allowed: a file as ./run calibrate writes it"
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{at}: is not a key here; allowed: the keys that ./run calibrate writes"
    return f"{at}: is {shown(error['input'])}; allowed: a value as ./run calibrate writes it"


def names() -> list[str]:
    """Return the devices that zgen brings."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(word: str) -> Device:
    """Return the device of a name, or of a file's path. Raises SpecError for a file with mistakes,
    OSError or UnicodeDecodeError if there is none."""
    path = FOLDER / f"{word}.yaml" if word in names() else Path(word)
    if not path.is_file() or path.stat().st_size > MOST:
        raise OSError(f"{path}: no file of at most {MOST} bytes")
    return read(path.read_text(), word)


def linked(
    device: Device, peers: Mapping[str, float], network: Mapping[str, float]
) -> Device:
    """Return a device with other numbers of its links."""
    return replace(
        device,
        peers=replace(device.peers, **peers),
        network=replace(device.network, **network),
    )
