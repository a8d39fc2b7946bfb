"""old.py -- translates spellings of older versions in a spec."""

from __future__ import annotations

from collections.abc import Iterator

from .node import Node, dotted

# Spellings of values before version 0.2, by key.
_VALUES = {("train", "accumulate"): {"grains": "micro_batches"}}


def spelt(root: Node) -> Iterator[str]:
    """Replace old spellings in a spec. Yield a note for each."""
    for key, words in _VALUES.items():
        above = root.at(key[:-1]).value
        if not isinstance(above, dict):
            continue
        node = above.get(key[-1])
        if not node or not isinstance(node.value, str):
            continue
        new = words.get(node.value)
        if new:
            yield f"{node.where}: {dotted(key)}: {node.value} is now called {new}"
            node.value = new
