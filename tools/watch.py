"""watch.py -- the losses of runs, drawn from their logs while they grow.

watch.py LOG... [--once] [--svg FILE] [--csv FILE] [--tensorboard DIR] [--wandb [PROJECT]]

On a terminal the picture is drawn anew when a log grows, else once, at the end: when all runs have
ended, at Ctrl-C, or at once with --once. Files are whole then; TensorBoard and Weights & Biases
have each step as it comes.

Exit codes: 0; 2 an argument is wrong, or a file cannot be read or written; 3 the disk is full.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import plotext
from checkpoint import Bad, code_of, printable, tell
from curve import curve
from logs import Log, Record
from zg.commandline import Parser
from zg.output import naming

LOOK_S = 1.0  # between two looks at the logs
RECENT = 20  # steps, of which the median tells the rate, and what is left
MOST = 1e30  # that is drawn; NaN is not
ROWS, COLUMNS = 20, 80  # where there is no terminal
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
HOME, CLEAR = "\x1b[H", "\x1b[2J"  # where a picture begins; the screen
REST, BELOW = "\x1b[K", "\x1b[K\x1b[J"  # of a line; and all lines below


# ---- on the terminal


def numbers(record: Record) -> dict[str, float]:
    return {
        key: x
        for key, x in record.items()
        if key != "step" and isinstance(x, (int, float))
    }


def steps_of(run: Record) -> int:
    """--steps of a run; 0: it has none."""
    words = [str(word) for word in run.get("arguments", ())]
    found = re.findall(r"(?:^| )--steps[= ](\d+)", " ".join(words))
    return int(found[-1]) if found else 0


def left(log: Log) -> str:
    """How long the run will take, by its last steps."""
    took = [seconds for _, seconds in log.points("seconds")][-RECENT:]
    more = steps_of(log.run) - max(log.steps, default=0)
    if log.ended or not took or more <= 0:
        return ""
    minutes, seconds = divmod(round(more * statistics.median(took)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02} left"


def line(log: Log, name: str) -> str:
    """How far a run has come."""
    losses, found = log.points("loss"), log.points("val_loss")
    rates = log.points("tokens_per_second")
    most = steps_of(log.run)
    words = [name]
    if losses:
        step, loss = losses[-1]
        words.append(f"step {step}/{most}" if most else f"step {step}")
        words.append(f"loss {loss:.4f}")
    if found:
        words.append(f"val loss {found[-1][1]:.4f}")
    if rates:
        late = statistics.median(rate for _, rate in rates[-RECENT:])
        words.append(f"{late:.0f} tokens/s")
    words.append("ended" if log.ended else left(log))
    return printable("  ".join(filter(None, words)))


def drawn(logs: Sequence[Log], names: Sequence[str]) -> str:
    """A plot of losses, and a line for each log."""
    size = shutil.get_terminal_size((COLUMNS, ROWS + len(logs) + 1))
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(size.columns, max(size.lines - len(logs) - 1, 8))
    for log, name in zip(logs, names, strict=True):
        for key, marker in (("loss", "braille"), ("val_loss", "o")):
            points = [p for p in log.points(key) if abs(p[1]) < MOST]
            if not points:
                continue
            label = f"{name} {key}" if len(logs) > 1 else key
            draw = plotext.plot if key == "loss" else plotext.scatter
            steps, losses = zip(*points, strict=True)
            draw(steps, losses, marker=marker, label=printable(label))
    plot = ESCAPE.sub("", plotext.build())
    lines = [row.rstrip() for row in plot.splitlines()]
    lines += [
        line(log, name)[: size.columns]
        for log, name in zip(logs, names, strict=True)
    ]
    return "\n".join(lines)


# ---- where numbers go


class Sink(Protocol):
    def add(self, step: int, found: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path, name: str) -> None:
        from tensorboard.summary import Writer

        self.folder = folder / name
        self.writer = Writer(str(self.folder))

    def add(self, step: int, found: dict[str, float]) -> None:
        with naming(self.folder):
            for key, x in found.items():
                self.writer.add_scalar(key, x, step)

    def close(self) -> None:
        with naming(self.folder):
            self.writer.close()


class Wandb:
    def __init__(self, project: str, log: Log, name: str) -> None:
        import wandb

        self.run = wandb.init(
            project=project, name=name, config=log.run, reinit="create_new"
        )

    def add(self, step: int, found: dict[str, float]) -> None:
        self.run.log(found, step=step)

    def close(self) -> None:
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
    """A row for each step of each log; what a step does not have is empty."""
    rows = [
        {"log": name, "step": step, **numbers(record)}
        for log, name in zip(logs, names, strict=True)
        for step, record in sorted(log.steps.items())
    ]
    fields = dict.fromkeys(key for row in rows for key in row)
    with naming(path), open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


# ---- watching


def named(paths: Sequence[Path]) -> list[str]:
    """What each log is called: its file's name where no other has it, else its path from the folder
    that all are in."""
    stems = [path.stem for path in paths]
    if len(set(stems)) == len(stems):
        return stems
    whole = [Path(os.path.abspath(path)) for path in paths]
    above = os.path.commonpath([path.parent for path in whole])
    return [str(path.relative_to(above)) for path in whole]


class Watch:
    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.logs = [Log(path) for path in chosen.log]
        self.names = named(chosen.log)
        self.sinks: list[list[Sink]] = []

    def look(self) -> bool:
        """Takes in what is new; whether anything is."""
        found = []
        for log in self.logs:
            with naming(log.path):
                found.append(log.read())
        for log in self.logs:
            if not log.run and not log.steps:
                raise Bad(f"{log.path}: no record of a run")
        if not self.sinks:
            places = self.chosen.tensorboard, self.chosen.wandb
            self.sinks = [
                sinks(log, name, *places)
                for log, name in zip(self.logs, self.names, strict=True)
            ]
        for new, into in zip(found, self.sinks, strict=True):
            for step, record in new.items():
                for sink in into:
                    sink.add(step, numbers(record))
        return any(found)

    def goes_on(self) -> bool:
        return not self.chosen.once and not all(log.ended for log in self.logs)

    def watch(self) -> None:
        """Until all runs have ended, or somebody has seen enough."""
        live = sys.stdout.isatty() and not self.chosen.once
        self.look()
        try:
            tell(CLEAR * live, end="")
            self.show(live)
            while self.goes_on():
                time.sleep(LOOK_S)
                if self.look():
                    self.show(live)
        except KeyboardInterrupt:
            tell("")
        finally:
            for sink in chain(*self.sinks):
                sink.close()
        self.show(not live)

    def show(self, now: bool) -> None:
        if not now:
            return
        picture = drawn(self.logs, self.names)
        if sys.stdout.isatty() and not self.chosen.once:
            picture = HOME + picture.replace("\n", f"{REST}\n") + BELOW
        tell(picture)

    def write(self) -> None:
        if self.chosen.csv:
            write_csv(self.chosen.csv, self.logs, self.names)
        if not self.chosen.svg:
            return
        if not all(log.points("loss") for log in self.logs):
            raise Bad(f"{self.chosen.svg}: a log has no step to draw yet")
        with naming(self.chosen.svg):
            self.chosen.svg.write_text(curve(self.logs, self.names))


def run(chosen: argparse.Namespace) -> int:
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
    parser.add_argument("--once", action="store_true", help="do not wait")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="a picture")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="a table")
    parser.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="a folder for it"
    )
    parser.add_argument(
        "--wandb",
        nargs="?",
        const="zero",
        metavar="PROJECT",
        help="Weights & Biases; WANDB_MODE=offline keeps it here",
    )
    return code_of("run watch", run, parser.parse_args(words))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
