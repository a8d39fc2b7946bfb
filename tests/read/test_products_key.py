"""test_products_key.py -- tests train.products: its refusals, and its place in outputs."""

from __future__ import annotations

import pytest
from zg.read.spec import SpecError, load
from zg.write import config

from tests.lib import law, trainer

BF16 = "train.precision=bf16"


@pytest.mark.parametrize(
    "keys,said",
    [
        (
            ("train.products=tiles",),
            "tiles applies to bf16 only; f32 has a single order; allowed: auto, or with "
            "train.precision bf16",
        ),
        (
            ("train.products=pairs", "train.precision=f16"),
            "pairs applies to bf16 only; f16 has a single order; allowed: auto, or with "
            "train.precision bf16",
        ),
        (
            ("train.products=tiles", BF16, "targets=[sm_90]"),
            "tiles applies to CPUs only; GPUs have an order of their own; allowed: auto, or with the "
            "target cpu added",
        ),
        (
            ("train.products=rows", BF16),
            "'rows' is not known; allowed: auto or pairs or tiles",
        ),
    ],
)
def test_what_is_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpecError) as e:
        load(str(law.path("gpt")), keys)
    assert str(e.value) == f"--set: train.products: {said}"


@pytest.mark.parametrize(
    "order,number",
    [("auto", "-1"), ("pairs", "ZK_PAIRS"), ("tiles", "ZK_TILES")],
)
def test_a_program_has_what_the_spec_says(order: str, number: str) -> None:
    """The recipe has a line for the order if the spec sets it; otherwise a run adds one."""
    key = f"train.products={order}"
    source = trainer.generate(law.path("gpt"), BF16, key)
    assert f".products = products, .order = {number}," in source
    lines = config.recipe(load(str(law.path("gpt")), (BF16, key)))
    said = [line for line in lines if "products" in line]
    assert said == ([] if order == "auto" else [f'train.products: "{order}"'])


def test_f32_has_one_order() -> None:
    assert ".products" not in trainer.generate(law.path("gpt"))
