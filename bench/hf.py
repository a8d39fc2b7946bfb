"""hf.py -- computes the loss of a folder that out/train has saved, with transformers itself.

    python3 -P bench/hf.py FOLDER TOKENS SEQUENCE

TOKENS: a file of uint16, as `--val` reads it; SEQUENCE: train.sequence. Needs torch and
transformers in an environment of their own; -P, so that they do not import kernels.py beside this
file. Every weight must come from the folder, and every tensor in it must be used. The last line is
the mean loss in float64, to compare with the program's `val loss`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def loss(folder: str, tokens: str, sequence: int) -> float:
    """Return the mean loss over every whole sample of the file, as the program computes it."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
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
