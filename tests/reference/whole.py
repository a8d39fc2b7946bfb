"""whole.py -- writes whole.npz: results of PEFT for tests/runtime/test_whole_files.py, which trains
modules whole beside adapters (modules_to_save).

A tool for developers; the tests read its file and need neither:
    python3 -m venv /tmp/hf
    /tmp/hf/bin/pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 numpy
    .venv/bin/python -m pytest -p no:xdist tests/runtime/test_whole_files.py -k out_and_in \\
        --basetemp /tmp/job -o tmp_path_retention_policy=all
    /tmp/hf/bin/python -P tests/reference/whole.py /tmp/job
The file has for each family: the loss in float64 of the base with the folder that --save wrote, by
PeftModel (`ours`), and with a folder that PEFT wrote, with known.py's weights (`own`); the names of
its tensors and its adapter_config.json.
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

SEQUENCE, COUNT = 40, 8
WHOLE = {
    "llama": {"modules_to_save": ["embed_tokens", "lm_head", "model.norm"]},
    "qwen3": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
}


def opened(folder: pathlib.Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder)


def loss(model: torch.nn.Module) -> float:
    tokens = known.stream("whole", SEQUENCE, 256)
    x, y = map(torch.from_numpy, known.batch(tokens, SEQUENCE, 0, COUNT))
    with torch.no_grad():
        logits = model.double().eval()(x).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


def own(folder: pathlib.Path, family: str) -> torch.nn.Module:
    """Return the base with PEFT's adapters and modules, saved and loaded again."""
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        **WHOLE[family],
    )
    model = get_peft_model(opened(folder / "base"), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                key = name.replace(".default", "").replace(".modules_to_save", "")
                norm = known.is_norm_weight(key)
                p.copy_(torch.from_numpy(known.weight(key, tuple(p.shape), norm)))
    model.save_pretrained(folder / "peft")
    return PeftModel.from_pretrained(opened(folder / "base"), folder / "peft")


def main(job: pathlib.Path) -> None:
    made: dict[str, object] = {}
    for family in WHOLE:
        (folder,) = job.glob(f"whole[0-9]/{family}")
        ours = PeftModel.from_pretrained(opened(folder / "base"), folder / "new")
        made[f"{family}_ours"] = loss(ours)
        made[f"{family}_own"] = loss(own(folder, family))
        with safe_open(folder / "peft" / "adapter_model.safetensors", "np") as file:
            made[f"{family}_names"] = np.array(sorted(file.keys()))
        text = (folder / "peft" / "adapter_config.json").read_text()
        made[f"{family}_config"] = np.array(text.replace(str(folder), family))
        print(family, made[f"{family}_ours"], made[f"{family}_own"])
    np.savez_compressed(HERE / "whole.npz", **made)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
