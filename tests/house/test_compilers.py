"""test_compilers.py -- tests programs of clang, programs under sanitizers, and the compilation of
train.c."""

import os
import pathlib
import re
import resource
import shutil
import subprocess

import pytest

from tests.lib import law, program, trainer, zk
from tests.lib.covering import covering
from tests.lib.patience import LIMIT

SPECS = sorted(path.name for path in (trainer.ROOT / "model_specs").glob("*.yaml"))
SMALL = [
    "train.micro_batch=1",
    "train.global_batch=4",
    "zero.reduce_bucket_size=5000",
    "zero.allgather_bucket_size=9000",
]
COMPILERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not shutil.which(name), reason=f"no {name} on this machine"
        ),
    )
    for name in ("gcc", "clang")
]


# ---- train.c


def compiled(compiler: str, source: str, folder: pathlib.Path, *more: str) -> None:
    """Compile train.c with the build's command and more flags, and expect no message."""
    (folder / "train.c").write_text(source)
    done = subprocess.run(
        [
            compiler,
            *trainer.flags("warn", "code"),
            "-Iruntime",
            "-Ikernels",
            *more,
            "-c",
            folder / "train.c",
            "-o",
            folder / "train.o",
        ],
        cwd=trainer.ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("spec", SPECS)
def test_train_c_compiles(tmp_path: pathlib.Path, spec: str, compiler: str) -> None:
    assert {"-Wall", "-Wextra", "-Werror"} <= set(trainer.flags("warn"))
    compiled(
        compiler,
        trainer.generate(trainer.ROOT / "model_specs" / spec),
        tmp_path,
    )


WARNED = {
    "gcc $warn -c x.c -o x.o": "int f(void) { int unused; return 0; }",
    "nvcc $nvcc -c x.cu -o x.o": "void f() { int unused; }",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", WARNED)
def test_warnings_may_pass(tmp_path: pathlib.Path, command: str) -> None:
    """A warning ends a build, unless ZR_WERROR is empty."""
    source = tmp_path / command.split()[3]
    source.write_text(WARNED[command])
    nvcc = f"{trainer.sh('runtime/cuda/toolkit').split()[0]}/bin"
    rules = tmp_path / "build.ninja"
    rules.write_text(
        f"include {trainer.ROOT}/runtime/flags.ninja\n"
        f"rule make\n  command = PATH=$$PATH:{nvcc} {command}\nbuild x.o: make\n"
    )
    env = {name: x for name, x in os.environ.items() if name != "ZR_WERROR"}
    for more, code in ({}, 1), ({"ZR_WERROR": ""}, 0):
        done = subprocess.run(
            ["ninja", "-C", tmp_path], env=env | more, capture_output=True, text=True
        )
        assert done.returncode == code and "warning" in done.stdout + done.stderr


SCALING = "{type: yarn, factor: 8, original_context: 32}"


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "key",
    [
        "train.lora={rank: 4, alpha: 6}",
        "train.optimizer.groups=[{match: ['*norm*', '*_proj*'], weight_decay: 0}]",
        f"model.units[1].ops[0].residual[1].attention.rope.scaling={SCALING}",
    ],
)
def test_a_long_line_of_the_recipe_compiles(
    tmp_path: pathlib.Path, key: str, compiler: str
) -> None:
    """A long line of the recipe compiles as several literals, also if it is the only line."""
    source = trainer.generate(law.path("llama"), key)
    assert '\n    ("' in source
    compiled(compiler, source, tmp_path, "-fsyntax-only")


def of_405b() -> str:
    return trainer.generate(
        trainer.ROOT / "model_specs" / "llama3-405b.yaml",
        "cluster.ranks=16384",
        "train.global_batch=16384",
    )


@pytest.mark.slow
def test_the_largest_train_c_is_small() -> None:
    assert len(of_405b()) < 100_000


def busy() -> float:
    """Return the processor seconds of ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_largest_train_c_takes_a_second(
    tmp_path: pathlib.Path, compiler: str
) -> None:
    """The compiler takes less than 3 s for the largest train.c. The cost of zgen itself is measured
    in executed lines (test_mutants.py)."""
    source = of_405b()
    begun = busy()
    compiled(compiler, source, tmp_path)
    assert busy() - begun < 3


# ---- another compiler


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("clang"), reason="no clang on this machine")
@pytest.mark.parametrize(
    "family,isa",
    covering(law.FAMILIES, zk.ISAS),
)
def test_clang_gives_the_same_bits(
    tmp_path: pathlib.Path, family: str, isa: str
) -> None:
    zk.need(isa)
    assert law.known(trainer.CLANG, family, tmp_path, ZK_ISA=isa) == law.KNOWN[family]


# ---- sanitizers


def files(folder: pathlib.Path) -> list[object]:
    trainer.write_tokens(folder / "tokens", law.tokens(256, 40 * 20, holes=True))
    return ["--data", folder / "tokens", "--val", folder / "tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage,family,precision",
    [
        (0, "llama", "f32"),
        (1, "gpt", "bf16"),
        (2, "qwen3", "f32"),
        (3, "gpt", "f32"),
        (3, "qwen3", "bf16"),
    ],
)
def test_addresses_and_undefined_behaviour(
    tmp_path: pathlib.Path, stage: int, family: str, precision: str
) -> None:
    """Sanitizers report nothing while two ranks train with accumulation, save, load and sample, and
    the hash is the plain program's."""
    source = trainer.generate(
        law.path(family),
        *SMALL,
        "cluster.ranks=2",
        f"zero.stage={stage}",
        f"train.precision={precision}",
    )
    plain, checked = trainer.build(source), trainer.build(source, trainer.ASAN)
    data, log = files(tmp_path), tmp_path / "log"
    work = [
        *data,
        "--steps",
        3,
        "--threads",
        2,
        "--sample",
        3,
        "--val-every",
        2,
    ]
    found = law.run(checked, *work, "--save", tmp_path / "w", log=log)
    assert found == law.run(plain, *work, log=log)
    again = law.run(checked, *data, "--steps", 0, "--load", tmp_path / "w", log=log)
    assert again.weights == found.weights
    law.run(
        checked,
        *data,
        "--steps",
        2,
        "--load",
        tmp_path / "w",
        "--queue",
        "shuffled:1",
        log=log,
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("queue", ["eager", "shuffled:1", "shuffled:2"])
def test_threads(tmp_path: pathlib.Path, ranks: int, queue: str) -> None:
    """Queues and kernels' threads of a rank never race, and the hash is the plain program's."""
    source = trainer.generate(
        law.path("qwen3"),
        *SMALL,
        "zero.stage=3",
        f"cluster.ranks={ranks}",
        "zero.stage3_prefetch_bucket_size=100000000",
    )
    log = tmp_path / "log"
    work = [*files(tmp_path), "--steps", 2, "--threads", 2, "--queue", queue]
    found = law.run(
        trainer.build(source, trainer.TSAN),
        *work,
        log=log,
        under=program.in_place(),
        TSAN_OPTIONS="halt_on_error=1",
    )
    assert found == law.run(trainer.build(source), *work, log=log)


@pytest.mark.parametrize(
    "room,header,name",
    [("runtime", "zr.h", "ZR_ABI"), ("kernels", "zk.h", "ZK_ABI")],
)
def test_a_train_c_of_another_version_is_refused(
    room: str, header: str, name: str, tmp_path: pathlib.Path
) -> None:
    """A train.c of another version is refused with the remedy, before the compiler reports other
    errors."""
    (tmp_path / "train.c").write_text(
        trainer.generate(trainer.ROOT / "model_specs/gpt-tiny.yaml")
    )
    text = (trainer.ROOT / room / header).read_text()

    def made(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / header).write_text(text)
        return subprocess.run(
            [
                "gcc",
                "-std=gnu11",
                "-E",
                "-o",
                "/dev/null",
                f"-I{tmp_path}",
                "-Iruntime",
                "-Ikernels",
                tmp_path / "train.c",
            ],
            cwd=trainer.ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )

    assert made(text).returncode == 0
    newer = re.sub(
        rf"(#define {name}) (\d+)", lambda m: f"{m[1]} {int(m[2]) + 1}", text
    )
    assert newer != text and "regenerate it" in made(newer).stderr
