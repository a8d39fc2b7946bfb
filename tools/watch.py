"""watch.py -- draws the losses of runs from their logs while they grow.

watch.py LOG... [--once] [--svg FILE] [--csv FILE] [--tensorboard DIR] [--wandb [PROJECT]]

On a terminal the picture is drawn again when a log grows, otherwise once, at the end: when all runs
have ended, at Ctrl-C, or at once with --once. Files are complete then; TensorBoard and Weights &
Biases get each step as it comes.

A line that is no record is reported once, by its number, and skipped.

Exit codes: 0; 2 an argument is wrong, or a file cannot be read or written; 3 a disk is full or
failing.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import plotext
from checkpoint import Bad, code_of, printable
from curve import axes, curve, drawable, write
from logs import Log, Record, Steps, is_number, named
from zg.commandline import Parser
from zg.output import FOLDERS, naming, nowhere
from zg.write.svg import clean

LOOK_S = 1.0  # seconds between two looks at the logs
RECENT = 20  # steps whose median gives the rate and the time left
LATEST = 10**9  # seconds: a later end is not shown
UNREAD = 5  # most lines of a log that are reported
ROWS, COLUMNS = 20, 80  # size without a terminal
# Signs of curves, which have no colours.
SIGNS = ("braille", "x", "+", "*", "#")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
# Move to the start of the picture; clear the screen
HOME, CLEAR = "\x1b[H", "\x1b[2J"
# Clear the rest of a line; and all lines below
REST, BELOW = "\x1b[K", "\x1b[K\x1b[J"


# ---- on the terminal


def numbers(record: Record) -> dict[str, float]:
    return {
        clean(key): x
        for key, x in record.items()
        if key not in ("log", "step") and is_number(x)
    }


def steps_of(run: Record) -> int:
    """Return --steps of a run, 0 if it has none."""
    words = " ".join(run.get("arguments", ()))
    found = re.findall(r"(?:^| )--steps[= ]([0-9]{1,18})(?: |$)", words)
    return int(found[-1]) if found else 0


def left(log: Log) -> str:
    """Return the time that the run still takes, by its last steps."""
    took = [seconds for _, seconds in log.points("seconds")][-RECENT:]
    more = steps_of(log.run) - max(log.steps, default=0)
    if log.ended or not took or more <= 0:
        return ""
    seconds = more * statistics.median(took)
    if not 0 <= seconds < LATEST:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left"


def told(x: float, digits: int) -> str:
    return f"{x:.{digits}f}" if abs(x) < 1e9 else f"{x:.4g}"


def line(log: Log, name: str) -> str:
    """Return a line about a run's progress."""
    losses, found = log.points("loss"), log.points("val_loss")
    rates = log.points("tokens_per_second")
    most = steps_of(log.run)
    words = [name]
    if losses:
        last = max(log.steps)
        step, loss = losses[-1]
        words.append(f"step {last}/{most}" if most else f"step {last}")
        of = "" if step == last else f" at step {step}"
        words.append(f"loss {told(loss, 4)}{of}")
    if found:
        words.append(f"val loss {told(found[-1][1], 4)}")
    if rates:
        late = statistics.median(rate for _, rate in rates[-RECENT:])
        words.append(f"{told(late, 0)} tokens/s")
    words.append("ended" if log.ended else left(log))
    return printable("  ".join(filter(None, words)))


def drawn(logs: Sequence[Log], names: Sequence[str]) -> str:
    """Return a plot of losses, and a line for each log. The library gets only fractions of the
    plot's width and height, so it meets no number that it cannot draw."""
    size = shutil.get_terminal_size((COLUMNS, ROWS + len(logs) + 1))
    columns, rows = size.columns, max(size.lines - len(logs) - 1, 8)
    found = axes(logs, max(2, rows // 3))
    steps = found.steps(columns // (len(str(found.last)) + 8))
    losses = found.losses()
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(columns, rows)
    plotext.xlim(0, 1)
    plotext.ylim(0, 1)
    plotext.xticks([found.at(step, 0)[0] for step, _ in steps], [x for _, x in steps])
    plotext.yticks([found.at(0, loss)[1] for loss, _ in losses], [x for _, x in losses])
    for number, (log, name) in enumerate(zip(logs, names, strict=True)):
        sign = SIGNS[number % len(SIGNS)]
        for key, marker in (("loss", sign), ("val_loss", "o")):
            points = [found.at(*point) for point in drawable(log, key)]
            if not points:
                continue
            label = f"{name} {key}" if len(logs) > 1 else key
            draw = plotext.plot if key == "loss" else plotext.scatter
            draw(
                *zip(*points, strict=True),
                marker=marker,
                label=printable(label),
            )
    plot = ESCAPE.sub("", plotext.build())
    lines = [row.rstrip() for row in plot.splitlines()]
    lines += [line(log, name)[:columns] for log, name in zip(logs, names, strict=True)]
    return "\n".join(lines)


# ---- outputs


class Sink(Protocol):
    def add(self, step: int, found: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Writes to TensorBoard. Its writer thread passes an error on after printing a traceback."""

    def __init__(self, folder: Path, name: str) -> None:
        from tensorboard.summary import Writer

        threading.excepthook = lambda _: None
        self.folder = folder
        with naming(folder, anew=True):
            self.writer = Writer(str(folder / name))

    def add(self, step: int, found: dict[str, float]) -> None:
        with naming(self.folder, anew=True):
            for key, x in found.items():
                self.writer.add_scalar(key, x, step)

    def close(self) -> None:
        with naming(self.folder, anew=True):
            self.writer.close()


class Wandb:
    """Writes to Weights & Biases. It never asks for a key: stdin is empty."""

    def __init__(self, project: str, log: Log, name: str) -> None:
        import wandb

        self.error = wandb.Error
        sys.stdin = open(os.devnull)
        with self.telling():
            self.run = wandb.init(
                project=project, name=name, config=log.run, reinit="create_new"
            )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Turn wandb's errors into Bad; ValueError is raised for WANDB_MODE and the like."""
        try:
            yield
        except (self.error, ValueError) as e:
            raise Bad(
                f"--wandb: {' '.join(str(e).split())} (.venv/bin/wandb login stores a key; "
                "WANDB_MODE=offline needs none)"
            ) from None

    def add(self, step: int, found: dict[str, float]) -> None:
        with self.telling():
            self.run.log(found, step=step)

    def close(self) -> None:
        with self.telling():
            self.run.finish()


def sinks(
    log: Log, name: str, tensorboard: Path | None, project: str | None
) -> list[Sink]:
    made: list[Sink] = []
    if tensorboard:
        made.append(TensorBoard(tensorboard, name))
    if project:
        made.append(Wandb(project, log, name))
    return made


def write_csv(path: Path, logs: Sequence[Log], names: Sequence[str]) -> None:
    """Write a row for each step of each log; missing numbers are empty."""
    rows = [
        {"log": clean(name), "step": step, **numbers(record)}
        for log, name in zip(logs, names, strict=True)
        for step, record in sorted(log.steps.items())
    ]
    fields = dict.fromkeys(key for row in rows for key in row)
    table = io.StringIO()
    writer = csv.DictWriter(table, list(fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(table.getvalue(), path)


# ---- watching


class Watch:
    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.logs = [Log(path) for path in chosen.log]
        self.names = named(chosen.log)
        self.sinks: list[list[Sink]] = []
        self.told = [0] * len(self.logs)  # unread lines of each log

    def open(self, closing: ExitStack) -> None:
        """Read the logs for the first time, and open the outputs."""
        found = [log.read(self.chosen.once) for log in self.logs]
        for log in self.logs:
            if not log.run and not log.steps:
                self.tell()
                raise Bad(f"{log.path}: not a record of a run")
        places = self.chosen.tensorboard, self.chosen.wandb
        for log, name in zip(self.logs, self.names, strict=True):
            self.sinks.append(sinks(log, name, *places))
            for sink in self.sinks[-1]:
                closing.callback(sink.close)
        self.hand_on(found)

    def look(self, all_of_it: bool = False) -> bool:
        """Read new records. Return whether there are any."""
        found = [log.read(all_of_it) for log in self.logs]
        self.hand_on(found)
        return any(found)

    def hand_on(self, found: Sequence[Steps]) -> None:
        for new, into in zip(found, self.sinks, strict=True):
            for step, record in new.items():
                for sink in into:
                    sink.add(step, numbers(record))

    def tell(self, now: bool = True) -> None:
        """Report lines that are no records: the first ones of a log, then the number of others. A
        live picture would hide it."""
        if not now:
            return
        for n, log in enumerate(self.logs):
            before, self.told[n] = self.told[n], len(log.unread)
            for text in log.unread[before:UNREAD]:
                warn(f"{text}; passed over")
            if (more := len(log.unread) - max(before, UNREAD)) > 0:
                warn(f"{log.path}: {more} more lines passed over")

    def goes_on(self) -> bool:
        return not self.chosen.once and not all(log.ended for log in self.logs)

    def watch(self) -> None:
        """Watch until all runs have ended or the user interrupts."""
        live = sys.stdout.isatty() and not self.chosen.once
        with ExitStack() as closing:
            self.open(closing)
            try:
                if live:
                    write(CLEAR, None)
                self.show(live)
                self.tell(not live)
                while self.goes_on():
                    time.sleep(LOOK_S)
                    if self.look():
                        self.show(live)
                    self.tell(not live)
            except KeyboardInterrupt:
                write("\n", None)
            self.look(all_of_it=True)
        self.show(not live)
        self.tell()

    def show(self, now: bool) -> None:
        if not now:
            return
        picture = drawn(self.logs, self.names)
        if sys.stdout.isatty() and not self.chosen.once:
            picture = HOME + picture.replace("\n", f"{REST}\n") + BELOW
        write(f"{picture}\n", None)

    def write(self) -> None:
        if self.chosen.csv:
            write_csv(self.chosen.csv, self.logs, self.names)
        if not self.chosen.svg:
            return
        for log in self.logs:
            if not drawable(log, "loss"):
                raise Bad(f"{log.path}: no step to draw yet, so --svg is not written")
        write(curve(self.logs, self.names), self.chosen.svg)


def warn(text: str) -> None:
    print(printable(f"run watch: {text}"), file=sys.stderr)


def run(chosen: argparse.Namespace) -> int:
    for option, file in (("--svg", chosen.svg), ("--csv", chosen.csv)):
        if file and (lacks := nowhere(str(file))):
            raise Bad(
                f"{option} {file}: there is no folder {lacks}; allowed: {FOLDERS}"
            )
    watch = Watch(chosen)
    watch.watch()
    watch.write()
    return 0


def main(words: Sequence[str]) -> int:
    parser = Parser(
        prog="run watch",
        description=__doc__.partition("[PROJECT]]\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", nargs="+", type=Path, metavar="LOG")
    parser.add_argument("--once", action="store_true", help="draw once, do not wait")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write an SVG picture")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a CSV table")
    parser.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="write TensorBoard events"
    )
    parser.add_argument(
        "--wandb",
        nargs="?",
        const="zero",
        metavar="PROJECT",
        help="log to Weights & Biases; WANDB_MODE=offline keeps the data here",
    )
    return code_of("run watch", run, parser.parse_args(words))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
