"""test_names.py -- tests that names in train.c are only for readers: whatever a spec calls its
layers, the program computes the same."""

import pathlib

import pytest

from tests.lib import law, trainer

# Names that are no identifiers of C, that are letters of dimensions, or that other layers' values
# have.
ODD = {
    "gpt": {
        "mlp.c_fc": "mlp.0",
        "mlp.c_proj": "d",
        "name: ln_1": "name: h",
        "name: ln_2": "name: fc_2",
        "name: attn": "name: int8_max",
    },
    "llama": {
        "[mlp.gate_proj, mlp.up_proj]": "[mlp.0, mlp.1]",
        "mlp.down_proj": "d",
        "name: input_layernorm": "name: w",
        "name: post_attention_layernorm": "name: shard_block",
        "name: self_attn": "name: g",
        "lm_head": "v",
    },
}


def renamed(family: str, folder: pathlib.Path) -> pathlib.Path:
    text = law.path(family).read_text()
    for old, new in ODD[family].items():
        assert old in text
        text = text.replace(old, new)
    made = folder / "odd.yaml"
    made.write_text(text)
    return made


@pytest.mark.parametrize("family", ODD)
def test_names_change_no_bit(family: str, tmp_path: pathlib.Path) -> None:
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 2000))
    usual, odd = (
        trainer.sh(
            trainer.build(trainer.generate(spec)),
            *("--data", tmp_path / "tokens", "--steps", 2, "--hash"),
        ).splitlines()[-1]
        for spec in (law.path(family), renamed(family, tmp_path))
    )
    assert usual == odd and usual.startswith("weights ")
