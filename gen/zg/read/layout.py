"""layout.py -- checks the keys of the layout of ranks against each other: hosts, ranks that share
parameters, and ranks that share states."""

from __future__ import annotations

from collections.abc import Callable, Container

from .schema import Cluster, Zero

# Returns the error of a key, from the mistake and the allowed values.
Wrong = Callable[[str, str, str], Exception]


def _divisors(n: int, local: int = 1) -> list[int]:
    """Return the divisors of n that divide `local` or are a multiple of it."""
    found = [d for d in range(1, n + 1) if n % d == 0]
    return [d for d in found if not d % local or not local % d]


def _nearest(some: list[int], to: int) -> str:
    """Return the nearest numbers below and above `to`."""
    below = [x for x in some if x < to]
    above = [x for x in some if x > to]
    return " or ".join(map(str, below[-1:] + above[:1]))


def _hosts(ranks: int, local: int, wrong: Wrong) -> None:
    if local and ranks % local:
        raise wrong(
            "cluster.local",
            f"{ranks} ranks are no hosts of {local}; where hosts have different numbers of ranks, "
            "it is a number that divides each",
            _nearest(_divisors(ranks), local),
        )


def _key(z: Zero, given: Container[str], wrong: Wrong) -> str:
    """Return the key that sets how many ranks share parameters, '' if none does."""
    said = {
        "zero.shard_size": z.shard_size > 0,
        "zero.mics_shard_size": z.mics_shard_size > 0,
        "zero.hpz_partition_size": z.hpz_partition_size > 1,
    }
    found = [key for key, given in said.items() if given]
    if len(found) > 1:
        raise wrong(
            found[1],
            f"{found[0]} says how many ranks share parameters",
            "one of the two",
        )
    if z.mics_shard_size > 0 and z.states == "all" and "zero.states" in given:
        raise wrong(
            "zero.states",
            "all: mics_shard_size shares states over as many ranks as parameters",
            "shard, or zero.shard_size in its place",
        )
    if not found and z.states == "shard":
        raise wrong(
            "zero.states",
            "shard: the ranks of a shard are not said",
            "zero.shard_size beside it, or all",
        )
    return found[0] if found else ""


def _shared(c: Cluster, z: Zero, key: str, wrong: Wrong) -> None:
    n, local = z.shared, c.local or c.ranks
    sizes = [size for size in _divisors(c.ranks, local) if size > 1]
    least = 1 if key == "zero.shard_size" else 3
    if z.stage < least:
        raise wrong(
            key,
            f"at stage {z.stage} every rank has all parameters"
            + " and states" * (z.stage == 0),
            f"zero.stage {3 if z.stage or least > 1 else '1, 2 or 3'} beside it, or {key} 0",
        )
    if n == 1:
        what, stage = ("parameters", 2) if z.stage == 3 else ("states", 0)
        raise wrong(
            key,
            f"1: every rank would have all {what}",
            f"{', '.join(map(str, sizes))}, or zero.stage {stage} beside {key} 0",
        )
    if c.ranks % n:
        why = f"{c.ranks} ranks are no sets of {n}"
        raise wrong(key, why, _nearest(sizes, n) or "0")
    if n % local and local % n:
        raise wrong(
            key,
            f"{n} ranks are neither a part of a host of {local} nor whole hosts",
            _nearest(sizes, n),
        )


def _beside(z: Zero, key: str, wrong: Wrong) -> None:
    """Refuse settings that require all ranks to share parameters or states."""
    if z.replicates and z.hpz_partition_size > 1:
        raise wrong(
            "zero.states",
            "hpz_partition_size shares states over all ranks",
            "all, or zero.shard_size instead",
        )
    if z.replicates and z.offload_optimizer.device != "none":
        raise wrong(
            "zero.states" if z.states == "shard" else key,
            "with an offloaded optimizer each rank would keep the states of other ranks' shards "
            "on its host, too",
            "zero.shard_size and zero.states all, which has the same bits and takes less (beside a "
            "ds_config.json: by --set, or in the spec)",
        )
    if z.offload_param.device != "none":
        raise wrong(
            key,
            "parameters that are offloaded are shared by all ranks",
            "0, or zero.offload_param.device none beside it",
        )


def agree(c: Cluster, z: Zero, given: Container[str], wrong: Wrong) -> None:
    """Refuse keys that contradict each other. given: keys in the spec. With one rank they have no
    effect."""
    key = _key(z, given, wrong)
    if c.ranks > 1:
        _hosts(c.ranks, c.local, wrong)
    if key and c.ranks > 1:
        _shared(c, z, key, wrong)
        if z.shared < c.ranks:
            _beside(z, key, wrong)
