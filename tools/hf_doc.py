"""hf_doc.py -- writes docs/hf_keys.md: keys of config.json, and the keys of a spec that they set.

PYTHONPATH=gen .venv/bin/python tools/hf_doc.py > docs/hf_keys.md; a test compares.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping

from zg.read import hf, hfkeys
from zg.read.hfmodels import FAMILIES
from zg.read.hfrows import ConfigKey, HfFamily
from zg.read.node import Names
from zg.read.schema import VALUES, Op

HEAD = """# Keys of config.json

Made by `PYTHONPATH=gen .venv/bin/python tools/hf_doc.py > docs/hf_keys.md`; a test compares.
[data.md](data.md) explains `--from`, which reads a `config.json` as transformers 5.23 does, with
its defaults.

- A key that this page lacks is an error with its name and line. The generator reports all errors of
  a file at once.
- A value must have the type of transformers' default: `"32"` and `32.0` are refused for 32.
NULLS
- Rotary positions: `rope_theta` with `rope_scaling`, or `rope_parameters`. Scaling is `linear`,
  `dynamic`, `llama3`, `yarn` or `longrope` with all of its keys; `mscale` and `mscale_all_dim`
  become `attention_factor`. Other types are refused. longrope takes `long_factor` if
  `train.sequence` exceeds the original context, and dynamic grows theta by `train.sequence`, as
  transformers do for a sample of that length; shorter prompts keep that theta.
  `partial_rotary_factor` becomes `rope.width`, `no_rope_layers` (or `no_rope_layer_interval`)
  `rope_layers`; OLMo 3 and Gemma 3 have positions for layers with a window (`local_rope`) and for
  the others. GPT-NeoX has `rotary_emb_base` for `rope_theta` and `rotary_pct` for
  `partial_rotary_factor`; in `rope_parameters` they have the usual names.
- `use_parallel_residual` (GPT-NeoX, StableLM): attention and MLP add to one residual (`parallel`).
- GELU's words are `gelu` and `gelu_python` (`erf`); `gelu_new`, `gelu_pytorch_tanh`, `gelu_fast`
  and `gelu_accurate` (`tanh`).
- A window (`sliding_window`, unless `use_sliding_window` is false) applies to all layers, or to
  those that `layer_types` or `max_window_layers` select (Qwen2, Qwen3); in SmolLM3 to those without
  rotary positions; in OLMo 3 to all but every fourth, in Gemma 2 to every other; in Gemma 3
  `sliding_window_pattern` says so. Mistral, Phi-3 and StarCoder2 have it in all layers or none.
  After training from scratch `--save` writes `layer_types`, and `max_window_layers` where that key
  can express the windows.
- `quantization_config` may be bitsandbytes', with one of `load_in_4bit` and `load_in_8bit`:
  [Folders of bitsandbytes](data.md#folders-of-bitsandbytes).
- transformers gives the embedding of `pad_token_id` no gradient. Here it is a token like any other.
"""

NULLS = f"""- Null is a value of {", ".join(f"`{key}`" for key in sorted(hfkeys.NULLS))}. For
another key of the model null means an absent key if the default is null or false; otherwise it is
refused. For keys outside the model null always means an absent key. One note names all nulls
without effect."""

Pairs = Iterator[tuple[str, str]]


def of_op(op: Op) -> Pairs:
    """Yield pairs (key of config.json, key of a spec)."""
    for name, value in op.args.items():
        values = value if isinstance(value, tuple) else (value,)
        for each in values:
            if isinstance(each, ConfigKey):
                one = name == VALUES.get(op.kind)
                yield each, op.kind if one else f"{op.kind}.{name}"
    for inner in op.ops:
        yield from of_op(inner)


def of_family(f: HfFamily) -> Pairs:
    layers, width, vocab = f.sizes
    yield vocab, "model.vocab"
    yield width, "model.width"
    yield layers, "blocks"
    yield f.context, "train.sequence"
    for op in (f.embedding, *f.block, *f.last, f.head):
        for key, where in of_op(op):
            if key in f.usual and key not in hf.WINDOWS:
                yield key, where
    yield "tie_word_embeddings", "linear.tied"


def idle(f: HfFamily) -> Names:
    """Return the keys of Llama that the family's configs repeat without effect."""
    used = {key for key, _ in of_family(f)} | {*f.when}
    return tuple(k for k in f.usual if k not in used and k not in hf.WINDOWS)


def shown(words: Mapping[str, None]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def table() -> str:
    places: dict[str, dict[str, None]] = {}
    families: dict[str, dict[str, None]] = {}
    for f in FAMILIES:
        for key, where in of_family(f):
            places.setdefault(key, {})[where] = None
            families.setdefault(key, {})[f.type] = None
    lines = [
        "| key of config.json | families | key of the spec |",
        "|---|---|---|",
    ]
    none = {f.type: idle(f) for f in FAMILIES}
    for key, found in places.items():
        every = len(families[key]) == len(none)
        whose = "all" if every else ", ".join(families[key])
        lines.append(f"| `{key}` | {whose} | {shown(found)} |")
        others = ", ".join(f for f, keys in none.items() if key in keys)
        if others:
            lines.append(f"| `{key}` | {others} | no effect, as in transformers |")
    return "\n".join(lines)


def named(title: str, keys: tuple[str, ...], behind: str = "") -> str:
    said = f"{title}: {shown(dict.fromkeys(keys))}{behind}."
    return textwrap.fill(said, 100, break_on_hyphens=False)


def text() -> str:
    fixed = ", ".join(f"`{key}: {json.dumps(x)}`" for key, x in hfkeys.FIXED.items())
    one = f"Only this value or null is allowed: {fixed}."
    why = {
        key: f"{wrong.format(method='')}; take {good}"
        for key, (wrong, good) in hfkeys.REFUSED.items()
    }
    return "\n\n".join(
        (
            HEAD.rstrip().replace(
                "NULLS", textwrap.fill(NULLS, 100, subsequent_indent="  ")
            ),
            table(),
            textwrap.fill(one, 100, break_on_hyphens=False),
            named("Ignored, with a note", hfkeys.DROPOUTS),
            named("No effect on training", hfkeys.FREE),
            named("No effect on training, with a note", hfkeys.TOLD),
            *(
                named(
                    "Refused",
                    tuple(k for k in why if why[k] == reason),
                    f": {reason}",
                )
                for reason in dict.fromkeys(why.values())
            ),
        )
    )


if __name__ == "__main__":
    print(text())
