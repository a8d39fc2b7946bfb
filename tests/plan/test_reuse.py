"""test_reuse.py -- tests units that stay gathered from one use to the next: their choice, the
elements gathered at once, and the bytes saved on the wire. test_law.py tests the bits."""

import pathlib
import tempfile
from collections import Counter

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zg.check import check
from zg.plan.plan import Plan
from zg.predict import cost
from zg.read import spec
from zg.search import search
from zg.write import explain

from tests.lib import drawn
from tests.lib.plans import planned

FAR = 10**9
GPT = ("gpt-tiny", "zero.stage=3", "cluster.ranks=2")


def reuse(distance: int) -> str:
    return f"zero.stage3_max_reuse_distance={distance}"


def gathered(p: Plan) -> Counter[str]:
    """Return how often each unit is gathered in a micro-batch."""
    steps = p.section("micro_batch").steps
    return Counter(
        s.unit
        for s in steps
        if s.op == "gather" and s.outs[0].cls.startswith("ring") and s.outs[0].at == 0
    )


def sizes(p: Plan) -> dict[str, int]:
    return {f.name: f.shard * p.head.ranks for f in p.flats}


def test_the_nearest_stay() -> None:
    """Units with a short distance to their next use stay. gpt-tiny uses the embedding, three
    blocks, the head (with the embedding's table), and the blocks again."""
    size = sizes(planned(*GPT))
    head, block = size["embed"], size["block"]
    all_ = {"embed[0]", "block[0]", "block[1]", "block[2]", "head[0]"}
    for distance, twice in (
        (0, {"block[0]", "block[1]", "block[2]"}),
        (head - 1, {"block[0]", "block[1]", "block[2]"}),
        (head, {"block[0]", "block[1]"}),
        (head + 2 * block - 1, {"block[0]", "block[1]"}),
        (head + 2 * block, {"block[0]"}),
        (head + 4 * block, set()),
        (FAR, set()),
    ):
        p = planned(*GPT, reuse(distance))
        check.check(p)
        # the embedding's table stays for the head if three blocks are within the distance
        once = {"head[0]"} if distance >= 3 * block else set()
        assert gathered(p) == Counter(all_ - once) + Counter(twice)
        assert cost.staying(p) == 3 - len(twice) + len(once)
        assert f"from one use to the next: {cost.staying(p)}" in explain.explain(p)


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt2-124m", "llama3-8b"])
def test_the_wire_falls_by_what_stays(name: str) -> None:
    """The wire falls by (W-1)/W of each unit that is not gathered again, in every micro-batch, and
    by nothing else."""
    keys = ("zero.stage=3", "zero.stage3_max_live_parameters=1000000000000")
    p, far = planned(name, *keys), planned(name, *keys, reuse(10**12))
    W, real, micro_batches = (
        p.head.ranks,
        {"f32": 4, "bf16": 2}[p.head.real],
        p.head.micro_batches,
    )
    skipped = gathered(p) - gathered(far)

    def flat(unit):
        return p.flat(
            unit.split("[")[0]
            if "head" not in unit or any(f.name == "head" for f in p.flats)
            else "embed"
        )

    elems = sum(n * flat(unit).shard for unit, n in skipped.items())
    a, b = cost.training_wire(p), cost.training_wire(far)
    assert a.bytes - b.bytes == micro_batches * (W - 1) * elems * real > 0

    def steps(p):
        return sum(s.op == "gather" for s in p.section("micro_batch").steps)

    assert a.messages - b.messages == micro_batches * (steps(p) - steps(far)) > 0
    assert max(gathered(far).values()) == 1


def test_the_bound_wins() -> None:
    """Every bound on live parameters holds and limits the units that stay, and prefetch keeps its
    distance."""
    free = planned(*GPT, reuse(FAR))
    least = planned(*GPT).head
    seen = set()
    for bound in range(least.live, free.head.live + 4096, 4096):
        p = planned(*GPT, reuse(FAR), f"zero.stage3_max_live_parameters={bound}")
        check.check(p)
        assert p.head.live <= bound and p.head.prefetch == least.prefetch
        seen.add(cost.staying(p))
    assert (
        len(seen) > 2
        and {1, cost.staying(free)} <= seen
        and p.head.live == free.head.live
    )
    few = planned(*GPT, reuse(FAR), "zero.stage3_max_live_parameters=1000")
    assert few.head.live == few.head.bound > 1000


@pytest.mark.parametrize("name", ["gpt-tiny", "llama3-8b"])
def test_a_bound_of_0_is_the_least(name: str) -> None:
    """A bound of 0 becomes the least bound that uncut units allow. One element less cuts a unit, or
    is raised to that bound."""
    least = planned(name, "zero.stage=3", "zero.stage3_max_live_parameters=0").head
    assert least.live == least.bound and least.prefetch == 0
    assert (
        planned(
            name,
            "zero.stage=3",
            f"zero.stage3_max_live_parameters={least.live}",
        ).head
        == least
    )
    below = f"zero.stage3_max_live_parameters={least.live - 1}"
    if name == "gpt-tiny":
        assert planned(name, "zero.stage=3", below).head.live < least.live
        return
    assert planned(name, "zero.stage=3", below).head == least


def test_nothing_changes_below_stage_3() -> None:
    for stage in (0, 1, 2):
        keys = ("gpt-tiny", f"zero.stage={stage}")
        assert planned(*keys) == planned(*keys, reuse(FAR))


def test_slots_are_what_is_alive() -> None:
    """There are as many slots as units alive at once: all blocks, or the two that prefetch
    needs."""
    for distance, count in ((0, 2), (FAR, 3)):
        assert planned(*GPT, reuse(distance)).cls("ring.block").slots == count
    p = planned("gpt2-124m", "zero.stage=3", reuse(FAR))
    assert p.cls("ring.block").slots == 12 and p.head.live == sum(
        f.count * f.shard * p.head.ranks for f in p.flats
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn.specs(),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 3000, 40000, FAR]),
    st.sampled_from([0, 5000, FAR]),
    st.sampled_from([2000, 20000, 60000, FAR]),
    st.booleans(),
    st.sampled_from([0, 50, 100000]),
)
def test_drawn_models(
    mapping: drawn.Mapping,
    ranks: int,
    distance: int,
    prefetch: int,
    bound: int,
    overlap: bool,
    small: int,
) -> None:
    """The checker counts the elements gathered at once by its own clocks: the stated number is
    exact, and no setting breaks the bound."""
    mapping["cluster"] = {"ranks": ranks}
    mapping["train"]["global_batch"] = mapping["train"]["micro_batch"] * ranks * 2
    mapping["zero"] = {
        "stage": 3,
        "overlap_comm": overlap,
        "stage3_max_reuse_distance": distance,
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_max_live_parameters": bound,
        "stage3_param_persistence_threshold": small,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "spec.yaml"
        path.write_text(yaml.safe_dump(mapping))
        built = search.find(spec.load(str(path)))
        mapping["zero"]["stage3_max_live_parameters"] = built.plan.head.bound
        path.write_text(yaml.safe_dump(mapping))
        again = search.find(spec.load(str(path)))
    check.check(built.plan)
    assert again.plan == built.plan
    raised = any("the least possible" in note for note in built.notes)
    assert raised == (built.plan.head.bound > (bound or built.plan.head.bound))
