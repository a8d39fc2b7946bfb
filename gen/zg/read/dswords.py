"""dswords.py -- messages about keys of a ds_config.json that the table of dskeys.py lacks."""

from __future__ import annotations

import difflib

from .dskeys import TABLE
from .dsrows import Honour
from .node import Node, meant, printable

TOP = {key.partition(".")[0] for key in TABLE}
SECTIONS = {key[:i] for key in TABLE for i, c in enumerate(key) if c == "."}
_ALIASES = ("bfloat16",)
_STARS = {"*", "_*"}


def dotted(key: str, node: Node) -> str:
    """Return the error for a key that contains a dot."""
    *above, last = key.split(".")
    there = (
        "".join(f'"{word}": {{' for word in above) + f'"{last}": ...' + "}" * len(above)
    )
    return (
        f"{node.where}: {printable(key)}: has a dot in its name, but a section is an object; "
        f"allowed: {printable(there)}"
    )


def unknown(key: str, node: Node) -> tuple[str, bool]:
    """Return the message for a key that the table lacks, and whether it is an error.

    The key may be misspelled or in the wrong section. Otherwise, at the top level, it is only a
    note: DeepSpeed ignores keys that it does not know.
    """
    section, _, word = key.rpartition(".")
    if word.startswith("_") or word in ("comment", "//"):
        return (
            f"{node.where}: {printable(key)}: is a comment inside a section; "
            "allowed: at the top level of the file, or after a #"
        ), True
    start = f"{section}." if section else ""
    here = sorted(
        {k[len(start) :].split(".")[0] for k in TABLE if k.startswith(start)} - _STARS
    )
    homes = sorted(
        {
            k
            for k in {*TABLE, *SECTIONS}
            if k.rpartition(".")[2] == word not in _STARS
            and k.partition(".")[0] not in _ALIASES
        }
    )
    # A high threshold: among so many keys some resemble any word.
    hint = meant(word, here, 0.68)
    if 0 < len(homes) < 4:
        top = " at the top level" if section and "." not in homes[-1] else ""
        hint = f"did you mean {' or '.join(homes)}{top}? "
    elif not hint and not homes:
        names = {k.rpartition(".")[2] for k in TABLE}
        near = difflib.get_close_matches(word, names - _STARS, 1, 0.9)
        homes = sorted(k for k in TABLE if near and k.rpartition(".")[2] == near[0])
        hint = f"did you mean {homes[0]}? " if homes else ""
    if not section and not hint and not homes:
        return (
            f"{node.where}: {printable(key)}: has no effect here: it is not a DeepSpeed key; "
            f"DeepSpeed "
            "ignores it, too"
        ), False
    ours = sorted(
        {
            k[len(start) :].split(".")[0]
            for k, row in TABLE.items()
            if k.startswith(start) and isinstance(row, Honour)
        }
    )
    return (
        f"{node.where}: {printable(key)}: is not a key here; {hint}"
        f"allowed: {', '.join(ours or here)}"
    ), True
