"""yamltext.py -- reads YAML into Nodes and writes it back. Only this file imports yaml.

YAML is composed, never constructed: no tag makes an object. Scalars are read as in YAML 1.2, so
1e-3 is a number and `no` is a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import yaml

from .node import DEPTH, NODES, Node, SpecError, number, several, shown

_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in (
        "str",
        "int",
        "float",
        "bool",
        "null",
        "timestamp",
        "merge",
        "value",
        "seq",
        "map",
    )
}
_SECOND = "mapping values are not allowed here"  # PyYAML's words
# A key and its value without a space between them.
_GLUED = re.compile(r"[\s-]*([A-Za-z_]\w*):([^\s/].*?)\s*")
_RESOLVER = yaml.resolver.Resolver()


@dataclass
class Reader:
    """Turns composed YAML into Nodes. place(line) is the location that an error names; lines count
    from 0."""

    place: Callable[[int], str]
    count: int = 0
    twice: list[str] = field(default_factory=list)  # errors of duplicate keys

    def fail(self, line: int, wrong: str, allowed: str) -> SpecError:
        return SpecError(f"{self.place(line)}: {wrong}; allowed: {allowed}")

    def document(self, text: str) -> Node:
        """Return the document. Raises SpecError, also for a duplicate key."""
        root = self.read(text)
        if self.twice:
            raise several(self.twice)
        return root

    def read(self, text: str) -> Node:
        """Return the document; the first of duplicate keys counts, and `twice` gets an error."""
        # PyYAML raises these for a broken %YAML line or \U escape.
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.reader.ReaderError as e:
            line = text.count("\n", 0, e.position)
            raise self.fail(
                line,
                f"the character {ascii(chr(e.character))} is not printable",
                "printable text",
            ) from None
        except yaml.MarkedYAMLError as e:
            line, said = _broken(e, text.splitlines())
            raise self.fail(line, f"broken syntax: {said}", "YAML") from None
        except RecursionError:
            raise self.fail(0, "is nested too deeply", f"{DEPTH} levels") from None
        except (
            ValueError,
            OverflowError,
        ) as e:
            raise self.fail(0, f"broken syntax: {ascii(str(e))}", "YAML") from None
        if root is None:
            raise self.fail(0, "is empty", "a spec: model, train, ...")
        return self.node(root, root.start_mark.line, 0)

    def node(self, n: yaml.Node, line: int, depth: int) -> Node:
        self.count += 1
        if self.count > NODES or depth > DEPTH:
            raise self.fail(
                line,
                "is too large or nested too deeply (each use of an alias counts)",
                f"{NODES} values, {DEPTH} levels",
            )
        if n.tag not in _TAGS:
            raise self.fail(
                n.start_mark.line,
                f"the tag {shown(n.tag)} is not supported",
                "plain YAML without tags",
            )
        if isinstance(n, yaml.MappingNode):
            return Node(self.mapping(n, depth), self.place(line))
        if isinstance(n, yaml.SequenceNode):
            items = [
                self.node(item, item.start_mark.line, depth + 1) for item in n.value
            ]
            return Node(items, self.place(line))
        quoted = isinstance(n, yaml.ScalarNode) and n.style
        return Node(n.value if quoted else _scalar(n.value), self.place(line))

    def mapping(self, n: yaml.MappingNode, depth: int) -> dict[str, Node]:
        found: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key, value in n.value:
            line = key.start_mark.line
            if not isinstance(key, yaml.ScalarNode):
                raise self.fail(line, "a key that is not a scalar", "scalar keys")
            if key.tag.endswith(":merge"):
                for source in (
                    value.value if isinstance(value, yaml.SequenceNode) else [value]
                ):
                    if not isinstance(source, yaml.MappingNode):
                        raise self.fail(
                            line,
                            "<< of a value that is not a mapping",
                            "<<: *ANCHOR of a mapping",
                        )
                    merged = {
                        **self.node(source, line, depth + 1).value,
                        **merged,
                    }
                continue
            if key.value in found:
                wrong = f"{shown(key.value)} is given twice"
                said = self.fail(line, wrong, "each key once")
                self.twice.append(str(said))
                continue
            found[key.value] = self.node(value, line, depth + 1)
        return {**merged, **found}


def _broken(e: yaml.MarkedYAMLError, lines: Sequence[str]) -> tuple[int, str]:
    """Return the line of a mistake and its description. PyYAML reports a key without a space after
    its colon, or without a colon, one line late."""
    mark = e.problem_mark or e.context_mark
    line = mark.line if mark else 0
    said = " ".join(f"{e.context or ''} {e.problem or ''}".split())
    unfinished = e.context_mark if e.context == "while scanning a simple key" else None
    at = unfinished.line if unfinished else line - 1
    glued = _GLUED.fullmatch(lines[at]) if 0 <= at < len(lines) else None
    if glued and (unfinished or e.problem == _SECOND):
        key, value = glued.groups()
        spaced = shown(f"{key}: {value}")
        return at, (
            f"{shown(f'{key}:{value}')} is not a key; did you mean {spaced}? a space after the "
            "colon is needed"
        )
    if unfinished and at < len(lines):
        return at, f"{shown(lines[at].strip())} has no colon after its key"
    return line, said


def _scalar(text: str) -> object:
    """Return the value of an unquoted scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if text.lower() in (".inf", "+.inf", "-.inf", ".nan"):
        return float(text.replace(".", ""))
    found = number(text)
    return text if found is None else found


# ---- writing


def text(root: Node) -> str:
    """Return YAML that a Reader reads as the same Nodes."""
    return yaml.serialize(
        _made(root, 0), Dumper=yaml.SafeDumper, width=100, allow_unicode=True
    )


def _made(node: Node, depth: int) -> yaml.Node:
    """Return YAML nodes. Lists and mappings of scalars take one line each, except top-level
    sections."""
    value = node.value
    if not isinstance(value, (dict, list)):
        return _written(value)
    below = list(value.values() if isinstance(value, dict) else value)
    flow = depth > 1 and not any(isinstance(b.value, (dict, list)) for b in below)
    if isinstance(value, list):
        return yaml.SequenceNode(
            "tag:yaml.org,2002:seq",
            [_made(b, depth + 1) for b in below],
            flow_style=flow,
        )
    pairs = [(_written(key), _made(b, depth + 1)) for key, b in value.items()]
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=flow)


def _written(value: object) -> yaml.ScalarNode:
    """Return a scalar, quoted if its text would be read as another type."""
    if isinstance(value, str):
        quoted = _scalar(value) != value
        return yaml.ScalarNode(
            "tag:yaml.org,2002:str", value, style='"' if quoted else None
        )
    words = {None: "null", False: "false", True: "true"}
    said = words[value] if value is None or isinstance(value, bool) else repr(value)
    tag = _RESOLVER.resolve(yaml.ScalarNode, said, (True, False))  # type: ignore[no-untyped-call]
    return yaml.ScalarNode(tag, said)
