"""test_rules.py -- tests the house's rules on the sources: allowed imports and includes, the
content of templates, a caller and a test for every kernel, and the form of files."""

import ast
import functools
import itertools
import pathlib
import re
import subprocess
import sys

import pytest
from zg.predict import cost
from zg.read import spec
from zg.search import search
from zg.write import emit, explain, view

from tests.lib import law

ROOT = pathlib.Path(__file__).resolve().parents[2]
ZG = sorted((ROOT / "gen" / "zg").rglob("*.py"))
TEMPLATES = sorted((ROOT / "templates").glob("*.j2"))
RUNTIME = sorted((ROOT / "runtime").rglob("*.[ch]"))
KERNELS = sorted((ROOT / "kernels").rglob("*.[ch]"))
STANDARD = {"<stddef.h>", "<stdint.h>"}


@functools.cache
def tracked() -> list[pathlib.Path]:
    """Return the repository's files; without git (in a copy), the files of the source folders."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        return [
            path
            for path in map(ROOT.joinpath, listed.stdout.split("\0"))
            if path.is_file()
        ]
    return [
        path
        for name in (
            "gen",
            "tools",
            "runtime",
            "kernels",
            "templates",
            "tests",
            "bench",
            "docs",
        )
        for path in sorted((ROOT / name).rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    ]


def sources(*suffixes: str) -> list[pathlib.Path]:
    return [path for path in tracked() if path.suffix in suffixes]


def short(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


# ---- imports


def parents(name: str) -> set[str]:
    """Return the packages that are imported together with a module."""
    words = name.split(".")
    return {".".join(words[:n]) for n in range(1, len(words))}


def imports(
    text: str, name: str = "zg.x", known: frozenset[str] = frozenset()
) -> set[str]:
    """Return the imports of module `name` anywhere in it. Of `zg` these are whole module names with
    their packages, of others the first word. known: our modules."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            found |= {
                f"{module}.{a.name}" if f"{module}.{a.name}" in known else module
                for a in node.names
            }
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "__import__",
            "importlib.import_module",
            "exec",
        ):
            found.add("by name")
    ours = {word for word in found if word.split(".")[0] == "zg"}
    return {word.split(".")[0] for word in found - ours} | ours.union(
        *map(parents, ours)
    ) - {name}


def dotted(path: pathlib.Path) -> str:
    words = path.relative_to(ROOT / "gen").with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return our modules, each with our modules that it imports."""
    named = {dotted(path): path for path in ZG}
    known = frozenset(named)
    return {
        name: {word for word in imports(path.read_text(), name, known) if word in known}
        for name, path in named.items()
    }


def room(name: str) -> str:
    """Return a module's package. The modules directly in zg have none: ''."""
    return name.split(".")[1] if "." in name else ""


def rooms(modules: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, others in modules.items():
        found.setdefault(room(name), set()).update(map(room, others))
    return {name: others - {name, ""} for name, others in found.items() if name}


def floors(of: dict[str, set[str]]) -> list[set[str]]:
    """Return the floors: each has the modules that need only lower ones. The rest after the last
    floor is in a circle or above one."""
    left, found = dict(of), []
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        found.append(free)
        left = {name: needs for name, needs in left.items() if name not in free}
    return [*found, set(left)] if left else found


def circle(of: dict[str, set[str]]) -> set[str]:
    """Return the modules that are in no floor."""
    last = floors(of)[-1]
    return last if any(of[name] & last for name in last) else set()


def test_imports_are_seen() -> None:
    known = frozenset({"zg.a", "zg.b", "zg.c", "zg.r.d", "zg.r"})
    text = (
        "import os.path\nfrom . import a, b\nfrom .c import x\nfrom .r import d\n"
        "if TYPE_CHECKING:\n    from zg.r import y\ndef f():\n    from e.g import h"
    )
    assert imports(text, "zg.x", known) == {
        "os",
        "zg",
        "zg.a",
        "zg.b",
        "zg.c",
        "zg.r",
        "zg.r.d",
        "e",
    }
    assert imports("from . import d", "zg.r.x", known) == {
        "zg",
        "zg.r",
        "zg.r.d",
    }
    assert imports('importlib.import_module("x")') == {"by name"}


def test_circles_are_seen() -> None:
    assert floors({"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b", "c"}}) == [
        {"a"},
        {"b", "c"},
        {"d"},
    ]
    assert circle({"a": set(), "b": {"a", "d"}, "c": {"b"}, "d": {"c"}}) == {
        "b",
        "c",
        "d",
    }
    assert circle({"a": {"b"}, "b": set()}) == set()


def test_no_import_goes_in_a_circle() -> None:
    """No import forms a circle among modules or packages, wherever it stands in a file."""
    assert circle(graph()) == set()
    assert circle(rooms(graph())) == set(), floors(rooms(graph()))


def test_every_room_is_told() -> None:
    """The table of docs/design.md lists every package; only the command line calls both the checker
    and the writer."""
    told = re.findall(
        r"^\| (`[^|]+) \|", (ROOT / "docs" / "design.md").read_text(), re.M
    )
    words = {
        word.removesuffix(".py")
        for row in told
        for word in re.findall(r"`([^`]+)`", row)
    }
    of = rooms(graph())
    assert of.keys() <= words
    assert {name for name, others in of.items() if others & {"check", "write"}} == {
        "main"
    }


@pytest.mark.parametrize(
    "name,allowed",
    [
        ("plan", set()),
        ("facts", {"plan"}),
        ("check", {"plan", "facts"}),
        ("write", {"plan", "facts", "read", "predict", "home"}),
        ("read", {"facts"}),
    ],
)
def test_what_a_room_knows(name: str, allowed: set[str]) -> None:
    """Packages import only the ones they may: the checker knows no pass; the writer knows the plan,
    the read spec (to print its keys), and the place of templates."""
    assert rooms(graph())[name] <= allowed


@pytest.mark.parametrize(
    "package,sole",
    [
        ("jinja2", {"emit"}),
        ("yaml", {"yamltext"}),
        ("pydantic", {"speckeys", "schema", "keytypes", "units", "device"}),
    ],
)
def test_sole_importers(package: str, sole: set[str]) -> None:
    assert {path.stem for path in ZG if package in imports(path.read_text())} <= sole


def test_nothing_else_is_imported() -> None:
    """The generator imports only the standard library and the packages of gen/requirements.txt."""
    known = set(sys.stdlib_module_names) | {
        "jinja2",
        "yaml",
        "pydantic",
        "pydantic_core",
    }
    for path in ZG:
        other = {
            name
            for name in imports(path.read_text(), dotted(path))
            if name.split(".")[0] != "zg"
        } - known
        assert not other, f"{short(path)}: {other}"


@pytest.mark.slow
def test_nothing_but_the_input_is_looked_at() -> None:
    """No time, random number or host name gets into the output of zgen."""
    for path in ZG:
        assert not imports(path.read_text()) & {
            "time",
            "datetime",
            "random",
            "socket",
            "platform",
            "uuid",
            "getpass",
        }, short(path)


# ---- includes


def includes(path: pathlib.Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*([<"][^>"]+[>"])', path.read_text(), re.M)


def test_what_train_c_includes() -> None:
    for name, _ in programs():
        found = re.findall(r"^#\s*include (.*)$", emitted()[name, _], re.M)
        assert set(found) - STANDARD == {'"zr.h"', '"zk.h"'}, name


def test_headers_stay_in_their_rooms() -> None:
    """The runtime never includes the kernels' header, nor the kernels the runtime's; CUDA's headers
    stay in cuda/."""
    for path in RUNTIME:
        assert not [x for x in includes(path) if "zk" in x or "kernels" in x], short(
            path
        )
    for path in KERNELS:
        assert not [x for x in includes(path) if "zr" in x or "runtime/" in x], short(
            path
        )
    for path in [*RUNTIME, *KERNELS]:
        cuda = [x for x in includes(path) if re.search(r"cuda|cublas|nccl", x)]
        assert not cuda or path.parent.name == "cuda", f"{short(path)}: {cuda}"
        assert "mpi.h" not in includes(path) or path.name == "wire.c"
    for path in (ROOT / "runtime" / "zr.h", ROOT / "kernels" / "zk.h"):
        assert set(includes(path)) <= STANDARD, short(path)


def test_kernels_need_no_libm() -> None:
    """Kernels call no function of another library that could decide a bit of a weight."""
    for path in (ROOT / "kernels" / "cpu").glob("*.[ch]"):
        assert "<math.h>" not in includes(path) and "<tgmath.h>" not in includes(
            path
        ), short(path)
    for path in [ROOT / "build.ninja", *(ROOT / "runtime").glob("*.ninja")]:
        assert not re.search(r"-lm\b|-ffast-math", path.read_text()), short(path)


# ---- the runtime interprets nothing; test_ranks.py has the words that it may not know


def test_no_table_of_operations_in_the_runtime() -> None:
    """The runtime has no switch and no indexed table of functions."""
    for path in RUNTIME:
        text = re.sub(r'/\*.*?\*/|"(\\.|[^"\\])*"', "", path.read_text(), flags=re.S)
        assert not re.search(r"\bswitch\b|\bopcode\b|\bcase\b.*:", text), short(path)
        assert not re.search(r"\(\s*\*\s*(const\s+)?\w+\s*\[[^]]*\]\s*\)\s*\(", text), (
            short(path)
        )


# ---- templates


def wrong_in_template(text: str) -> list[str]:
    """Return the tags that are more than a `for` over ready lines, an `include`, or a name with its
    attribute."""
    plain = [
        r"{#.*?#}",
        r"{%-? for \w+ in \w+(\.\w+)? -?%}",
        r"{%-? endfor -?%}",
        r'{%-? include "[\w.]+" -?%}',
        r"{{ \w+(\.\w+)? }}",
    ]
    rest = re.sub("|".join(plain), "", text, flags=re.S)
    return re.findall(
        r"{[{%#].*?[}%#]}|[{}%#][{}%]",
        rest.replace("{{{", "{").replace("}}}", "}"),
    )


def computed_in_template(text: str) -> list[str]:
    """Return numbers of the plan that C would add or multiply; the view should do that."""
    return re.findall(
        r".*(?:[-+*/%] ?{{ \w+(?:\.\w+)? }} ?[-+*/%]|}} ?[-+*/%] ?{{).*", text
    )


def test_template_rules_can_fail() -> None:
    for bad in (
        "{% if a %}",
        "{% set a = 1 %}",
        "{{ a | upper }}",
        "{{ a + 1 }}",
        "{{ a(1) }}",
        "{% for a in b if c %}",
        "{% macro m() %}",
        "{{ a.b.c }}",
        "{{ a[0] }}",
        "{% for a in f(b) %}",
    ):
        assert wrong_in_template(f"x {bad} y"), bad
    assert computed_in_template("x * {{ a.b }} * {{ c }}")
    assert not wrong_in_template("{% for a in b.c %}{ {{ a }} }{{ d.e }}{% endfor %}")


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_have_no_logic(path: pathlib.Path) -> None:
    assert wrong_in_template(path.read_text()) == []
    assert computed_in_template(path.read_text()) == []


# ---- kernels

WAYS = [
    ("zero.stage=0", "cluster.ranks=1"),
    ("zero.stage=1", "cluster.ranks=2"),
    ("zero.stage=3", "cluster.ranks=4"),
    ("zero.stage=3", "cluster.ranks=2", "train.precision=bf16"),
    (
        "zero.stage=2",
        "train.precision=bf16",
        "zero.offload_optimizer.device=cpu",
    ),
]

SLICED = (
    "zero.stage3_max_live_parameters=25000",
    "zero.stage3_param_persistence_threshold=64",
)
ADAPTED = ("train.lora={rank: 4, alpha: 6}",)
QUANTIZED = ("train.lora={rank: 4, alpha: 6, base: int8}",)
PACKED = ("data.documents=mask", "data.end=0")
BLOCKS = ("train.sequence_blocks=4", "cluster.ranks=4", "cluster.context_parallel=4")
WHOLE = ("model.units[1].ops[0].residual[1].attention.qk_norm=whole",)
SQUARED = (
    "model.units[1].ops[1].residual[2]={relu2: {}}",
    "train.dropout=0.1",
    "train.attention_dropout=0.1",
    "train.loss_mean=micro_batch",
)


@functools.cache
def programs() -> list[tuple[str, tuple[str, ...]]]:
    tiny = sorted((ROOT / "model_specs").glob("*tiny*.yaml"))
    return [
        *((path.stem, way) for path in tiny for way in WAYS),
        ("llama-tiny", SLICED),
        ("gpt-tiny", SQUARED),
        ("qwen3-tiny", ADAPTED),
        ("qwen3-tiny", QUANTIZED),
        ("qwen3-tiny", WHOLE),
        ("qwen3-tiny", law.OPS),
        ("gpt-tiny", PACKED),
        ("llama-tiny", PACKED),
        ("llama-tiny", BLOCKS),
    ]


@functools.cache
def emitted() -> dict[tuple[str, tuple[str, ...]], str]:
    made = {}
    for name, way in programs():
        p = search.find(spec.load(str(ROOT / "model_specs" / f"{name}.yaml"), way)).plan
        made[name, way] = emit.train(
            view.view(p, cost.summary(p), explain.memory_line(p), False)
        )
    return made


def kernel_names() -> list[str]:
    """Return the kernels of kernels.def, and those of zk.h that every object shares."""
    listed = re.findall(
        r"X\((zk_\w+)\)", (ROOT / "kernels/cpu/kernels.def").read_text()
    )
    header = re.sub(r"/\*.*?\*/", "", (ROOT / "kernels/zk.h").read_text(), flags=re.S)
    declared = re.findall(r"^[\w ]+?[ *](zk_\w+)\(", header, re.M)
    declared += re.findall(r"^extern __typeof__\(\w+\) (zk_\w+);", header, re.M)
    assert len(set(listed)) == len(listed) > 30 and set(listed) <= set(declared)
    return declared


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_has_a_caller_and_a_test(name: str) -> None:
    called = re.compile(rf"\b{name}\b[,(]")
    assert any(called.search(text) for text in emitted().values()), (
        "no tiny program calls it"
    )
    named = re.compile(rf"\b{name}\b")
    tests = [
        path for path in (ROOT / "tests").rglob("*.py") if path.name != "test_rules.py"
    ]
    assert any(named.search(path.read_text()) for path in tests), "no test names it"


def test_every_kernel_that_is_called_is_declared() -> None:
    for text in emitted().values():
        assert set(re.findall(r"\b(zk_[a-z]\w*)\(k", text)) <= set(kernel_names())


# ---- form

CODE = [
    *sources(
        ".py",
        ".c",
        ".h",
        ".ninja",
        ".mk",
        ".def",
        ".j2",
        ".ini",
        ".toml",
        ".yml",
    ),
    *(ROOT / name for name in ("gen/zgen", "run", ".ci/run")),
]
# Most lines of a file, as `ruff format` folds them. Tests may have more because of their tables of
# cases.
LINES, CASES = 750, 1200


def headed(path: pathlib.Path) -> bool:
    """Return whether one of the first two lines (the other may be #!) is a comment `name --
    purpose`."""
    name = path.name if path.name != "__init__.py" else path.parent.name
    return any(
        re.match(rf"\W*(\.ci/)?{re.escape(name)} -- \w", line)
        for line in path.read_text().splitlines()[:2]
    )


def test_every_file_says_what_it_is_for() -> None:
    assert [short(path) for path in CODE if not headed(path)] == []


def test_every_spec_says_what_it_is() -> None:
    for path in (ROOT / "model_specs").glob("*.yaml"):
        assert re.match(r"# \w", path.read_text()), short(path)


def test_files_are_no_longer_than_they_may_be() -> None:
    long = [
        (short(path), n)
        for path in CODE
        if (n := len(path.read_text().splitlines()))
        > (CASES if "tests" in path.parts else LINES)
    ]
    assert long == []


@pytest.mark.parametrize("folder", ["gen", "tools", "runtime", "kernels", "templates"])
def test_lines_are_no_longer_than_they_may_be(folder: str) -> None:
    """Lines have at most 100 columns. In a template tags are not counted, because the view lays
    their text out."""
    long = [
        f"{short(path)}:{n}"
        for path in CODE
        if path.is_relative_to(ROOT / folder)
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []


def c_functions(text: str) -> list[tuple[str, int]]:
    """Return (name, lines) of every function in K&R style, with its brace on a line of its own in
    the first column."""
    found, start = [], None
    lines = text.splitlines()
    for n, line in enumerate(lines):
        if line == "{":
            start = n
            while start and re.match(r"[^}#].*[^;/]$", lines[start - 1]):
                start -= 1
        elif line == "}" and start is not None:
            found.append((lines[start], n - start + 1))
            start = None
    return found


# A static function or table, on a line that begins in the first column.
OWN = re.compile(
    r"^(?:__attribute__.* |template .* )?(?:static|ZK_INLINE)\b"
    r"[^=;{]*?\b(?!__)(\w+)\(",
    re.M,
)


def test_what_a_file_keeps_to_itself_is_seen() -> None:
    text = """static int a(int x)
ZK_INLINE v16 *b(void)
__attribute__((format(printf, 2, 3))) static void c(const char *format, ...)
static __attribute__((noinline)) void d(void)
template <class T> static __global__ void
__launch_bounds__((A * B), 8) e(T *x)
static const int f = g(1);
    static int h(void);
int i(void)
"""
    assert OWN.findall(text) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    "folders",
    [
        ("runtime", "runtime/cpu", "runtime/cuda"),
        ("runtime", "runtime/cpu", "runtime/mpi"),
        ("kernels", "kernels/cpu"),
        ("kernels", "kernels/cuda"),
    ],
    ids="/".join,
)
def test_a_static_function_has_a_name_of_its_own(
    folders: tuple[str, ...],
) -> None:
    """No static name occurs in two files: shared code exists once, different code has different
    names."""
    files: dict[str, set[str]] = {}
    for path in (at for folder in folders for at in (ROOT / folder).iterdir()):
        if path.suffix in (".c", ".h", ".cu"):
            for name in OWN.findall(path.read_text()):
                files.setdefault(name, set()).add(short(path))
    assert len(files) > 50
    assert {name: at for name, at in files.items() if len(at) > 1} == {}


@pytest.mark.slow
def test_no_function_is_longer_than_it_may_be() -> None:
    long = [
        (short(path), name, n)
        for path in sources(".c", ".h")
        for name, n in c_functions(path.read_text())
        if n > 80
    ]
    for path in [*sources(".py"), ROOT / "gen/zgen"]:
        long += [
            (short(path), node.name, node.end_lineno - node.lineno + 1)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.end_lineno - node.lineno + 1 > 80
        ]
    assert long == []


def test_functions_are_short() -> None:
    """The median length of the product's functions, in C and Python, stays near 12 lines."""
    sizes = [
        n for path in [*RUNTIME, *KERNELS] for _, n in c_functions(path.read_text())
    ]
    assert len(sizes) > 200 and sorted(sizes)[len(sizes) // 2] <= 15
    sizes = [
        node.end_lineno - node.lineno + 1
        for path in ZG
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    assert len(sizes) > 150 and sorted(sizes)[len(sizes) // 2] <= 15


def test_no_file_tells_where_it_was_written() -> None:
    """No tracked file contains a workplace's path, a tracker's number or a package host."""
    words = [
        "/" + "work" + r"\b(?!/\w*\.)",
        r"\b" + "issue" + r" ?#?\d",
        "python" + "hosted",
        "py" + r"pi\.org",
        "-----BE" + "GIN",
    ]
    found = [
        f"{short(path)}: {hit}"
        for path, word in itertools.product(tracked(), words)
        if path.name != "kjv.txt" and path.suffix != ".npz"
        for hit in re.findall(word, path.read_text(errors="replace"))
    ]
    assert found == []


def test_nothing_is_left_to_do() -> None:
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    assert [short(path) for path in CODE if words.search(path.read_text())] == []
