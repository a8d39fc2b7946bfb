"""data.py -- writes a folder of token files from text, JSONL or Parquet.

data.py text|jsonl|parquet FILE... -o DIR     docs/data.md has the options and the folder

It uses a process per core (taskset chooses fewer); the output does not depend on their number.

Exit codes: 0 written; 2 an argument or a file is wrong; 3 the disk is full or fails; 130 and 143
interrupted. Unless the code is 0, DIR is left as it was.

Invariants
 1. DIR appears when it is complete; it replaces only a folder written by this program.
 2. Memory is bounded by pieces in flight, not by files (except with --train-bpe, and for a text
    whose tokenizer allows no cut at lines).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from io import FileIO
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import FrameType

import documents
import encoding
import numpy as np
import packing
from checkpoint import Bad, code_of, printable, say
from documents import PIECE, Layout, Piece, size_of
from encoding import Done, Encoder, Recipe
from zg.commandline import Parser
from zg.output import naming

FORMAT = 1
PROGRESS_S = 5
MOST = 4096  # most pieces of a task
BPE_MOST = 10_000_000  # most tokens of a BPE
PACK_MOST = 1 << 24  # most tokens of a sample
SPLITS = ("train", "val")
OURS = {f"{split}{end}.bin" for split in SPLITS for end in ("", ".labels")}
OURS |= {"meta.json", "tokenizer.json"}
Counts = dict[str, tuple[int, int]]  # split -> tokens and documents
Ends = dict[str, list[int]]  # split -> ends of its documents
SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,9})?)%|(\d{1,12})")


def tell(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


# ---- processes

_encoder: Encoder


def begin(recipe: Recipe) -> None:
    """Start a worker. It ends with its parent process."""
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow, daemon=True).start()
    _encoder = Encoder(recipe)


def follow() -> None:
    parent = parent_process()
    if parent:
        parent.join()
        os._exit(1)


def work(pieces: list[Piece]) -> Done:
    return _encoder.encode(pieces)


def tasks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield tasks of about PIECE bytes each."""
    task: list[Piece] = []
    held = 0
    for piece in pieces:
        task.append(piece)
        held += piece.bytes
        if held >= PIECE or len(task) == MOST:
            yield task
            task, held = [], 0
    if task:
        yield task


def encoded(recipe: Recipe, pieces: Iterable[Piece], processes: int) -> Iterator[Done]:
    """Yield encoded tasks in the order of the files."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    waiting: deque[Future[Done]] = deque()
    pool = ProcessPoolExecutor(processes, get_context("spawn"), begin, (recipe,))
    try:
        for task in tasks(pieces):
            waiting.append(pool.submit(work, task))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise Bad(
            "a worker process was killed, probably because memory ran out"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


# ---- the folder


def ours(folder: Path) -> None:
    """Refuse a folder that this program did not write."""
    if not folder.exists() and not folder.is_symlink():
        return
    there: set[str] = set()
    if folder.is_dir() and not folder.is_symlink():
        there = {x.name for x in folder.iterdir()}
    if "meta.json" not in there or there - OURS:
        raise Bad(f"{folder}: already exists and is not a folder of token files")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """Create a folder that replaces `folder` if the block succeeds."""
    ours(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made, old = (
        folder.with_name(f".{folder.name}.{os.getpid()}{x}") for x in ("", ".old")
    )
    made.mkdir()
    try:
        yield made
        ours(folder)
        if folder.exists():
            folder.rename(old)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def put(file: FileIO, raw: bytes, folder: Path) -> None:
    """Write all bytes unbuffered, so that no error is lost at close."""
    left = memoryview(raw)
    with naming(folder / Path(file.name).name):
        while left:
            left = left[file.write(left) :]


class Progress:
    """Reports progress and speed from time to time."""

    def __init__(self, total: int) -> None:
        self.total, self.read, self.tokens = max(total, 1), 0, 0
        self.start = self.told = time.monotonic()

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.start, 1e-9)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def more(self, read: int, tokens: int) -> None:
        self.read += read
        self.tokens = tokens
        now = time.monotonic()
        if now - self.told < PROGRESS_S:
            return
        self.told = now
        share = min(self.read / self.total, 1)
        left = self.seconds * (1 - share) / max(share, 1e-9)
        speed = f"{self.rate:,.0f} a second"
        tell(f"{share:4.0%}  {self.tokens:,} tokens  {speed}  {left:.0f} s left")


def files_of(recipe: Recipe, split: str) -> list[str]:
    names = [f"{split}.bin"]
    return names if recipe.ignore is None else [*names, f"{split}.labels.bin"]


def meta(recipe: Recipe, counts: Counts) -> dict[str, object]:
    kind = "bytes" if recipe.file is None else "tokenizers"
    files = {}
    for split, (tokens, docs) in counts.items():
        name, *labels = files_of(recipe, split)
        files[name] = {
            "tokens": tokens,
            "documents": docs,
            "labels": labels[0] if labels else None,
        }
    packed = {"sequence": recipe.pack} if recipe.pack else {}
    return {
        "format": FORMAT,
        "vocab": recipe.vocab,
        "dtype": recipe.dtype,
        "end": recipe.end,
        "ignore": recipe.ignore,
        **packed,
        "tokenizer": {"kind": kind, "sha256": recipe.sha256},
        "files": files,
    }


def write(
    recipe: Recipe,
    done: Iterable[Done],
    splits: Sequence[str],
    folder: Path,
    progress: Progress,
) -> tuple[Counts, int]:
    """Write the token files. Return the counts, and the number of empty documents."""
    counts = dict.fromkeys(splits, (0, 0))
    ends: Ends = {split: [] for split in splits}
    empty = 0
    width = np.dtype(recipe.dtype).itemsize
    with appearing(folder) as made, ExitStack() as stack:
        out: dict[str, FileIO] = {}
        for split in splits:
            for name in files_of(recipe, split):
                file = open(made / name, "wb", buffering=0)
                out[name] = stack.enter_context(file)
        for each in done:
            empty += each.empty
            for split, part in zip(splits, each.parts, strict=False):
                name, *labels = files_of(recipe, split)
                put(out[name], part.tokens, folder)
                for name in labels:
                    put(out[name], part.labels, folder)
                tokens, docs = counts[split]
                if recipe.pack:
                    ends[split] += [tokens + end for end in part.ends]
                tokens += len(part.tokens) // width
                counts[split] = tokens, docs + len(part.ends)
            total = sum(tokens for tokens, _ in counts.values())
            progress.more(each.bytes, total)
        if not any(tokens for tokens, _ in counts.values()):
            raise Bad(f"no document has a token; {empty} are empty")
        for split, (tokens, _) in counts.items():
            if not tokens:
                raise Bad(f"no document is left for {split}.bin; see --val")
        if recipe.pack:
            counts = packed(recipe, counts, ends, made)
        about(recipe, counts, made, folder)
    return counts, empty


def packed(recipe: Recipe, counts: Counts, ends: Ends, made: Path) -> Counts:
    """Pack the documents of each split into samples. Return the new counts."""
    assert recipe.ignore is not None
    new = {}
    for split, (_, docs) in counts.items():
        tokens, labels = (made / name for name in files_of(recipe, split))
        done = packing.pack(
            tokens,
            labels,
            ends[split],
            recipe.pack,
            recipe.end or 0,
            recipe.ignore,
            recipe.dtype,
        )
        tell(f"{split}: {docs:,} documents in {done.text(recipe.pack)}")
        new[split] = done.samples * recipe.pack + 1, docs
    return new


def about(recipe: Recipe, counts: Counts, made: Path, folder: Path) -> None:
    """Write the files that describe the others."""
    told = json.dumps(meta(recipe, counts), indent=2)
    texts = {"meta.json": told + "\n"}
    if recipe.file is not None:
        texts["tokenizer.json"] = recipe.file
    for name, text in texts.items():
        with open(made / name, "wb", buffering=0) as file:
            put(file, text.encode(), folder)


# ---- the command


def validation(
    wanted: Fraction | int | None, kind: str, files: Sequence[Path]
) -> tuple[int, int | None]:
    """Return the hash below which documents belong to validation. For a single text, return the
    byte at which validation starts."""
    if wanted is None:
        return 0, None
    if isinstance(wanted, int):
        of = documents.count(kind, files)
        if wanted >= of:
            raise Bad(
                f"--val {wanted}: there are only {of} documents; give fewer, or a percentage"
            )
        return documents.bound(wanted, of), None
    if kind == "text" and len(files) == 1:
        (file,) = files
        at = int(size_of(file) * (1 - wanted))
        return 0, documents.line_start(file, at)
    return int(wanted * 2**64), None


def learned(
    args: argparse.Namespace,
    layout: Layout,
    below: int,
    cut: int | None,
) -> Recipe:
    """Train the tokenizer of --train-bpe, on the text that is not for validation."""
    if layout.kind != "text":
        raise Bad(f"--train-bpe: needs texts, but these are {layout.kind}")
    rule = Recipe(below=below, cut=cut)
    pieces = documents.opened(
        args.kind, args.file, layout.fields, lambda a, b: True, cut
    )
    texts = (
        encoding.text_in(piece, layout)
        for piece in pieces
        if not rule.val([piece.number])[0]
    )
    tell(f"a byte-level BPE of {args.train_bpe} tokens is trained")
    return encoding.trained(texts, args.train_bpe)


def prepared(args: argparse.Namespace) -> Recipe:
    layout = documents.first(args.kind, args.file, args.field)
    below, cut = validation(args.val, args.kind, args.file)
    if args.train_bpe:
        recipe = learned(args, layout, below, cut)
    else:
        recipe = encoding.read(args.tokenizer)
    recipe = replace(recipe, layout=layout, below=below, cut=cut, pack=args.pack or 0)
    if layout.kind == "text" or not recipe.templates:
        return recipe
    return replace(recipe, end=Encoder(recipe).separator())


def build(args: argparse.Namespace, processes: int) -> int:
    ours(args.o)
    recipe = prepared(args)
    total = sum(map(size_of, args.file))
    progress = Progress(total)
    splits = SPLITS if args.val else SPLITS[:1]
    encoder = Encoder(recipe)
    columns = recipe.layout.columns
    pieces = documents.opened(args.kind, args.file, columns, encoder.splits, recipe.cut)
    done = encoded(recipe, pieces, processes)
    counts, empty = write(recipe, done, splits, args.o, progress)
    for note in (*recipe.notes, *encoder.notes()):
        say(note)
    if empty:
        say(f"{empty} empty texts are no documents")
    if recipe.end is None and recipe.file is not None:
        say("no token ends a document (eos_token of tokenizer_config.json)")
    told = ", ".join(
        f"{split} {tokens:,} of {docs:,} documents"
        for split, (tokens, docs) in counts.items()
    )
    say(f"{args.o}: tokens: {told}; {progress.rate:,.0f} a second")
    say(following(recipe, args))
    return 0


def following(recipe: Recipe, args: argparse.Namespace) -> str:
    """Return the next command to type. Conversations are packed, and attention is masked between
    them."""
    folder = shlex.quote(str(args.o))
    data = f"--data {folder}"
    if args.val:
        data += f" --val {folder}"
    keys = f", --set train.sequence={recipe.pack}" if recipe.pack else ""
    if recipe.ignore is not None and recipe.end is not None:
        keys += f", --set data.documents=mask --set data.end={recipe.end}"
    vocab = f"model.vocab: {recipe.vocab}"
    return f"next: {vocab} in the spec{keys}, and out/train {data}"


def part(text: str) -> Fraction | int:
    """Parse --val: a share below 1, or a number of documents."""
    found = SHARE.fullmatch(text)
    share, number = found.groups() if found else (None, None)
    if share and 0 < Fraction(share) < 100:
        return Fraction(share) / 100
    if number and int(number):
        return int(number)
    raise argparse.ArgumentTypeError(
        "must be a percentage such as 1%, or a number from 1"
    )


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="run data",
        description="Writes a folder of token files; see docs/data.md.",
    )
    parser.add_argument("kind", choices=("text", "jsonl", "parquet"))
    parser.add_argument("file", nargs="+", type=Path, metavar="FILE")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="FILE|DIR|bytes",
        help="a tokenizer.json, a folder with one, or bytes (the default)",
    )
    which.add_argument(
        "--train-bpe", type=int, metavar="N", help="train a BPE tokenizer with N tokens"
    )
    parser.add_argument(
        "--field",
        metavar="NAME",
        help="field of a record that holds its text or messages",
    )
    parser.add_argument(
        "--val",
        type=part,
        metavar="1%|N",
        help="percentage or number of documents for val.bin",
    )
    parser.add_argument(
        "--pack",
        type=int,
        metavar="T",
        help="put whole documents into samples of T tokens (train.sequence); cut longer ones",
    )
    parser.add_argument("-o", required=True, type=Path, metavar="DIR")
    args = parser.parse_args(words)
    if args.train_bpe is not None and not 257 <= args.train_bpe <= BPE_MOST:
        parser.error(
            f"--train-bpe: must be from 257 (256 bytes and an end-of-text token) to {BPE_MOST}"
        )
    if args.pack is not None and not 2 <= args.pack <= PACK_MOST:
        parser.error(f"--pack: must be from 2 to {PACK_MOST}")
    if args.field and args.kind == "text":
        parser.error("--field: text has no fields")
    if args.o.name in ("", ".."):
        parser.error("-o: must end with the name of a folder")
    return args


def main(words: Sequence[str], processes: int = 0) -> int:
    args = arguments(words)
    cores = processes or len(os.sched_getaffinity(0))
    return code_of("run data", build, args, cores)


def ended(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, ended)
    sys.exit(main(sys.argv[1:]))
