"""test_workers.py -- tests that work spread over cores has the results of one core."""

import os
import signal

import pytest
from zg import main
from zg.check import check
from zg.read.node import SpecError
from zg.search import fit, workers

from tests.search import test_fit


def on(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(cores)})


@pytest.mark.parametrize("cores", [1, 2, 5])
def test_results_are_in_order(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Items need not be sent, so they may be of any type."""
    on(monkeypatch, cores)
    items = [lambda n=n: n for n in range(7)]
    assert workers.spread(lambda item: item() ** 2, items) == [n * n for n in range(7)]
    assert workers.spread(str, []) == []


def test_processes_are_as_many_as_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 2)
    found = {*workers.spread(lambda _: os.getpid(), range(64))}
    assert len(found) <= 2 and os.getpid() not in found
    assert workers.spread(lambda _: os.getpid(), [0]) == [os.getpid()]


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("error", [SpecError("a: b\nc: d"), check.CheckError("order")])
def test_an_error_is_raised(
    monkeypatch: pytest.MonkeyPatch, cores: int, error: Exception
) -> None:
    def act(n: int) -> None:
        if n:
            raise error

    on(monkeypatch, cores)
    with pytest.raises(type(error)) as found:
        workers.spread(act, [0, 1, 0])
    assert str(found.value) == str(error)


def test_a_process_that_is_killed_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever kills it, perhaps the system for lack of memory."""
    on(monkeypatch, 2)
    first = os.getpid()

    def killed(self: fit.Search, *_: object, **__: object) -> dict[str, object]:
        assert os.getpid() != first
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    s = test_fit.loaded("gpt-tiny", *test_fit.GPU, *test_fit.holding("zero.stage"))
    found = fit.Search(s, fit.clock.device_of(s), {"device": None})
    monkeypatch.setattr(fit.Search, "numbers", killed)
    with pytest.raises(
        ChildProcessError, match="one of 2 processes that plan was killed"
    ):
        found.add([test_fit.loaded("gpt-tiny", f"train.seed={n}") for n in (1, 2)])
    monkeypatch.setattr(main, "text", lambda _: found.add(test_fit.every(s)))
    spec = str(test_fit.trainer.ROOT / "model_specs/gpt-tiny.yaml")
    assert main.main([spec, "--fit"]) == 3
    assert "was killed, perhaps for lack of memory" in capsys.readouterr().err


def test_a_wrong_plan_of_the_front_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, 2)
    found = fit.find(
        test_fit.loaded("gpt-tiny", *test_fit.GPU, *test_fit.holding(*test_fit.PLACES))
    )
    assert len(found.best) > 1
    found.prove(check.check)

    def refuse(p: object) -> None:
        raise check.CheckError("order")

    with pytest.raises(check.CheckError, match="order"):
        found.prove(refuse)


def test_a_search_does_not_depend_on_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    s = test_fit.loaded("gpt-tiny", *test_fit.GPU, *test_fit.holding(*test_fit.PLACES))
    results = []
    for cores in (1, 3):
        on(monkeypatch, cores)
        found = fit.find(s)
        results.append((found.rows, found.dropped, found.planned, fit.table(found)))
    assert results[0] == results[1] and len(results[0][0]) > 10
