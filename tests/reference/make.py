"""make.py -- writes gpt.npz, llama.npz and qwen3.npz: loss, gradients and 20 AdamW steps of the
tiny models of model_specs/ in float64, by PyTorch.

A tool for developers; the tests read its files and need no PyTorch:
    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install torch==2.5.1 numpy pyyaml
    /tmp/torch/bin/python tests/reference/make.py
The models consist of PyTorch's own modules, autograd and optimizer. They share nothing with
tests/lib/oracle.py or the generator except the numbers of the YAML files.

A file holds: losses, norms [20] (before clipping); for the cases `plain` and `ignored`, CASE/loss
and CASE/grad/TENSOR (digests, see known.py) of the first global batch; last/TENSOR: the weights
after 20 steps; shape/TENSOR: its shape in the weights' file.
"""

import math
import pathlib
import sys

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import known  # noqa: E402

HERE = pathlib.Path(__file__).parent
SPECS = HERE.parent.parent / "model_specs"


class GptBlock(nn.Module):
    def __init__(self, C: int, H: int, F4: int):
        super().__init__()
        self.H = H
        self.ln_1 = nn.LayerNorm(C)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(C, 3 * C), "c_proj": nn.Linear(C, C)}
        )
        self.ln_2 = nn.LayerNorm(C)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(C, F4), "c_proj": nn.Linear(F4, C)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, self.H, C // self.H).transpose(1, 2)
            for part in self.attn["c_attn"](self.ln_1(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp["c_proj"](
            F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        )


class Gpt(nn.Module):
    """GPT-2: learned positions, LayerNorm, tanh GELU, tied head."""

    def __init__(self, spec: dict):
        super().__init__()
        model = spec["model"]
        embedding, blocks, _ = model["units"]
        attention = blocks["ops"][0]["residual"][1]["attention"]
        C, up = (
            model["width"],
            blocks["ops"][1]["residual"][1]["linear"]["out"],
        )
        self.wte = nn.Embedding(model["vocab"], C)
        self.wpe = nn.Embedding(embedding["embedding"]["context"], C)
        self.h = nn.ModuleList(
            GptBlock(C, attention["heads"], up) for _ in range(blocks["blocks"])
        )
        self.ln_f = nn.LayerNorm(C)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T

    @staticmethod
    def transposed(name: str) -> bool:
        """Return whether the weights' file stores the transpose: GPT-2's files keep linears as [in,
        out]."""
        return name.split(".")[-2].startswith("c_") and name.endswith(".weight")


def frequencies(rope: dict, D: int) -> torch.Tensor:
    """Return inverse frequencies [D/2], with Llama 3's scaling if the spec asks for it."""
    freq = rope["theta"] ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    scaling = rope.get("scaling")
    if scaling is None:
        return freq
    # In the original context
    turns = scaling["original_context"] * freq / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return freq * (keep + (1 - keep) / scaling["factor"])


class LlamaAttention(nn.Module):
    def __init__(self, C: int, args: dict):
        super().__init__()
        self.H, self.G = args["heads"], args["kv_heads"]
        self.D = args.get("head_dim", C // self.H)
        self.q_proj = nn.Linear(C, self.H * self.D, bias=False)
        self.k_proj = nn.Linear(C, self.G * self.D, bias=False)
        self.v_proj = nn.Linear(C, self.G * self.D, bias=False)
        self.o_proj = nn.Linear(self.H * self.D, C, bias=False)
        if args.get("qk_norm"):
            self.q_norm = nn.RMSNorm(self.D, eps=args.get("eps", 1e-6))
            self.k_norm = nn.RMSNorm(self.D, eps=args.get("eps", 1e-6))
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.freq = frequencies(args["rope"], self.D)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B,H,T,D] with rotary positions: elements i and i + D/2 are one complex
        number."""
        angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), self.freq)
        z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(
            torch.ones_like(angle), angle
        )
        return torch.cat([z.real, z.imag], dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.H, self.D)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, self.G, self.D)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.G, self.D).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(B, T, self.H * self.D))


class LlamaMlp(nn.Module):
    def __init__(self, C: int, up: int):
        super().__init__()
        self.gate_proj = nn.Linear(C, up, bias=False)
        self.up_proj = nn.Linear(C, up, bias=False)
        self.down_proj = nn.Linear(up, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    def __init__(self, C: int, ops: list):
        super().__init__()
        (norm1, attention), (norm2, gate_up, *_) = (
            ops[0]["residual"],
            ops[1]["residual"],
        )
        self.input_layernorm = nn.RMSNorm(C, eps=norm1["rmsnorm"]["eps"])
        self.self_attn = LlamaAttention(C, attention["attention"])
        self.post_attention_layernorm = nn.RMSNorm(C, eps=norm2["rmsnorm"]["eps"])
        self.mlp = LlamaMlp(C, gate_up["linear"]["out"][0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Llama and Qwen3: RMSNorm, rotary positions, grouped queries, SwiGLU, tied head or not."""

    def __init__(self, spec: dict):
        super().__init__()
        model = spec["model"]
        _, blocks, head = model["units"]
        norm, out = head["head"]
        C = model["width"]
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(model["vocab"], C),
                "layers": nn.ModuleList(
                    LlamaBlock(C, blocks["ops"]) for _ in range(blocks["blocks"])
                ),
                "norm": nn.RMSNorm(C, eps=norm["rmsnorm"]["eps"]),
            }
        )
        self.lm_head = (
            None
            if "tied" in out["linear"]
            else nn.Linear(C, model["vocab"], bias=False)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            x = block(x)
        x = self.model["norm"](x)
        return (
            self.lm_head(x) if self.lm_head else x @ self.model["embed_tokens"].weight.T
        )

    @staticmethod
    def transposed(name: str) -> bool:
        return False


def rate(train: dict, step: int) -> float:
    """Return the learning rate of step 1, 2, ...: linear warm-up, then cosine or linear decay to
    min_lr."""
    top, s = train["optimizer"]["lr"], train["schedule"]
    if step <= s["warmup"]:
        return top * step / s["warmup"]
    done = (step - s["warmup"]) / (s["steps"] - s["warmup"])
    share = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[
        s["type"]
    ]
    return s["min_lr"] + (top - s["min_lr"]) * share


def loss_of(net: nn.Module, inputs: np.ndarray, targets: np.ndarray) -> torch.Tensor:
    logits = net(torch.from_numpy(inputs)).flatten(0, 1)
    return F.cross_entropy(logits, torch.from_numpy(targets).flatten(), ignore_index=-1)


def in_file(net: nn.Module, name: str, x: torch.Tensor) -> np.ndarray:
    """Return a tensor as it lies in the weights' file."""
    return (x.T if net.transposed(name) else x).detach().numpy()


def load(net: nn.Module) -> None:
    """Load the initial weights of known.py."""
    with torch.no_grad():
        for name, p in net.named_parameters():
            shape = in_file(net, name, p).shape
            w = torch.from_numpy(known.weight(name, shape, known.is_norm_weight(name)))
            p.copy_(w.T if net.transposed(name) else w)


def gradients(
    net: nn.Module, case: str, inputs: np.ndarray, targets: np.ndarray
) -> dict[str, np.ndarray]:
    net.zero_grad()
    loss = loss_of(net, inputs, targets)
    loss.backward()
    found = {f"{case}/loss": np.float64(loss.item())}
    for name, p in net.named_parameters():
        found[f"{case}/grad/{name}"] = known.digest(name, in_file(net, name, p.grad))
    return found


def train(net: nn.Module, spec: dict, tokens: np.ndarray) -> dict[str, np.ndarray]:
    t, o = spec["train"], spec["train"]["optimizer"]
    assert o["type"] == "AdamW"
    parameters = list(net.parameters())
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": o["weight_decay"],
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"])
    losses, norms = [], []
    for step in range(known.STEPS):
        adamw.zero_grad()
        G = t["global_batch"]
        loss = loss_of(net, *known.batch(tokens, t["sequence"], step * G, G))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, o["clip"]).item())
        for group in adamw.param_groups:
            group["lr"] = rate(t, step + 1)
        adamw.step()
        losses.append(loss.item())
    last = {
        f"last/{name}": known.digest(name, in_file(net, name, p))
        for name, p in net.named_parameters()
    }
    return {"losses": np.array(losses), "norms": np.array(norms), **last}


def make(name: str, kind: type[nn.Module]) -> None:
    spec = yaml.safe_load((SPECS / f"{name}-tiny.yaml").read_text())
    net = kind(spec)
    load(net)
    t = spec["train"]
    tokens = known.stream(name, t["sequence"], spec["model"]["vocab"])
    inputs, targets = known.batch(tokens, t["sequence"], 0, t["global_batch"])
    found = gradients(net, "plain", inputs, targets)
    some = np.where(targets == known.HOLE, -1, targets)
    found |= gradients(net, "ignored", np.where(inputs == known.HOLE, 0, inputs), some)
    found |= {
        f"shape/{n}": np.array(in_file(net, n, p).shape)
        for n, p in net.named_parameters()
    }
    found |= train(net, spec, tokens)
    np.savez_compressed(HERE / f"{name}.npz", **found)
    print(
        name,
        "losses",
        found["losses"][[0, -1]],
        "norms",
        found["norms"][[0, -1]],
        "ignored",
        int((some < 0).sum()),
    )


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    make("gpt", Gpt)
    make("llama", Llama)
    make("qwen3", Llama)
