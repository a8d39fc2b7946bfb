"""test_bundle.py -- tests programs in other places: bundles, zgen as pip installs it, several
programs side by side."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.lib import law, trainer
from tests.lib.trainer import ROOT

SPEC = ROOT / "model_specs" / "gpt-tiny.yaml"


def zgen(
    *args: object, at: pathlib.Path = ROOT, **more: object
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "gen" / "zgen", *map(str, args)],
        cwd=at,
        capture_output=True,
        text=True,
        timeout=300,
        **more,
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("bundle") / "of a model"
    done = zgen(SPEC, "--emit", "bundle", "-o", folder)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return folder


def compiled(commands: str) -> dict[str, str]:
    """Return the compiler call of each object, from the commands that ninja or make would run."""
    plain = re.sub(r" -MM?D -MF \S+| -Xptxas -v|>\S+\.log 2>&1 .*", "", commands)
    plain = plain.replace("${CC:-gcc}", "gcc").replace("\\\n", " ")
    lines = [" ".join(line.split()) for line in plain.splitlines()]
    return {line.split(" -o ")[1]: line for line in lines if " -c " in line}


@pytest.mark.parametrize("program", ["out/train", "out/train-cuda"])
def test_make_runs_ninjas_commands(tmp_path: pathlib.Path, program: str) -> None:
    ninja = trainer.sh("ninja", "-t", "commands", program)
    root = trainer.checkout(tmp_path / "tree")
    (root / "out/train.c").touch()
    make = trainer.sh(
        "make",
        "-C",
        root,
        "-s",
        "-B",
        "-n",
        "-f",
        "runtime/program.mk",
        program,
    )
    assert len(compiled(ninja)) > 40 and compiled(make) == compiled(ninja)
    linked = make.replace("\\\n", " ").splitlines()[-1]
    assert set(re.findall(r"\S+\.o\b", linked)) == set(compiled(ninja))


@pytest.mark.slow
@pytest.mark.parametrize(
    "builder",
    [
        pytest.param(("make", "-j2"), id="make"),
        pytest.param(("ninja",), marks=pytest.mark.exhaustive, id="ninja"),
    ],
)
def test_a_bundle_builds_without_python(
    bundle: pathlib.Path, tmp_path: pathlib.Path, builder: tuple[str, ...]
) -> None:
    """A bundle builds in an empty environment, to the same program as here."""
    folder = shutil.copytree(bundle, tmp_path / "a copy")
    path = tmp_path / "bin"
    path.mkdir()
    for name in (
        builder[0],
        "sh",
        "gcc",
        "as",
        "ld",
        "ar",
        "mkdir",
        "dirname",
        "sha256sum",
        "cat",
        "rm",
        "cmp",
        "cp",
    ):
        (path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        builder,
        cwd=folder,
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    trainer.write_tokens(tmp_path / "tokens", law.tokens(256, 5000))
    args = ("--data", tmp_path / "tokens", "--steps", 2, "--hash")
    here = trainer.build(trainer.generate(SPEC))
    # a program of another command's train.c may be here already
    versions = [
        re.sub(r"(?m)^train\.c .*\n", "", trainer.sh(program, "--version"))
        for program in (folder / "out/train", here)
    ]
    assert versions[0] == versions[1] and "sources " in versions[0]
    weights = [
        trainer.sh(program, *args).splitlines()[-1]
        for program in (folder / "out/train", here)
    ]
    assert weights[0] == weights[1] and weights[0].startswith("weights ")


@pytest.mark.slow
def test_a_bundle_is_new(bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    before = sorted(bundle.rglob("*"))
    for more, said in (
        (("-o", bundle), "is a file or a folder that is not empty; allowed: a folder"),
        (("-o", ROOT / "VERSION"), "VERSION: is a file or a folder that is not empty"),
        ((), "--emit bundle: needs -o DIR, a folder that is new"),
    ):
        done = zgen(SPEC, "--emit", "bundle", *more)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    assert sorted(bundle.rglob("*")) == before
    done = zgen(SPEC, "--emit", "bundle", "-o", tmp_path / "no" / "such")
    assert (
        done.returncode == 2
        and "there is no folder" in done.stderr
        and not list(tmp_path.iterdir())
    )
    (tmp_path / "empty").mkdir()
    assert zgen(SPEC, "--emit", "bundle", "-o", tmp_path / "empty").returncode == 0
    assert (tmp_path / "empty/out/train.c").read_text() == trainer.generate(SPEC)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.slow
def test_what_pip_installs(bundle: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The installed zgen writes the same files, from a folder of which pip knows nothing else."""
    tree = trainer.checkout(tmp_path / "tree")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            tmp_path / "site",
            tree,
        ],
        check=True,
        timeout=300,
    )
    shutil.rmtree(tree)
    command = [sys.executable, tmp_path / "site" / "bin" / "zgen"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    told = subprocess.run(
        [*command, "--version"], env=env, capture_output=True, text=True
    )
    assert told.stdout == f"zgen {(ROOT / 'VERSION').read_text()}"
    subprocess.run(
        [*command, SPEC, "--emit", "bundle", "-o", tmp_path / "out"],
        env=env,
        check=True,
        timeout=300,
    )

    def files(root):
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in root.rglob("*")
            if path.is_file()
        }

    assert files(tmp_path / "out") == files(bundle)
    assert files(bundle)["LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_versions_are_one() -> None:
    version = (ROOT / "VERSION").read_text().strip()
    assert zgen("--version").stdout == f"zgen {version}\n"
    told = trainer.sh(trainer.build(trainer.generate(SPEC)), "--version")
    assert f"\nversion {version}\n" in told
    assert re.search(
        rf"^## {re.escape(version)}\b",
        (ROOT / "CHANGELOG.md").read_text(),
        re.M,
    )


@pytest.mark.slow
def test_programs_side_by_side(tmp_path: pathlib.Path) -> None:
    root = trainer.with_objects(trainer.checkout(tmp_path / "tree"))
    specs = ("gpt-tiny", "llama-tiny")
    for name in specs:
        (root / "build" / name).mkdir(parents=True)
        source = trainer.generate(ROOT / "model_specs" / f"{name}.yaml")
        (root / "build" / name / "train.c").write_text(source)

    def programs():
        return subprocess.run(
            ["ninja", "programs"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=600,
        )

    made = programs()
    assert made.returncode == 0, made.stdout
    for name in specs:
        assert trainer.sh(root / "build" / name / "train", "--version").startswith(
            f"{name}, "
        )
    before, after = specs
    kept = root / "build" / before / "train"
    changed = root / "build" / after / "train.c"
    made_at = kept.stat().st_mtime_ns
    os.utime(changed)
    assert programs().returncode == 0
    assert kept.stat().st_mtime_ns == made_at
    compiled = changed.with_suffix("").stat().st_mtime_ns
    assert compiled > changed.stat().st_mtime_ns
    os.utime(root / "out/o/cc/objects")
    assert programs().returncode == 0
    assert kept.stat().st_mtime_ns > made_at
