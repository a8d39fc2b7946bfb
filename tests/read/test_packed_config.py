"""test_packed_config.py -- tests quantization_config of a folder: bitsandbytes' is read, and all
others are refused by name."""

from __future__ import annotations

import json
import pathlib

import pytest
from zg.read import spec
from zg.read.node import SpecError

from tests.lib import packed
from tests.read.test_from import GPT2, LLAMA, folder

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NF4 = FOUR | {"bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
LORA = "train.lora={rank: 4, alpha: 8}"
BASED = "train.lora={rank: 4, alpha: 8, base: nf4}"


def told(tmp_path: pathlib.Path, said: object, *keys: str) -> str:
    """Return the note about quantization_config."""
    there = folder(tmp_path, {**LLAMA, "quantization_config": said})
    notes = spec.load(None, keys, None, there).notes
    (note,) = (x for x in notes if "quantization_config" in x)
    return note


@pytest.mark.parametrize(
    "said, format_, base",
    [
        (NF4, "nf4", "nf4"),
        (FOUR, "fp4", "nf4"),
        (EIGHT, "int8", "int8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4", "nf4"),
    ],
)
def test_notes(tmp_path: pathlib.Path, said: object, format_: str, base: str) -> None:
    """A note says that the linears are quantized, and how a base of adapters treats them."""
    begins = f"quantization_config: the linears are in bitsandbytes' {format_}: "
    plain = f"{begins}the program dequantizes them when it loads them"
    anew = "quantizes them anew"
    kept = "keeps their numbers where the form is the same"
    note = told(tmp_path, said)
    assert note.endswith(f"{plain}, and all parameters are trained")
    note = told(tmp_path, said, LORA)
    mine = kept if base == format_ else anew
    assert note.endswith(f"{plain}; train.lora.base: {base} {mine}")
    note = told(tmp_path, said, BASED)
    mine = kept if format_ == "nf4" else anew
    assert note.endswith(f"{begins}train.lora.base: nf4 {mine}")


@pytest.mark.parametrize("name", packed.FOLDERS)
def test_the_model_is_the_plain_one(tmp_path: pathlib.Path, name: str) -> None:
    given = packed.DATA / name
    config = json.loads((given / "config.json").read_text())
    del config["quantization_config"]
    plain = spec.load(None, (), None, folder(tmp_path, config))
    assert spec.load(None, (), None, str(given)).model == plain.model


@pytest.mark.parametrize(
    "said, wrong",
    [
        (
            {"quant_method": "awq"},
            "15: quantization_config: the weights are quantized by 'awq';",
        ),
        (
            {"quant_method": "gptq", "bits": 4},
            "quantized by 'gptq'; only those of bits",
        ),
        ({"quant_method": "fp8"}, "quantized by 'fp8'; only those of bitsandbytes are"),
        ({"bits": 4}, "the weights are quantized; only those of bitsandbytes are read"),
        ("nf4", "the weights are quantized; only those of bitsandbytes are read"),
        ({"quant_method": "bitsandbytes"}, "0 of load_in_8bit, load_in_4bit are true"),
        (FOUR | {"load_in_8bit": True}, "2 of load_in_8bit, load_in_4bit are true"),
        (
            FOUR | {"bnb_4bit_quant_type": "af4"},
            "18: quantization_config.bnb_4bit_quant_type: is 'af4'; allowed: fp4, nf4",
        ),
    ],
)
def test_refusals(tmp_path: pathlib.Path, said: object, wrong: str) -> None:
    with pytest.raises(SpecError) as e:
        told(tmp_path, said)
    assert wrong in str(e.value) and len(str(e.value).splitlines()) == 1


def test_a_transposed_family(tmp_path: pathlib.Path) -> None:
    """bitsandbytes stores GPT-2's linears in another order than the family's files."""
    there = folder(tmp_path, {**GPT2, "quantization_config": NF4})
    with pytest.raises(SpecError, match=r"stores this family's linears as \[out,in\]"):
        spec.load(None, (), None, there)
