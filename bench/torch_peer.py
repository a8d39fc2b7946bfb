"""torch_peer.py -- the same training in PyTorch, for a comparison of speed.

    torch_peer.py SPEC.yaml --batch B --sequence T --data TOKENS --steps N --out OUT.json
                  [--compile model|block|none] [--device cuda] [--precision bf16]

Shapes come from the spec. The recipe is ours: parameters and activations in bf16, f32 masters, f32
moments, f32 gradient sums, clipping by the norm of all gradients, AdamW (fused) with decay on
matrices alone. Attention is PyTorch's scaled_dot_product_attention, the loss F.cross_entropy on f32
logits. Everything runs under torch.compile: the whole model, or block by block if compiling many
blocks would take minutes. The weights' layout is PyTorch's own; initial values are normal numbers.
Tokens are uint16, in order.

Figures: seconds of every step (each one waited for, as ours are), the first loss and the last, peak
memory.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn


# ---- parts of a model, by the words of a spec


class Rms(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., width]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with grouped queries; rope rotates halves of a head, as ours does."""

    def __init__(self, width: int, args: dict) -> None:
        super().__init__()
        self.H, bias = args["heads"], args.get("bias", False)
        self.G = args.get("kv_heads", self.H)
        self.D = args.get("head_dim", width // self.H)
        self.qkv = nn.Linear(width, (self.H + 2 * self.G) * self.D, bias=bias)
        self.out = nn.Linear(self.H * self.D, width, bias=bias)
        eps = args.get("eps", 1e-6)
        self.norms = nn.ModuleList(
            [Rms(self.D, eps), Rms(self.D, eps)] if args.get("qk_norm") else []
        )
        self.theta = args["rope"]["theta"] if "rope" in args else 0.0

    def turned(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [B, heads, T, D] by a table of cosine and sine, [T, D/2] each."""
        a, b = x.chunk(2, -1)
        cos, sin = table
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        """Attend within x [B, T, C]."""
        B, T, _ = x.shape
        q, k, v = (
            part.view(B, T, -1, self.D).transpose(1, 2)
            for part in self.qkv(x).split(
                [self.H * self.D, self.G * self.D, self.G * self.D], -1
            )
        )
        if len(self.norms):
            q, k = self.norms[0](q), self.norms[1](k)
        if table is not None:
            q, k = self.turned(q, table), self.turned(k, table)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.G != self.H
        )
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


def part(kind: str, args: dict | str, width: int, into: int) -> tuple[nn.Module, int]:
    """Return the module of an op of the spec for an input width, and its output width."""
    args = args or {}
    if kind == "layernorm":
        return nn.LayerNorm(width, args.get("eps", 1e-5)), into
    if kind == "rmsnorm":
        return Rms(width, args.get("eps", 1e-6)), into
    if kind == "attention":
        return Attention(width, args), width
    if kind == "linear":
        out = args["out"] if isinstance(args["out"], int) else sum(args["out"])
        return nn.Linear(into, out, bias=args.get("bias", False)), out
    if kind == "gelu":
        return nn.GELU("tanh" if args in ("tanh", {}) else "none"), into
    if kind == "relu2":
        return Relu2(), into
    if kind == "swiglu":
        return SwiGlu(), into // 2
    raise ValueError(f"{kind}: no such op here")


class Relu2(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class SwiGlu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Gate x [..., 2F], which is gate and up side by side."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class Block(nn.Module):
    """A row of residual branches."""

    def __init__(self, branches: list[list[dict]], width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList()
        for branch in branches:
            ops, into = nn.ModuleList(), width
            for op in branch:
                ((kind, args),) = op.items()
                made, into = part(kind, args, width, into)
                ops.append(made)
            self.branches.append(ops)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor] | None) -> Tensor:
        for ops in self.branches:
            y = x
            for op in ops:
                y = op(y, table) if isinstance(op, Attention) else op(y)
            x = x + y
        return x


class Model(nn.Module):
    """An embedding, blocks, and a head with the loss: the units of a spec."""

    def __init__(self, model: dict, sequence: int) -> None:
        super().__init__()
        first, *middle, last = model["units"]
        C, V, embedding = model["width"], model["vocab"], first["embedding"]
        self.tokens = nn.Embedding(V, C)
        self.positions = (
            nn.Embedding(embedding["context"], C) if "positions" in embedding else None
        )
        self.blocks = nn.ModuleList(
            [
                Block([op["residual"] for op in unit["ops"]], C)
                for unit in middle
                for _ in range(unit["blocks"])
            ]
        )
        ((kind, args),) = last["head"][0].items()
        self.norm, _ = part(kind, args, C, C)
        self.head = nn.Linear(C, V, bias=False)
        if "tied" in last["head"][1]["linear"]:
            self.head.weight = self.tokens.weight
        self.T = sequence

    def table(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return cosine and sine [T, D/2], f32, or None without rotary positions."""
        a = next(m for m in self.modules() if isinstance(m, Attention))
        if not a.theta:
            return None
        freq = a.theta ** (
            -torch.arange(0, a.D, 2, device=device, dtype=torch.float64) / a.D
        )
        angle = torch.outer(
            torch.arange(self.T, device=device, dtype=torch.float64), freq
        )
        return angle.cos().float(), angle.sin().float()

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of x [B, T, C] against target [B, T]."""
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))

    def start(self, token: Tensor) -> Tensor:
        """Embed token [B, T]."""
        x = self.tokens(token)
        return x if self.positions is None else x + self.positions.weight[: self.T]

    def forward(
        self,
        token: Tensor,
        target: Tensor,
        table: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        x = self.start(token)
        for block in self.blocks:
            x = block(x, table)
        return self.loss(x, target)


def make(spec: dict, sequence: int, device: str, dtype: torch.dtype, how: str) -> Model:
    torch.set_default_dtype(dtype)
    with torch.device(device):
        m = Model(spec["model"], sequence)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if p.dim() > 1:
                p.normal_(0.0, 0.02)
            else:
                p.fill_(0.0 if name.endswith("bias") else 1.0)
    if how == "model":
        m.compile()
    elif how == "block":
        for block in m.blocks:
            block.compile()
        m.loss, m.start = torch.compile(m.loss), torch.compile(m.start)
    return m


# ---- training


class Trainer:
    """AdamW on f32 masters of a model whose parameters may be bf16."""

    def __init__(self, m: Model, recipe: dict) -> None:
        o = recipe["optimizer"]
        self.m, self.clip, self.warmup = (
            m,
            o["clip"],
            recipe["schedule"]["warmup"],
        )
        self.real = list(m.parameters())
        f32 = all(p.dtype == torch.float32 for p in self.real)
        self.master = self.real if f32 else [p.detach().float() for p in self.real]
        if not f32:
            for p in self.master:
                p.grad = torch.zeros_like(p)
        groups = [
            {
                "params": [p for p in self.master if p.dim() > 1],
                "weight_decay": o["weight_decay"],
            },
            {
                "params": [p for p in self.master if p.dim() <= 1],
                "weight_decay": 0.0,
            },
        ]
        self.adamw = torch.optim.AdamW(
            groups,
            lr=o["lr"],
            betas=tuple(o["betas"]),
            eps=o["eps"],
            fused=True,
        )
        self.lr, self.step_number, self.apart = o["lr"], 0, not f32

    def step(
        self,
        token: Tensor,
        target: Tensor,
        table: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        loss = self.m(token, target, table)
        loss.backward()
        if self.apart:
            torch._foreach_copy_(
                [p.grad for p in self.master], [p.grad for p in self.real]
            )
            for p in self.real:
                p.grad = None
        torch.nn.utils.clip_grad_norm_(self.master, self.clip)
        self.step_number += 1
        for group in self.adamw.param_groups:
            group["lr"] = self.lr * min(1.0, self.step_number / max(1, self.warmup))
        self.adamw.step()
        if self.apart:
            with torch.no_grad():
                torch._foreach_copy_(self.real, self.master)
        else:
            self.adamw.zero_grad(set_to_none=True)
        return loss.detach()


def batches(path: str, B: int, T: int, device: str, rank: int = 0, ranks: int = 1):
    """Yield batches `rank`, `rank` + `ranks`, ... of a file."""
    data, at = np.fromfile(path, np.uint16), rank * B
    while True:
        rows = [
            data[(at + i) * T : (at + i) * T + T + 1].astype(np.int64) for i in range(B)
        ]
        at += ranks * B
        x = torch.from_numpy(np.stack(rows))
        if device == "cuda":
            x = x.pin_memory().to(device, non_blocking=True)
        yield x[:, :-1].contiguous(), x[:, 1:].contiguous()


def train(given: argparse.Namespace) -> dict[str, object]:
    spec = yaml.safe_load(Path(given.spec).read_text())
    cuda = given.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    begun = time.perf_counter()
    m = make(
        spec,
        given.sequence,
        given.device,
        torch.bfloat16 if given.precision == "bf16" else torch.float32,
        given.compile,
    )
    trainer, table = (
        Trainer(m, spec["train"]),
        m.table(torch.device(given.device)),
    )
    data = batches(given.data, given.batch, given.sequence, given.device)
    seconds, losses = [], []
    for _ in range(given.steps):
        t = time.perf_counter()
        loss = trainer.step(*next(data), table)
        wait()
        seconds.append(time.perf_counter() - t)
        losses.append(loss.item())
        assert math.isfinite(losses[-1])
    return {
        "torch": torch.__version__,
        "compile": given.compile,
        "seconds": seconds,
        "first_step": sum(seconds[:1]),
        "start": time.perf_counter() - begun - sum(seconds),
        "losses": losses,
        "params": sum(p.numel() for p in m.parameters()),
        "peak": torch.cuda.max_memory_reserved() if cuda else 0,
    }


def options(says: str) -> argparse.ArgumentParser:
    """Return the options that all peers take. says: a peer's docstring."""
    parser = argparse.ArgumentParser(description=says.split("\n")[0])
    parser.add_argument("spec")
    for name in ("batch", "sequence", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", required=True)
    return parser


def main() -> int:
    parser = options(__doc__)
    parser.add_argument(
        "--compile", choices=("model", "block", "none"), default="model"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=("bf16", "f32"), default="bf16")
    given = parser.parse_args()
    found = train(given)
    Path(given.out).write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
