"""test_fits.py -- tests cluster.memory: a plan that does not fit is refused, with ways that do
fit."""

import re

import pytest
from zg import build
from zg.facts import reserve
from zg.predict import clock, play
from zg.read import spec
from zg.search import fit, fits, knobs, search

from tests.lib.plans import SPECS, planned

BASE = (
    "zero.stage=1",
    "cluster.ranks=2",
    "train.global_batch=8",
    "targets=[cpu]",
)
OFFLOAD = ("zero.stage=3", "zero.offload_optimizer.device=cpu")


def ways(said: str) -> list[list[str]]:
    """Return the ways that a refusal names, each as its settings."""
    named = said.partition("allowed: ")[2].partition(";")[0]
    return [re.split(" with | and ", way) for way in named.split(", or ")]


def refused(*keys: str) -> str:
    with pytest.raises(spec.SpecError) as e:
        planned("gpt-tiny", *BASE, *keys)
    return str(e.value)


def test_a_byte_decides() -> None:
    need = planned("gpt-tiny", *BASE).arena("cpu")
    planned("gpt-tiny", *BASE, f"cluster.memory.device={need}")
    said = refused(f"cluster.memory.device={need - 1}")
    assert said.startswith(
        f"--set: cluster.memory.device: a rank needs {need:,} bytes of device "
        f"memory but has only {fits.size(need - 1)}; allowed: zero.stage=3, or "
    )


def test_processors_alone_are_named_where_they_fit() -> None:
    """A plan for GPUs and CPUs that is too large for a GPU names the target cpu, if that fits."""
    p = planned("gpt-tiny")
    least = p.arena("cpu")
    hint = f"; to run without a GPU, targets=[cpu], which needs {fits.size(least)}"
    for limit, named in ((least, True), (least - 1, False)):
        with pytest.raises(spec.SpecError) as e:
            planned("gpt-tiny", f"cluster.memory.device={limit}")
        assert str(e.value).endswith(hint) == named
    planned("gpt-tiny", f"cluster.memory.device={least}", "targets=[cpu]")


def test_the_ways_that_are_named_fit() -> None:
    """Every way that a refusal names fits, at any limit."""
    least = planned(
        "gpt-tiny",
        *BASE,
        *OFFLOAD,
        "zero.offload_param.device=cpu",
        "train.recompute=full",
        "train.offload_activations=true",
    ).arena("cpu")
    for limit in (least, planned("gpt-tiny", *BASE).arena("cpu") - 1):
        named = ways(refused(f"cluster.memory.device={limit}"))
        assert 1 <= len(named) <= 3
        for way in named:
            assert planned("gpt-tiny", *BASE, *way).arena("cpu") <= limit
    assert (
        "no other setting that zgen tries (stage 3, recompute, offloading, "
        in refused(f"cluster.memory.device={least - 1}")
    )


def every(s: spec.Spec) -> list[knobs.Way]:
    """Return all ways that may be suggested for a spec, the spec itself first."""
    found = fit.Search(s, clock.device_of(s), {})
    some = knobs.settings(s, knobs.helpful(s))
    return [found.way(made) for made in knobs.combinations(s, some)]


@pytest.mark.parametrize(
    "keys,each",
    [
        ((), 9),
        pytest.param((), 1, marks=pytest.mark.exhaustive),
        pytest.param(
            ("zero.stage=3", "train.accumulate=layers"),
            1,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_every_way_is_found(keys: tuple[str, ...], each: int) -> None:
    """A way is named at exactly the memory that it needs, unless fewer settings or three faster
    ways fit there, too."""
    keys = *BASE, "zero.offload_optimizer.nvme_path=/tmp", *keys
    begun = spec.load(str(SPECS / "gpt-tiny.yaml"), (*keys, "cluster.memory.host=1GiB"))
    first, *found = every(begun)
    whole = fits.needs(search.find(first.spec).plan)["device"]
    tried = 0
    for way in found[::each]:
        needs = fits.needs(build.build(way.spec).plan)
        limits = [f"cluster.memory.{name}={max(1, n)}" for name, n in needs.items()]
        if needs["device"] < whole:
            named = ways(refused(*keys, *limits))
            assert (
                [*way.settings] in named
                or len(named) == 3
                or len(named[0]) < len(way.settings)
            ), (way.text, named)
            tried += 1
    assert tried > 30 / each


def test_a_way_is_what_changes_and_no_more() -> None:
    """Each way is a spec of its own with just the keys that it names. Those that are named have as
    few settings as possible, the fastest first."""
    name = str(SPECS / "gpt-tiny.yaml")
    begun = spec.load(name, (*BASE, *OFFLOAD))
    first, *found = every(begun)
    assert first.spec == begun
    assert len({repr(way.spec) for way in [first, *found]}) == len(found) + 1 > 10
    for way in found:
        read = spec.load(name, (*BASE, *OFFLOAD, *way.settings))
        assert (read.zero, read.train) == (way.spec.zero, way.spec.train)
    less = (
        f"cluster.memory.device={planned('gpt-tiny', *BASE, *OFFLOAD).arena('cpu') - 1}"
    )
    said = ways(refused(*OFFLOAD, less))
    assert sorted(said) == [
        ["train.offload_activations=true"],
        ["train.recompute=full"],
        ["zero.offload_param.device=cpu"],
    ]
    took = []
    for way in said:
        s = spec.load(name, (*BASE, *OFFLOAD, *way))
        took.append(play.step(clock.of(s, search.find(s).plan)).seconds)
    assert took == sorted(took) and took[0] < took[-1]


def test_a_disk_is_for_a_host_that_is_full() -> None:
    """A disk is suggested for a full host only, because it frees nothing on a device."""
    keys = *BASE, *OFFLOAD, "train.precision=bf16"
    on_disk = planned(
        "gpt-tiny",
        *keys,
        "zero.offload_optimizer.device=nvme",
        "zero.offload_optimizer.nvme_path=/tmp",
    )
    assert planned("gpt-tiny", *keys).arena("cpu") <= on_disk.arena("cpu")

    def load(*more):
        return spec.load(str(SPECS / "gpt-tiny.yaml"), (*keys, *more))

    def disk(s):
        return any("nvme" in way.text for way in every(s)[1:])

    assert not disk(load()) and disk(load("cluster.memory.host=1GiB"))


def test_a_size_without_a_unit() -> None:
    """A size without a unit is taken as bytes: 58 is surely a mistake, 4096 may be meant."""
    said = refused("cluster.memory.device=58")
    assert re.search(
        r"bytes of device memory but has only 58 bytes; did you mean 58GiB\? allowed: more",
        said,
    )
    assert "did you mean" not in refused("cluster.memory.device=4096")
    planned("gpt-tiny", *BASE, "cluster.memory.device=58GiB")


def test_a_gpus_arena_counts_where_it_is_a_target() -> None:
    """A GPU target counts its exact arena and the allowance beside it for libraries and NCCL's
    buffers."""
    p, both = (
        planned("gpt-tiny", *BASE, "targets=[cpu, sm_90]"),
        "targets=[cpu, sm_90]",
    )
    beside = reserve.bytes_of("sm_90", 2)
    need = p.arena("sm_90") + beside
    assert p.arena("sm_90") > p.arena("cpu") and beside > 6 * 10**8
    planned("gpt-tiny", *BASE, both, f"cluster.memory.device={need}")
    for there in (need - 1, p.arena("sm_90"), p.arena("cpu")):
        said = refused(both, f"cluster.memory.device={there}")
        assert (
            f"needs {fits.size(need)} of device memory (target sm_90: arena "
            f"{fits.size(p.arena('sm_90'))}, and about {fits.size(beside)} outside it) but has "
            f"only {fits.size(there)};" in said
        )


def test_another_rule_of_sums_is_named_where_it_fits() -> None:
    """Another rule of sums is named separately from ways that keep the bits: the dearest rule that
    fits, if there is one."""
    keys = ("zero.stage=3", "train.micro_batch=1", "train.global_batch=512")
    need = [
        planned("gpt-tiny", *BASE, *keys, f"train.sum={rule}").arena("cpu")
        for rule in ("tree", "{block: 16}", "fold")
    ]
    assert need[0] > need[1] > need[2]
    words = "; or, with different bits, train.sum={}, which takes less memory for sums of gradients"
    for limit, rule in (
        (need[0] - 1, "{block: 16}"),
        (need[1] - 1, "fold"),
        (need[2], "fold"),
    ):
        said = refused(*keys, "train.sum=tree", f"cluster.memory.device={limit}")
        assert said.endswith(words.format(rule)), said
    for rule in ("tree", "fold"):
        said = refused(
            *keys, f"train.sum={rule}", f"cluster.memory.device={need[2] - 1}"
        )
        assert "train.sum=" not in said


def test_the_host_has_a_limit_too() -> None:
    need = planned("gpt-tiny", *BASE, *OFFLOAD).hosted
    planned("gpt-tiny", *BASE, *OFFLOAD, f"cluster.memory.host={need}")
    said = refused(*OFFLOAD, f"cluster.memory.host={need - 1}")
    assert re.search(
        rf"cluster.memory.host: a rank needs {need:,} bytes of host memory",
        said,
    )
    assert ways(said) == [["zero.offload_optimizer.device=none"]]
    bf16 = ("train.precision=bf16", *OFFLOAD, "zero.sub_group_size=5000")
    less = planned("gpt-tiny", *BASE, *bf16).hosted
    said = refused(
        *bf16, "zero.offload_param.device=cpu", f"cluster.memory.host={less}"
    )
    assert ["zero.offload_param.device=none"] in ways(said)


def test_a_way_keeps_the_spec_s_other_keys() -> None:
    """A way keeps the spec's single buffer for tiles; four would not fit."""
    keys = (
        *OFFLOAD,
        "zero.offload_optimizer.buffer_count=1",
        "train.recompute=none",
    )
    again = planned("gpt-tiny", *BASE, *keys[:-1], "train.recompute=full")
    said = refused(
        *keys,
        f"cluster.memory.device={again.arena('cpu')}",
        f"cluster.memory.host={again.hosted}",
    )
    assert ways(said) == [["train.recompute=full"]]


def test_micro_batches_by_themselves_need_less() -> None:
    keys = ("zero.stage=3", "train.recompute=full", "train.micro_batch=1")
    least = planned("gpt-tiny", *BASE, *keys).arena("cpu")
    said = refused(*keys, "train.accumulate=layers", f"cluster.memory.device={least}")
    assert ways(said)[0] == ["train.accumulate=micro_batches"]
    less = planned("gpt-tiny", *BASE, *keys, *OFFLOAD).arena("cpu")
    said = refused(*keys, "train.accumulate=layers", f"cluster.memory.device={less}")
    assert [
        "zero.offload_optimizer.device=cpu",
        "train.accumulate=micro_batches",
    ] in ways(said)


def test_replicas_may_share() -> None:
    """A full memory leads replicas to share states among all ranks, then parameters, too."""
    keys = ("zero.stage=3", "cluster.ranks=4", "zero.shard_size=2")
    apart, states, all_ = (
        planned("gpt-tiny", *BASE, *keys, *more).arena("cpu")
        for more in (
            ["zero.states=shard"],
            [],
            ["zero.shard_size=0", "train.recompute=full"],
        )
    )
    assert apart > states > all_
    for limit, first in (
        (states, "zero.states=all"),
        (all_, "zero.shard_size=0"),
    ):
        said = refused(*keys, "zero.states=shard", f"cluster.memory.device={limit}")
        assert first in ways(said)[0]
        for way in ways(said):
            some = planned("gpt-tiny", *BASE, *keys, "zero.states=shard", *way)
            assert some.arena("cpu") <= limit


def test_values_on_the_host_may_come_back() -> None:
    keys = (
        "zero.stage=3",
        "train.recompute=none",
        "train.offload_activations=true",
    )
    need = planned("gpt-tiny", *BASE, *keys).hosted
    assert ways(refused(*keys, f"cluster.memory.host={need - 1}"))[0] == [
        "train.offload_activations=false"
    ]


def test_a_way_is_none_that_another_key_forbids() -> None:
    """A way that another key forbids is not named: offloaded parameters need masters."""
    bare = (
        "train.precision=bf16",
        "train.optimizer={type: AdamW, lr: 1.0e-3, masters: false}",
    )
    least = planned("gpt-tiny", *BASE, *OFFLOAD, "train.precision=bf16").arena("cpu")
    assert "zero.offload" not in refused(*bare, f"cluster.memory.device={least}")


def test_parameters_alone_go_to_a_file() -> None:
    params = (
        "zero.stage=3",
        "train.precision=bf16",
        "zero.offload_param.device=cpu",
        "zero.offload_param.nvme_path=/tmp",
    )
    host = planned("gpt-tiny", *BASE, *params).hosted
    said = refused(*params, f"cluster.memory.host={host - 1}")
    assert said.endswith(
        ", or zero.offload_param.device=nvme with zero.offload_param.nvme_path=/tmp"
    )
    assert said.count("nvme") == 2


@pytest.mark.parametrize(
    "text,size",
    [
        ("3MiB", 3 << 20),
        ("2 GB", 2 * 10**9),
        ("12345", 12345),
        ("24e9", 24 * 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    loaded = spec.load(str(SPECS / "gpt-tiny.yaml"), [f"cluster.memory.host={text}"])
    assert loaded.cluster.memory.host == size and loaded.cluster.memory.device is None


def test_no_size() -> None:
    assert "cluster.memory.device: " in refused("cluster.memory.device=much")
