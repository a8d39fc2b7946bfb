"""hf.py -- writes NAME.npz beside hf/NAME/config.json: loss, gradients and the losses of 10 AdamW
steps in float64, by transformers' own model of that file.

A tool for developers; the tests read its files and need no transformers:
    python3 -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.15.0 transformers==5.24.0 numpy
    /tmp/hf/bin/python tests/reference/hf.py [NAME ...]
Weights and tokens are known.py's. A file holds loss; grad/TENSOR (digests, see known.py) of the
first global batch; losses [10]. Dropout is 0. A `.float()` in transformers' code keeps float64.
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import known  # noqa: E402

HERE = pathlib.Path(__file__).parent / "hf"
torch.Tensor.float = torch.Tensor.double  # Gemma's norms would round gradients
SEQUENCE, BATCH, STEPS = 40, 8, 10
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def named(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters by the names of the hub's files, which have no prefix for GPT-2 and
    another name of GPT-NeoX's head."""
    found = {
        name.removeprefix("transformer."): p for name, p in model.named_parameters()
    }
    if model.config.model_type == "gpt_neox":
        found["embed_out.weight"] = found.pop("lm_head.weight")
    return found


def loss_of(model: torch.nn.Module, tokens: np.ndarray, first: int) -> torch.Tensor:
    x, y = map(torch.from_numpy, known.batch(tokens, SEQUENCE, first, BATCH))
    logits = model(x).logits
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), y.reshape(-1)
    )


def reference(name: str) -> dict[str, np.ndarray]:
    config = AutoConfig.from_pretrained(HERE / name)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float64
    ).eval()
    params = named(model)
    with torch.no_grad():
        for key, p in params.items():
            p.copy_(torch.from_numpy(known.of_model(name, key, tuple(p.shape))))
    tokens = known.stream(f"hf {name}", SEQUENCE, config.vocab_size)
    matrices = [p for p in params.values() if p.ndim > 1]
    others = [p for p in params.values() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": DECAY},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    losses, out = [], {}
    for step in range(STEPS):
        loss = loss_of(model, tokens, step * BATCH)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            out = {
                f"grad/{key}": known.digest(key, p.grad.numpy()).astype(np.float32)
                for key, p in params.items()
            }
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return {"loss": np.array(losses[0]), "losses": np.array(losses), **out}


if __name__ == "__main__":
    names = [path.name for path in HERE.iterdir() if path.is_dir()]
    for name in sys.argv[1:] or sorted(names):
        made = reference(name)
        np.savez_compressed(HERE / f"{name}.npz", **made)
        print(name, made["losses"])
