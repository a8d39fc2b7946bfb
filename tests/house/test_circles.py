"""test_circles.py -- reads the calls among C files off the objects of a program, and the includes off
their sources, and tests that no file is in a circle of either, and that a file of the runtime
includes the headers that it uses."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import tempfile

import pytest

from tests.house import test_rules
from tests.lib import trainer

OURS = "runtime/", "kernels/"
PROGRAMS = [
    trainer.GCC,
    pytest.param(trainer.MPI, marks=pytest.mark.slow),
    pytest.param(trainer.EMULATED, marks=pytest.mark.slow),
]

# Folders whose files a target must have completely; of others it may have some.
OF = {
    trainer.GCC: {"/cpu/"},
    trainer.MPI: {"/mpi/"},
    trainer.EMULATED: {"/cuda/"},
}


def sources() -> dict[pathlib.Path, str]:
    """Return the source of every object that ninja knows."""
    known = json.loads(trainer.sh("ninja", "-t", "compdb"))
    return {trainer.ROOT / row["output"]: row["file"] for row in known}


def symbols(made: pathlib.Path, *which: str) -> set[str]:
    """Return the names that an object defines or asks of others."""
    listed = subprocess.run(
        ["nm", "-jP", *which, made], capture_output=True, text=True, check=True
    )
    return set(listed.stdout.split())


def calls(objects: dict[pathlib.Path, str]) -> dict[str, set[str]]:
    """Return each source with the sources that it calls. Functions of its headers are its own. A
    source compiled for several processors is one."""
    owner = {
        name: source
        for made, source in objects.items()
        for name in symbols(made, "--defined-only", "--extern-only")
    }
    found: dict[str, set[str]] = {source: set() for source in objects.values()}
    for made, source in objects.items():
        asked = symbols(made, "--undefined-only")
        found[source] |= {owner[name] for name in asked if name in owner} - {source}
    return found


def included(source: str, folder: pathlib.Path) -> set[str]:
    """Files of ours that one includes."""
    path = folder / source
    return {
        str((path.parent / name).resolve().relative_to(folder.resolve()))
        for name in re.findall(r'^#include "(.*)"', path.read_text(), re.M)
        if (path.parent / name).exists()
    }


def own_functions(header: str, folder: pathlib.Path) -> set[str]:
    """Names that the functions of a header, and of those that it includes, ask of objects."""
    with tempfile.NamedTemporaryFile(suffix=".o") as made:
        words = "-std=gnu11 -fkeep-inline-functions -w -x c -c".split()
        subprocess.run(["gcc", *words, header, "-o", made.name], cwd=folder, check=True)
        return symbols(pathlib.Path(made.name), "--undefined-only")


def needs(
    objects: dict[pathlib.Path, str], folder: pathlib.Path = trainer.ROOT
) -> dict[str, set[str]]:
    """Return the files that each file calls or includes, with its header. Of the kernels' headers,
    which every processor compiles in its own way, only includes count."""
    found = calls(objects)
    owner = {
        name: source
        for made, source in objects.items()
        for name in symbols(made, "--defined-only", "--extern-only")
    }
    left = set(found)
    while left:
        source = left.pop()
        found.setdefault(source, set()).update(included(source, folder))
        left |= found[source] - found.keys()
        if source.endswith(".h") and not source.startswith("kernels/"):
            asked = own_functions(source, folder)
            own = source.removesuffix("h") + "c"
            found[source] |= {owner[name] for name in asked & owner.keys()} - {own}
    return found


def of_a_program(kind: trainer.Kind) -> dict[pathlib.Path, str]:
    known = sources()
    return {
        made: known[made]
        for made in trainer.objects(kind)
        if known[made].startswith(OURS)
    }


def circles(of: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of files that reach themselves through others."""
    far = {name: set(needs) for name, needs in of.items()}
    for by in far:
        for name in far:
            far[name] |= far[by] if by in far[name] else set()
    found = [{other for other in far[name] if name in far[other]} for name in far]
    return [ring for n, ring in enumerate(found) if ring and ring not in found[:n]]


def compiled(folder: pathlib.Path, **texts: str) -> dict[pathlib.Path, str]:
    """Compile files that call each other."""
    for name, text in texts.items():
        (folder / f"{name}.c").write_text(text)
        subprocess.run(["gcc", "-c", f"{name}.c"], cwd=folder, check=True)
    return {folder / f"{name}.o": name for name in texts}


def test_calls_are_seen(tmp_path: pathlib.Path) -> None:
    """Calls through a header or a table are seen; static functions belong to one file alone."""
    (tmp_path / "h.h").write_text(
        "void low(void); static inline void in(void) { low(); }"
    )
    made = compiled(
        tmp_path,
        a='#include "h.h"\nvoid up(void); static void f(void) { up(); }\n'
        "void (*const table[])(void) = {in, f};",
        b="static void f(void) {}\nvoid up(void) { f(); }",
        c="extern void (*const table[])(void); void low(void) { table[0](); }",
    )
    assert calls(made) == {"a": {"b", "c"}, "b": set(), "c": {"a"}}
    assert circles(calls(made)) == [{"a", "c"}]
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}) == [
        {"a", "b"},
        {"c", "d"},
    ]


def test_headers_are_seen(tmp_path: pathlib.Path) -> None:
    """A file needs the functions that its headers call, used or not."""
    (tmp_path / "low.h").write_text(
        "void up(void); static inline void in(void) { up(); }"
    )
    (tmp_path / "mid.h").write_text('#include "low.h"\n')
    made = compiled(
        tmp_path,
        a='#include "mid.h"\nvoid f(void) {}',
        b="void f(void); void up(void) { f(); }",
    )
    files = {path: f"{name}.c" for path, name in made.items()}
    assert needs(files, tmp_path) == {
        "a.c": {"mid.h"},
        "b.c": {"a.c"},
        "low.h": {"b.c"},
        "mid.h": {"b.c", "low.h"},
    }
    assert circles(needs(files, tmp_path)) == [{"a.c", "b.c", "low.h", "mid.h"}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS, ids=lambda kind: kind.program)
def test_no_call_goes_in_a_circle(kind: trainer.Kind) -> None:
    objects = of_a_program(kind)
    found = calls(objects)
    files = {
        path
        for path in map(test_rules.short, test_rules.sources(".c", ".cu"))
        if path.startswith(OURS)
    }
    others = {"/cpu/", "/mpi/", "/cuda/"} - OF[kind]
    apart = {path for path in files if any(t in path for t in others)}
    assert found.keys() == files - apart | (found.keys() & apart)
    assert circles(found) == []


@pytest.mark.slow
def test_no_include_goes_in_a_circle() -> None:
    """Nor do calls by way of functions in headers."""
    found = needs(of_a_program(trainer.GCC))
    assert {"runtime/zr.h", "runtime/zr_rank.h"} <= found.keys()
    assert circles(found) == []


# ---- a file includes the headers that it uses


def code(path: pathlib.Path) -> str:
    """Return a file without comments, strings and structs that are only named."""
    return re.sub(
        r'/\*.*?\*/|"(\\.|[^"\\\n])*"|\bstruct \w+', " ", path.read_text(), flags=re.S
    )


def declared(text: str) -> set[str]:
    """Names of the functions, types, macros and constants of a header."""
    listed = [
        *re.findall(r"^\w[^\n;={]*?\b(zr_\w+)\(", text, re.M),
        *re.findall(r"^extern .*?\b(zr_\w+)", text, re.M),
        *re.findall(r"^(?:}|typedef) .*?(zr_\w+);", text, re.M),
        *re.findall(r"^#define (zr_\w+|ZR_\w+)", text, re.M),
    ]
    for constants in re.findall(r"\benum {(.*?)}", text, re.S):
        listed += re.findall(r"(?:^|,)\s*(ZR_\w+)", constants)
    return set(listed)


def not_included(folder: pathlib.Path) -> dict[str, set[str]]:
    """Return the files that use names of headers that they do not include, with these names. zr.h
    counts as included."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*.[ch]")}
    has = {name: declared(code(files[name])) for name in files if name.endswith(".h")}
    everything = set().union(*has.values())
    found = {}
    for name, path in files.items():
        near = [name, "zr.h", *included(name, folder)]
        known = set().union(*(has.get(other, set()) for other in near))
        used = set(re.findall(r"\bzr_\w+|\bZR_\w+", code(path)))
        found[name] = used & everything - known
    return {name: names for name, names in found.items() if names}


def test_a_missing_include_is_seen(tmp_path: pathlib.Path) -> None:
    (tmp_path / "zr.h").write_text("typedef struct zr zr;")
    (tmp_path / "low.h").write_text(
        "enum { ZR_A = 1, ZR_B };\n#define ZR_C 1\ntypedef struct zr_d {\n} zr_d;\n"
        "typedef struct zr_e zr_e;\nint zr_f(zr *z);\nextern const int zr_g[];\n"
    )
    (tmp_path / "mid.h").write_text('#include "low.h"\n')
    uses = "zr *z; int x = ZR_A + ZR_B + ZR_C + zr_f(z) + zr_g[0]; zr_d d; zr_e *e;"
    (tmp_path / "a.c").write_text('#include "low.h"\n' + uses)
    (tmp_path / "b.c").write_text('#include "mid.h"\n/* ZR_A */ struct zr_d *d;')
    (tmp_path / "c.c").write_text('#include "mid.h"\n' + uses)
    names = {"ZR_A", "ZR_B", "ZR_C", "zr_d", "zr_e", "zr_f", "zr_g"}
    assert not_included(tmp_path) == {"c.c": names}


def test_files_include_what_they_use() -> None:
    """The runtime's files do, and each header compiles alone."""
    assert not_included(trainer.ROOT / "runtime") == {}
    headers = [
        path
        for path in (trainer.ROOT / "runtime").rglob("*.h")
        if path.parent.name != "cuda"
    ]
    words = "-std=gnu11 -Wall -Wextra -Werror -fsyntax-only -x c".split()
    subprocess.run(["gcc", *words, *headers], check=True)
