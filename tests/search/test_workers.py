"""test_workers.py -- tests that work spread over cores has the results of one core."""

import os

import pytest
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
def test_an_error_is_raised(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    on(monkeypatch, cores)
    with pytest.raises(ZeroDivisionError, match="division"):
        workers.spread(lambda n: 1 // n, [1, 0])


def test_a_search_does_not_depend_on_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    s = test_fit.loaded("gpt-tiny", *test_fit.GPU, *test_fit.holding(*test_fit.PLACES))
    tables = []
    for cores in (1, 3):
        on(monkeypatch, cores)
        tables.append(fit.table(fit.find(s)))
    assert tables[0] == tables[1] and tables[0].count("zero.") > 3
