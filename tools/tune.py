"""tune.py -- fine-tunes a Hugging Face model: runs the commands of the page, and prints each.

tune.py FOLDER DATA... -o DIR [--lora RANK|full] [--epochs N] [--merge] ...

DIR gets data/ (token files), checkpoints/, log.jsonl, adapter/ or model/, and tune.json with the
inputs of data/. The same command continues where it was stopped.

Exit codes: 0 tuned, or printed (--dry-run); 2 an argument or a file is wrong; otherwise the code of
the command that failed: 75 stopped, the same command goes on.

Invariants
 1. Every command that is run is printed as it can be typed.
 2. Nothing is written before all that can be checked is checked.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import shlex
import signal
import subprocess
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import documents
from checkpoint import Bad, code_of, parsed, printable
from pretrained import config
from zg.commandline import Parser
from zg.output import naming
from zg.read import hf, hfpacked
from zg.read.node import SpecError

ROOT = Path(__file__).resolve().parents[1]
VALIDATIONS = 4  # in an epoch
WARMUP = 0.03  # share of the steps
VAL = 0.05  # share of the documents for validation
LONGEST = 1024  # tokens of a sample, unless --sequence says otherwise
STOPPED = 75
BASES = ("nf4", "int8")
# Keys with an option here, on which the steps of the schedule depend.
OWN = {
    "train.sequence": "--sequence",
    "train.global_batch": "--batch",
    "train.micro_batch": "--micro-batch",
}
DONE = "data/meta.json"


def say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Job:
    """A tuning job, with paths as they are typed in the commands."""

    args: argparse.Namespace
    folder: Path
    files: tuple[Path, ...]
    out: Path
    build: Path
    sequence: int
    rows: int  # by token, that the model has

    @property
    def program(self) -> Path:
        return self.build / "train"

    @property
    def result(self) -> Path:
        return self.out / ("model" if self.args.lora is None else "adapter")


@dataclass(frozen=True)
class Made:
    """Numbers of the data. steps: as --epochs computes them; end: the token that ends a document;
    tokens: size of the tokenizer's vocabulary."""

    steps: int
    end: int | None
    tokens: int


# ---- the commands

Command = list[str]


def words(*given: object) -> Command:
    return [str(x) for x in given]


def data(job: Job) -> Command:
    kinds = {".parquet": "parquet", ".txt": "text"}
    ends = [x for x in job.files[0].suffixes if x != ".gz"]
    kind, val = kinds.get(ends[-1] if ends else "", "jsonl"), job.args.val
    if not val and kind == "text":
        val = f"{VAL:%}"
    elif not val:  # so many that a small file has one, too
        val = max(round(VAL * documents.count(kind, [ROOT / x for x in job.files])), 1)
    found = words("./run", "data", kind, *job.files, "--tokenizer", job.folder)
    found += words("--val", val, "--pack", job.sequence)
    return found + words("-o", job.out / "data")


def based(job: Job) -> str | None:
    """Return the base of as many bits as bitsandbytes gave the folder's linears."""
    said = config(ROOT / job.folder / "config.json").get(hfpacked.KEY)
    return hfpacked.base(said)


def generate(job: Job, made: Made) -> Command:
    args, steps, end = job.args, made.steps, made.end
    keys: dict[str, object] = {
        "train.sequence": job.sequence,
        "train.global_batch": args.batch,
        "train.micro_batch": args.micro_batch,
        "train.optimizer.lr": args.lr or ("2e-4" if args.lora else "1e-5"),
        "train.schedule.type": "cosine",
        "train.schedule.steps": steps,
        "train.schedule.warmup": int(WARMUP * steps),
        "data.shuffle": "true",
    }
    if end is not None:
        keys |= {"data.documents": "mask", "data.end": end}
    else:
        say(
            "run tune: no token ends a document, so attention goes across conversations"
        )
    if args.lora is not None:
        lora = {"rank": args.lora, "alpha": args.alpha or 2 * args.lora}
        base = args.base or based(job)
        lora |= {"base": base} if base in BASES else {}
        lora |= {"dropout": args.lora_dropout} if args.lora_dropout else {}
        said = ", ".join(f"{key}: {value}" for key, value in lora.items())
        keys["train.lora"] = f"{{{said}}}"
    found = words("gen/zgen", "--from", job.folder)
    if rows := grown(job, made.tokens):
        found += words("--vocab", rows)
    for key, value in keys.items():
        found += words("--set", f"{key}={value}")
    for setting in args.set:
        found += words("--set", setting)
    return found + words("-o", job.build / "train.c")


def train(job: Job, steps: int) -> Command:
    args = job.args
    every = max(steps // (VALIDATIONS * args.epochs), 1)
    folder = job.out / "data"
    found = words(job.program, "--load", job.folder, "--data", folder, "--val", folder)
    found += words("--epochs", args.epochs, "--val-every", every)
    found += words("--checkpoints", job.out / "checkpoints", "--save-every", every)
    found += words("--keep", 1, "--keep-best", "--log", job.out / "log.jsonl")
    if args.patience:
        found += words("--patience", args.patience)
    return found + words("--save", job.result)


def merge(job: Job) -> Command:
    found = words(job.program, "--load", job.folder, "--adapter", job.result)
    return found + words("--steps", 0, "--save", job.out / "model", "--merge")


# ---- running them

child: subprocess.Popen[bytes] | None = None


def forward(number: int, frame: FrameType | None) -> None:
    """Leave the end to the command: it saves, and its exit code says so. Without one, end."""
    if not child:
        raise SystemExit(128 + number)
    if number != signal.SIGINT:  # a terminal's Ctrl-C has reached it
        child.send_signal(number)


def run(command: Command) -> int:
    """Print a command and run it. Return its exit code."""
    global child
    say("")
    say(f"$ {shlex.join(command)}")
    lock = ROOT / "out" / "test" / "ninja.lock"  # tests and ./run demo build here, too
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as held:
        if command[0] == "ninja":
            fcntl.flock(held, fcntl.LOCK_EX)
        with subprocess.Popen(command, cwd=ROOT) as child:
            code = child.wait()
    child = None
    if code:
        say(f"run tune: {command[0]} ended with exit code {code}")
    return code if code >= 0 else 128 - code


def numbers(job: Job) -> Made:
    """Return the numbers of the data that are made."""
    path = job.out / DONE
    with naming(path):
        found = parsed(path.read_bytes(), str(path))
    try:
        length, end = found["files"]["train.bin"]["tokens"], found["end"]
        tokens = int(found["vocab"])
    except (KeyError, TypeError):
        raise Bad(f"{path}: is not of ./run data") from None
    samples = (int(length) - 1) // job.sequence
    return Made(-(-job.args.epochs * samples // job.args.batch), end, tokens)


def grown(job: Job, tokens: int) -> int | None:
    """Return the rows of a model that gets new ones: --vocab's, or those of a tokenizer with more
    tokens than the model has. None: it keeps its own."""
    asked: int | None = job.args.vocab
    if asked and asked < tokens:
        raise Bad(f"--vocab {asked}: the tokenizer has {tokens} tokens")
    if asked or tokens <= job.rows:
        return asked
    say(
        f"run tune: {tokens} tokens, and the model has {job.rows} rows: it gets new rows"
    )
    return tokens


# Keys of tune.json, as messages name them.
SAID = {
    "folder": "FOLDER",
    "data": "DATA",
    "sequence": "--sequence",
    "val": "--val",
}


def begun(job: Job) -> dict[str, Any]:
    """Return the content of tune.json: everything that data/ depends on."""
    files = [(ROOT / x).resolve() for x in job.files]
    stats = [file.stat() for file in files]
    return {
        "folder": str((ROOT / job.folder).resolve()),
        "data": list(map(str, files)),
        "sequence": job.sequence,
        "val": job.args.val,
        "bytes": [x.st_size for x in stats],
        "changed": [x.st_mtime_ns for x in stats],
    }


def shown(value: object) -> str:
    """Return a value of tune.json for people."""
    if value is None:
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def same(job: Job) -> bool:
    """Return whether DIR has the data of this command. Refuse a folder of others, and other data
    than those of its checkpoints; the checkpoints themselves refuse another recipe."""
    folder, told = ROOT / job.out, begun(job)
    path = folder / "tune.json"
    if path.exists():
        before = parsed(path.read_bytes(), str(path))
        differs = [key for key, value in told.items() if before.get(key) != value]
        if differs and any(folder.glob("checkpoints/step-*")):
            (key, *_) = differs
            how = "files of DATA that have changed since"
            if key in SAID:
                was, now = (shown(x.get(key)) for x in (before, told))
                how = f"{SAID[key]} {was}, and this command has {now}"
            raise Bad(
                f"{job.out}: its checkpoints were trained with {how}; use another -o, or the same "
                "options and files"
            )
        return not differs and (folder / DONE).exists()
    if folder.exists() and any(folder.iterdir()):
        raise Bad(f"{job.out}: already exists and is not a folder of ./run tune")
    return False


def note(job: Job) -> None:
    path = ROOT / job.out / "tune.json"
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(begun(job), indent=1) + "\n")


def tune(args: argparse.Namespace) -> int:
    job = checked(args)
    if Path.cwd() != ROOT:
        say(f"$ cd {shlex.quote(str(ROOT))}")
    ready = same(job)
    if not ready and args.dry_run:
        say(shlex.join(data(job)))
        say("(the other commands need its result: the number of samples)")
        return 0
    if not args.dry_run:
        note(job)
    if not ready and (code := run(data(job))):
        return code
    made = numbers(job)
    commands = [
        generate(job, made),
        words("ninja", job.program),
        train(job, made.steps),
    ]
    if args.merge and args.lora is not None:
        commands.append(merge(job))
    for command in commands:
        if args.dry_run:
            say(shlex.join(command))
        elif code := run(command):
            if code == STOPPED:
                say("run tune: stopped and saved; the same command goes on")
            return code
    for line in following(job) if not args.dry_run else ():
        say(line)
    return 0


def following(job: Job) -> list[str]:
    """Return lines that name the next commands."""
    model = job.out / "model" if job.args.merge else job.result
    lines = ["", f"{model}: the tuned {model.name}. Next:"]
    lines.append(f"  ./run chat {shlex.quote(str(model))}")
    lines.append(f"  ./run watch {shlex.quote(str(job.out / 'log.jsonl'))} --once")
    if model.name == "adapter":
        lines.append(f"  {shlex.join(merge(job))}")
    return lines


# ---- the command line


def typed(path: Path, here: Path) -> Path:
    """Return a path as it is typed in ROOT, where the commands run."""
    whole = here / path
    return path if here == ROOT else whole


def model(folder: Path) -> tuple[int, int]:
    """Return a model's rows by token and its positions, as gen/zgen reads them: config.json may
    leave out those of its family."""
    try:
        found = hf.load(str(folder))
    except SpecError as wrong:
        raise Bad(str(wrong)) from None
    return int(found.model.value["vocab"].value), found.context


def checked(args: argparse.Namespace) -> Job:
    """Check folder and data."""
    here = Path.cwd()
    known = here / args.folder / "config.json"
    if not known.exists():
        raise Bad(f"{args.folder}: has no config.json: a Hugging Face folder is needed")
    rows, most = model(here / args.folder)
    sequence = args.sequence or min(LONGEST, most)
    if sequence > most:
        raise Bad(f"--sequence {sequence}: the model has {most} positions")
    if args.vocab and args.vocab < rows:
        raise Bad(f"--vocab {args.vocab}: the model has {rows} rows; {rows} or more")
    for file in args.data:
        documents.size_of(here / file)
    if args.batch % args.micro_batch:
        raise Bad(f"--batch {args.batch}: must be a multiple of --micro-batch")
    for setting in args.set:
        key = setting.partition("=")[0].strip()
        if key in OWN:
            raise Bad(f"--set {key}: the number of steps depends on it; use {OWN[key]}")
    there = (here / args.o).resolve()
    name = re.sub(r"\W+", "-", there.name)
    name += f"-{zlib.crc32(bytes(there)):08x}"
    return Job(
        args=args,
        folder=typed(args.folder, here),
        files=tuple(typed(x, here) for x in args.data),
        out=typed(args.o, here),
        build=Path("build") / f"tune-{name}",
        sequence=sequence,
        rows=rows,
    )


def count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError("must be a whole number from 1")
    return int(text)


def rank(text: str) -> int | None:
    return None if text == "full" else count(text)


def rate(text: str) -> str:
    try:
        if 0 < float(text) < 1e9:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError("must be a number above 0")


def share(text: str) -> str:
    try:
        if 0 <= float(text) <= 0.99:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError("must be a number from 0 to 0.99")


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="run tune",
        description="Fine-tunes a Hugging Face model on conversations; see docs/tuning.md. Runs"
        " ./run data, gen/zgen, ninja and the program, and prints each command.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the model: --from, --load"
    )
    parser.add_argument(
        "data", nargs="+", type=Path, metavar="DATA", help="JSONL, Parquet or text"
    )
    parser.add_argument(
        "-o", type=Path, required=True, metavar="DIR", help="the results"
    )
    for name, kind, usual, told in (
        (
            "--lora",
            rank,
            16,
            "rank of the adapters, or `full`: train all parameters (16)",
        ),
        ("--alpha", rate, None, "alpha of the adapters (twice the rank)"),
        ("--lora-dropout", share, None, "dropout of the adapters' inputs (0)"),
        ("--epochs", count, 3, "passes through the data (3)"),
        ("--lr", rate, None, "highest learning rate (2e-4; of all parameters 1e-5)"),
        ("--batch", count, 8, "samples in a step (8)"),
        ("--micro-batch", count, 1, "samples at once (1)"),
        (
            "--sequence",
            count,
            None,
            f"tokens of a sample (the model's, at most {LONGEST})",
        ),
        (
            "--vocab",
            count,
            None,
            "rows of the model's embedding (the tokenizer's tokens, if it has fewer)",
        ),
        ("--val", str, None, "documents for validation: a share or a number (5%%)"),
        ("--patience", count, None, "stop after N validations that are not better"),
    ):
        usually = "X" if kind is rate else "N"
        metavar = {"--lora": "RANK", "--lora-dropout": "P"}.get(name, usually)
        parser.add_argument(name, type=kind, default=usual, metavar=metavar, help=told)
    parser.add_argument(
        "--base",
        choices=(*BASES, "none"),
        help="format of the frozen weights, as in QLoRA (train.precision; of a folder that"
        " bitsandbytes quantized, its own)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="key for gen/zgen",
    )
    parser.add_argument(
        "--merge", action="store_true", help="also save the merged model"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands only"
    )
    args = parser.parse_args(given)
    for name in ("merge", "alpha", "base", "lora_dropout"):
        if args.lora is None and getattr(args, name):
            option = name.replace("_", "-")
            parser.error(f"--{option}: with --lora full there are no adapters")
    if args.o.name in ("", ".."):
        parser.error("-o: must end with the name of a folder")
    return args


def main(given: Sequence[str]) -> int:
    return code_of("run tune", tune, arguments(given))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, forward)
    sys.exit(main(sys.argv[1:]))
