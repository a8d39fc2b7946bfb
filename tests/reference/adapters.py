"""adapters.py -- writes adapters.npz: results of transformers and PEFT for the folders of the job
in tests/tools/test_jobs.py that fine-tunes a chat model by LoRA.

A tool for developers; the tests read its file and need neither:
    python3 -m venv /tmp/hf
    /tmp/hf/bin/pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 numpy
    .venv/bin/python -m pytest -p no:xdist tests/tools/test_jobs.py -k lora \
        --basetemp /tmp/job -o tmp_path_retention_policy=all
    /tmp/hf/bin/python -P tests/reference/adapters.py /tmp/job/test_a_chat_model_by_lora_merg0
The file holds logits [positions, vocabulary] of every fourth token of one sample, in float64
rounded to float32: `merged` of the folder that --merge wrote, `adapted` of the base with the
adapter that --save wrote, by PeftModel, and `own` of adapters that PEFT wrote, with known.py's
weights; their `names` and `config`, adapter_config.json, as PEFT wrote them.
"""

import pathlib
import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import known  # noqa: E402

SEQUENCE, EACH = 64, 4


def opened(folder: pathlib.Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    model = model.double().eval()
    with torch.no_grad():
        found = model(torch.from_numpy(tokens)[None]).logits[0]
    return found[::EACH].float().numpy()


def own(job: pathlib.Path) -> torch.nn.Module:
    """Return the base with PEFT's adapters, saved and loaded again."""
    modules = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        rank_pattern={"v_proj": 6},
        alpha_pattern={"down_proj": 12},
        target_modules=modules,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(opened(job / "base"), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                key = name.replace(".default", "")
                p.copy_(torch.from_numpy(known.weight(key, tuple(p.shape), False)))
    model.save_pretrained(job / "peft")
    return PeftModel.from_pretrained(opened(job / "base"), job / "peft")


def main(job: pathlib.Path) -> None:
    tokens = np.fromfile(job / "chats" / "val.bin", np.uint16)
    tokens = tokens[:SEQUENCE].astype(np.int64)
    adapted = PeftModel.from_pretrained(opened(job / "base"), job / "adapter")
    made = {
        "merged": logits(opened(job / "merged adapter"), tokens),
        "adapted": logits(adapted, tokens),
        "own": logits(own(job), tokens),
    }
    with safe_open(job / "peft" / "adapter_model.safetensors", "np") as file:
        made["names"] = np.array(sorted(file.keys()))
    made["config"] = np.array((job / "peft" / "adapter_config.json").read_text())
    np.savez_compressed(HERE / "adapters.npz", **made)
    off = np.abs(made["merged"] - made["adapted"]).max()
    print(f"merged and adapted: {off:.3g} of {np.abs(made['merged']).max():.3g}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
