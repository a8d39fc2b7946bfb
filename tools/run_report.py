"""run_report.py -- writes an HTML page about runs, from their logs.

run_report.py LOG... [--plan FILE] -o FILE

The page has losses, rates, pauses, restarts and the slowest steps; several logs share its charts.
--plan compares steps with a prediction, the output of zgen --emit time.json. If a run wrote a trace
with --profile, parts of a step are compared, too, and its slowest ranks are listed.

A line that is no record is reported by its number and skipped.

Exit codes: 0; 2 an argument is wrong, or a file cannot be read or written; 3 a disk is full or
failing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from checkpoint import Bad, code_of, command, printable
from curve import COLOURS, write
from logs import Log, Record, is_number, named
from zg.commandline import Parser
from zg.facts.commands import COMMANDS
from zg.output import FOLDERS, is_one_of, naming, nowhere
from zg.read.node import shown
from zg.write import emit, page
from zg.write.page import Chart, Curve, Page, Section, Table, Track, table
from zg.write.timeline import FAR, OTHER, WORDS, kind_of

UNREAD = 5  # most lines of a log that are reported
SLOWEST = 8  # ranks of a trace that are listed
MOST = 1e30  # largest number that is drawn
# Fields of a run's record that are shown.
FIELDS = (
    "run",
    "host",
    "time",
    "version",
    "summary",
    "kernels",
    "ranks",
    "threads",
    "parameters",
    "tokens_per_step",
    "flops_per_step",
    "plan",
)
# Tracks of the chart: key of a step's record, name, unit, height in pixels.
TRACKS = (
    ("loss", "loss", "nats a token", 240),
    ("tokens_per_second", "throughput", "tokens/s", 110),
    ("seconds", "step time", "s", 110),
    ("pause", "pauses for checkpoints", "s", 80),
    ("norm", "gradient norm", "", 110),
)
PLAN = "a prediction: the output of zgen --emit time.json"

Times = dict[str, float]


# ---- numbers of a log


def seconds(log: Log) -> list[tuple[int, float]]:
    """Return the steps' seconds, without those of the first step if there are others."""
    found = log.points("seconds")
    first = {start.step for start in log.starts}
    return [point for point in found if point[0] not in first] or found


def typical(log: Log) -> float:
    """Return the median of a step's seconds, NaN without steps."""
    return statistics.median([x for _, x in seconds(log)] or [math.nan])


def number(x: float) -> str:
    return "-" if math.isnan(x) else f"{x:,.0f}" if abs(x) >= 1e4 else f"{x:.4g}"


def last(log: Log, key: str) -> str:
    found = log.points(key)
    return f"{number(found[-1][1])} at step {found[-1][0]}" if found else "-"


def slowest(log: Log) -> str:
    found = max(seconds(log), key=lambda point: point[1], default=None)
    if found is None:
        return "-"
    step, took = found
    return (
        f"step {step}: {took:.4g} s, {took / (typical(log) or 1):.3g} times the median"
    )


def pauses(log: Log) -> str:
    found = log.points("pause")
    if not found:
        return "none"
    step, most = max(found, key=lambda point: point[1])
    total = sum(x for _, x in found)
    return (
        f"{len(found)}, {total:.4g} s together, the longest {most:.4g} s at step {step}"
    )


def results(log: Log) -> list[tuple[str, str]]:
    rates = [x for _, x in log.points("tokens_per_second")]
    again = sum(start.repeated for start in log.starts)
    skipped = sum(x for _, x in log.points("skipped"))
    return [
        ("steps", str(max(log.steps, default=0))),
        ("ended", "yes" if log.ended else "no"),
        ("loss", last(log, "loss")),
        ("validation loss", last(log, "val_loss")),
        ("seconds of a step, median", number(typical(log))),
        ("tokens/s, median", number(statistics.median(rates or [math.nan]))),
        ("slowest step", slowest(log)),
        ("pauses for checkpoints", pauses(log)),
        ("restarts", str(max(0, len(log.starts) - 1))),
        ("steps made again after restarts", str(again)),
        ("skipped steps", number(skipped)),
    ]


# ---- sections


def beside(
    title: str, names: Sequence[str], columns: Sequence[list[tuple[str, str]]]
) -> Table:
    """Return a table with a column for each log."""
    rows = [
        (same[0][0], *(text for _, text in same))
        for same in zip(*columns, strict=True)
        if any(text for _, text in same)
    ]
    return table(title, "|".join(["", *(n.replace("|", "/") for n in names)]), rows)


def fields(run: Record) -> list[tuple[str, str]]:
    def text(x: Any) -> str:
        return "" if x is None else f"{x:,}" if type(x) is int else str(x)

    return [(key.replace("_", " "), text(run.get(key))) for key in FIELDS]


def restarts(log: Log, name: str) -> Iterator[Table]:
    rows = [
        (x.step, x.run.get("time", ""), x.run.get("host", ""), x.repeated)
        for x in log.starts[1:]
    ]
    if rows:
        heads = "first step|time|host|steps made again"
        yield table(f"Restarts of {name}", heads, rows)


def curves(logs: Sequence[Log], key: str) -> Iterator[Curve]:
    """Yield the curve of a number for each log that has it, and marks at validations."""
    for n, log in enumerate(logs):
        for of in (key, *("val_loss",) * (key == "loss")):
            points = [(step, x) for step, x in log.points(of) if abs(x) < MOST]
            if points:
                marks = of in ("val_loss", "pause")
                yield Curve(n, page.thinned(points), marks)


def chart(logs: Sequence[Log], names: Sequence[str]) -> Iterator[Chart]:
    tracks = []
    for key, name, unit, height in TRACKS:
        found = tuple(curves(logs, key))
        marked = ", circles: validations" * (key == "loss")
        note = f"{unit}{marked * any(c.marks for c in found)}"
        if found:
            tracks.append(Track(name, note, height=height, curves=found, unit=unit))
    steps = [x for t in tracks for c in t.curves for x, _ in c.points]
    if steps:
        colours = [COLOURS[n % len(COLOURS)] for n in range(len(logs))]
        series = page.series(zip(names, colours, strict=True))
        yield Chart(
            "Training steps", series, tuple(tracks), min(steps), max(steps), "step"
        )


# ---- a prediction


def is_times(x: object) -> bool:
    return isinstance(x, dict) and all(
        is_number(y) and 0 <= y < MOST for y in x.values()
    )


def prediction(path: Path) -> Record:
    """Return a prediction from its file."""
    with naming(path), open(path, "rb") as file:
        text = file.read()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise Bad(f"{path}: is not JSON; allowed: {PLAN}") from None
    if not isinstance(found, dict):
        raise Bad(f"{path}: {shown(found)} is not a JSON object; allowed: {PLAN}")
    for key in ("step", "tokens_per_second", "flops"):
        if not is_number(found.get(key)) or not 0 < found[key] < MOST:
            told = shown(found.get(key))
            raise Bad(
                f"{path}: {key}: {told} is not a positive number; allowed: {PLAN}"
            )
    if not isinstance(found.get("plan"), str):
        raise Bad(f"{path}: plan: is no hash of a plan; allowed: {PLAN}")
    if not is_times(found.get("busy")):
        raise Bad(f"{path}: busy: is not a mapping to numbers; allowed: {PLAN}")
    return found


def option(run: Record, name: str) -> str:
    """Return the value of an option of a run's command line, '' if it has none."""
    words = run.get("arguments", [])
    for word, after in pairwise([*words, ""]):
        if word == name:
            return str(after)
        if word.startswith(f"{name}="):
            return str(word.removeprefix(f"{name}="))
    return ""


@dataclass(frozen=True)
class Trace:
    """Seconds in a step of a run's trace. parts: of rank 0, by part; ranks: of each rank's queue
    main in its own kernels, which wait for no peer."""

    parts: Times
    ranks: dict[int, float]


def traced(log: Log, name: str) -> Trace | None:
    """Return the trace that a run's --profile names, or the file of that name beside the
    log; None if neither is a trace."""
    path = Path(name)
    if not path.is_file():  # a pipe would wait for a writer
        path = log.path.parent / path.name
    try:
        return summed(json.loads(path.read_bytes())) if path.is_file() else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def summed(events: list[Any]) -> Trace | None:
    """Return a trace's seconds, None if it has no steps."""
    mains = {
        (e["pid"], e["tid"])
        for e in events
        if e["name"] == "thread_name" and e["args"]["name"] == "main"
    }
    parts: Counter[str] = Counter()
    ranks: Counter[int] = Counter()
    steps = set()
    for e in events:
        said = e.get("args", {})
        if e["ph"] != "X" or "step" not in said:
            continue
        steps.add(said["step"])
        if "for" in said:
            continue
        kind, took = kind_of(e["name"]), e["dur"] / 1e6
        if e["pid"] == 0:
            parts[WORDS.get(kind, (OTHER, ""))[0]] += took
        if (e["pid"], e["tid"]) in mains and not (
            kind in COMMANDS and COMMANDS[kind].meets
        ):
            ranks[e["pid"]] += took
    if not steps:
        return None
    each = len(steps)
    return Trace(
        {part: x / each for part, x in parts.items()},
        {rank: x / each for rank, x in ranks.items()},
    )


def by_rank(took: Trace, name: str) -> Iterator[Table]:
    """Yield a table of the ranks that work longest, if the trace has several ranks."""
    middle = statistics.median([*took.ranks.values()] or [0.0])
    rows = [
        (rank, number(x), share(x / middle) if middle else "-")
        for rank, x in sorted(took.ranks.items(), key=lambda row: -row[1])
    ]
    if len(rows) > 1:
        title = f"{name}: seconds in a step of queue main's kernels, the slowest ranks first"
        yield table(title, "rank|seconds|times the median", rows[:SLOWEST])


def share(x: float) -> str:
    return f"{x:.3f}" if x >= 0.1 else f"{x:.3g}"


def ratio(predicted: float, measured: float) -> tuple[str, str, str]:
    both = predicted > 0 and measured > 0
    return (
        number(predicted),
        number(measured),
        share(measured / predicted) if both else "-",
    )


def compared(plan: Record, log: Log, name: str) -> tuple[list[str], list[Table]]:
    """Return notes and tables of a log beside the prediction."""
    heads = "{}|predicted|measured|measured / predicted"
    rates = [x for _, x in log.points("tokens_per_second")] or [math.nan]
    rows = [
        ("seconds of a step", *ratio(plan["step"], typical(log))),
        ("tokens/s", *ratio(plan["tokens_per_second"], statistics.median(rates))),
    ]
    shares = [x for _, x in log.points("share_of_peak")]
    if shares and is_number(plan.get("mfu")):
        rows.append(("share of peak", *ratio(plan["mfu"], statistics.median(shares))))
    tables = [table(f"{name}: a step", heads.format("rate"), rows)]
    notes = []
    if log.run.get("plan", plan["plan"]) != plan["plan"]:
        notes.append(f"{name}: the run's plan is not the predicted one.")
    trace = option(log.run, "--profile")
    took = traced(log, trace) if trace else None
    if trace and took is None:
        notes.append(f"{name}: {trace} is no trace that can be read.")
    if took is not None:
        predicted: Counter[str] = Counter()
        near = {far: part for part, far in FAR.items()}
        for part, x in plan["busy"].items():
            predicted[near.get(part, part)] += x
        parts = dict.fromkeys([*predicted, *took.parts])
        tables.append(
            table(
                f"{name}: seconds of rank 0 in a step by part, over all queues",
                heads.format("part"),
                [(p, *ratio(predicted[p], took.parts.get(p, 0.0))) for p in parts],
            )
        )
        tables += by_rank(took, name)
    return notes, tables


def predicted(
    plan: Record, logs: Sequence[Log], names: Sequence[str]
) -> Iterator[Section]:
    notes, tables = [], []
    for log, name in zip(logs, names, strict=True):
        said, made = compared(plan, log, name)
        notes += said
        tables += made
    lines = (
        f"Predicted for {plan.get('device', 'an unknown device')}. Measured are medians of steps "
        "without the first ones of runs, and means of profiled steps.",
        "On a CPU the measured time of a collective includes the wait for peers.",
        *notes,
    )
    clean = tuple(map(page.clean, lines))
    yield Section("predicted", "Predicted and measured", clean, tables=tuple(tables))


# ---- the page


def text(logs: Sequence[Log], names: Sequence[str], plan: Record | None) -> str:
    """Return the report as HTML."""
    tables = [beside("Results", names, [results(log) for log in logs])]
    for log, name in zip(logs, names, strict=True):
        tables += restarts(log, name)
    about = beside("Runs", names, [fields(log.run) for log in logs])
    sections = [
        Section(
            "steps",
            "Steps",
            ("Medians leave out the first step of each run.",),
            tuple(chart(logs, names)),
            tuple(tables),
        ),
        *(predicted(plan, logs, names) if plan else ()),
        Section("runs", "Runs", tables=(about,)),
    ]
    unread = [line for log in logs for line in log.unread]
    if unread:
        sections.append(Section("notes", "Lines that are no records", tuple(unread)))
    told = str(logs[0].run.get("run", "?")) if len(logs) == 1 else f"{len(logs)} runs"
    lead = f"From {', '.join(log.path.name for log in logs)}"
    return emit.page(Page(page.clean(told), page.clean(lead), tuple(sections)))


def tell(log: Log) -> None:
    """Report lines that are no records: the first ones, then the number of others."""
    for line in log.unread[:UNREAD]:
        print(printable(f"run report: {line}; passed over"), file=sys.stderr)
    more = len(log.unread) - UNREAD
    if more > 0:
        told = f"run report: {log.path}: {more} more lines passed over"
        print(printable(told), file=sys.stderr)


def run(chosen: argparse.Namespace) -> int:
    place, plan = str(chosen.out), chosen.plan
    if lacks := nowhere(place):
        raise Bad(f"-o {place}: there is no folder {lacks}; allowed: {FOLDERS}")
    inputs = [str(path) for path in (*chosen.log, *([plan] if plan else ()))]
    if over := is_one_of(place, inputs):
        raise Bad(f"-o {place}: is the input file {over}; name another file")
    logs = [Log(path) for path in chosen.log]
    for log in logs:
        log.read(True)
        tell(log)
        if not log.run and not log.steps:
            raise Bad(f"{log.path}: not a record of a run")
    write(text(logs, named(chosen.log), prediction(plan) if plan else None), chosen.out)
    return 0


def main(words: Sequence[str]) -> int:
    parser = Parser(
        prog="run report",
        description=__doc__.partition("-o FILE\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", nargs="+", type=Path, metavar="LOG")
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="the prediction that zgen --emit time.json wrote",
    )
    parser.add_argument(
        "-o",
        dest="out",
        type=Path,
        metavar="FILE",
        required=True,
        help="the page, replaced only once it is complete",
    )
    return code_of("run report", run, parser.parse_args(words))


if __name__ == "__main__":
    command(main)
