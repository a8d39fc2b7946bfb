"""hf.py -- transformers itself on a folder that out/train has saved: the loss it finds there.

    python3 -P bench/hf.py FOLDER TOKENS SEQUENCE

TOKENS: a file of uint16, as `--val` reads it; SEQUENCE: train.sequence. Needs torch and
transformers in an environment of their own; -P, for they must not find kernels.py beside this
file. Every weight must come from the folder, and every tensor there must have its place; the last
line is the mean loss in float64, to hold beside the program's `val loss`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def loss(folder: str, tokens: str, sequence: int) -> float:
    """Of every whole sample of the file, as the program has it."""
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    wrong = {k: v for k, v in told.items() if v and k != "error_msgs"}
    if wrong:
        sys.exit(f"{folder}: {wrong}")
    print(f"{type(model).__name__}, {model.dtype}, {model.num_parameters():,}")
    data = np.fromfile(tokens, np.uint16).astype(np.int64)
    samples = (len(data) - 1) // sequence
    total = 0.0
    model = model.double().eval()
    for at in range(0, samples * sequence, sequence):
        piece = torch.from_numpy(data[at : at + sequence + 1])
        with torch.no_grad():
            logits = model(piece[None, :-1]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, piece[1:]).item()
    return total / samples


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    _, folder, tokens, sequence = sys.argv
    if any(Path(folder).glob("tokenizer*")):
        print(type(AutoTokenizer.from_pretrained(folder)).__name__)
    print(f"loss {loss(folder, tokens, int(sequence)):.6f}")
