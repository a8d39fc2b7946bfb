"""main.py -- zgen's command line: reads a spec, makes and checks its plan, and writes the requested
output.

Exit codes: 0 done; 1 a Python package is missing; 2 bad input, nothing written; 3 the checker
refuses the plan (a defect of zgen), the output cannot be written, or a process of a search was
killed; 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import home, output, progress
from .commandline import Parser
from .read import node

if TYPE_CHECKING:
    from .plan.plan import Plan
    from .read.schema import Spec
    from .search.fit import Search

EXAMPLES = """examples:
  gen/zgen model_specs/gpt-tiny.yaml -o out/train.c && ninja out/train
  gen/zgen model_specs/gpt2-124m.yaml --set zero.stage=2 --emit explain
  gen/zgen model_specs/llama3-8b.yaml --zero ds_config.json --emit memory
  gen/zgen model_specs/llama3-8b.yaml --zero ds_config.json --emit config
  gen/zgen model_specs/llama3-8b.yaml --zero ds_config.json --emit spec -o mine.yaml
  gen/zgen model_specs/llama-tiny.yaml --set 'model.units[1].blocks=3' --emit memory
  gen/zgen model_specs/gpt2-124m-8gpu.yaml --fit --emit spec -o fast.yaml
  gen/zgen --from DIR --emit spec -o mine.yaml
  gen/zgen --from DIR --vocab 32016 -o out/train.c
  gen/zgen model_specs/qwen3-0.6b.yaml --emit plan > plan.txt
  gen/zgen model_specs/gpt2-124m.yaml --emit timeline -o step.svg
  gen/zgen model_specs/gpt2-124m.yaml --emit report -o report.html
  gen/zgen model_specs/gpt2-124m.yaml --emit bundle -o gpt2 && make -C gpt2 -j

exit codes:
  0    done
  1    a Python package is missing (./run setup installs it)
  2    bad input; nothing is written
  3    the plan failed its own check (a bug in zgen), the output cannot be written, or a process of
       a search was killed
  130  interrupted (SIGINT); nothing is written
"""


def inputs(p: argparse.ArgumentParser) -> None:
    """Add the arguments that give a spec."""
    p.add_argument("spec", nargs="?", help="YAML model spec (see model_specs/)")
    p.add_argument(
        "--from",
        metavar="DIR",
        dest="folder",
        help="a Hugging Face model folder: its config.json gives the model, and SPEC, if given, "
        "everything else",
    )
    p.add_argument(
        "--vocab",
        metavar="N",
        type=int,
        help="with --from: gives the model N rows by token, for new tokens; --load sets the rows "
        "that DIR lacks to the mean of its rows",
    )
    p.add_argument(
        "--zero",
        metavar="FILE",
        help="a DeepSpeed ds_config.json; its keys take precedence over SPEC's",
    )
    p.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="sets a key of the spec, e.g. zero.stage=2 or, inside a list, "
        "model.units[1].blocks=3; takes precedence over --zero and SPEC; the last one wins",
    )


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    what = "Turns a model spec and a ZeRO config into one static C program."
    p = Parser(
        prog="zgen",
        description=what,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inputs(p)
    p.add_argument(
        "--emit",
        choices=(
            "c",
            "plan",
            "memory",
            "explain",
            "time",
            "time.json",
            "timeline",
            "report",
            "config",
            "spec",
            "bundle",
        ),
        default="c",
        help="what to write (default: c, the program); plan: the plan as text; memory: the "
        "layout of a rank's memory, byte by byte; explain: communication volume, FLOPs and "
        "commands of a step; time: the predicted time of a step on `cluster.device`, by parts, and "
        "the waits in it; time.json: the same as data; timeline: an SVG picture of a step, with "
        "predicted times; report: one HTML page of model, memory, predicted times, wire and "
        "recipe; config: the value of every key and where it comes from; spec: SPEC "
        "merged with --zero and --set; bundle: a folder with train.c and everything that make or "
        "ninja needs to build it",
    )
    p.add_argument(
        "-o",
        metavar="FILE",
        dest="out",
        help="output file (default: stdout), replaced only once it is complete; missing folders "
        "are created, but only below the current one; a bundle's folder must be new or empty",
    )
    p.add_argument(
        "--flat",
        action="store_true",
        help="write C without loops: one line per command",
    )
    p.add_argument(
        "--fit",
        action="store_true",
        help="search stage, sharding, recomputation, offloading, prefetch and buckets for the "
        "shortest predicted step under `cluster.memory`, by default the device's memory; print a "
        "table of time and memory; and go on with the fastest settings as if they were typed as "
        "--set. Keys of --set stay, and so do the bits",
    )
    p.add_argument("--version", action="version", version=f"zgen {home.version()}")
    args = p.parse_args(argv)
    if args.spec is None and args.folder is None:
        p.error("SPEC or --from DIR is required")
    if args.vocab is not None and args.folder is None:
        p.error("--vocab needs --from DIR; a spec has model.vocab and model.vocab_from")
    return args


def origin(args: argparse.Namespace) -> str:
    """Return the command that a train.c comes from, without the folders of its files."""
    words = ["zgen", args.spec] if args.spec else ["zgen"]
    words += ["--from", os.path.normpath(args.folder)] if args.folder else []
    words += ["--vocab", str(args.vocab)] if args.vocab else []
    words += ["--zero", args.zero] if args.zero else []
    words = [os.path.basename(word) for word in words]
    words += [word for value in args.set for word in ("--set", value)]
    words += ["--flat"] if args.flat else []
    said = shlex.join(words)
    return f"zgen {home.version()}: {said if said.isprintable() else ascii(said)}"


def text(args: argparse.Namespace) -> str:
    """Return the text that a command line asks for. Raises SpecError for bad input, CheckError for
    a wrong plan."""
    from .check import check
    from .plan.text import print_plan
    from .predict import cost
    from .read import spec
    from .search import search
    from .write import config, explain, notes

    read = spec.load(args.spec, args.set, args.zero, args.folder, args.vocab)
    fitted, found = "", None
    if args.fit:
        from .search import fit

        found = fit.find(read)
        progress.doing("checks the plans of --fit")
        found.prove(check.check)
        fitted = fit.table(found)
        args.set = [*args.set, *found.best[0].way.settings]
        read = spec.load(args.spec, args.set, args.zero, args.folder, args.vocab)
    progress.doing("plans")
    built = search.find(read)
    progress.doing("checks the plan")
    check.check(built.plan)
    progress.doing(f"writes --emit {args.emit}")
    others = functools.partial(search.other_rules, built.spec)
    told = (*built.notes, *notes.notes(built.plan, others))
    for note in told:
        print(f"zgen: note: {note}", file=sys.stderr)
    if fitted and args.emit != "explain":
        print(fitted, end="", file=sys.stderr)
    if args.emit == "spec":
        return spec.text(args.spec, args.set, args.zero, args.folder, args.vocab)
    if args.emit == "config":
        return config.text(read)
    if args.emit == "plan":
        return print_plan(built.plan)
    if args.emit == "memory":
        return explain.memory(built.plan, others())
    if args.emit == "explain":
        return explain.explain(built.plan) + "".join(
            "\n" + text for text in (built.choices, fitted) if text
        )
    if args.emit in ("timeline", "time", "time.json", "report"):
        return predicted(args, read, built.plan, told, found)
    from .write import emit, hf, peft, view

    predicted_step = {}
    if read.cluster.device:
        from .predict import clock, play

        timed = clock.of(read, built.plan)
        predicted_step[timed.device.target] = play.step(timed).seconds
    return emit.train(
        view.view(
            built.plan,
            cost.summary(built.plan),
            explain.memory_line(built.plan),
            args.flat,
            config.recipe(read),
            [*hf.fields(read), *peft.fields(read)],
            origin(args),
            predicted_step,
            hf.mark(read),
        )
    )


def predicted(
    args: argparse.Namespace,
    read: Spec,
    p: Plan,
    told: tuple[str, ...],
    found: Search | None,
) -> str:
    """Return an output that has predicted times. told: the notes of the plan; found: the search of
    --fit."""
    from .predict import clock
    from .write import report, timeline, times

    timed = clock.of(read, p)
    if args.emit == "timeline":
        return timeline.text(timed)
    if args.emit == "time":
        return times.table(timed, times.scheduled(read))
    if args.emit == "time.json":
        return times.data(timed, times.scheduled(read))
    front = None
    if found:
        from .search import fit

        best = found.best[0]
        front = report.Front(
            tuple(fit.about(found)),
            (fit.LAST, *fit.HEADS),
            [(row.way.words, *fit.cells(row, best)) for row in fit.listed(found)],
            [(row.way.words, *fit.cells(row, best)) for row in found.other],
            [(row.device, row.seconds) for row in found.best],
        )
    return report.text(timed, read, told, origin(args), front)


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    try:
        return run(args)
    except KeyboardInterrupt:
        print("zgen: interrupted; nothing is written", file=sys.stderr)
        return 130


def new_folder(path: str | None) -> bool:
    """Return whether a path does not exist yet or is an empty folder."""
    return path is not None and (
        not os.path.lexists(path) or os.path.isdir(path) and not os.listdir(path)
    )


def run(args: argparse.Namespace) -> int:
    """Run a command line and return its exit code."""
    config = os.path.join(args.folder, "config.json") if args.folder else None
    over = args.out and output.is_one_of(
        args.out, [f for f in (args.spec, args.zero, config) if f]
    )
    if over:
        print(
            f"zgen: -o {node.printable(args.out)}: is the input file {node.printable(over)}, which "
            "would be overwritten; name another file",
            file=sys.stderr,
        )
        return 2
    nowhere = output.nowhere(args.out) if args.out else ""
    if nowhere:
        print(
            f"zgen: -o {node.printable(args.out)}: there is no folder {node.printable(nowhere)}; "
            f"allowed: {output.FOLDERS}",
            file=sys.stderr,
        )
        return 2
    if args.emit == "bundle" and not new_folder(args.out):
        wrong = (
            f"-o {node.printable(args.out)}: is a file or a folder that is not empty; allowed:"
            if args.out
            else "--emit bundle: needs -o DIR,"
        )
        print(f"zgen: {wrong} a folder that is new or empty", file=sys.stderr)
        return 2
    progress.begin("reads the spec")
    from .check.check import CheckError
    from .read.spec import SpecError

    try:
        made = text(args)
    except SpecError as e:
        print(e, file=sys.stderr)
        return 2
    except ChildProcessError as e:
        print(f"zgen: {e}", file=sys.stderr)
        return 3
    except CheckError as e:
        print(
            f"zgen: the plan is wrong (a bug in zgen, please report it): {e}",
            file=sys.stderr,
        )
        return 3
    try:
        if args.emit == "bundle":
            from .write import bundle

            with output.folders(args.out):
                bundle.write(made, args.out)
        else:
            output.write(made, args.out)
    except OSError as e:
        there = "to stdout" if args.out is None else node.printable(args.out)
        print(f"zgen: cannot write {there}: {output.why(e)}", file=sys.stderr)
        return 3
    return 0


def console() -> int:
    """Entry point that pip installs. The cycle collector is off: a plan has many records and no
    cycles."""
    gc.disable()
    return main(sys.argv[1:])
