"""test_lint.py -- formats, lints and type-checks Python and C with the settings of pyproject.toml
and .clang-format."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(sys.prefix) / "bin"
PYTHON = ("gen", "tools", "bench", "tests")
C = ("kernels", "runtime", "bench", "tests")
LIMIT = 120  # seconds, on a busy machine


def run(tool: str, *words: str | pathlib.Path) -> str:
    """Return a tool's complaints, or '' if it has none."""
    done = subprocess.run(
        [BIN / tool, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize(
    "words",
    [("ruff", "format", "--check", *PYTHON), ("ruff", "check", *PYTHON)],
    ids=lambda words: words[1],
)
def test_python(words: tuple[str, ...]) -> None:
    assert run(*words) == ""


def test_types() -> None:
    assert run("mypy") == ""


def test_c() -> None:
    files = [
        path
        for folder in C
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".c", ".h", ".cpp", ".cu")
        and "golden" not in path.parts  # written by zgen
    ]
    assert files
    assert run("clang-format", "--dry-run", "-Werror", *files) == ""


def test_a_tool_that_complains_is_heard(tmp_path: pathlib.Path) -> None:
    """Each tool complains of a file that is wrong in its way."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import os\nx: int = 'text'\n")
    assert "F401" in run("ruff", "check", wrong)
    assert "assignment" in run("mypy", wrong)
    assert "reformat" in run("ruff", "format", "--check", wrong)
    wrong.with_suffix(".c").write_text("int  x ;\n")
    formatted = ("clang-format", "--dry-run", "-Werror")
    assert "wrong.c" in run(*formatted, wrong.with_suffix(".c"))
