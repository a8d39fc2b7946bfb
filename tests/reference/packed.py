"""packed.py -- writes tests/data/packed: small Llamas in few bits by bitsandbytes, and the weights
to which it dequantizes them.

A tool for developers; the tests read its folders and need none of this:
    python3 -m venv /tmp/bnb
    /tmp/bnb/bin/pip install torch==2.15.0 transformers==5.24.0 bitsandbytes==0.50.2 accelerate
    /tmp/bnb/bin/python -P tests/reference/packed.py
transformers writes `nf4`, with double quantization, and `int8`. Of `mixed` each linear has another
form, of bitsandbytes' own functions. weights.json has for each linear the SHA-256 of its float32
weights, and its first ones.
"""

import hashlib
import json
import pathlib
import tempfile

import torch
from bitsandbytes import functional
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.integrations.bitsandbytes import dequantize_bnb_weight

OUT = pathlib.Path(__file__).resolve().parents[1] / "data" / "packed"
FOUR = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": torch.bfloat16,
}
# width, feed-forward, heads of k and v
SIZES = {"nf4": (128, 256, 4), "int8": (32, 256, 2), "mixed": (64, 96, 2)}
# quant_type, dtype, blocksize, nested, quant_storage; None: 8 bits
FORMS = {
    "q_proj": ("fp4", torch.bfloat16, 64, True, torch.uint8),
    "k_proj": ("nf4", torch.float16, 64, False, torch.uint8),
    "v_proj": ("nf4", torch.float32, 128, True, torch.uint8),
    "o_proj": None,
    "gate_proj": ("nf4", torch.bfloat16, 64, True, torch.bfloat16),
    "up_proj": ("fp4", torch.float16, 512, False, torch.uint8),
    "down_proj": ("nf4", torch.bfloat16, 32, True, torch.uint8),
}


def model(name: str, folder: str) -> None:
    """Save a model of random weights."""
    width, inner, kv = SIZES[name]
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=kv,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder
    )


def digest(w: torch.Tensor) -> dict[str, object]:
    x = w.detach().float().contiguous().numpy()
    first = [float(v) for v in x.ravel()[:4]]
    return {"sha256": hashlib.sha256(x.tobytes()).hexdigest(), "first": first}


def quantized(name: str, config: BitsAndBytesConfig) -> dict[str, object]:
    """Write a folder of transformers."""
    with tempfile.TemporaryDirectory() as plain:
        model(name, plain)
        made = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=config, dtype=torch.bfloat16
        )
    made.save_pretrained(OUT / name)
    return {
        f"{key}.weight": digest(
            dequantize_bnb_weight(part.weight, getattr(part, "state", None))
        )
        for key, part in made.named_modules()
        if type(part).__name__ in ("Linear4bit", "Linear8bitLt")
    }


def mixed() -> dict[str, object]:
    found, told = {}, {}
    with tempfile.TemporaryDirectory() as plain:
        model("mixed", plain)
        config = json.loads((pathlib.Path(plain) / "config.json").read_text())
        with safe_open(f"{plain}/model.safetensors", "pt") as file:
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for key, w in {**found}.items():
        part = key.split(".")[-2]
        if part not in FORMS:
            continue
        if not FORMS[part]:
            x, rows, _ = functional.int8_vectorwise_quant(w.half())
            found |= {
                key: x,
                key.replace("weight", "SCB"): rows,
                f"{key}_format": torch.tensor(0, dtype=torch.uint8),
            }
            told[key] = digest(functional.int8_vectorwise_dequant(x, rows))
            continue
        kind, dtype, block, nested, storage = FORMS[part]
        x, state = functional.quantize_4bit(
            w.to(dtype),
            blocksize=block,
            compress_statistics=nested,
            quant_type=kind,
            quant_storage=storage,
        )
        found[key] = x
        found |= {f"{key}.{k}": v for k, v in state.as_dict(packed=True).items()}
        told[key] = digest(functional.dequantize_4bit(x, state))
    (OUT / "mixed").mkdir(exist_ok=True)
    save_file(found, OUT / "mixed" / "model.safetensors", {"format": "pt"})
    made = BitsAndBytesConfig(**FOUR)
    text = {**config, "quantization_config": made.to_dict()}
    (OUT / "mixed" / "config.json").write_text(json.dumps(text, indent=2) + "\n")
    return told


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    told = {
        "nf4": quantized("nf4", BitsAndBytesConfig(**FOUR)),
        "int8": quantized("int8", BitsAndBytesConfig(load_in_8bit=True)),
        "mixed": mixed(),
    }
    (OUT / "weights.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
