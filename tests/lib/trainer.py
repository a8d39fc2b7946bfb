"""trainer.py -- turns specs into running programs for the tests, with the functions of users'
commands.

Invariants
 1. out/train.c and out/train are not touched: a program is compiled in its own folder and linked
    with the objects of one of build.ninja's programs; equal sources are compiled once.
 2. All output is in out/test; its programs are rebuilt if an object or header is newer.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from safetensors.numpy import load_file, save_file
from zg import main

from tests.lib.patience import LIMIT

ROOT = pathlib.Path(__file__).resolve().parents[2]
MADE = ROOT / "out" / "test"
# ZR_TEST_READY: a folder of objects and libraries that were built elsewhere, for a machine that
# cannot build them.
READY = pathlib.Path(os.environ.get("ZR_TEST_READY", "/nonexistent"))


@dataclass(frozen=True)
class Kind:
    """A program of build.ninja, and how its train.c is compiled and linked here."""

    program: str
    compiler: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...] = ()


GCC = Kind("out/train", "gcc", ("-s",))
CLANG = Kind("out/train-clang", "clang", ("-s",))
ASAN = Kind(
    "out/train-asan",
    "gcc",
    ("-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)
TSAN = Kind("out/train-tsan", "gcc", ("-g1", "-fsanitize=thread"))
TILES = Kind("out/train-tiles", "gcc", ("-s",))  # emulates AMX
MPI = Kind("out/train-mpi", "mpicc", ("-g1",))
EMULATED = Kind("out/train-emulated", "gcc", ("-s",), ("-lstdc++", "-lm"))
# the same with kernels from nvcc's PTX, by processor
BY_PTX = {
    target: replace(EMULATED, program=f"out/train-ptx-{target}")
    for target in ("sm_80", "sm_90", "sm_100")
}
# with the libraries where runtime/cuda/toolkit found them
CUDA = Kind(
    "out/train-cuda",
    "gcc",
    ("-s",),
    (
        *(
            word
            for name in ("lib", "nccl/lib")
            for word in (
                f"-Lout/cuda/{name}",
                f"-Wl,-rpath,{ROOT}/out/cuda/{name}",
            )
        ),
        "-l:libcudart.so.13",
        "-l:libcublasLt.so.13",
        "-l:libnccl.so.2",
        "-lstdc++",
        "-lm",
    ),
)


def sh(*command: object, **options) -> str:
    """Run a command in the root and return its output. A failure shows all of it."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        **options,
    )
    assert done.returncode == 0, (
        f"{command} gave {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def tool(name: str, *words: object, **options) -> subprocess.CompletedProcess[str]:
    """Run a command of tools/, as `run` starts it."""
    return subprocess.run(
        [sys.executable, ROOT / "tools" / name, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={"PYTHONPATH": str(ROOT / "gen")},
        **options,
    )


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Hold a lock: test processes run side by side."""
    MADE.mkdir(parents=True, exist_ok=True)
    with open(MADE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compiled(
    own: pathlib.Path, parts: Sequence[pathlib.Path], *flags: str
) -> pathlib.Path:
    """Return the program of a test's C file and files of runtime/. It is built once for all test
    processes, and again if a file or a flag changes."""
    runtime = ROOT / "runtime"
    made_of = hashlib.sha256(repr((flags, parts)).encode())
    headers = [*own.parent.glob("*.h"), *runtime.rglob("*.h")]
    for path in (own, *parts, *sorted(headers)):
        made_of.update(path.read_bytes())
    binary = MADE / f"{own.stem}-{made_of.hexdigest()[:20]}"
    with alone(binary.name):
        if not binary.exists():
            new = binary.with_suffix(".new")
            checked = ("-std=gnu11", "-Wall", "-Wextra", "-Werror")
            sh(
                "gcc",
                *checked,
                *flags,
                f"-I{runtime}",
                own,
                *parts,
                "-pthread",
                "-o",
                new,
            )
            new.rename(binary)
    return binary


def inputs(target: str) -> list[str]:
    """Return the inputs of a target of build.ninja."""
    return re.search(
        r"input: \w+\n((?: {4}.*\n)*)", sh("ninja", "-t", "query", target)
    )[1].split()


def members(target: str) -> list[str]:
    """Return the objects that a program or an archive is made from. Of two with one name the later
    one counts: an archive made from another has a member replaced."""
    found: dict[str, str] = {}
    for name in inputs(target):
        for part in members(name) if name.endswith(".a") else [name]:
            if part.endswith(".o"):
                found[pathlib.Path(part).name] = part
    return list(found.values())


@functools.cache
def objects(kind: Kind = GCC) -> list[pathlib.Path]:
    """Return the objects that a program of build.ninja is linked from besides train.o, brought up
    to date once per process."""
    with alone("ninja"):  # another ninja may be about to replace its log
        names = [n for n in members(kind.program) if not n.endswith("/train.o")]
        sh("ninja", *names)
    return [ROOT / n for n in names]


@functools.cache
def joined(kind: Kind) -> pathlib.Path:
    """Return these objects linked into one, without debug information if the program is stripped:
    that takes about half of a link's time."""
    ready = READY / f"{pathlib.Path(kind.program).name}.o"
    if ready.exists():
        return ready
    parts = objects(kind)
    strip = ["-S"] if "-s" in kind.flags else []
    made_of = hashlib.sha256(repr((parts, strip)).encode()).hexdigest()[:20]
    whole = MADE / f"{pathlib.Path(kind.program).name}-{made_of}.o"
    with alone(whole.name):
        newest = max(part.stat().st_mtime for part in parts)
        if not whole.exists() or whole.stat().st_mtime < newest:
            new = whole.with_suffix(".new")
            sh("ld", "-r", *strip, *parts, "-o", new)
            new.rename(whole)
    return whole


def generate(spec: pathlib.Path, *keys: str, flat: bool = False) -> str:
    """Return train.c of a spec with `key=value` settings, as gen/zgen writes it. flat: with a line
    for every step."""
    return main.text(
        main.arguments(
            [
                str(spec),
                *(w for key in keys for w in ("--set", key)),
                *["--flat"] * flat,
            ]
        )
    )


def flags(*names: str) -> list[str]:
    """Return compiler flags by their names in runtime/flags.ninja. A variable of the environment
    has its default."""
    text = (ROOT / "runtime" / "flags.ninja").read_text()
    lines = [re.search(rf"^{name} = (.*)$", text, re.M)[1] for name in names]
    return re.sub(r"\$\$\{\w+:?-(.*?)\}", r"\1", " ".join(lines)).split()


def compile_source(kind: Kind, source: pathlib.Path, *rest: object) -> None:
    sh(
        kind.compiler,
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        *os.environ.get("ZR_WERROR", "-Werror").split(),
        "-Wno-unused-function",
        "-O0",  # tables and calls: optimizing them is not worth the time
        "-ffp-contract=off",
        "-pthread",
        "-Iruntime",
        "-Ikernels",
        *kind.flags,
        source,
        *rest,
    )


def unsigned(source: str) -> str:
    """Return a train.c without the command that made it."""
    return re.sub(r" \* From .*?(?= \* Plan )", "", source, flags=re.DOTALL)


def build(source: str, kind: Kind = GCC) -> pathlib.Path:
    """Return the program of a train.c. Sources that differ only in the command that made them have
    one program."""
    whole = joined(kind)
    told = f"{kind}{whole.name}{unsigned(source)}"
    name = hashlib.sha256(told.encode()).hexdigest()[:20]
    folder = MADE / name
    program = folder / "train"
    with alone(name):
        made_of = [whole, ROOT / "runtime" / "zr.h", ROOT / "kernels" / "zk.h"]
        newest = max(part.stat().st_mtime for part in made_of)
        if program.exists() and program.stat().st_mtime >= newest:
            return program
        folder.mkdir(exist_ok=True)
        (folder / "train.c").write_text(source)
        compile_source(kind, folder / "train.c", whole, *kind.libraries, "-o", program)
    return program


def checkout(root: pathlib.Path) -> pathlib.Path:
    """Copy everything needed to set up, generate and build; nothing is built in it."""
    for name in (
        "gen",
        "tools",
        "templates",
        "runtime",
        "kernels",
        "model_specs",
        "bench",
        "tests/emulation",
    ):
        shutil.copytree(ROOT / name, root / name)
    for name in (
        "run",
        "build.ninja",
        "VERSION",
        "LICENSE",
        "pyproject.toml",
        "README.md",
        "out/.gitignore",
    ):
        (root / name).parent.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    (root / "out" / "programs.ninja").touch()
    if (ROOT / ".venv").exists():
        (root / ".venv").symlink_to((ROOT / ".venv").resolve())
    return root


def with_objects(root: pathlib.Path) -> pathlib.Path:
    """Add the objects of out/train to a checkout, so that ninja compiles only train.c."""
    objects()
    with alone("ninja"):
        shutil.copytree(ROOT / "out/o/cc", root / "out/o/cc")
        for name in (".ninja_log", ".ninja_deps"):
            shutil.copy2(ROOT / "out" / name, root / "out" / name)
    return root


def write_tokens(path: pathlib.Path, tokens: np.ndarray) -> None:
    path.write_bytes(np.asarray(tokens).astype("<u2").tobytes())


def train(
    spec: pathlib.Path,
    folder: pathlib.Path,
    params: dict[str, np.ndarray],
    tokens: np.ndarray,
    steps: int,
    *keys: str,
) -> dict[str, np.ndarray]:
    """Return float32 weights after `steps` steps from given weights over a stream of tokens."""
    before, after = folder / "before", folder / "after"
    (folder / "log.jsonl").unlink(missing_ok=True)
    before.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(x, np.float32) for name, x in params.items()},
        before / "model.safetensors",
    )
    write_tokens(folder / "tokens.bin", tokens)
    sh(
        build(generate(spec, *keys)),
        "--data",
        folder / "tokens.bin",
        "--steps",
        steps,
        "--load",
        before,
        "--save",
        after,
        "--log",
        folder / "log.jsonl",
    )
    return load_file(after / "model.safetensors")


# ---- GPUs' processors

PTX = "-gencode arch=compute_90a,code=compute_90a --no-compress"


def processors(*targets: str) -> str:
    """Return ZR_GENCODE: code for these processors, or for all if none is given, and PTX as it
    is."""
    flags = (ROOT / "runtime" / "flags.ninja").read_text()
    lines = re.findall(r"^sm_\w+ = (.*code=(.*))$", flags, re.M)
    return " ".join([*(x for x, name in lines if not targets or name in targets), PTX])
