"""pretrained.py -- reads a tokenizer's folder as AutoTokenizer.from_pretrained does.

tokenizer.json is the tokenizer. The other files add tokens to it, name its special tokens and have
the chat templates. A key that would change tokens in a way not supported here is refused.

It follows transformers 5.24; tests/reference/folders.py compares.

Invariants
 1. A token has the id that its file states, or the folder is refused.
 2. Files are not trusted: a wrong type is an error that names the file and the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import Bad
from documents import loaded
from tokenizers import AddedToken, Tokenizer

CONFIG = 100_000_000  # most bytes of a tokenizer's file
SETTINGS = "tokenizer_config.json"
MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
NAMED = [f"{x}_token" for x in "bos eos unk sep pad cls mask".split()]
MORE, OLDER = "extra_special_tokens", "additional_special_tokens"
OWN = "model_specific_special_tokens"
# Files of other tokenizers, which AutoTokenizer converts to a tokenizer.json.
OTHERS = (
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
)
SAVE = (
    "transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes a"
    " tokenizer.json that has it"
)

Config = dict[str, Any]
Stated = tuple[int, str, AddedToken]  # an id, the file and key that state it


@dataclass(frozen=True)
class Source:
    """A chat template with its file and key."""

    where: str
    text: str


@dataclass(frozen=True)
class Pretrained:
    """A tokenizer. text: tokenizer.json with the tokens that other files add."""

    text: str
    names: dict[str, str] = field(default_factory=dict)  # bos_token, ...
    templates: dict[str, Source] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# ---- files


def text_of(path: Path) -> str:
    if path.stat().st_size > CONFIG:
        raise Bad(f"{path}: over {CONFIG} bytes")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise Bad(f"{path}: not UTF-8") from None


def config(path: Path) -> Config:
    """Return the content of a JSON file, {} if there is none."""
    if not path.exists():
        return {}
    found = parsed(path, text_of(path))
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Bad(f"{path}: half a UTF-16 surrogate pair is not text") from None
    return found


def parsed(path: Path, text: str) -> Config:
    found = loaded(str(path), text.encode())
    if not isinstance(found, dict):
        raise Bad(f"{path}: not an object")
    return found


def library(text: str, where: object) -> Tokenizer:
    """Return a tokenizer without its file's truncation and padding."""
    try:
        found = Tokenizer.from_str(text)
    except Exception as e:  # the library has no exception class of its own
        raise Bad(f"{where}: not a tokenizer: {e}") from None
    found.no_truncation()
    found.no_padding()
    return found


# ---- tokens


def token(where: str, x: object, **default: bool) -> AddedToken:
    """Return a token, given as text or as an object with `content` and flags. Missing flags come
    from `default`, then from the library."""
    if isinstance(x, str):
        x = {"content": x}
    if not isinstance(x, dict) or not isinstance(x.get("content"), str):
        raise Bad(f'{where}: must be a string or {{"content": ...}}')
    flags = {flag: x[flag] for flag in FLAGS if flag in x}
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise Bad(f"{where}: {flag}: must be true or false")
    return AddedToken(x["content"], **{**default, **flags})


def listed(where: str, x: object) -> list[AddedToken]:
    if not isinstance(x, list):
        raise Bad(f"{where}: must be a list of tokens")
    return [token(where, each, special=True) for each in x]


def objects(where: str, x: object) -> Config:
    if not isinstance(x, dict):
        raise Bad(f"{where}: must be an object")
    return x


def number(where: str, x: object) -> int:
    """Return the id of a token; keys of JSON are texts."""
    if isinstance(x, str) and x.isdecimal() and len(x) < 10:
        x = int(x)
    if type(x) is not int or not 0 <= x < 2**31:
        raise Bad(f"{where}: {x} is not a token id")
    return x


@dataclass
class Folder:
    """Content of the files beside tokenizer.json."""

    path: Path
    known: Config  # tokenizer_config.json, with special_tokens_map.json if that counts
    named: dict[str, AddedToken] = field(default_factory=dict)
    more: list[AddedToken] = field(default_factory=list)
    # id -> the file and key that state it, and the token
    stated: dict[int, tuple[str, AddedToken]] = field(default_factory=dict)

    def where(self, file: str, key: object = None) -> str:
        return f"{self.path / file}" + ("" if key is None else f": {key}")


def read(path: Path, raw: Config) -> Folder:
    """Read the files of a folder. raw: tokenizer.json.

    special_tokens_map.json and added_tokens.json count only without added_tokens_decoder, and then
    take precedence over tokenizer_config.json.
    """
    found = Folder(path, config(path / SETTINGS))
    renamed(found.known)
    key = "added_tokens_decoder"
    if key in found.known:
        where = found.where(SETTINGS, key)
        for id_, x in objects(where, found.known[key]).items():
            at = f"{where}: {id_}"
            if isinstance(x, str):
                raise Bad(f'{at}: must be {{"content": ...}}')
            found.stated[number(at, id_)] = (at, token(at, x))
        named(found, SETTINGS)
    else:
        legacy(found, raw)
    return found


def legacy(found: Folder, raw: Config) -> None:
    """Read the files that transformers wrote before added_tokens_decoder existed."""
    known, there = found.known, config(found.path / MAP)
    before = known.get(MORE)
    if isinstance(before, list) and isinstance(there.get(MORE), list):
        there[MORE] = before + [x for x in there[MORE] if x not in before]
    known.update(there)
    renamed(known, once=True)
    named(found, f"{SETTINGS}, {MAP}" if there else SETTINGS)
    # AutoTokenizer treats an object in tokenizer_config.json as a special token only afterwards.
    plain = [x for x in NAMED if x in there or isinstance(known.get(x), str)]
    names = [found.named[key] for key in plain if key in found.named]
    names += found.more if known.get(MORE) else []
    contents = {x.content for x in names}
    for content, id_ in config(found.path / ADDED).items():
        at = found.where(ADDED, content)
        known_ = content in contents
        made = AddedToken(content, special=known_, normalized=not known_)
        found.stated[number(at, id_)] = (at, made)
    for id_, at, x in own(found.path / "tokenizer.json", raw):
        found.stated[id_] = (at, x)


def renamed(known: Config, once: bool = False) -> None:
    """Rename keys to their current names. additional_special_tokens became extra_special_tokens;
    tokens of an object become model_specific_special_tokens. once: existing new keys stay."""
    if OLDER in known and not known.get(MORE) and not once:
        known[MORE] = known.pop(OLDER)
    if isinstance(known.get(MORE), dict) and isinstance(known.get(OWN) or {}, dict):
        known[OWN] = (known.get(OWN) or {}) | known.pop(MORE)


def named(found: Folder, file: str) -> None:
    """Read bos_token and the like, then tokens without names."""
    known = found.known
    names = [x for x in known if x.endswith("_token") and x not in NAMED]
    for key in (*NAMED, *names):
        x = known.get(key)
        where = found.where(file, key)
        if isinstance(x, (str, dict)):
            found.named[key] = token(where, x, special=True)
        elif x is not None and key in NAMED:
            raise Bad(f"{where}: must be a string")
    own = known.get(OWN) or {}
    if not isinstance(own, dict):
        raise Bad(f"{found.where(file, OWN)}: must be an object")
    for key, x in own.items():
        where = found.where(file, f"{MORE}: {key}")
        found.named[key] = token(where, x, special=True)
    key = MORE if MORE in known else OLDER
    if known.get(key) is not None:
        found.more = listed(found.where(file, key), known[key])


def own(path: Path, raw: Config) -> Iterator[Stated]:
    """Yield added_tokens of a tokenizer.json that the library has read."""
    there = raw.get("added_tokens")
    for x in there if isinstance(there, list) else []:
        at = f"{path}: added_tokens: {x['content']}"
        yield number(at, x["id"]), at, token(at, x)


def added(found: Folder, tokenizer: Tokenizer) -> list[AddedToken]:
    """Return the tokens that tokenizer.json lacks or has with other flags, in the order of their
    ids, then those that are only named. The last of duplicates counts."""
    there = tokenizer.get_added_tokens_decoder().values()
    same = {repr(x) for x in there}
    tokens = [x for _, (_, x) in sorted(found.stated.items())]
    tokens = [x for x in tokens if repr(x) not in same]
    seen = {x.content for x in (*there, *tokens)}
    others = (*found.named.values(), *found.more)
    tokens += [x for x in others if x.content and x.content not in seen]
    names = {x.content for x in found.named.values()}
    for x in tokens:
        x.special = x.special or x.content in names
    return tokens


def held(stated: Iterable[Stated], made: Tokenizer) -> None:
    """Require that each token has the id that its file states."""
    for id_, where, x in stated:
        if not x.content:
            raise Bad(f"{where}: its content is empty")
        has = made.token_to_id(x.content)
        if has != id_:
            said = "none" if has is None else has
            raise Bad(
                f"{where}: its id is {id_} there, but {said} in the tokenizer: ids that conflict or"
                " leave gaps are not kept by the tokenizers library"
            )


# ---- unsupported settings


def steps(part: Any) -> Iterator[Config]:
    """Yield a tokenizer's normalizer, pre-tokenizer or post-processor, or each step of a sequence,
    as the library's JSON."""
    if part is not None:
        first = json.loads(part.__getstate__())
        several = ("normalizers", "pretokenizers", "processors")
        yield from next((first[x] for x in several if x in first), [first])


def prefixed(made: Tokenizer) -> bool | None:
    """Return whether the tokenizer puts a space before a text, None if it is unknown."""
    for x in steps(made.pre_tokenizer):
        if x["type"] == "ByteLevel":
            return bool(x["add_prefix_space"])
        if x["type"] == "Metaspace":
            return bool(x["prepend_scheme"] != "never")
    kinds = [x["type"] for x in steps(made.normalizer)]
    return True if "Prepend" in kinds else None


def lowered(made: Tokenizer) -> bool:
    return any(
        x["type"] == "Lowercase" or x.get("lowercase") is True
        for x in steps(made.normalizer)
    )


def whole(file: Path, made: Tokenizer) -> None:
    """Refuse a post-processor that adds an unknown token: the library panics there."""
    for x in steps(made.post_processor):
        if x["type"] != "TemplateProcessing":
            continue
        for piece in x["single"]:
            name = piece.get("SpecialToken", {}).get("id")
            if name is not None and name not in x["special_tokens"]:
                raise Bad(
                    f"{file}: post_processor: {name}: is not in its special_tokens"
                )


def refused(found: Folder, made: Tokenizer) -> None:
    """Refuse keys with which AutoTokenizer may produce other tokens than tokenizer.json."""
    known = found.known
    for key, has in (
        ("add_prefix_space", prefixed(made)),
        ("do_lower_case", lowered(made)),
    ):
        asked = known.get(key)
        if isinstance(asked, bool) and has is not None and asked != has:
            raise Bad(
                f"{found.where(SETTINGS, key)}: is {json.dumps(asked)}, but tokenizer.json does"
                f" not; make them agree: {SAVE}"
            )
    for key in ("split_special_tokens", "fix_mistral_regex"):
        if known.get(key):
            raise Bad(f"{found.where(SETTINGS, key)}: is not known; {SAVE}")
    files = known.get("fast_tokenizer_files")
    if files and files != ["tokenizer.json"]:
        where = found.where(SETTINGS, "fast_tokenizer_files")
        raise Bad(f"{where}: only tokenizer.json is read; {SAVE}")


def nothing(path: Path) -> Bad:
    """Return the error of a folder without a tokenizer.json."""
    others = [x for x in OTHERS if (path / x).exists()]
    has = f" ({', '.join(others)} alone is not read)" if others else ""
    return Bad(
        f"{path / 'tokenizer.json'}: there is none{has}; --tokenizer names another, the folder that"
        " ./run data made, or `bytes`; transformers'"
        " AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes one"
    )


# ---- chat templates


def templates(found: Folder) -> dict[str, Source]:
    """Return the chat templates by name. chat_template.jinja is `default`; files take precedence
    over tokenizer_config.json."""
    path = found.path
    files = {"default": path / "chat_template.jinja"}
    more = path / "additional_chat_templates"
    if more.is_dir():
        files |= {x.stem: x for x in sorted(more.glob("*.jinja"))}
    made = {
        name: Source(str(file), text_of(file))
        for name, file in files.items()
        if file.exists()
    }
    where = found.where(SETTINGS, "chat_template")
    if not made:
        texts = several(where, found.known.get("chat_template"))
        made = {name: Source(where, text) for name, text in texts.items()}
    return made


def several(where: str, x: object) -> dict[str, str]:
    """Return a template, or several by name."""
    if x is None:
        return {}
    if isinstance(x, str):
        return {"default": x}
    if isinstance(x, list) and all(isinstance(each, dict) for each in x):
        x = {str(each.get("name")): each.get("template") for each in x}
    if not isinstance(x, dict) or not all(isinstance(text, str) for text in x.values()):
        raise Bad(
            f'{where}: must be a string, or a list of {{"name": ..., "template": ...}}'
        )
    return x


# ---- a folder


def around(found: Folder, made: Tokenizer) -> Iterator[str]:
    """Yield notes about add_bos_token and add_eos_token settings that tokenizer.json does not
    follow."""
    ids = made.encode("a").ids
    for key, name, place in (
        ("add_bos_token", "bos_token", ids[:1]),
        ("add_eos_token", "eos_token", ids[-1:]),
    ):
        asked, token_ = found.known.get(key), found.named.get(name)
        if not isinstance(asked, bool) or token_ is None:
            continue
        if asked != (place == [made.token_to_id(token_.content)]):
            yield (
                f"{found.where(SETTINGS, key)}: is {json.dumps(asked)}, but tokenizer.json does"
                " otherwise, which counts here as in transformers 5"
            )


def notes(
    found: Folder, tokens: Sequence[AddedToken], made: Tokenizer
) -> Iterator[str]:
    """Yield notes for the user: tokens that other files add, tokens that do not exist, and more
    tokens than the model's embedding has rows."""
    path = found.path
    new = [f"{x.content} {made.token_to_id(x.content)}" for x in tokens]
    if new:
        more = f" and {len(new) - 8} more" if len(new) > 8 else ""
        yield (
            f"{path}: tokens that tokenizer.json lacks, or has otherwise:"
            f" {', '.join(new[:8])}{more}"
        )
    empty = [key for key, x in found.named.items() if not x.content]
    empty += [MORE for x in found.more if not x.content][:1]
    if empty:
        yield f"{path}: {', '.join(empty)}: an empty text is no token"
    yield from around(found, made)
    known = config(path / "config.json")
    inner = known.get("text_config")
    rows = (inner if isinstance(inner, dict) else known).get("vocab_size")
    size = vocabulary(made)
    if type(rows) is int and 0 < rows < size:
        yield (
            f"{path}: {size} tokens, and config.json's model has {rows} rows (vocab_size): the"
            f" trainer adds rows with gen/zgen --from {path} --vocab {size}"
        )


def vocabulary(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def ended(found: Folder, file: Path, made: Tokenizer) -> None:
    """Require that the token that ends a text is in some file, and not only named."""
    end = found.named.get("eos_token")
    others = (x for _, x in found.stated.values())
    there = {x.content for x in (*others, *found.more)}
    if end and end.content and end.content not in there:
        if made.token_to_id(end.content) is None:
            raise Bad(f"{file}: eos_token {end.content} is not one of its tokens")


def pretrained(file: Path) -> Pretrained:
    """Return a tokenizer.json with the files beside it."""
    text = text_of(file)
    made = library(text, file)
    raw = parsed(file, text)
    whole(file, made)
    found = read(file.parent, raw)
    refused(found, made)
    ended(found, file, made)
    tokens = added(found, made)
    if tokens:
        made.add_tokens(tokens)
        text = made.to_str(pretty=True) + "\n"
    held(own(file, raw), made)
    held(((id_, *x) for id_, x in found.stated.items()), made)
    return Pretrained(
        text=text,
        names={key: x.content for key, x in found.named.items()},
        templates=templates(found),
        notes=tuple(notes(found, tokens, made)),
    )
