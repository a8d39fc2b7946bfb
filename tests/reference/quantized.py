"""quantized.py -- writes quantized.npz: weights that bitsandbytes quantizes to NF4, with double
quantization, and dequantizes.

A tool for developers; the tests read its file and need neither:
    python3 -m venv /tmp/nf4
    /tmp/nf4/bin/pip install torch==2.15.0 bitsandbytes==0.50.2 numpy
    /tmp/nf4/bin/python -P tests/reference/quantized.py
The file holds `levels` of NF4, the dynamic 8-bit type from 0 on as `dynamic`, and for each number of
elements N in known.NF4 the weights `nf4.N` in float32 and `mean.N`, their blocks' mean. Each has at
most 256 blocks of 64: there bitsandbytes has one mean, as the program has for every 256 blocks.
Factors go through its formula for types without a kernel: its CPU kernel takes one of these 256
factors to a value that is not quite the nearest.
"""

import pathlib
import sys

import numpy as np
import torch
from bitsandbytes import functional

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import known  # noqa: E402


def main() -> None:
    found, dynamic = {}, functional.create_dynamic_map()
    for n in known.NF4:
        x = torch.from_numpy(known.tailed(n))
        q, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
        mean = state.absmax.mean()
        factors = (state.absmax - mean).double()
        codes, scale = torch.ops.bitsandbytes.quantize_blockwise(factors, dynamic, 256)
        state.absmax = dynamic[codes.int()] * scale + mean
        found[f"nf4.{n}"] = functional.dequantize_4bit(q, state).numpy().ravel()
        found[f"mean.{n}"] = mean.numpy()
        found["levels"] = state.code.numpy()
    found["dynamic"] = dynamic.numpy()[127:]
    np.savez_compressed(HERE / "quantized.npz", **found)


if __name__ == "__main__":
    main()
