"""test_shards.py -- tests that each rank initialises its own shard of the weights and no more."""

from __future__ import annotations

import collections
import re

import pytest

from tests.lib import program, trainer

# Inserted after the headers of a train.c: prints the elements of each flat buffer that zk_init
# makes.
NOTED = """
#include <stdio.h>
#include <unistd.h>
static void noted(zk *k, const zk_launch *L, void *p, const zk_span *spans, int64_t nspans,
                  int64_t first, int64_t n, uint64_t seed, int full)
{
    fprintf(stderr, "made %d %p %lld %lld\\n", getpid(), (const void *)spans, (long long)first,
            (long long)n);
    zk_init(k, L, p, spans, nspans, first, n, seed, full);
}
#define zk_init noted
"""
HEADER = '#include "zk.h"\n'
FLAT = re.compile(
    r'\{"master", \w+\(0\), SIZE\(\w+\), (?P<shard>SHARD_\w+), 0, (?P=shard), \d+, (?P<count>\d+), '
    r"(?:-1|GROUP_ALL), ZR_MAIN, ZR_\w+, hash_\w+\},"
)

Pieces = dict[str, list[tuple[int, int]]]


def made(source: str) -> dict[str, Pieces]:
    """Return the [first, end) of the pieces that each rank makes, by process and flat buffer."""
    assert source.count(HEADER) == 1
    binary = trainer.build(source.replace(HEADER, HEADER + NOTED))
    done = program.run(binary, "--steps", 0)
    assert done.code == 0, done.err
    ranks: dict[str, Pieces] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for pid, spans, first, n in re.findall(
        r"^made (\d+) (\w+) (\d+) (\d+)$", done.err, re.M
    ):
        ranks[pid][spans].append((int(first), int(first) + int(n)))
    return ranks


def sizes(source: str) -> tuple[list[int], int]:
    """Return the elements of each flat buffer over all layers and ranks, and those of one rank's
    shards."""
    ranks = int(re.search(r"\.ranks = (\d+)", source)[1])
    table = re.search(r"zr_state states\[\] = \{\n(.*?)\n\};", source, re.S)[1]
    numbers = dict(re.findall(r"^    (SHARD_\w+) = (\d+),", source, re.M))
    shards = [
        int(numbers[flat["shard"]]) * int(flat["count"])
        for flat in FLAT.finditer(" ".join(table.split()))
    ]
    return [ranks * shard for shard in shards], sum(shards)


def joined(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pieces in order, with neighbours joined. An element in two pieces is an error."""
    whole: list[tuple[int, int]] = []
    for first, end in sorted(pieces):
        assert not whole or first >= whole[-1][1], f"{first} is made twice"
        if whole and first == whole[-1][1]:
            first = whole.pop()[0]
        whole.append((first, end))
    return whole


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_each_rank_makes_its_own_shard(family: str, stage: int) -> None:
    """Each rank makes its own shard; at stage 0, without shards, a rank makes everything."""
    source = trainer.generate(
        trainer.ROOT / "model_specs" / f"{family}-tiny.yaml",
        f"zero.stage={stage}",
        "cluster.ranks=3",
        "train.global_batch=24",
        "train.micro_batch=1",
        "zero.stage3_param_persistence_threshold=100",
    )
    flats, each = sizes(source)
    ranks = made(source)
    assert len(ranks) == 3
    groups = (
        [[rank] for rank in ranks.values()] if stage == 0 else [list(ranks.values())]
    )
    for group in groups:
        spans = {name for rank in group for name in rank}
        found = [
            joined([piece for rank in group for piece in rank[name]]) for name in spans
        ]
        assert sorted(found) == sorted([(0, size)] for size in flats)
    for rank in ranks.values():
        elements = sum(end - first for pieces in rank.values() for first, end in pieces)
        assert elements == (3 * each if stage == 0 else each)
