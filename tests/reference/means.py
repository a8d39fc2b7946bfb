"""means.py -- writes means.npz: steps of tiny models of model_specs/ in float64 whose loss is the mean
over each micro-batch's targets, then over micro-batches, by PyTorch.

A tool for developers, used like make.py, whose models it takes. A file holds, for each model of
known.MEANS: NAME/losses and NAME/norms of known.MEANS_STEPS steps on known.prompts, and
NAME/grad/TENSOR (digests) of the first one. The model has micro-batches of two samples; a
micro-batch without a target, whose mean PyTorch calls NaN, adds 0.
"""

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from make import HERE, SPECS, Gpt, Llama, in_file, known, load, rate
from torch import nn


def loss_of(
    net: nn.Module, inputs: np.ndarray, targets: np.ndarray, smoothing: float
) -> torch.Tensor:
    logits, hits = net(torch.from_numpy(inputs)), torch.from_numpy(targets)
    if (targets < 0).all():
        return logits.sum() * 0
    return F.cross_entropy(
        logits.flatten(0, 1), hits.flatten(), ignore_index=-1, label_smoothing=smoothing
    )


def make(name: str, kind: type[nn.Module], smoothing: float) -> dict[str, np.ndarray]:
    spec = yaml.safe_load((SPECS / f"{name}-tiny.yaml").read_text())
    net, t, o = kind(spec), spec["train"], spec["train"]["optimizer"]
    load(net)
    T, G, B = t["sequence"], t["global_batch"], known.MEANS_BATCH
    tokens = known.prompts(known.stream(name, T, spec["model"]["vocab"]), T)
    parameters = list(net.parameters())
    groups = [
        {
            "params": [p for p in parameters if (p.ndim >= 2) == decays],
            "weight_decay": o["weight_decay"] * decays,
        }
        for decays in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"])
    losses, norms, found = [], [], {}
    for step in range(known.MEANS_STEPS):
        adamw.zero_grad()
        inputs, targets = known.batch(tokens, T, step * G, G)
        targets = np.where(targets == known.HOLE, -1, targets)
        inputs = np.where(inputs == known.HOLE, 0, inputs)
        total = 0.0
        for first in range(0, G, B):
            rows = slice(first, first + B)
            loss = loss_of(net, inputs[rows], targets[rows], smoothing) / (G // B)
            loss.backward()
            total += loss.item()
        losses.append(total)
        if not step:
            for tensor, p in net.named_parameters():
                grad = known.digest(tensor, in_file(net, tensor, p.grad).copy())
                found[f"{name}/grad/{tensor}"] = grad
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, o["clip"]).item())
        for group in adamw.param_groups:
            group["lr"] = rate(t, step + 1)
        adamw.step()
    made = {f"{name}/losses": np.array(losses), f"{name}/norms": np.array(norms)}
    print(name, losses, norms)
    return found | made


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, smoothing in known.MEANS.items():
        found |= make(name, {"gpt": Gpt, "llama": Llama}[name], smoothing)
    np.savez_compressed(HERE / "means.npz", **found)
