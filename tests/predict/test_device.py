"""test_device.py -- tests that device files are read: those that zgen brings, and wrong ones."""

import json

import pytest
import yaml
from zg import build
from zg.predict import clock, device
from zg.predict.device import DEFAULT, rate
from zg.read import spec
from zg.read.keytypes import TARGETS
from zg.read.node import SpecError
from zg.write import times

from tests.lib.plans import planned
from tests.lib.trainer import ROOT

GOOD = yaml.safe_load((device.FOLDER / "cpu.yaml").read_text())


@pytest.mark.parametrize("name", device.names())
def test_a_device_of_zgen_is_read(name: str) -> None:
    found = device.load(name)
    assert found.target in TARGETS
    for r in found.rates:
        assert {"products", "others"} <= set(r.cold)


def test_every_target_has_a_device() -> None:
    assert DEFAULT.keys() == {*TARGETS}
    for target, name in DEFAULT.items():
        assert device.load(name).target == target


def test_rates_between_points_lie_on_a_line_of_logarithms() -> None:
    curve = ((10.0, 100.0), (1000.0, 400.0))
    assert rate(curve, 1) == rate(curve, 10) == 100
    assert rate(curve, 1000) == rate(curve, 1e9) == 400
    assert rate(curve, 100) == pytest.approx(200)


def changed(**more: object) -> str:
    return json.dumps(GOOD | more, indent=1)


POINTS = "a list of [size, rate], sizes ascending"
RATE = "a number from 1 to 1e+18"
WRONG = (
    {
        "a device: {": ("line", "broken syntax"),
        "": ("line", "is empty; allowed: a device"),
        "- 1": ("line", "is no mapping; allowed: a device"),
        changed(about="a\x1b[31m"): ("about", "printable characters"),
        changed(about=""): ("about", "printable characters"),
        changed(launch=-1): (
            "launch",
            "-1 is out of range; allowed: a number from 0 to 1000",
        ),
        changed(speed=1): ("speed", "is not a key here"),
        json.dumps({k: v for k, v in GOOD.items() if k != "peers"}): (
            "peers",
            "is missing",
        ),
        changed(target="sm_70"): ("target", "allowed: cpu or sm_80"),
        changed(rates=[]): ("rates", "is empty"),
        changed(rates=[{"precision": "f32", "cold": {"products": [[1, 1]]}}]): (
            "cold",
            "others is missing",
        ),
        changed(rates=[{"precision": "f32", "cold": {"zk_linear_fw": [[1, 1]]}}]): (
            "cold",
            "did you mean zk_linear_fwd?",
        ),
        changed(
            rates=[GOOD["rates"][0] | {"hot": {"products": [[1, 1]]}}],
        ): ("hot", "others is missing"),
    }
    | {
        changed(peak=peak): ("peak", RATE)
        for peak in ({"f32": -5}, {"f32": "x"}, {"f32": True}, {"f32": 1e-300})
    }
    | {changed(peak=peak): ("peak", "to FLOP/s") for peak in ({"f64": 1e12}, 5)}
    | {
        changed(rates=[{"precision": "f32", "cold": {"others": points}}]): (
            "cold",
            said,
        )
        for points, said in (
            *((x, POINTS) for x in ([], [[2, 1], [1, 1]], [[1]], 5, [[1, 1], 2])),
            *(
                ([x], RATE)
                for x in ([1, 0], [1, 1e-20], [True, 1], [1, True], ["x", 2])
            ),
        )
    }
)


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused_at_its_line(text: str) -> None:
    key, message = WRONG[text]
    with pytest.raises(SpecError) as wrong:
        device.read(text, "mine.yaml")
    said = str(wrong.value)
    assert said.startswith("mine.yaml:") and message in said
    assert key in said or key == "line"


def test_a_spec_names_its_device(tmp_path) -> None:
    """`cluster.device` is a name or a file, `cluster.links` changes its links, and neither changes
    the plan."""
    path = ROOT / "model_specs" / "gpt-tiny.yaml"
    mine = tmp_path / "mine.yaml"
    mine.write_text(changed(about="my own"))

    def said(*keys: str) -> str:
        try:
            read = spec.load(str(path), [*keys], None, None)
            return times.table(clock.of(read, build.build(read).plan))
        except SpecError as e:
            return str(e)

    assert "my own" in said(f"cluster.device={mine}")
    assert "no device and no file" in said("cluster.device=h101")
    assert "did you mean h100?" in said("cluster.device=h101")
    assert "is a device of target sm_90" in said("cluster.device=h100", "targets=[cpu]")
    slow = said("cluster.links.peers.bandwidth=1e5")
    assert float(slow.split("a step")[1].split()[0]) > 2 * float(
        said().split("a step")[1].split()[0]
    )
    assert planned("gpt-tiny") == planned("gpt-tiny", "cluster.device=cpu")
