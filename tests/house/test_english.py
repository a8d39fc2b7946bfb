"""test_english.py -- the English of docstrings and comments of Python and C, as far as a program can
judge it.

A docstring starts with a verb or with the noun of its field. A sentence has at most one relative
clause with "which" or "who". The word "what" stands in quotes or names a field: in other places a
noun says more.
"""

import ast
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Files that keep the rules; "gen/**/*.py" would be all of the generator.
KEPT = (
    "gen/zg/check/*.py",
    "gen/zg/facts/*.py",
    "gen/zg/graph/*.py",
    "gen/zg/passes/*.py",
    "gen/zg/read/*.py",
    "gen/zg/*.py",
    "gen/zg/plan/*.py",
    "gen/zg/search/*.py",
    "gen/zg/write/*.py",
    "tools/*.py",
    "bench/*.py",
    "tests/**/*.py",
)
KEPT_C = (
    "runtime/**/*.[ch]",
    "kernels/**/*.[ch]",
    "kernels/**/*.cu",
    "tests/*/*.[ch]",
    "tests/*/*.cpp",
)
KEPT_SHELL = ("run",)
# Words that start no docstring: a sentence that starts with one has its subject last, or none.
FUNCTION_WORDS = frozenset(
    "also although and as at because beside besides but by for from how if in into of on or so"
    " than that those though to unless until what when where whether which while who whom whose"
    " why with within without".split()
)
# Texts of others: code, quoted words, and names of fields before their description.
QUOTED = re.compile(
    r"``?[^`]*``?"
    r"|\"[^\"\n]*\""
    r"|(?<!\w)'[^'\n]*'(?!\w)"
    r"|\bwhat(?=(, \w+)*: )"
)
HEAD = re.compile(r"\A\S+ -- ")
SENTENCE_END = re.compile(r"(?<=[.!?;:])\s+|\n\s*\n")
RELATIVE = re.compile(r"\b(which|who|whom|whose)\b", re.IGNORECASE)
WHAT = re.compile(r"\b[Ww]hat\b")
C_TOKEN = re.compile(
    r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)
SHELL_COMMENT = re.compile(r"(?<!\S)# .*")


def wrong_in_text(text: str) -> list[str]:
    """Return the rules that a docstring or a comment breaks in any place."""
    return ["what in place of a noun"] if WHAT.search(QUOTED.sub("", text)) else []


def wrong_in_docstring(text: str) -> list[str]:
    """Return the rules that a docstring breaks."""
    text = HEAD.sub("", text.strip())
    found = wrong_in_text(text)
    first = re.match(r"[A-Za-z]+(?![\w`.:])", text)
    if first and first[0].lower() in FUNCTION_WORDS:
        found.append(f"starts with {first[0]!r}")
    return found + nested(text)


def nested(text: str) -> list[str]:
    """Return an error for each sentence with two relative clauses."""
    return [
        f"two relative clauses: {' '.join(sentence.split())}"
        for sentence in SENTENCE_END.split(QUOTED.sub("", text))
        if len(RELATIVE.findall(sentence)) > 1
    ]


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring of a source with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(
            node,
            ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
        ):
            found = ast.get_docstring(node)
            if found is not None:
                yield node.body[0].lineno, found


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield each comment of a source with its line; comments on lines in a row are one."""
    line, lines = 0, []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        at, said = token.start[0], token.string.lstrip("# ")
        if lines and at != line + len(lines):
            yield line, "\n".join(lines)
            lines = []
        line = line if lines else at
        lines.append(said)
    if lines:
        yield line, "\n".join(lines)


def wrong_in_source(text: str) -> list[str]:
    """Return the broken rules of a Python source, each after its line."""
    found = [
        (line, rule)
        for line, said in docstrings(text)
        for rule in wrong_in_docstring(said)
    ]
    found += [
        (line, rule) for line, said in comments(text) for rule in wrong_in_text(said)
    ]
    return [f"{line}: {rule}" for line, rule in sorted(found)]


def wrong_in_c(text: str) -> list[str]:
    """Return the broken rules of the comments of a C source, each after its line."""
    found = []
    for token in C_TOKEN.finditer(text):
        if token[0].startswith("/"):
            said = re.sub(r"\n\s*\* ?", "\n", token[0].strip("/* "))
            line = text.count("\n", 0, token.start()) + 1
            found += [f"{line}: {rule}" for rule in wrong_in_text(said) + nested(said)]
    return found


def wrong_in_shell(text: str) -> list[str]:
    """Return the broken rules of the comments of a shell script, each after its line."""
    return [
        f"{line}: {rule}"
        for line, code in enumerate(text.splitlines(), 1)
        for said in SHELL_COMMENT.findall(code)
        for rule in wrong_in_text(said)
    ]


@functools.cache
def kept(patterns: tuple[str, ...] = KEPT) -> list[pathlib.Path]:
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


# Each sentence beside a plain one that says the same.
PAIRS = (
    (
        "What of the device's memory is what, where that is no plain arena.",
        "Return how device memory splits into arena and library allowance.",
    ),
    (
        "Of elements whose parameters lie off the device (away), what an update keeps there (low),"
        " or on it.",
        "The optimizer states an update needs; `away`: parameters are offloaded, `low`: so are the"
        " states.",
    ),
    (
        "Whose ranks have a class: all; those that cannot read peers' memory, to which pieces are"
        " sent (unshared); GPUs'.",
        "Targets that allocate a class: all; `unshared` (no access to peers' memory); `gpu`. Each"
        " includes the ones before it.",
    ),
    (
        "By its unit; a unit that has no flat has its buffers' (a tied head the embedding's).",
        "Guess the flat from the unit name (the tied head uses the embedding's).",
    ),
    (
        "Of a class with a slot for each micro-batch of a unit (x, save), micro-batch g of slot n"
        " has n * together + g.",
        "Classes x and save have one slot per (unit n, micro-batch g), at index n * together + g.",
    ),
    (
        "Unless peers' memory is read: slots for pieces.",
        "Receive slots, used when peers' memory cannot be read.",
    ),
    (
        "Where a plan keeps what, and by which ways it comes there, is not known here: bytes say"
        " it.",
        "The checker has no notion of offloading or sharding: it tracks the content of bytes.",
    ),
    (
        "A unit, whose flat another, which comes before it, has.",
        "A unit whose flat belongs to the unit before it.",
    ),
    (
        "Whether a plan fits.",
        "Return whether a plan fits.",
    ),
)


@pytest.mark.parametrize("bad,good", PAIRS)
def test_a_docstring_that_reads_twice_is_refused(bad: str, good: str) -> None:
    assert wrong_in_docstring(bad) and not wrong_in_docstring(good)


def test_what_needs_a_noun_in_comments_too() -> None:
    bad = "near = 0  # what stays of a shard of which a part goes down\n"
    assert wrong_in_source(bad) == ["1: what in place of a noun"]
    good = '"""x.py -- a shard.\n\nwhat: "what" as a word, `what` as a name.\n"""\n'
    assert wrong_in_source(good) == []
    assert wrong_in_source("f('what')  # a name, or whatever text\n") == []


def test_comments_of_c_and_shell_are_read() -> None:
    bad = 'f("/* what */"); /* a\n * what stays */\n'
    assert wrong_in_c(bad) == ["1: what in place of a noun"]
    two = "\n// a file which has lines which end\n"
    assert wrong_in_c(two)[0].startswith("2: two relative clauses")
    assert wrong_in_shell("# x\necho '#what'  # what is said\n") == [
        "2: what in place of a noun"
    ]


def test_comments_in_a_row_are_one() -> None:
    text = "# a\n# b\nx = 1  # c\n\n# d\n"
    assert [said for _, said in comments(text)] == ["a\nb\nc", "d"]


def test_files_are_found() -> None:
    names = {path.parent.name for path in kept()}
    assert {"check", "facts", "graph", "passes", "read", "search"} <= names
    assert all(any(ROOT.glob(x)) for x in KEPT + KEPT_C + KEPT_SHELL)


@pytest.mark.parametrize(
    "patterns,wrong",
    [(KEPT, wrong_in_source), (KEPT_C, wrong_in_c), (KEPT_SHELL, wrong_in_shell)],
)
def test_english(patterns: tuple[str, ...], wrong: Callable[[str], list[str]]) -> None:
    assert [
        f"{path.relative_to(ROOT)}:{rule}"
        for path in kept(patterns)
        for rule in wrong(path.read_text())
    ] == []
