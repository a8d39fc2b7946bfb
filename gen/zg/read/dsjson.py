"""dsjson.py -- parses the text of a ds_config.json into Nodes.

DeepSpeed reads Hjson: JSON with comments (#, //, /* */), unquoted keys, extra commas, and optional
commas at the end of a line. So does this parser. Errors recognize templates, Markdown and Python.
"""

from __future__ import annotations

import json
import re
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from .node import DEPTH, NODES, Node, SpecError, number, shown

_GAP = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)*")
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.)*)"|' r"'((?:[^'\\\n]|\\.)*)'")
_LONG = re.compile(r"'''(.*?)'''", re.S)
_KEY = re.compile(r"""[^\s,:{}\[\]"']+""")
_END = r"(?=\s*(?:[,\]}\n]|#|//|/\*|$))"
_PLAIN = re.compile(r"[^\s,:{}\[\]\"'#]+" + _END)
_BARE = re.compile(r"[A-Za-z_/.~][\w./+-]*[ \t\r]*(?=\n|$)")
_MARK = re.compile(r"\{\{|\{%|\$\{|\$[A-Za-z_]\w*|<[A-Za-z_][^<>\n]*>")
# BATCH_SIZE, a placeholder for sed.
_NAME = re.compile(r"(?!NaN\b)[A-Z][A-Z0-9_]+\b")
_FENCE = re.compile(r"^[ \t]*(```|~~~)", re.M)
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": -float("inf"),
}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass
class _Text:
    text: str
    place: Callable[[int], str]  # location of a line, counted from 0
    at: int = 0
    count: int = 0
    lines: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = [m.start() for m in re.finditer("\n", self.text)]

    def where(self, at: int) -> str:
        return self.place(bisect(self.lines, at - 1))

    def fail(self, at: int, wrong: str, allowed: str) -> SpecError:
        left = _MARK.match(self.text, at) or _NAME.match(self.text, at)
        if left:
            return self.template(at, left[0])
        return SpecError(
            f"{self.where(at)}: broken syntax: {wrong}; allowed: {allowed}"
        )

    def template(self, at: int, found: str) -> SpecError:
        return SpecError(
            f"{self.where(at)}: {shown(found)} is a template placeholder; "
            "allowed: the value it stands for"
        )

    def skip(self) -> str:
        """Skip white space and comments. Return the next character, '' at the end."""
        gap = _GAP.match(self.text, self.at)
        self.at = gap.end() if gap else self.at
        if self.text.startswith("/*", self.at):
            raise self.fail(self.at, "this comment has no end", "/* ... */")
        return self.text[self.at : self.at + 1]

    # ---- values

    def value(self, depth: int) -> Node:
        c, start = self.skip(), self.at
        self.count += 1
        if self.count > NODES or depth > DEPTH:
            raise SpecError(
                f"{self.where(start)}: is nested too deeply or has too many values; "
                f"allowed: {DEPTH} levels, {NODES} values"
            )
        if c == "{":
            return Node(self.members(start, depth), self.where(start))
        if c == "[":
            return Node(self.items(start, depth), self.where(start))
        found = self.quoted() if c in ('"', "'") else self.plain()
        return Node(found, self.where(start))

    def members(self, start: int, depth: int) -> dict[str, Node]:
        """Parse {...}, or a whole file without its braces."""
        found: dict[str, Node] = {}
        braces = self.text[start : start + 1] == "{"
        self.at = start + braces
        if _MARK.match(self.text, start):
            raise self.fail(start, "", "")
        while (c := self.skip()) != "}" or not braces:
            if not c:
                if braces:
                    raise self.open(start, "{")
                return found
            at, key = self.at, self.key()
            if self.skip() != ":":
                raise self.fail(
                    self.at if self.text[self.at :] else at,
                    f"there is no colon after the key {shown(key)}",
                    "KEY: VALUE",
                )
            self.at += 1
            if key in found:
                raise SpecError(
                    f"{self.where(at)}: {shown(key)} is given twice; "
                    "allowed: each key once"
                )
            found[key] = Node(self.value(depth + 1).value, self.where(at))
            self.comma("}")
        self.at += 1
        return found

    def items(self, start: int, depth: int) -> list[Node]:
        found = []
        self.at = start + 1
        while (c := self.skip()) != "]":
            if not c:
                raise self.open(start, "[")
            found.append(self.value(depth + 1))
            self.comma("]")
        self.at += 1
        return found

    def open(self, start: int, what: str) -> SpecError:
        return SpecError(
            f"{self.where(start)}: broken syntax: the file ends before the {what} of "
            "this line is closed; allowed: JSON"
        )

    def comma(self, end: str) -> None:
        """Parse the separator after a value: a comma, the end, or a new line."""
        before = self.at
        c = self.skip()
        if c == ",":
            self.at += 1
        elif c and c != end and "\n" not in self.text[before : self.at]:
            raise self.fail(
                self.at,
                f"{shown(c)} after the end of a value",
                f"a comma or {end}",
            )

    # ---- words

    def key(self) -> str:
        c = self.text[self.at]
        if c in "\"'":
            return self.quoted()
        found = _KEY.match(self.text, self.at)
        if not found or _MARK.match(found[0]):
            raise self.fail(
                self.at, f"{shown(c)} where a key is expected", '"KEY": VALUE'
            )
        self.at = found.end()
        return found[0]

    def quoted(self) -> str:
        start = self.at
        long = _LONG.match(self.text, start)
        if long:
            self.at = long.end()
            return long[1].strip()
        found = _QUOTED.match(self.text, start)
        if not found:
            raise self.fail(
                start,
                "this string has no closing quote",
                '"text"',
            )
        self.at = found.end()
        body = found[1]
        if body is None:
            body = found[2].replace("\\'", "'").replace('"', '\\"')
        left = _MARK.search(body)
        if left:
            raise self.template(start, left[0])
        try:
            return str(json.loads(f'"{body}"', strict=False))
        except ValueError:
            raise self.fail(
                start,
                f"{shown(found[0])} has an invalid escape \\",
                "JSON's \\n, \\\\, \\u00e9",
            ) from None

    def plain(self) -> object:
        """Parse a number, true, false, null, or a word alone on the rest of its line."""
        start = self.at
        found = _PLAIN.match(self.text, start)
        if found and (found[0] in _WORDS or number(found[0]) is not None):
            self.at = found.end()
            return _WORDS[found[0]] if found[0] in _WORDS else number(found[0])
        line = self.text[start:].partition("\n")[0].strip()
        first, _, rest = line.partition(" ")
        if rest and (first in _WORDS or number(first) is not None):
            raise self.fail(
                start,
                f"{shown(rest)} after {first}",
                "a comma or a new line",
            )
        if found and found[0] in _PYTHON:
            raise self.fail(start, f"{found[0]} is Python, not JSON", _PYTHON[found[0]])
        bare = _BARE.match(self.text, start)
        if not bare or _NAME.fullmatch(bare[0].strip()):
            what = f"{shown(line)} is not a value" if line else "a value is missing"
            text = '"text" in quotes' if line[:1].isalpha() else '"text"'
            raise self.fail(
                start,
                what,
                f"a number, true, false, null, {text}, [...] or {{...}}",
            )
        self.at = bare.end()
        return bare[0].strip()


def parse(text: str, place: Callable[[int], str]) -> Node:
    """Parse the object of a file. place(line) is the location that an error names; lines count from
    0.

    Raises SpecError.
    """
    t = _Text(text, place)
    fence = _FENCE.search(text)
    if fence:
        raise SpecError(
            f"{t.where(fence.start(1))}: {fence[1]} is a Markdown code fence; "
            "allowed: the text between the fences"
        )
    c = t.skip()
    if not c:
        raise SpecError(f"{place(0)}: is empty; allowed: an object {{...}}")
    if c in "{[" or not re.compile(r"""("[^"\n]*"|[^\s,:{}\[\]"']+)\s*:""").match(
        text, t.at
    ):
        root = t.value(0)
    else:
        root = Node(t.members(t.at, 0), t.where(t.at))
    if not isinstance(root.value, dict):
        raise SpecError(
            f"{root.where}: is {shown(root.plain())}; allowed: an object {{...}}"
        )
    if c == "{" and t.skip():
        raise t.fail(
            t.at,
            f"{shown(t.text[t.at])} after the end of the object",
            "one object",
        )
    return root
