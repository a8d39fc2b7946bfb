"""clock.py -- the clock of a spec's plan: the device that `cluster.device` names, with
`cluster.links`."""

from __future__ import annotations

from dataclasses import asdict

from ..plan.plan import Plan
from ..read.node import meant, printable
from ..read.schema import LinkKeys, Spec
from . import device
from .seconds import Clock


def _given(keys: LinkKeys) -> dict[str, float]:
    return {name: x for name, x in asdict(keys).items() if x is not None}


def of(spec: Spec, p: Plan) -> Clock:
    """Return the clock of a plan. Raises SpecError as `device_of` does."""
    return Clock(p, device_of(spec))


def device_of(spec: Spec) -> device.Device:
    """Return the device of a spec, with the spec's links. Raises SpecError if it is unknown or of
    another target."""
    c = spec.cluster
    word = c.device or device.DEFAULT[spec.targets[0]]
    try:
        found = device.load(word)
    except (OSError, UnicodeDecodeError):
        known = device.names()
        raise spec.wrong(
            "cluster.device",
            f"{printable(word)} is no device and no file that can be read",
            f"{', '.join(known)}, or the path of a file that ./run calibrate wrote",
            meant(word, known),
        ) from None
    if found.target not in spec.targets:
        raise spec.wrong(
            "cluster.device",
            f"{c.device} is a device of target {found.target}, for which the spec makes no program",
            f"a device of {' or '.join(spec.targets)}",
        )
    links = c.links
    return device.linked(found, _given(links.peers), _given(links.network))
