"""data.py -- compares the command `./run data` with the tokenizers library alone, in tokens a
second.

The corpus is a text (--text, by default the Bible of tests/data) repeated in JSONL records of some
3 kB each; the tokenizer is a BPE of 4096 tokens trained on the text. The library has the records in
memory and calls encode_batch on all cores. Ours is the whole command: it starts processes, reads
and parses the file, and writes tokens. Both run in turns. Figures are medians over rounds, by the
clock and, for a busy machine, by processor time. The exit code is 1 if ours has less than 90 % of
the library's speed by the clock.

    .venv/bin/python bench/data.py --text tests/data/kjv.txt --mb 64 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import bench
import results
from results import Block
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
MADE = ROOT / "out" / "bench-data"
SHARE, TOKENS, RECORD, BATCH = 0.9, 4096, 3000, 1000


def command(*words: object) -> None:
    run = [ROOT / "run", "data", *words]
    subprocess.run([str(x) for x in run], check=True, stdout=sys.stderr)


def records(text: str, size: int) -> list[str]:
    """Return records of `size` characters in total, each starting at another place of the text."""
    step = RECORD - 7
    starts = [at * step % len(text) for at in range(size // RECORD)]
    return [(text[at:] + text[:at])[:RECORD] for at in starts]


def used() -> float:
    """Return the seconds of processor time of this process and its ended children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    found = [resource.getrusage(kind) for kind in kinds]
    return sum(each.ru_utime + each.ru_stime for each in found)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of a call by the clock, and of processor time."""
    start, before = time.monotonic(), used()
    call()
    return time.monotonic() - start, used() - before


def library(tokenizer: Tokenizer, texts: list[str]) -> int:
    """Return the number of tokens."""
    return sum(
        len(found)
        for at in range(0, len(texts), BATCH)
        for found in tokenizer.encode_batch(texts[at : at + BATCH])
    )


def ours(file: Path) -> None:
    how = ("--tokenizer", MADE / "bpe" / "tokenizer.json")
    command("jsonl", file, *how, "-o", MADE / "tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description="see the file's head")
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/kjv.txt")
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = bench.with_out(parser).parse_args()
    command("text", args.text, "--train-bpe", TOKENS, "-o", MADE / "bpe")
    texts = records(args.text.read_text(), args.mb * 1_000_000)
    file = MADE / "records.jsonl"
    with open(file, "w") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    tokenizer = Tokenizer.from_file(str(MADE / "bpe" / "tokenizer.json"))
    tokens = library(tokenizer, texts)
    calls = {
        "library": lambda: library(tokenizer, texts),
        "run data": lambda: ours(file),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    rates = {
        name: [tokens / 1e6 / statistics.median(x) for x in zip(*found, strict=True)]
        for name, found in times.items()
    }
    pairs = zip(rates["run data"], rates["library"], strict=True)
    share, of = (a / b for a, b in pairs)
    found: list[Block] = [
        results.table(
            "million tokens a second | by the clock | of a processor's time",
            (f"{name} | {x:.2f} | {busy:.2f}" for name, (x, busy) in rates.items()),
        ),
        f"run data: {share:.0%} of the library by the clock, {of:.0%} by processors",
    ]
    head = [f"{bench.cpu()}, {os.cpu_count()} cores"]
    results.finish(head, found, args.out, f"others {100 * bench.others():.1f} %")
    return int(share < SHARE)


if __name__ == "__main__":
    sys.exit(main())
