"""folders.py -- writes folders.json: the tokens that transformers' AutoTokenizer makes of a text
with each of FOLDERS, its named tokens, and the output of its chat template.

A tool for developers; the tests read its file and need no transformers:
    python3 -m venv /tmp/hf && /tmp/hf/bin/pip install transformers==5.24.0 jinja2
    /tmp/hf/bin/python tests/reference/folders.py
"""

import json
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
TEXT = "<s>a <tool> b<TOOL>c <x y>  d [PAD] end bend <|im_start|>x<|im_end|>\n</s> End"
TALK = [
    {"role": "user", "content": "<tool>"},
    {"role": "assistant", "content": "yes", "reasoning": "so"},
]
TOOLS = [{"name": "look"}]
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
TEMPLATE = (
    "{{ mode }}{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.reasoning_content }}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
TOOL_USE = "{{ tools | tojson }}{{ image_token }}" + TEMPLATE


def token(content: str, *flags: str, typed: bool = False) -> dict:
    """Return a token as transformers writes it; `typed` in tokenizer_config.json."""
    made = {"content": content, **{flag: flag in flags for flag in FLAGS}}
    return made | ({"__type": "AddedToken"} if typed else {})


def own(last: int) -> dict:
    """Return an added_tokens_decoder with tokenizer.json's tokens up to number `last`."""
    names = {"256": "<s>", "257": "</s>", "258": "<|im_start|>"}
    return {key: token(x, "special") for key, x in [*names.items()][: last - 255]}


MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
SETTINGS = "tokenizer_config.json"
ENDS = {"eos_token": "</s>", "bos_token": "<s>"}
# Files beside a tokenizer.json that has own(258) as its added tokens.
FOLDERS: dict[str, dict[str, dict | str]] = {
    "alone": {},
    "decoder": {
        SETTINGS: {
            **ENDS,
            "added_tokens_decoder": own(258)
            | {
                "259": token("<|im_end|>", "special"),
                "260": token("<tool>", "normalized"),
                "261": token("<x y>", "lstrip", "rstrip", "special"),
                "262": token("end", "single_word", "special"),
            },
        }
    },
    "decoder with other flags": {
        SETTINGS: {
            "added_tokens_decoder": own(258)
            | {"258": token("<|im_start|>", "special", "rstrip")},
            "pad_token": "[PAD]",
            "cls_token": token("<tool>", "normalized", typed=True),
        },
        # Keys that do not count beside added_tokens_decoder.
        MAP: {"eos_token": "<s>", "unk_token": "<x y>"},
        ADDED: {"end": 259},
    },
    "named": {SETTINGS: {**ENDS, "pad_token": "[PAD]", "image_token": "end"}},
    "additional": {
        SETTINGS: {
            **ENDS,
            "additional_special_tokens": [
                "<tool>",
                token("<x y>", "rstrip", typed=True),
                "</s>",
            ],
        }
    },
    "additional, renamed": {SETTINGS: {"extra_special_tokens": ["<tool>", "[PAD]"]}},
    "extra by name": {
        SETTINGS: {
            "additional_special_tokens": ["end"],
            "extra_special_tokens": {
                "image_token": "[PAD]",
                "other": "<tool>",
            },
        }
    },
    "map": {
        SETTINGS: {**ENDS, "pad_token": "[PAD]"},
        MAP: {
            "eos_token": {**token("</s>", "lstrip")},
            "pad_token": "<|im_start|>",
            "additional_special_tokens": ["<tool>", "<x y>"],
        },
    },
    "map where there are none": {
        SETTINGS: {"additional_special_tokens": []},
        MAP: {"additional_special_tokens": ["<tool>"]},
    },
    "map, both": {
        SETTINGS: {"extra_special_tokens": ["<tool>"]},
        MAP: {"extra_special_tokens": ["end", "<tool>"]},
    },
    "added": {
        SETTINGS: {**ENDS, "additional_special_tokens": ["<x y>"]},
        ADDED: {"<x y>": 260, "<tool>": 259, "</s>": 257},
    },
    "added and map": {
        MAP: {"pad_token": "<tool>"},
        ADDED: {"<tool>": 259, "end": 260},
    },
    "around": {SETTINGS: {**ENDS, "add_bos_token": True, "add_eos_token": True}},
    "one template": {SETTINGS: {"bos_token": "<s>", "chat_template": TEMPLATE}},
    "templates": {
        SETTINGS: {
            "image_token": "<tool>",
            "chat_template": [
                {"name": "default", "template": TEMPLATE},
                {"name": "tool_use", "template": TOOL_USE},
            ],
        }
    },
    "files of templates": {
        SETTINGS: {**ENDS, "chat_template": "no"},
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/tool_use.jinja": TOOL_USE,
    },
}


def base() -> dict:
    """Return a tokenizer.json of bytes."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: at for at, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found = json.loads(made.to_str())
    found["added_tokens"] = [{"id": int(key), **x} for key, x in own(258).items()]
    return found


def written(name: str, folder: pathlib.Path) -> pathlib.Path:
    files = {"tokenizer.json": base(), **FOLDERS[name]}
    for file, x in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(x if isinstance(x, str) else json.dumps(x))
    return folder


def main() -> None:
    from transformers import AutoTokenizer

    found = {}
    for name in FOLDERS:
        with tempfile.TemporaryDirectory() as folder:
            path = written(name, pathlib.Path(folder))
            (path / SETTINGS).touch()
            settings = json.loads((path / SETTINGS).read_text() or "{}")
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            (path / SETTINGS).write_text(json.dumps(settings))
            made = AutoTokenizer.from_pretrained(folder)
        found[name] = {
            "ids": made(TEXT)["input_ids"],
            "names": made.special_tokens_map,
            "chats": [
                made.apply_chat_template(
                    TALK, tools=tools, tokenize=False, mode="short"
                )
                for tools in (None, TOOLS)
                if made.chat_template
            ],
        }
    text = ",\n".join(f"{json.dumps(key)}: {json.dumps(x)}" for key, x in found.items())
    (HERE / "folders.json").write_text("{\n" + text + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
