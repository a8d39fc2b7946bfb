"""usertext.py -- reads the text of a user's file, and names its lines in errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from .node import SpecError, printable

# Most bytes of a file; a spec of twenty kinds of block has 20 KiB
BYTES = 128 * 1024


HUB = re.compile(
    r"[A-Za-z0-9][\w.-]*/(?!\S*\.(?:ya?ml|json)$)[A-Za-z0-9][\w.-]*", re.ASCII
)


def download(path: str) -> str:
    """Return the download command for a missing path that looks like a model's name on the hub;
    else ''."""
    if os.path.lexists(path) or not HUB.fullmatch(path):
        return ""
    folder = path.partition("/")[2]
    return (
        f"hf download {path} --local-dir {folder} (huggingface-cli download in older versions), "
        f"then --from {folder}"
    )


def text(path: str, kind: str = "a spec", hint: str = "") -> str:
    """Return the content of a user's file. hint: the usual reason for a file that is too long.

    Raises SpecError.
    """
    if os.path.isfile(os.path.join(path, "config.json")):
        raise SpecError(
            f"{printable(path)}: is a Hugging Face folder; allowed: a spec, or --from "
            f"{printable(path)}"
        )
    try:
        with open(path, "rb") as f:
            raw = f.read(BYTES + 1)
    except (OSError, ValueError) as e:
        why = (getattr(e, "strerror", None) or str(e)).lower()
        raise SpecError(
            f"{printable(path)}: cannot be read: {why}; "
            f"allowed: {download(path) or 'a text file'}"
        ) from None
    if raw.startswith(b"version https://git-lfs."):
        raise SpecError(
            f"{printable(path)}: is a Git LFS pointer, not the file itself; allowed: the "
            f"file, which "
            "git lfs pull downloads"
        )
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\0")) + 1
        raise SpecError(
            f"{printable(path)}:{line}: byte 0x00 is not text; allowed: UTF-8 text"
        )
    if len(raw) > BYTES:
        raise SpecError(
            f"{printable(path)}: is too long for {kind}{hint}; allowed: up to {BYTES} bytes"
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise SpecError(
            f"{printable(path)}:{line}: byte 0x{raw[e.start]:02x} is not UTF-8; "
            "allowed: UTF-8 text"
        ) from None


def place(path: str) -> Callable[[int], str]:
    """Return the function that names a line of a file in errors; lines count from 0."""
    return lambda line: f"{printable(path)}:{line + 1}"
