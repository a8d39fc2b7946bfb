"""conftest.py -- shared settings of all tests: their order, hypothesis without chance or clocks,
the tally for `run`."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter

import pytest
from hypothesis import settings

from tests.lib import trainer, zk
from tests.lib.program import data, program  # noqa: F401 -- fixtures of tests of the runtime

# The same examples in every run: a failure can be repeated, and a pass means the same.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.load_profile("fixed")

# Programs run as on the named class of processors: an Intel one with AMX takes avx512.
named = os.environ.get("ZR_TEST_ISA")
if named:
    if named not in zk.CLASSES or not zk.runs("tiles" if named == "amx" else named):
        raise pytest.UsageError(
            f"ZR_TEST_ISA={named}: not on this processor, "
            f"which can stand for {', '.join(zk.isas(zk.CLASSES[:-1]))}"
        )
    os.environ["ZK_ISA"] = "avx512" if named == "amx" else named

# A background job of a shell ignores these signals, and so would the programs that tests start and
# signal.
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) == signal.SIG_IGN:
        usual = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if usual else signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """Compile kernels for one processor, or for all of them if exhaustive tests run."""
    if "ZR_TEST_DEVICE" not in os.environ:
        few = "not exhaustive" in config.option.markexpr
        targets = ("sm_90a",) if few else ()
        os.environ.setdefault("ZR_GENCODE", trainer.processors(*targets))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort long tests to the front, so that those at the end are short, and spread tests that wait
    among them. `quick` marks the first row of a test that is short and needs no machine of its
    own."""

    def marked(item, *names):
        return any(item.get_closest_marker(name) for name in names)

    def phase(item):
        if marked(item, "waits"):
            return "waits"
        return "long" if marked(item, "slow", "exhaustive") else "short"

    number, count = Counter(), Counter(map(phase, items))
    place = {}
    for item in items:
        of = phase(item)
        place[item] = (of == "short", (number[of] + 0.5) / count[of])
        number[of] += 1
    items.sort(key=place.get)
    seen = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        long = marked(item, "slow", "exhaustive", "alone")
        if not long and test not in seen:
            item.add_marker("quick")
            seen.add(test)


def pytest_collection_finish() -> None:
    """Exempt existing objects from the cycle collector, because they stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Append to the file that `run` names: "passed failed", counting an error of set-up as failed,
    and a line for each skipped test with its reason."""
    path = os.environ.get("ZR_TALLY")
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if not path or reporter is None or hasattr(config, "workerinput"):
        return
    count = {key: len(reports) for key, reports in reporter.stats.items()}
    failed = count.get("failed", 0) + count.get("error", 0)
    with open(path, "a", encoding="utf-8") as tally:
        tally.write(f"{count.get('passed', 0)} {failed}\n")
        for report in reporter.stats.get("skipped", []):
            reason = report.longrepr[2].removeprefix("Skipped: ")
            tally.write(f"skipped {' '.join(reason.split())}\n")


# ---- kernels


@pytest.fixture(params=zk.ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    zk.need(request.param)
    return request.param


@pytest.fixture
def isas() -> list[str]:
    return zk.isas()


@pytest.fixture(params=[*zk.ISAS, zk.EMULATED])
def target(request: pytest.FixtureRequest) -> str:
    """Return an object of a CPU's kernels, or a GPU's kernels under emulation."""
    zk.need(request.param)
    return request.param


@pytest.fixture
def kernels(target: str) -> zk.Kernels:
    return zk.Kernels(target)
