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
            f"{local} does not divide {ranks} ranks; if hosts have different numbers of ranks, "
            "give a number that divides each of them",
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
            f"{found[0]} sets the number of ranks that share parameters, too",
            "only one of the two",
        )
    if z.mics_shard_size > 0 and z.states == "all" and "zero.states" in given:
        raise wrong(
            "zero.states",
            "all contradicts mics_shard_size, which shards states over the same ranks as "
            "parameters",
            "shard, or zero.shard_size instead of mics_shard_size",
        )
    if not found and z.states == "shard":
        raise wrong(
            "zero.states",
            "shard needs the number of ranks in a shard",
            "all, or with zero.shard_size",
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
            f"zero.stage {3 if z.stage or least > 1 else '1, 2 or 3'} with it, or {key} 0",
        )
    if n == 1:
        what, stage = ("parameters", 2) if z.stage == 3 else ("states", 0)
        raise wrong(
            key,
            f"with 1 every rank would have all {what}",
            f"{', '.join(map(str, sizes))}, or {key} 0 with zero.stage {stage}",
        )
    if c.ranks % n:
        why = f"{n} does not divide {c.ranks} ranks"
        raise wrong(key, why, _nearest(sizes, n) or "0")
    if n % local and local % n:
        raise wrong(
            key,
            f"{n} ranks neither divide a host of {local} ranks nor are a multiple of it",
            _nearest(sizes, n),
        )


def _beside(z: Zero, key: str, wrong: Wrong) -> None:
    """Refuse settings that require all ranks to share parameters or states."""
    if z.replicates and z.hpz_partition_size > 1:
        raise wrong(
            "zero.states",
            "hpz_partition_size shards states over all ranks",
            "all, or zero.shard_size instead",
        )
    if z.replicates and z.offload_optimizer.device != "none":
        raise wrong(
            "zero.states" if z.states == "shard" else key,
            "with offload_optimizer each rank would also keep the states of other ranks' shards "
            "on its host",
            "zero.shard_size with zero.states all, which gives the same bits in less memory "
            "(next to a "
            "ds_config.json: with --set, or in the spec)",
        )
    if z.offload_param.device != "none":
        raise wrong(
            key,
            "offloaded parameters are sharded over all ranks",
            "0, or with zero.offload_param.device none",
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
