"""replay.py -- compares another commit's outputs with the working tree's, for refactors.

    .venv/bin/python tests/replay.py BASE [--only WORD] [--no-weights]

BASE and the working tree spread every spec of model_specs in every way of plans.py and of the list
below. Plan, train.c, memory, explain, config, and notes or errors are compared byte for byte. The
tiny specs also train two steps, and the hashes of their weights are compared. Exit code 1: a
difference, a failed program, or nothing to compare; the texts are in out/replay.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "replay"
EMITS = ("plan", "c", "memory", "explain", "config")
TINY = "gpt-tiny", "llama-tiny", "qwen3-tiny"
STEPS = 2

# Settings beside plans.WAYS; refusals are compared, too.
MORE = {
    "activations and the optimizer on the host": (
        "train.offload_activations=true",
        "zero.offload_optimizer.device=cpu",
        "zero.stage=2",
    ),
    "f16": ("train.precision=f16", "zero.stage=3"),
    "frozen matrices": (
        "zero.stage=1",
        'train.optimizer.groups=[{match: ["*attn*", "*mlp*"], frozen: true}]',
    ),
    # norm, ln_
    "norms alone train, parameters in a file": (
        "zero.stage=3",
        "zero.offload_param.device=nvme",
        "zero.offload_param.nvme_path=/tmp",
        "train.precision=bf16",
        "train.optimizer.groups="
        '[{match: ["*[rn][m_]*"]}, {match: ["*"], frozen: true}]',
    ),
    "a linear in slices": (
        "zero.stage=3",
        "zero.stage3_param_persistence_threshold=0",
        "zero.stage3_max_live_parameters=20000",
    ),
    "bf16 without masters": (
        "train.precision=bf16",
        "train.optimizer.masters=false",
        "train.optimizer.moments=bf16",
        "zero.stage=3",
    ),
    "a part of the parameters in memory": (
        "zero.stage=3",
        "zero.offload_param.device=nvme",
        "zero.offload_param.nvme_path=/tmp",
        "zero.offload_param.max_in_cpu=20000",
        "train.precision=bf16",
        "zero.offload_optimizer.device=cpu",
    ),
    "a head in chunks": ("train.head_chunk=11",),
    "a budget": ("train.memory_budget=10GB", "train.precision=bf16"),
    "an unknown key": ("zero.stages=3",),
}


# ---- in one tree


def cases(only: str) -> list[list]:
    """Return name, way and settings of each case, by the working tree: the same for both trees."""
    sys.path[:0] = [str(ROOT), str(ROOT / "gen")]
    from tests.lib import plans

    made = [
        [name, way, plans.keys(name, way) if way in plans.WAYS else MORE[way]]
        for name in plans.NAMES
        for way in (*plans.WAYS, *(MORE if name in TINY else ()))
    ]
    return [case for case in made if only in f"{case[0]}, {case[1]}"]


def replay(chosen: list[list], weights: bool) -> None:
    """Write OUT/<case>/<emit> in the tree that is the working directory."""
    sys.path[:0] = [".", "tests/lib", "tests", "gen"]  # an older tree has no package
    import gc

    from zg import main

    from tests.lib import trainer

    gc.freeze()
    tokens = pathlib.Path("out/tokens.bin")
    trainer.write_tokens(tokens, [i * i % 97 for i in range(40000)])
    for name, way, settings in chosen:
        folder = pathlib.Path("out/replay") / f"{name}, {way}"
        folder.mkdir(parents=True)
        emitted(main, f"model_specs/{name}.yaml", tuple(settings), folder)
        source = folder / "c"
        if weights and name in TINY and "sm_" not in str(settings) and source.exists():
            (folder / "weights").write_text(trained(trainer, source, tokens))
        print(".", end="", file=sys.stderr, flush=True)


def emitted(main, spec: str, settings: tuple[str, ...], folder: pathlib.Path) -> None:
    for emit in EMITS:
        words = [spec, "--emit", emit, "-o", str(folder / emit)]
        words += [word for key in settings for word in ("--set", key)]
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            code = main.main(words)
        notes = [
            line for line in told.getvalue().splitlines() if not line.endswith(" ...")
        ]
        (folder / "notes").write_text("\n".join([*notes, f"exit {code}\n"]))
        if code:
            return


def trained(trainer, source: pathlib.Path, tokens: pathlib.Path) -> str:
    program = trainer.build(source.read_text())
    done = subprocess.run(
        [program, "--data", tokens, "--steps", str(STEPS), "--hash"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    told = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("loss", "weights"))
    ]
    return "\n".join([*told, f"exit {done.returncode}\n"])


# ---- with two trees


def tree(name: str, ref: str) -> pathlib.Path:
    """Return a folder with a commit's files."""
    made = OUT / name
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", ref], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x"], cwd=made, check=True, input=archive.stdout)
    return made


def working() -> str:
    """Return the working tree as an object of git, with all files that git does not ignore."""
    env = {**os.environ, "GIT_INDEX_FILE": str(OUT / "index")}

    def git(*words):
        return subprocess.run(
            ["git", *words],
            cwd=ROOT,
            env=env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    git("read-tree", "HEAD")
    git("add", "--all", "--", ".")
    # A link may exist
    git("rm", "--cached", "--quiet", "--ignore-unmatch", ".venv")
    return git("write-tree")


def files(made: pathlib.Path) -> dict[str, str]:
    there = made / "out" / "replay"
    found = {
        str(path.relative_to(there)): path.read_text()
        for path in sorted(there.rglob("*"))
        if path.is_file()
    }
    # A plan is compared as a whole
    for name in [name for name in found if name.endswith("/c")]:
        plan = found[f"{name.removesuffix('/c')}/plan"]
        found[name] = found[name].replace(
            hashlib.sha256(plan.encode()).hexdigest(), "PLAN"
        )
    return found


def difference(name: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return (
            f"{name}: only {'the working tree' if old is None else 'the base'} has it"
        )
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    shown = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
    return f"{name}: {len(shown)} lines differ, first\n  " + "\n  ".join(shown[:4])


def compare(old: dict[str, str], new: dict[str, str]) -> int:
    """Print differences and a count for each kind of text. Return the number of texts that differ
    or belong to a failed program, equal or not."""
    wrong = [
        name
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    failed = [
        name
        for name in sorted(old.keys() & new.keys() - {*wrong})
        if name.endswith("/weights") and not new[name].endswith("exit 0\n")
    ]
    for name in failed:
        print(f"{name}: neither program ended well")
    for name in wrong:
        print(difference(name, old.get(name), new.get(name)))
    for emit in (*EMITS, "notes", "weights"):
        compared, differ = (
            sum(name.endswith(f"/{emit}") for name in names) for names in (new, wrong)
        )
        print(f"{emit}: {compared} compared, {differ} differ")
    if not new:
        print("nothing is compared")
    return len(wrong) + len(failed) + (not new)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("base", help="a commit")
    p.add_argument("--only", default="", help="cases whose name holds this")
    p.add_argument("--no-weights", action="store_true", help="do not train")
    p.add_argument("--in-tree", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.in_tree:
        replay(json.load(sys.stdin), not args.no_weights)
        return 0
    chosen = json.dumps(cases(args.only))
    if chosen == "[]":
        p.exit(1, "no case has this in its name\n")
    trees = tree("base", args.base), tree("new", working())
    command = [
        sys.executable,
        str(pathlib.Path(__file__).resolve()),
        *sys.argv[1:],
        "--in-tree",
    ]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    running = [
        subprocess.Popen(command, cwd=made, env=env, text=True, stdin=subprocess.PIPE)
        for made in trees
    ]
    for child in running:
        child.stdin.write(chosen)
        child.stdin.close()
    if any([child.wait() for child in running]):
        return 1
    print(file=sys.stderr)
    return compare(*map(files, trees)) > 0


if __name__ == "__main__":
    sys.exit(main())
