"""test_run.py -- tests the command run: its set-up, the demo, and two runs at once.

Every call is made in a copy of the sources, so nothing of the user's is touched. An apt-get of our
own precedes the system's in PATH and fails the test when it is called.
"""

import fcntl
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import tomllib

import pytest

from tests.lib import trainer
from tests.lib.patience import LIMIT

NEEDED = (
    "bash",
    "cat",
    "dirname",
    "env",
    "flock",
    "python3",
    "readlink",
    "sed",
    "sha256sum",
    "tr",
)


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return trainer.checkout(tmp_path / "sources")


def command(folder: pathlib.Path, name: str, line: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def own(tmp_path: pathlib.Path) -> pathlib.Path:
    """Return a folder of commands for the front of PATH."""
    command(
        tmp_path / "own",
        "apt-get",
        f'echo "$@" >>{tmp_path}/installed; exit 1',
    )
    return tmp_path / "own"


def installed(own: pathlib.Path) -> bool:
    return (own.parent / "installed").exists()


def call(
    root: pathlib.Path,
    *args: object,
    path: str,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "run", *map(str, args)],
        capture_output=True,
        errors="replace",
        timeout=LIMIT,
        env={**os.environ, **env, "PATH": path},
    )


def test_a_set_of_tests_that_is_none_is_refused(root: pathlib.Path) -> None:
    """Before anything is set up, with the names of the sets."""
    done = call(root, "test", "quik", path=os.environ["PATH"])
    assert done.returncode == 2 and not done.stdout
    assert "run: test quik: no such file; quick, all, or files" in done.stderr


# ---- set-up


def seconds() -> float:
    """Return the processor seconds that children and their children have used on all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_second_set_up_does_nothing(root: pathlib.Path, own: pathlib.Path) -> None:
    """A second set-up does nothing, except perhaps for the demo's text and the compiler of GPU
    programs."""
    command(own, "bible", "exit 1")
    command(root / "runtime" / "cuda", "toolkit", "exit 0")
    stamp = (root / ".venv" / "stamp").stat().st_mtime_ns
    before = seconds()
    done = call(root, "setup", path=f"{own}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    assert seconds() - before < 1.0
    assert done.stdout + done.stderr == "" and not installed(own)
    assert (root / ".venv" / "stamp").stat().st_mtime_ns == stamp


def test_what_a_command_needs_is_fetched_once(
    root: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The lists of packages that a command lacks are installed by a single pip; installed ones are
    not fetched again."""
    (root / ".venv").unlink()
    (root / ".venv").mkdir()
    said = tmp_path / "said"
    command(root / ".venv/bin", "python", f'echo "$@" >>{said}')
    key = trainer.sh("sha256sum", "gen/requirements.txt")
    (root / ".venv" / "stamp").write_text(key)
    for words in ((), ("--tensorboard", "x"), ("--tensorboard", "x")):
        done = call(root, "watch", "log", *words, path=os.environ["PATH"])
        assert done.returncode == 0, done.stderr
    lists = [
        re.findall(r"tools/requirements-(\w+)", line)
        for line in said.read_text().splitlines()
        if line.startswith("-m pip")
    ]
    assert lists == [["watch"], ["tensorboard"]]
    (root / ".venv" / "stamp-watch").write_text("an older list")
    (root / ".venv" / "stamp-tensorboard").unlink()
    call(root, "watch", "log", "--tensorboard", "x", path=os.environ["PATH"])
    lines = said.read_text().splitlines()
    pip = [line for line in lines if line.startswith("-m pip")][-1]
    assert re.findall(r"tools/requirements-(\w+)", pip) == [
        "watch",
        "tensorboard",
    ]


def pins(*patterns: str) -> list[str]:
    return [
        line
        for pattern in patterns
        for path in trainer.ROOT.glob(pattern)
        for line in path.read_text().split()
    ]


def test_a_package_has_one_version() -> None:
    """Lists name the same version of a package, because one pip may install several lists."""
    lines = pins("gen/requirements.txt", "tools/requirements-*.txt")
    versions = dict(line.split("==") for line in lines)
    assert len(versions) == len(set(lines)) > 0


def test_the_demo_needs_no_package_of_the_tests(
    root: pathlib.Path, own: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The demo's list has the dependencies of zgen and numpy, and its set-up installs no other."""
    project = tomllib.loads((trainer.ROOT / "pyproject.toml").read_text())
    needs = {x.split(">")[0] for x in project["project"]["dependencies"]}
    found = {x.split("==")[0] for x in pins("gen/requirements.txt")}
    assert found == needs | {"numpy"}
    (root / ".venv").unlink()
    said = tmp_path / "said"
    (root / ".venv").mkdir()
    command(root / ".venv/bin", "python", f'echo "$@" >>{said}; exit 1')
    key = trainer.sh("sha256sum", "gen/requirements.txt")
    (root / ".venv" / "stamp").write_text(key)
    done = call(
        *(root, "demo", "--text", root / "run"),
        path=f"{own}:{os.environ['PATH']}",
    )
    assert done.returncode == 1
    assert said.read_text().startswith("tools/tokens.py ")
    assert not installed(own)


@pytest.mark.slow
def test_ninja_builds_a_program_of_build(root: pathlib.Path) -> None:
    """ninja builds a program by its name alone, whatever the folder is called, and does nothing
    twice."""
    trainer.with_objects(root)

    def ninja(name: str) -> str:
        return subprocess.run(
            ["ninja", name],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=LIMIT,
        ).stdout

    for name in ("tiny", "a model: $1"):
        source = f"build/{name}/train.c"
        subprocess.run(
            ["gen/zgen", "model_specs/gpt-tiny.yaml", "-o", source],
            cwd=root,
            check=True,
            timeout=LIMIT,
        )
    for name in ("tiny", "a model: $1"):
        program = f"build/{name}/train"
        assert program in ninja(program)
        assert program not in ninja(program)
        told = trainer.sh(root / program, "--version")
        assert told.startswith("gpt-tiny, ")
    (root / "build/tiny/train.c").unlink()
    assert "build/" not in ninja("build/a model: $1/train")


MPI = "openmpi-bin libopenmpi-dev mpich libmpich-dev iproute2"


@pytest.mark.parametrize(
    "present,lack",
    [
        ((), f"gcc g++ clang ninja-build make {MPI}"),
        (("gcc", "clang", "make"), f"g++ ninja-build {MPI}"),
        (
            ("gcc", "clang", "ip", "mpicc", "mpicc.mpich", "mpirun"),
            "g++ ninja-build make",
        ),
    ],
)
def test_somebody_who_is_not_root_is_told_what_to_type(
    root: pathlib.Path, own: pathlib.Path, present: tuple[str, ...], lack: str
) -> None:
    for name in NEEDED:
        (own / name).symlink_to(shutil.which(name))
    for name in present:
        command(own, name, "exit 1")
    command(own, "id", "echo 1000")
    done = call(root, "test", path=str(own))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "run: these packages are missing; please run",
        f"    sudo apt-get install --no-install-recommends -y {lack}",
    ]
    assert not installed(own)


def test_a_command_that_is_none_is_named(root: pathlib.Path) -> None:
    done = call(root, "dmo", path=os.environ["PATH"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "run: dmo: no such command; see ./run help\n"
    done = call(root, "\x1b[31m\n", path=os.environ["PATH"])
    assert done.stderr == "run: ?[31m?: no such command; see ./run help\n"


# ---- the demo


def quarter(root: pathlib.Path, own: pathlib.Path, steps: int = 0) -> pathlib.Path:
    """Return a text for the demo after reducing its model to a quarter of the width, and perhaps
    its steps."""
    trainer.with_objects(root)
    spec = root / "model_specs" / "demo.yaml"
    small = re.sub(
        r"\b(width|out): (\d+)",
        lambda m: f"{m[1]}: {int(m[2]) // 4}",
        spec.read_text(),
    )
    if steps:
        small = re.sub(r"\bsteps: \d+", f"steps: {steps}", small)
    spec.write_text(small)
    text = own.parent / "a text"
    text.write_text((trainer.ROOT / "docs/decisions.md").read_text() * 13)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_shell_alone_ends_the_demo(
    root: pathlib.Path, own: pathlib.Path, number: signal.Signals
) -> None:
    """A signal to the shell alone ends the demo and out/train, which holds the pipe of its stdout
    open."""
    text = quarter(root, own)
    demo = subprocess.Popen(
        [root / "run", "demo", "--text", text],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PATH": f"{own}:{os.environ['PATH']}"},
    )
    assert demo.stderr
    while not (line := demo.stderr.readline()).startswith("step 1/"):
        assert line, "the demo ended before its first step"
    demo.send_signal(number)
    demo.communicate(timeout=LIMIT)
    assert demo.returncode == 128 + number


@pytest.mark.slow
@pytest.mark.parametrize("judged", [True, False])
def test_the_demo_says_what_it_found(
    root: pathlib.Path, own: pathlib.Path, judged: bool
) -> None:
    """The demo reports its losses, and fails if the model is not below its bar; a run with other
    steps than the spec's is not judged."""
    text = quarter(root, own, steps=2 if judged else 0)
    done = call(
        root,
        "demo",
        "--text",
        text,
        "--steps",
        2,
        path=f"{own}:{os.environ['PATH']}",
    )
    assert done.returncode == judged, done.stderr
    losses = re.findall(r"^val loss (\S+) over", done.stdout, re.M)
    assert len(losses) == 2 and losses[0] == losses[1] and 2 < float(losses[0]) < 8
    bigram = float(re.search(r"validation loss is (\S+) nats", done.stderr)[1])
    told = re.search(
        r"^validation loss (\S+) nats a token over \d+ tokens, bigram model (\S+): (\S+) (below|above)$",
        done.stdout,
        re.M,
    )
    ours = float(losses[0])
    assert [float(x) for x in told.groups()[:3]] == pytest.approx(
        [ours, bigram, abs(bigram - ours)], abs=1.1e-4
    )
    assert told[4] == ("below" if ours < bigram else "above")
    read = (root / "out" / "demo-val.bin").stat().st_size // 2 - 1
    assert f"over {read} tokens" in told[0]
    headings = re.findall(r"^==(.*)$", done.stderr, re.M)
    assert len(headings) == 5 and all(headings)
    assert "PEAK" not in done.stderr and "of peak" not in done.stdout
    assert (
        done.stderr.splitlines()[-1] == "run: at least 0.4 below was wanted"
    ) == judged
    assert ("What to try next" in done.stderr) != judged
    drawn = (root / "out" / "demo.svg").read_text()
    assert f"validation {float(losses[0]):.2f}" in drawn
    assert "out/demo.svg" in done.stderr
    assert not installed(own)
    if not judged:
        samples_at_once(root, done.stderr)


def samples_at_once(root: pathlib.Path, said: str) -> None:
    """Run the command that the demo suggests, for 20 tokens."""
    (line,) = re.findall(r"^  (.*) # more of its text$", said, re.M)
    words = line.replace("--sample 1000", "--sample 20").split()
    more = subprocess.run(
        words, cwd=root, capture_output=True, errors="replace", timeout=LIMIT
    )
    assert more.returncode == 0, more.stderr
    assert "validation" not in more.stderr and "val loss" not in more.stdout
    assert len(more.stdout) > 20


# ---- two at once


@pytest.mark.parametrize("what", ["demo", "bench"])
def test_one_demo_or_bench_at_a_time(
    root: pathlib.Path, own: pathlib.Path, what: str
) -> None:
    before = sorted((root / "out").iterdir())
    command(own, "bible", "exit 1")
    with open(root / "out" / ".alone", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = call(root, what, path=f"{own}:{os.environ['PATH']}")
    assert (
        done.returncode == 1
        and done.stderr
        == "run: another ./run demo or ./run bench is at work in this folder; wait for its end\n"
    )
    assert {p.name for p in (root / "out").iterdir()} - {p.name for p in before} <= {
        ".alone",
        ".setup",
    }


def with_tests(root: pathlib.Path) -> None:
    """Install pytest's needs, and no test."""
    (root / "tests" / "lib").mkdir(parents=True)
    for name in (
        "pytest.ini",
        "conftest.py",
        "__init__.py",
        "lib/__init__.py",
        "lib/trainer.py",
        "lib/program.py",
        "lib/patience.py",
        "lib/zk.py",
        "lib/device.py",
        "lib/namespaces.py",
    ):
        shutil.copy(trainer.ROOT / "tests" / name, root / "tests" / name)


SKIPS = """
import pytest
from tests.lib import namespaces

@pytest.mark.parametrize("n", [1, 2])
def test_a(n): namespaces.mounts()

@pytest.mark.skipif(True, reason="of another kind")
def test_b(): assert 0

def test_c(): pass
"""


@pytest.mark.slow
def test_skips_are_counted_with_their_reasons(
    root: pathlib.Path, own: pathlib.Path
) -> None:
    """Skips are counted by their reason, in the error's own words if no namespace can be made,
    before the last line."""
    command(root / "runtime" / "cuda", "toolkit", "exit 0")
    with_tests(root)
    (root / "tests" / "test_some.py").write_text(SKIPS)
    refused = "unshare: unshare failed: Operation not permitted"
    command(own, "unshare", f"echo {refused} >&2; exit 1")
    for chosen, ran in (((), 1), (("-k", "test_a or test_b"), 0)):
        done = call(
            *(root, "test", "tests/test_some.py", *chosen),
            path=f"{own}:{os.environ['PATH']}",
        )
        assert done.returncode == 0, done.stdout
        assert done.stdout.splitlines()[-3:] == [
            f"2 skipped: no namespaces here: {refused}; {refused}",
            "1 skipped: of another kind",
            f"{ran} passed, 0 failed",
        ]


@pytest.mark.slow
def test_a_mistake_in_making_namespaces_is_no_skip(
    root: pathlib.Path, own: pathlib.Path
) -> None:
    command(root / "runtime" / "cuda", "toolkit", "exit 0")
    with_tests(root)
    (root / "tests" / "test_some.py").write_text(
        "from tests.lib import namespaces\n"
        "def test_a(): namespaces.need(('unshare', '--no-such', 'true'))\n"
    )
    done = call(root, "test", "tests/test_some.py", path=os.environ["PATH"])
    assert done.stdout.splitlines()[-1] == "0 passed, 1 failed"


@pytest.mark.slow
def test_every_run_of_tests_counts_for_itself(
    root: pathlib.Path, own: pathlib.Path
) -> None:
    """Two runs of tests at once each report their own tests and leave no file behind."""
    command(root / "runtime" / "cuda", "toolkit", "exit 0")
    with_tests(root)
    for name, body in (
        ("few", "def test_a(): pass"),
        (
            "more",
            "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pass",
        ),
    ):
        (root / "tests" / f"test_{name}.py").write_text(body + "\n")
    both = [
        subprocess.Popen(
            [root / "run", "test", f"tests/test_{name}.py"],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PATH": f"{own}:{os.environ['PATH']}"},
        )
        for name in ("few", "more")
    ]
    said = [p.communicate(timeout=LIMIT)[0].splitlines()[-1] for p in both]
    assert said == ["1 passed, 0 failed", "2 passed, 1 failed"]
    assert [p.returncode for p in both] == [0, 1]
    assert not list((root / "out").glob("tally*"))


@pytest.mark.slow
def test_bench_measures_a_model(root: pathlib.Path, own: pathlib.Path) -> None:
    """The benchmark reports figures, whatever they are; on a busy machine it calls them invalid and
    exits with 1."""
    trainer.with_objects(root)
    done = call(
        root,
        "bench",
        "--spec",
        "model_specs/llama-tiny.yaml",
        "--steps",
        1,
        "--rounds",
        1,
        path=f"{own}:{os.environ['PATH']}",
    )
    made = json.loads((root / "out" / "bench.json").read_text())
    assert done.returncode == (0 if made["valid"] else 1), done.stderr
    assert [c["name"] for c in made["cases"]] == ["rank-1", "zero-0", "zero-3"]
    for case in made["cases"]:
        assert (
            case["arena"] > case["shared"] >= 0
            and case["step"] > 0
            and case["start"] > 0
        )
        assert f"| {case['name']} | {case['step']:.3f} |" in done.stdout


def test_a_checkpoint_is_named_from_where_one_stands(
    root: pathlib.Path, own: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "here" / "ck").mkdir(parents=True)
    done = subprocess.run(
        [root / "run", "checkpoint", "list", "ck"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=tmp_path / "here",
        env={**os.environ, "PATH": f"{own}:{os.environ['PATH']}"},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("run checkpoint: ck: has no checkpoint")


def test_data_is_named_from_where_one_stands(
    root: pathlib.Path, own: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a").write_text("text")
    done = subprocess.run(
        [root / "run", "data", "text", "a", "-o", "data/a"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        cwd=tmp_path / "here",
        env={**os.environ, "PATH": f"{own}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("data/a: tokens: train 4 of 1 documents")
    assert (tmp_path / "here/data/a/train.bin").stat().st_size == 8
    assert not installed(own)
