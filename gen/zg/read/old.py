"""old.py -- what a spec of an older version says, read as the words of this one."""

from __future__ import annotations

from collections.abc import Iterator

from .node import Node, dotted

# Values that were spelt otherwise before version 0.2, by key.
_VALUES = {("train", "accumulate"): {"grains": "micro_batches"}}


def spelt(root: Node) -> Iterator[str]:
    """Changes old spellings in a spec to the new ones; a note of each."""
    for key, words in _VALUES.items():
        above = root.at(key[:-1]).value
        if not isinstance(above, dict):
            continue
        node = above.get(key[-1])
        if not node or not isinstance(node.value, str):
            continue
        new = words.get(node.value)
        if new:
            yield f"{node.where}: {dotted(key)}: {node.value} is {new} now"
            node.value = new
