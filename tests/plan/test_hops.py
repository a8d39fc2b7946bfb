"""test_hops.py -- tests how queues hand slots on: the waits of a hop, and events that order
nothing."""

import pytest
from zg.passes import hops
from zg.passes.hops import Hop, Ring, free, full
from zg.plan.plan import Event, Plan, Ref, Section, Step

from tests.lib.plans import planned

FORMS = ("full", "free", "end", "updated")
OFFLOADED = (
    "zero.stage=3",
    "zero.offload_optimizer.device=cpu",
    "zero.offload_param.device=cpu",
)
WAYS = [
    ("zero.stage=0",),
    ("zero.stage=3",),
    OFFLOADED,
    (*OFFLOADED, "zero.overlap_comm=false"),
    ("zero.stage=3", "zero.overlap_comm=false"),
    ("cluster.ranks=1", "train.offload_activations=true"),
]


def test_a_hop_takes_one_slot_and_fills_another() -> None:
    a, b = Ring("stage", 2).slot(5), Ref("fetched", 0)
    assert a == Ref("stage", 1)
    both, first = (
        Hop("up", b, a),
        Hop("fetch", Ref("param", 7), b, takes=False),
    )
    assert (both.waits, both.recs) == ((full(b), free(a)), (full(a), free(b)))
    assert (first.waits, first.recs) == ((free(b),), (full(b),))


def test_a_route_goes_from_slot_to_slot() -> None:
    home, fetched, stage, new = (
        Ref("param", 3),
        Ref("fetched", 0),
        Ref("stage", 1),
        Event("new", 0),
    )
    one, two = hops.route(home, [("fetch", fetched), ("up", stage)], (new,))
    assert (one.src, one.dst, two.src, two.dst) == (
        home,
        fetched,
        fetched,
        stage,
    )
    assert new in one.waits and new not in two.waits and full(home) not in one.waits
    assert (
        full(fetched) in one.recs
        and full(fetched) in two.waits
        and free(fetched) in two.recs
    )


def test_an_event_of_one_queue_goes() -> None:
    """An event recorded and awaited on one queue is removed, with a mark that becomes empty. An
    event between two queues stays (a control)."""
    alone, a, b = Event("alone", 0), Event("a", 0), Event("b", 0)
    steps = (
        Step("main", "fwd", "", recs=(alone, a)),
        Step("main", "mark", "", waits=(alone,)),
        Step("up", "copy", "", waits=(a,), recs=(b,)),
        Step("main", "bwd", "", waits=(alone, b)),
    )
    (section,) = hops.crossing([Section("micro_batch", 1, steps)])
    assert [s.op for s in section.steps] == ["fwd", "copy", "bwd"]
    fwd, copy, bwd = section.steps
    assert (fwd.recs, copy.waits, copy.recs, bwd.waits) == (
        (a,),
        (a,),
        (b,),
        (b,),
    )


def sides(p: Plan) -> dict[str, tuple[set[str], set[str]]]:
    """Return for each name of events the queues that wait for them and the queues that record
    them."""
    out: dict[str, tuple[set[str], set[str]]] = {}
    for s in (s for section in p.sections for s in section.steps):
        for n, events in enumerate((s.waits, s.recs)):
            for e in events:
                out.setdefault(e.name, (set(), set()))[n].add(s.queue)
    return out


@pytest.mark.parametrize("way", WAYS)
def test_events_are_slots_and_ends_between_queues(
    way: tuple[str, ...],
) -> None:
    p = planned("gpt-tiny", *way)
    found = sides(p)
    assert sorted(found) == [e.name for e in p.events]
    classes = {c.name for c in p.classes}
    for name, (waiting, recording) in found.items():
        assert waiting and recording and len(waiting | recording) > 1
        form, _, what = name.partition(".")
        assert form in FORMS
        if form in ("full", "free") and what not in ("up", "tile", "ring"):
            assert what in classes
    assert bool(found) == (way != ("zero.stage=3", "zero.overlap_comm=false"))
