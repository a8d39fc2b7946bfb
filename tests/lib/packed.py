"""packed.py -- reads and writes folders that bitsandbytes quantized, and dequantizes them by its
formulas, for comparison with the program.

tests/reference/packed.py wrote the folders of tests/data/packed with bitsandbytes itself.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import struct
from dataclasses import dataclass

import numpy as np

from tests.lib import quantized, trainer
from tests.lib.files import raw_file

DATA = trainer.ROOT / "tests" / "data" / "packed"
TOLD = json.loads((DATA / "weights.json").read_text())
FOLDERS = [*TOLD]
INVERSE = np.float32(7.874015718698502e-3)
TYPES = {"F32": "<f4", "F16": "<f2", "U8": "u1", "I8": "i1"}
FP4 = np.float32([0, 0.0625, 8, 12, 4, 6, 2, 3]) / np.float32(12)
LEVELS = {"nf4": quantized.NF4, "fp4": np.concatenate([FP4, -FP4])}
STATE = ".quant_state.bitsandbytes__"


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> np.ndarray:
        """Return the numbers; of bf16 as f32."""
        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, "<u2").astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, TYPES[self.dtype]).reshape(self.shape)


Tensors = dict[str, Tensor]


def read(folder: pathlib.Path) -> Tensors:
    whole = (folder / "model.safetensors").read_bytes()
    (n,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + n]), whole[8 + n :]
    header.pop("__metadata__", None)
    return {
        name: Tensor(x["dtype"], tuple(x["shape"]), data[slice(*x["data_offsets"])])
        for name, x in header.items()
    }


def write(folder: pathlib.Path, tensors: Tensors) -> None:
    """Write the tensors, and config.json of one of the folders beside them."""
    header, data = {}, b""
    for name, x in tensors.items():
        place = [len(data), len(data) + len(x.data)]
        header[name] = {"dtype": x.dtype, "shape": x.shape, "data_offsets": place}
        data += x.data
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(raw_file(header, data))


def plain(x: np.ndarray) -> Tensor:
    return Tensor("F32", x.shape, np.float32(x).tobytes())


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return f32 numbers after rounding to a type, ties to even."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = x.view(np.uint32)
    near = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return x if dtype == "float32" else near.view(np.float32)


def state_of(tensors: Tensors, name: str) -> tuple[str, dict]:
    """Return the name and the content of a weight's JSON."""
    (key,) = (key for key in tensors if key.startswith(f"{name}{STATE}"))
    return key, json.loads(tensors[key].data)


def factors(tensors: Tensors, name: str) -> np.ndarray:
    """Return the factor of each block of 4 bits."""
    _, state = state_of(tensors, name)
    found = tensors[f"{name}.absmax"].array()
    if f"{name}.nested_absmax" not in tensors:
        return found
    scales = tensors[f"{name}.nested_absmax"].array()
    scale = np.repeat(scales, state["nested_blocksize"])[: found.size]
    values = tensors[f"{name}.nested_quant_map"].array()[found]
    return values * scale + np.float32(state["nested_offset"])


def codes(tensors: Tensors, name: str) -> np.ndarray:
    both = np.frombuffer(tensors[name].data, np.uint8)
    return np.stack([both >> 4, both & 15], 1).ravel()


def products(tensors: Tensors, name: str) -> np.ndarray:
    """Return the weights before they are rounded to the type of the JSON."""
    if name.replace(".weight", ".SCB") in tensors:
        rows = tensors[name.replace(".weight", ".SCB")].array()
        return np.float32(tensors[name].array()) * rows[:, None] * INVERSE
    _, state = state_of(tensors, name)
    n = int(np.prod(state["shape"]))
    each = np.repeat(factors(tensors, name), state["blocksize"])[:n]
    levels = LEVELS[state["quant_type"]][codes(tensors, name)[:n]]
    return (levels * each).reshape(state["shape"])


def weights(tensors: Tensors, exact: bool = True) -> dict[str, np.ndarray]:
    """Return the tensors of the model as f32. exact: rounded as bitsandbytes does it."""
    found = {}
    for name, x in tensors.items():
        few = name.replace(".weight", ".SCB") in tensors
        if few and name.endswith(".weight"):
            found[name] = products(tensors, name)
        elif f"{name}.absmax" in tensors:
            made, (_, state) = products(tensors, name), state_of(tensors, name)
            found[name] = rounded(made, state["dtype"]) if exact else made
        elif name.endswith("norm.weight") or ".layers." not in name:
            found[name] = x.array()
    return found


def linears(tensors: Tensors) -> list[str]:
    return [x for x in weights(tensors) if ".layers." in x and "norm" not in x]


def digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x, np.float32).tobytes()).hexdigest()
