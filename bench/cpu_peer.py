"""cpu_peer.py -- the same training step in PyTorch on the CPU.

It runs in one process, or in several that torchrun starts, under DDP, FSDP2 or DeepSpeed's ZeRO.

    cpu_peer.py SPEC.yaml --batch B --sequence T --data TOKENS --steps N --out OUT.json
                [--precision f32|autocast|bf16] [--compile] [--spread ddp|fsdp2|zero0|zero3]
                [--lora] [--four-bit] [--blocks N]

Model and recipe are torch_peer.py's. autocast: f32 parameters, products in bf16; bf16: everything,
without masters, except under FSDP2 (f32 parameters and sums) and DeepSpeed (f32 masters). --lora: a
frozen GPT-2 of transformers, with PEFT's adapters of rank 16 on `c_attn`. --four-bit: as --lora, on
all linears of blocks, which bitsandbytes holds in NF4. --blocks: layers, if not the spec's. Figures
of rank 0: seconds of each step, losses, the host's clock when the first step began.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_peer
import yaml
from torch import Tensor, nn

# transformers imports packages whose names are those of files in this folder: kernels, data.
sys.path.remove(str(Path(__file__).resolve().parent))

Step = Callable[[Tensor, Tensor], Tensor]


def adamw(m: nn.Module, recipe: dict) -> torch.optim.AdamW:
    o = recipe["optimizer"]
    sides: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in m.parameters():
        if p.requires_grad:
            sides[p.dim() > 1].append(p)
    decays = {True: o["weight_decay"], False: 0.0}
    groups = [{"params": sides[side], "weight_decay": decays[side]} for side in sides]
    return torch.optim.AdamW(
        groups, lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"], fused=True
    )


def autocast(precision: str) -> contextlib.AbstractContextManager[object]:
    if precision == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def plain(m: nn.Module, recipe: dict, precision: str, table: object) -> Step:
    """Return a step of a module that needs no engine; under DDP it reduces gradients itself."""
    optimizer = adamw(m, recipe)

    def step(token: Tensor, target: Tensor) -> Tensor:
        with autocast(precision):
            loss = m(token, target, table)
        loss.backward()
        nn.utils.clip_grad_norm_(m.parameters(), recipe["optimizer"]["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def fsdp2(m: torch_peer.Model, precision: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ranks = int(os.environ["WORLD_SIZE"])
    how = {"mesh": init_device_mesh("cpu", (ranks,))}
    if precision == "bf16":
        how["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in m.blocks:
        fully_shard(block, **how)
    fully_shard(m, **how)
    return m


def zero(
    m: nn.Module, recipe: dict, stage: int, given: argparse.Namespace, table
) -> Step:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=m,
        optimizer=adamw(m, recipe),
        config={
            "train_micro_batch_size_per_gpu": given.batch,
            "gradient_clipping": recipe["optimizer"]["clip"],
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": given.precision == "bf16"},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(token: Tensor, target: Tensor) -> Tensor:
        loss = engine(token, target, table)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


class Adapted(nn.Module):
    """A model of transformers, called like torch_peer's models."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, target: Tensor, _: object) -> Tensor:
        logits = self.model(input_ids=token, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def in_four_bits(model: nn.Module) -> nn.Module:
    """Return a model of transformers as it is loaded in NF4."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=how, dtype=torch.float32
        )


def peft(spec: dict, four_bit: bool) -> nn.Module:
    """Return a GPT-2 of a spec with PEFT's adapters. four_bit: its linears are in NF4."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    first, blocks, _ = spec["model"]["units"]
    ops = [op for branch in blocks["ops"] for op in branch["residual"]]
    config = GPT2Config(
        vocab_size=spec["model"]["vocab"],
        n_positions=first["embedding"]["context"],
        n_embd=spec["model"]["width"],
        n_layer=blocks["blocks"],
        n_head=next(op["attention"]["heads"] for op in ops if "attention" in op),
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    adapters = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules="all-linear" if four_bit else ["c_attn"],
        fan_in_fan_out=not four_bit,  # bitsandbytes stores [out,in]
    )
    model: nn.Module = GPT2LMHeadModel(config)
    if four_bit:
        model = in_four_bits(model)
    return Adapted(get_peft_model(model, adapters)).train()


def made(given: argparse.Namespace, spec: dict) -> Step:
    recipe, spread = spec["train"], given.spread
    if given.lora or given.four_bit:
        return plain(peft(spec, given.four_bit), recipe, given.precision, None)
    apart = spread in ("fsdp2", "zero0", "zero3")  # these keep f32 themselves
    whole = given.precision == "bf16" and not apart
    m = torch_peer.make(
        spec,
        given.sequence,
        "cpu",
        torch.bfloat16 if whole else torch.float32,
        "model" if given.compile else "none",
    )
    table = m.table(torch.device("cpu"))
    if spread in ("zero0", "zero3"):
        return zero(m, recipe, int(spread[-1]), given, table)
    if spread == "fsdp2":
        m = fsdp2(m, given.precision)
    if spread == "ddp":
        m = nn.parallel.DistributedDataParallel(m)
    return plain(m, recipe, given.precision, table)


def train(given: argparse.Namespace) -> dict[str, object]:
    spec = yaml.safe_load(Path(given.spec).read_text())
    if given.blocks:
        spec["model"]["units"][1]["blocks"] = given.blocks
    rank, ranks = (
        int(os.environ.get(name, other))
        for name, other in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    torch.manual_seed(1)
    if given.spread:
        torch.distributed.init_process_group("gloo")
    step = made(given, spec)
    data = torch_peer.batches(
        given.data, given.batch, given.sequence, "cpu", rank, ranks
    )
    first, seconds, losses = time.monotonic(), [], []
    for _ in range(given.steps):
        began = time.perf_counter()
        loss = step(*next(data))
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    if given.spread:
        torch.distributed.destroy_process_group()
    return {
        "torch": torch.__version__,
        "rank": rank,
        "first": first,
        "seconds": seconds,
        "losses": losses,
    }


def main() -> int:
    parser = torch_peer.options(__doc__)
    parser.add_argument(
        "--precision", choices=("f32", "autocast", "bf16"), default="f32"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--spread", choices=("ddp", "fsdp2", "zero0", "zero3"))
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--four-bit", action="store_true")
    parser.add_argument("--blocks", type=int, default=0)
    given = parser.parse_args()
    found = train(given)
    if found["rank"] == 0:
        Path(given.out).write_text(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
