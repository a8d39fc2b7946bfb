"""test_published.py -- tests predictions against speeds that others published and against steps that
were measured on an H200, and that device files and page are those that the programs write."""

import statistics
import sys

import pytest
from zg.predict import device
from zg.predict.seconds import operands

from tests.lib.plans import planned
from tests.lib.trainer import ROOT

sys.path.append(str(ROOT / "bench"))
import gpu_devices
import published
import results

PAGE = ROOT / "docs" / "prediction.md"
FOUNDRY, LENGTHS = "llm-foundry", "llm-foundry, other lengths"


def errors(half: str, *tables: str) -> list[float]:
    found = [e for r, e in published.errors() if r.half == half and r.table in tables]
    assert found
    return [abs(e) for e in found]


def test_the_table_has_the_rows_of_its_source() -> None:
    """All 38 rows of 2,048 tokens and 32 of other lengths are there, every second one of them is
    fitted to, and each model is on both sides if it has several rows."""
    lengths = [r for r in published.rows() if r.table == LENGTHS]
    assert [r.half for r in lengths] == ["fit", "test"] * 16
    assert {r.sequence for r in lengths} == {2**n for n in (9, 10, 12, 13, 14, 15, 16)}
    assert {(r.model, r.sequence): r.rate for r in lengths}["mpt-1b", 32768] == 12025
    rows = [r for r in published.rows() if r.table == FOUNDRY]
    assert len(rows) == 38 and {r.sequence for r in rows} == {2048}
    assert [r.half for r in rows] == ["fit", "test"] * 19
    rates = {(r.model, r.ranks): r.rate for r in rows}
    seven = [rates["mpt-7b", n] for n in (8, 128, 256, 512)]
    assert seven == [10643, 10475, 10119, 9670]
    sides = {(r.model, r.half) for r in rows}
    assert all((r.model, half) in sides for r in rows for half in ("fit", "test"))


def test_rows_that_were_not_fitted_are_predicted() -> None:
    """FSDP's other half, of the program that was fitted, is 2 % off on average and 12 % at most, at
    other lengths than 2,048 tokens 3.5 % and 8 %. llm.c's rows, by the device files of GPUs, are
    another program's, to which nothing was fitted: 14 % at most. All bounds are just above the
    errors in docs/prediction.md."""
    found = errors("test", FOUNDRY)
    assert len(found) == 19
    assert statistics.mean(found) <= 0.02 and max(found) <= 0.12
    found = errors("test", LENGTHS)
    assert len(found) == 16
    assert statistics.mean(found) <= 0.035 and max(found) <= 0.08
    others = {r.table for r in published.rows()} - {FOUNDRY, LENGTHS}
    assert max(errors("test", *others)) <= 0.14


def test_the_device_file_is_the_fit() -> None:
    """Another value of any fitted constant fits the rows of the fit worse."""
    on = device.load(str(published.FSDP))
    cold = on.rates[0].cold
    x = {name: cold[name][-1][1] for name in ("products", "attention", "others")}
    x |= {"takes": on.network.takes}
    assert x.keys() == published.START.keys()
    assert device.read(published.written(x), "x") == on
    half = [r for r in published.rows() if r.half == "fit"]

    def miss(**more: float) -> float:
        return published.loss(published.misses(half, x | more))

    best = miss()
    for name in x:
        for factor in (0.95, 1.05):
            assert miss(**{name: factor * x[name]}) > best, (name, factor)


def test_steps_of_an_h200_are_predicted_from_its_kernels() -> None:
    """Kernels were timed one by one; a step of four models is within 10 % of their sum as
    played."""
    found = [took / real - 1 for _, took, real in gpu_devices.steps()]
    assert len(found) == 4
    assert max(map(abs, found)) <= 0.10


@pytest.mark.parametrize("gpu", gpu_devices.GPUS, ids=lambda g: g.name)
def test_device_files_are_those_that_the_program_writes(gpu: gpu_devices.Gpu) -> None:
    """gen/zg/devices is the output of .venv/bin/python bench/gpu_devices.py."""
    assert (device.FOLDER / f"{gpu.name}.yaml").read_text() == gpu_devices.text(gpu)


def test_every_device_of_a_gpu_is_written() -> None:
    assert {*device.names()} == {g.name for g in gpu_devices.GPUS} | {"cpu"}


def test_the_page_has_the_tables() -> None:
    """docs/prediction.md has the output of bench/published.py and of bench/gpu_devices.py steps."""
    page = PAGE.read_text()
    assert results.text(published.table()) in page
    assert results.markdown(gpu_devices.steps_table()) in page


def test_integer_sums_are_no_operand_of_many_elements() -> None:
    """A sum of squares reads its gradients and nothing else of their number."""
    p = planned("gpt2-124m", "targets=[sm_90]")
    calls = {f.name: f.calls for f in p.fns}
    found = 0
    for step in (s for section in p.step for s in section.steps):
        for call in calls.get(step.op, ()):
            if call.kernel == "zk_square_sum":
                n = next(i for i in call.args if isinstance(i, int))
                assert [o.bytes for o in operands(p, step, call)] == [4 * n]
                found += 1
    assert found
