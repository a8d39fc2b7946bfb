"""test_layout_keys.py -- tests keys of the layout of ranks: contradictions are refused at their
line with the allowed values, which then work; DeepSpeed's names mean the same as ours."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from zg.plan.text import print_plan
from zg.read.spec import SpecError, load
from zg.search import search

from tests.read import test_spec

SPEC = re.sub(r"(?m)^(zero|cluster):.*(\n +.*)*\n", "", test_spec.GPT.read_text())
# Further lines of a spec, and the error at the line of its key.
REFUSED = [
    (
        "cluster: {ranks: 8, local: 3}",
        "cluster.local: 3 does not divide 8 ranks; if hosts have different numbers of ranks, "
        "give a number that divides each of them; allowed: 2 or 4",
    ),
    (
        "cluster: {ranks: 8, local: 16}",
        "cluster.local: 16 does not divide 8 ranks; .*; allowed: 8",
    ),
    (
        "zero: {stage: 3, shard_size: 3}",
        "zero.shard_size: 3 does not divide 8 ranks; allowed: 2 or 4",
    ),
    (
        "zero: {stage: 3, shard_size: 100}",
        "zero.shard_size: 100 does not divide 8 ranks; allowed: 8",
    ),
    (
        "cluster: {ranks: 12, local: 6}\nzero: {stage: 3, shard_size: 4}",
        "zero.shard_size: 4 ranks neither divide a host of 6 ranks nor are a multiple of it; allowed: 3 or 6",
    ),
    (
        "zero: {stage: 3, shard_size: 1}",
        "zero.shard_size: with 1 every rank would have all parameters; allowed: 2, 4, 8, or "
        "zero.shard_size 0 with zero.stage 2",
    ),
    (
        "zero: {stage: 1, shard_size: 1}",
        "zero.shard_size: with 1 every rank would have all states; allowed: 2, 4, 8, or "
        "zero.shard_size 0 with zero.stage 0",
    ),
    (
        "zero: {stage: 3, mics_shard_size: 1}",
        "zero.mics_shard_size: with 1 every rank would have all parameters; .*",
    ),
    (
        "zero: {stage: 0, shard_size: 4}",
        "zero.shard_size: at stage 0 every rank has all parameters and states; allowed: zero.stage 1, "
        "2 or 3 with it, or zero.shard_size 0",
    ),
    (
        "zero: {stage: 2, mics_shard_size: 4}",
        "zero.mics_shard_size: at stage 2 every rank has all parameters; allowed: .*",
    ),
    (
        "zero: {stage: 1, hpz_partition_size: 4}",
        "zero.hpz_partition_size: at stage 1 every rank has all parameters; allowed: .*",
    ),
    (
        "zero: {stage: 3, states: shard}",
        "zero.states: shard needs the number of ranks in a shard; allowed: all, or with "
        "zero.shard_size",
    ),
    (
        "zero: {stage: 3, mics_shard_size: 4, states: all}",
        "zero.states: all contradicts mics_shard_size, which shards states over the same ranks as parameters; allowed: "
        "shard, or zero.shard_size instead of mics_shard_size",
    ),
    (
        "zero: {stage: 3, shard_size: 4, mics_shard_size: 4}",
        "zero.mics_shard_size: zero.shard_size sets the number of ranks that share parameters, too; "
        "allowed: only one of the two",
    ),
    (
        "zero: {stage: 3, mics_shard_size: 4, hpz_partition_size: 4}",
        "zero.hpz_partition_size: zero.mics_shard_size sets the number of ranks that share parameters, too; .*",
    ),
    (
        "zero: {stage: 3, hpz_partition_size: 4, states: shard}",
        "zero.states: hpz_partition_size shards states over all ranks; allowed: all, or "
        "zero.shard_size instead",
    ),
    (
        "zero: {stage: 3, shard_size: 4, states: shard, offload_optimizer: {device: cpu}}",
        "zero.states: with offload_optimizer each rank would also keep the states of other ranks' "
        "shards on its host; allowed: zero.shard_size with zero.states all, which gives the same "
        r"bits in less memory \(next to a ds_config\.json: with --set, or in the spec\)",
    ),
    (
        "zero: {stage: 3, mics_shard_size: 4, offload_optimizer: {device: cpu}}",
        "zero.mics_shard_size: with offload_optimizer each rank .*",
    ),
    (
        "zero: {stage: 3, shard_size: 4, offload_param: {device: cpu}}",
        "zero.shard_size: offloaded parameters are sharded over all ranks; allowed: 0, or "
        "with zero.offload_param.device none",
    ),
    (
        "zero: {stage: 3, shard_size: -1}",
        "zero.shard_size: -1 is out of range; allowed: an integer from 0 to .*",
    ),
    (
        "zero: {states: every}",
        "zero.states: 'every' is not known; allowed: all or shard",
    ),
]


def written(tmp: Path, lines: str) -> Path:
    path = tmp / "s.yaml"
    ranks = "" if "cluster:" in lines else "cluster: {ranks: 8}\n"
    path.write_text(f"{SPEC}{ranks}{lines}\n")
    return path


@pytest.mark.parametrize("lines,said", REFUSED)
def test_what_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    path = written(tmp_path, lines)
    batch = ("train.global_batch=24", "train.micro_batch=1")
    with pytest.raises(SpecError) as e:
        load(str(path), batch)
    place, _, message = str(e.value).partition(": ")
    assert re.fullmatch(said, message)
    section = f"{said.partition('.')[0]}:"
    at = [
        n
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if line.startswith(section)
    ]
    assert place == f"{path}:{at[0]}"
    offered = message.rpartition("allowed: ")[2]
    key = message.partition(":")[0]
    sizes = re.match(r"[\d, or]*", offered)[0]
    for size in re.findall(r"\d+", sizes):
        load(str(path), (*batch, f"{key}={size}"))


def text(tmp: Path, zero: str, ds: object = None) -> str:
    """Return the plan of 8 ranks."""
    path, config = written(tmp, zero), tmp / "ds.json"
    config.write_text(json.dumps(ds))
    keys = "train.global_batch=32", "train.micro_batch=1"
    spec = load(str(path), keys, str(config) if ds else None)
    return print_plan(search.find(spec).plan)


@pytest.mark.parametrize(
    "ours,key,size",
    [
        ("shard_size: 4, states: all", "hpz_partition_size", 4),
        ("shard_size: 4, states: shard", "mics_shard_size", 4),
        ("states: all", "hpz_partition_size", 1),
        ("states: all", "hpz_partition_size", 0),
        ("states: all", "mics_shard_size", -1),
        ("states: all", "mics_shard_size", 0),
    ],
)
def test_names_of_deepspeed(tmp_path: Path, ours: str, key: str, size: int) -> None:
    """DeepSpeed's names work in a spec and in a ds_config.json."""
    want = text(tmp_path, f"zero: {{stage: 3, {ours}}}")
    assert text(tmp_path, f"zero: {{stage: 3, {key}: {size}}}") == want
    named = {"hpz_partition_size": "zero_hpz_partition_size"}.get(key, key)
    ds = {"zero_optimization": {"stage": 3, named: size}}
    assert text(tmp_path, "zero: {stage: 3}", ds) == want
    assert (want == text(tmp_path, "zero: {stage: 3}")) == (size < 2)


@pytest.mark.parametrize(
    "key,size,said",
    [
        (
            "zero_hpz_partition_size",
            3,
            r"zero_optimization\.zero_hpz_partition_size: zero.hpz_partition_size: 3 does not divide 8 ranks",
        ),
        (
            "mics_shard_size",
            5,
            r"zero_optimization\.mics_shard_size: zero.mics_shard_size: 5 does not divide 8 ranks",
        ),
        (
            "mics_shard_size",
            -2,
            r"zero_optimization\.mics_shard_size: is -2; allowed: an integer from -1",
        ),
        (
            "zero_hpz_partition_size",
            2.5,
            r"zero_optimization\.zero_hpz_partition_size: is 2.5; allowed: ",
        ),
    ],
)
def test_what_a_ds_config_is_refused(
    tmp_path: Path, key: str, size: object, said: str
) -> None:
    with pytest.raises(SpecError) as e:
        text(
            tmp_path,
            "zero: {stage: 3}",
            {"zero_optimization": {"stage": 3, key: size}},
        )
    assert re.match(rf"{tmp_path}/ds\.json:1: {said}", str(e.value))
