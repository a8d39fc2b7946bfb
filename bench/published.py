"""published.py -- predicts training speeds that others published (tests/data/published.yaml).

    published.py        prints a Markdown table: published and predicted rates, and errors
    published.py fit    first fits the device file of llm-foundry's runs, tests/data/h100-fsdp.yaml
    published.py models prints the errors of every second model if others alone are fitted to

llm-foundry's runs were PyTorch 2.1's FSDP, whose kernels are not ours, so a few constants are
fitted, to every second row of its table. The other rows test predictions, as do llm.c's, which have
the device files of gen/zg/devices.

The fit is a damped least-squares one (Levenberg) of the errors' logarithms over the constants'
logarithms. Constants that are not fitted are in FILE, with their sources.
"""

from __future__ import annotations

import functools
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import results
import yaml
from bench import ROOT
from gpu_devices import LARGE, SMALL
from zg import build
from zg.plan.plan import Plan, Step
from zg.predict import device, play, seconds
from zg.predict.device import Device
from zg.read import spec

DATA = ROOT / "tests" / "data"
FSDP = DATA / "h100-fsdp.yaml"
# Where a fit begins: FLOP/s of large products and of attention, bytes/s of large other kernels, the
# share that a collective takes of arithmetic.
START = {"products": 6e14, "attention": 3e14, "others": 1.5e12, "takes": 0.2}
USUAL = 0.02  # size of an error up to which a fit squares it
# Lines of h100.yaml that the device file of llm-foundry's runs has, too.
SAME = "target memory peak launch copy update peers network host read write".split()
FILE = """\
# h100-fsdp.yaml -- NVIDIA H100 SXM5 80 GB with PyTorch 2.1's FSDP; written by
# bench/published.py fit.
# Fitted to every second row of llm-foundry's table (published.yaml): the rates of large products,
# of attention and of large other kernels, and takes. FSDP copies in and out of each collective;
# takes has that time, too.
# small calls: the shares of large calls' rates of calculon, systems/h100_80g_nvl8.json
# the rest: gen/zg/devices/h100.yaml
about: NVIDIA H100 SXM5 80 GB with PyTorch 2.1's FSDP, fitted
{same}
rates:
- precision: bf16
  cold:
    products: [{products}]
    attention: [[1.0e+9, {attention}]]
    others: [{others}]
"""
SPEC = """\
name: {model}
model:
  vocab: {vocab}
  width: {width}
  names: gpt2
  units:
  - embedding: {{tokens: wte, positions: wpe, context: {sequence}}}
  - blocks: {layers}
    name: h.{{l}}
    ops:
    - residual:
      - layernorm: {{name: ln_1}}
      - attention: {{name: attn, heads: {heads}, bias: true}}
    - residual:
      - layernorm: {{name: ln_2}}
      - linear: {{name: mlp.c_fc, out: {hidden}, bias: true}}
      - gelu: {gelu}
      - linear: {{name: mlp.c_proj, out: {width}, bias: true}}
  - head:
    - layernorm: {{name: ln_f}}
    - linear: {{tied: wte}}
zero: {{stage: {stage}, stage3_max_live_parameters: 1000000000000}}
train:
  global_batch: {batch}
  micro_batch: {micro_batch}
  sequence: {sequence}
  precision: bf16
  recompute: {recompute}
  optimizer: {{type: AdamW, lr: 3.0e-4, clip: 1.0}}
  reduction: fast
cluster: {{ranks: {ranks}, local: 8}}
targets: [{target}]
"""


@dataclass(frozen=True)
class Row:
    """A run that others published. device: name or path of its device; reduced: type in which
    gradients are reduced; rate: tokens per second and GPU; half: "fit" if constants were fitted to
    it, else "test"."""

    table: str
    device: str
    model: str
    sequence: int
    ranks: int
    micro_batch: int
    micro_batches: int
    stage: int
    recompute: str
    reduced: str
    rate: float
    half: str
    text: str


class Clock(seconds.Clock):
    """A clock of a run that reduces gradients in f32 although parameters have 16 bits."""

    def seconds(self, step: Step) -> float:
        if step.op == "reducescatter":
            wide = (
                replace(i, value=2 * i.value) if i.name == "bytes" else i
                for i in step.ints
            )
            step = replace(step, ints=tuple(wide))
        return super().seconds(step)


@functools.cache
def rows() -> tuple[Row, ...]:
    """Return all rows, in the order of the file."""
    said = yaml.safe_load((DATA / "published.yaml").read_text())
    found = []
    for table in said["tables"]:
        for n, cells in enumerate(table["rows"]):
            row = dict(zip(said["columns"], cells, strict=True))
            layers, width, heads = said["models"][row["model"]]
            text = SPEC.format(
                **{k: table[k] for k in ("vocab", "gelu")},
                **{k: row[k] for k in row if k not in ("reduced", "rate")},
                **{"layers": layers, "width": width, "heads": heads},
                hidden=4 * width,
                batch=row["ranks"] * row["micro_batch"] * row["micro_batches"],
                target="sm_80" if table["device"].startswith("a100") else "sm_90",
            )
            half = "fit" if table["fitted"] and n % 2 == 0 else "test"
            where = {"table": table["name"], "device": table["device"]}
            found.append(Row(**where, **row, half=half, text=text))
    return tuple(found)


@functools.cache
def plan(row: Row) -> Plan:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(row.text)
        file.flush()
        return build.build(spec.load(file.name)).plan


@functools.cache
def of(word: str) -> Device:
    return device.load(str(ROOT / word) if word.endswith(".yaml") else word)


def predicted(row: Row, on: Device | None = None) -> float:
    """Return the predicted tokens per second and GPU. on: another device than the row's."""
    p = plan(row)
    clock = (Clock if row.reduced == "f32" else seconds.Clock)(p, on or of(row.device))
    tokens = p.head.sequence * row.micro_batch * row.micro_batches
    return tokens / play.step(clock).seconds


def error(row: Row, on: Device | None = None) -> float:
    return predicted(row, on) / row.rate - 1


# ---- fitting


def written(x: dict[str, float]) -> str:
    """Return the device file of fitted constants, which have three digits there."""
    x = {name: float(f"{value:.3g}") for name, value in x.items()}

    def curve(name: str) -> str:
        shares = (*SMALL[name], (LARGE[name], 1.0))
        points = ((work, part * x[name]) for work, part in shares)
        return ", ".join(f"[{w:.2e}, {r:.4e}]" for w, r in points)

    lines = (device.FOLDER / "h100.yaml").read_text().splitlines()
    same = "\n".join(line for line in lines if line.split(":")[0] in SAME)
    same = re.sub(r"takes: [\d.]+", f"takes: {min(0.9, x['takes'])}", same)
    curves = {name: curve(name) for name in ("products", "others")}
    return FILE.format(same=same, attention=f"{x['attention']:.4e}", **curves)


def misses(some: Sequence[Row], x: dict[str, float]) -> np.ndarray:
    """Return the logarithms of predicted over published rates."""
    on = device.read(written(x), FSDP.name)
    return np.log([1 + error(row, on) for row in some])


def loss(e: np.ndarray) -> float:
    """Return the sum that a fit makes least: squares of errors, and beyond USUAL their sizes, so
    that one odd row does not move all others (Huber)."""
    far = np.maximum(np.abs(e) - USUAL, 0)
    return float(np.sum(e**2 - far**2))


def fitted(some: Sequence[Row], rounds: int = 8, damping: float = 1e-3) -> str:
    """Return the device file whose constants fit some rows."""

    def errors(logs: np.ndarray) -> np.ndarray:
        return misses(some, dict(zip(START, np.exp(logs), strict=True)))

    x = np.log(list(START.values()))
    for _ in range(rounds):
        e = errors(x)
        print("loss", loss(e), np.exp(x), file=sys.stderr)
        slope = np.stack(
            [(errors(x + 0.1 * one) - e) / 0.1 for one in np.eye(len(x))], axis=1
        )
        weighed = slope.T * np.minimum(1, USUAL / np.abs(e))
        normal = weighed @ slope + damping * np.eye(len(x))
        x = x - np.clip(np.linalg.solve(normal, weighed @ e), -0.7, 0.7)
    return written(dict(zip(START, np.exp(x), strict=True)))


# ---- the table


def summary(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"mean {sizes.mean():.1%}, greatest {sizes.max():.1%}"


@functools.cache
def errors() -> tuple[tuple[Row, float], ...]:
    """Return all rows with their errors, by the device files as they are."""
    return tuple((row, error(row)) for row in rows())


def table() -> list[results.Block]:
    """Return the rows with their predictions, and the errors of each table and half."""
    every = errors()
    cells = [
        f"{r.table} | {r.model} | {r.sequence:,} | {r.ranks} | {r.micro_batches} x "
        f"{r.micro_batch} | {r.stage} | {r.recompute} | {r.half} | {r.rate:,.0f} | "
        f"{r.rate * (1 + e):,.0f} | {e:+.1%}"
        for r, e in every
    ]
    kinds = dict.fromkeys((r.table, r.half) for r, _ in every)
    said = [
        f"{name}, {half}: "
        + summary([e for r, e in every if (r.table, r.half) == (name, half)])
        for name, half in kinds
    ]
    columns = (
        "source | model | tokens | GPUs | micro-batches | stage | recompute | half | published | "
        "predicted | error"
    )
    return ["Errors: " + "; ".join(said) + ".", results.table(columns, cells)]


def by_models() -> str:
    """Return the errors of every second model if constants are fitted to the models between."""
    some = [row for row in rows() if row.device == "tests/data/h100-fsdp.yaml"]
    models = sorted(
        {r.model for r in some},
        key=lambda m: -max(r.rate for r in some if r.model == m),
    )
    left, rest = ([r for r in some if r.model in models[n::2]] for n in (0, 1))
    on = device.read(fitted(left), FSDP.name)
    return f"{', '.join(models[1::2])}: {summary([error(r, on) for r in rest])}"


def main(argv: list[str]) -> int:
    if argv not in ([], ["fit"], ["models"]):
        print(__doc__, file=sys.stderr)
        return 2
    if argv == ["models"]:
        print(by_models())
        return 0
    if argv:
        half = [row for row in rows() if row.half == "fit"]
        FSDP.write_text(fitted(half))
    print(results.text(table()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
