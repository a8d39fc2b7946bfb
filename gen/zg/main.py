"""main.py -- zgen's command line: reads a spec, makes and checks its plan, writes what is asked.

Exit codes: 0 done; 2 bad input, nothing written; 3 a plan that the checker refuses (a defect of
zgen), or stdout cannot be written; 130 interrupted.
"""
from __future__ import annotations

import argparse
import sys
from typing import Sequence

EXAMPLES = """examples:
  gen/zgen model_specs/gpt-tiny.yaml > out/train.c && ninja out/train
  gen/zgen model_specs/gpt2-124m.yaml --set zero.stage=2 --set cluster.ranks=4 --emit explain
  gen/zgen model_specs/llama3-8b.yaml --zero ds_config.json --emit memory
  gen/zgen model_specs/llama3-8b.yaml --zero ds_config.json --emit config
  gen/zgen model_specs/qwen3-0.6b.yaml --emit plan > plan.txt

exit codes: 0 done, 2 bad input (nothing is written), 3 the plan failed its own check, or stdout
  cannot be written
"""


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    what = "A model spec and a ZeRO config to one static C program."
    p = argparse.ArgumentParser(prog="zgen", description=what, epilog=EXAMPLES,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("spec", help="YAML model spec (see model_specs/)")
    p.add_argument("--zero", metavar="FILE",
                   help="a DeepSpeed ds_config.json whose keys take precedence")
    p.add_argument("--set", metavar="KEY=VALUE", action="append", default=[],
                   help="override a key of the spec, e.g. zero.stage=2")
    p.add_argument("--emit", choices=("c", "plan", "memory", "explain", "config"),
                   default="c", help="what to write (default: c); config: every key's value and "
                   "where it came from")
    p.add_argument("--flat", action="store_true", help="C with a line per step instead of loops")
    return p.parse_args(argv)


def text(args: argparse.Namespace) -> str:
    """What a command line asks for. SpecError: bad input; CheckError: a plan that is wrong."""
    from . import build, check, config, cost, explain, spec
    from .text import print_plan
    read = spec.load(args.spec, args.set, args.zero)
    built = build.build(read)
    check.check(built.plan)
    for note in built.notes:
        print(f"zgen: note: {note}", file=sys.stderr)
    if args.emit == "config":
        return config.text(read)
    if args.emit == "plan":
        return print_plan(built.plan)
    if args.emit == "memory":
        return explain.memory(built.plan, build.other_rules(built.spec))
    if args.emit == "explain":
        return explain.explain(built.plan) + (built.choices and "\n" + built.choices)
    from . import emit, view
    return emit.train(view.view(built.plan, cost.summary(built.plan),
                                explain.memory_line(built.plan), args.flat))


def main(argv: Sequence[str]) -> int:
    args = arguments(argv)
    from .check import CheckError
    from .spec import SpecError
    try:
        made = text(args)
    except SpecError as e:
        print(e, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("zgen: interrupted; nothing is written", file=sys.stderr)
        return 130
    except CheckError as e:
        print(f"zgen: the plan is wrong, please report it: {e}", file=sys.stderr)
        return 3
    try:
        with open(1, "w", encoding="utf-8", closefd=False) as out:
            out.write(made)
    except OSError as e:
        print(f"zgen: cannot write to stdout: {e.strerror}", file=sys.stderr)
        return 3
    return 0
