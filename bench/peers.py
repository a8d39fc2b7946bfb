"""peers.py -- compares a training step with PyTorch's, FSDP2's and DeepSpeed's, on the CPU.

GPT-2 124M, 1024 tokens a step, f32 and bf16: one process with both cores (4 samples of 256 tokens),
and two ranks of one core each (2 samples). One process also trains Qwen3-0.6B's shape with 4 layers
(2 samples of 512) and the demo's model (8 of 128, 20 times as many steps). Programs run in turns. A
ratio is a peer's step over ours of the same round: the median over rounds, with the least and the
greatest. Ours in bf16 keeps f32 masters and moments. Memory is the peak resident set of the largest
process. A start lasts from the call of a program to the beginning of its first step; for ours the
time until its memory was in place is shown, too. llm.c's includes its validation and its end.

A row names the object of kernels that ours ran with and, in bf16, its order of products; one table
has the other order, too.

The floor of a step is its FLOPs at the rate of the faster GEMM of 2048^3 of the same run, ours or
PyTorch's, and the bytes of its update at the rate of a copy (`--emit explain` prints both).

    ./run bench --peers [--only NAME] [--spec FILE] [--llmc DIR] [--rounds N] [--steps N]

--only: rows whose names contain it, as `demo` or `gpt2-124m, PyTorch, 1, f32`. --spec: the model in
GPT-2's place. --llmc: a checkout of llm.c, whose train_gpt2.c is compiled with 256 tokens a sample.
The peers' venv is out/peers/venv. Tables go to stdout and to --out (results.py), all figures to
out/peers.json, a picture to out/peers.svg and beside --out. bench.py says when a run is invalid.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bench
import numpy as np
import results
from bench import MADE, ROOT, SEQUENCE, TOKENS, Case
from results import Block
from zg.plan.plan import Plan
from zg.predict import cost

PEERS = ROOT / "out" / "peers"
VENV = PEERS / "venv" / "bin"
CORES = min(os.cpu_count() or 1, 2)
NEEDS = (
    *("torch", "deepspeed", "transformers", "peft", "bitsandbytes", "accelerate"),
    *("numpy", "pyyaml"),
)

# PyTorch's bf16 product in a process of one thread: the best within a time, GFLOP/s.
PRODUCT = """
import sys, time, torch
torch.set_num_threads(1)
n, end, best = 2048, time.perf_counter() + float(sys.argv[1]), 1e9
x = torch.ones(n, n, dtype=getattr(torch, sys.argv[2]))
while time.perf_counter() < end:
    t = time.perf_counter()
    x @ x
    best = min(best, time.perf_counter() - t)
print(2e-9 * n**3 / best)
"""


@dataclass(frozen=True)
class Model:
    """A model of a row."""

    name: str
    spec: str
    sequence: int = SEQUENCE
    keys: tuple[str, ...] = ()  # settings of ours
    blocks: int = 0  # layers, if not the spec's
    times: int = 1  # factor of the number of steps


GPT2 = Model("gpt2-124m", "model_specs/gpt2-124m.yaml")
QWEN3 = Model(
    *("qwen3-0.6b-4", "model_specs/qwen3-0.6b.yaml", 512),
    keys=("train.recompute=none", "targets=[cpu]"),
    blocks=4,
)
DEMO = Model("demo", "model_specs/demo.yaml", 128, times=20)


@dataclass(frozen=True)
class Row:
    """A peer. Ours with the same ranks, precision and stage stands beside it."""

    name: str
    ranks: int
    precision: str
    stage: int
    words: tuple[str, ...]  # of cpu_peer.py; empty for llm.c
    model: Model = GPT2


ALONE = (
    Row("PyTorch", 1, "f32", 0, ("--precision", "f32")),
    Row("PyTorch, compiled", 1, "f32", 0, ("--compile",)),
    Row("PyTorch, autocast", 1, "bf16", 0, ("--precision", "autocast")),
    Row(
        *("PyTorch, autocast, compiled", 1, "bf16", 0),
        ("--precision", "autocast", "--compile"),
    ),
    Row("PyTorch, all bf16", 1, "bf16", 0, ("--precision", "bf16")),
    Row(
        *("PyTorch, all bf16, compiled", 1, "bf16", 0),
        ("--precision", "bf16", "--compile"),
    ),
)
ROWS = (
    *ALONE,
    Row("DDP", 2, "f32", 0, ("--spread", "ddp")),
    Row("DeepSpeed ZeRO-0", 2, "f32", 0, ("--spread", "zero0")),
    Row("FSDP2", 2, "f32", 3, ("--spread", "fsdp2")),
    Row("DeepSpeed ZeRO-3", 2, "f32", 3, ("--spread", "zero3")),
    Row(
        *("DDP, autocast", 2, "bf16", 0),
        ("--spread", "ddp", "--precision", "autocast"),
    ),
    Row("FSDP2", 2, "bf16", 3, ("--spread", "fsdp2", "--precision", "bf16")),
    Row(
        *("DeepSpeed ZeRO-3", 2, "bf16", 3),
        ("--spread", "zero3", "--precision", "bf16"),
    ),
    *(replace(row, model=QWEN3) for row in ALONE),
    *(replace(row, model=DEMO) for row in ALONE if row.precision == "f32"),
)
LLMC = Row("llm.c", 1, "f32", 0, ())

# Settings that save memory, compared with PyTorch on one rank in f32.
SAVING = {
    "recompute of GELU and norms": ("train.recompute=[gelu, layernorm]",),
    "recompute full": ("train.recompute=full",),
}


@dataclass(frozen=True)
class Ran:
    """One run of a program."""

    step: float  # seconds: the median of its steps except the first
    start: float  # seconds
    memory: int  # bytes
    loss: float  # of the first step
    placed: float = 0.0  # ours: seconds until its memory was in place
    # ours: the object of kernels; in bf16 also the order of products
    by: str = ""


def timed(words: list[object], **settings: object) -> tuple[float, int]:
    """Run a command. Return the time of its call (the host's monotonic clock), and the bytes of its
    largest process."""
    called = time.monotonic()
    running = subprocess.Popen(
        list(map(str, words)),
        cwd=ROOT,
        env={**os.environ, **{k: str(x) for k, x in settings.items()}},
        stdout=open(PEERS / "said", "w"),
        stderr=subprocess.STDOUT,
    )
    _, status, used = os.wait4(running.pid, 0)
    running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode:
        sys.exit(
            f"peers: {' '.join(map(str, words))} ended with {running.returncode}: "
            f"{(PEERS / 'said').read_text()[-2000:]}"
        )
    return called, 1024 * used.ru_maxrss


# ---- the programs


def venv() -> None:
    """Create the peers' venv if it is missing or incomplete."""
    stamp = PEERS / "stamp"
    if stamp.exists() and stamp.read_text() == " ".join(NEEDS):
        return
    print(f"{' '.join(NEEDS)} into {VENV.parent}", file=sys.stderr)
    PEERS.mkdir(parents=True, exist_ok=True)
    bench.sh(sys.executable, "-m", "venv", VENV.parent)
    bench.sh(VENV / "pip", "install", "-q", *NEEDS)
    stamp.write_text(" ".join(NEEDS))


def case_of(row: Row) -> Case:
    model = row.model
    keys = (
        *bench.spread(row.ranks, row.stage, model.sequence),
        *model.keys,
        f"train.precision={row.precision}",
    )
    if model.blocks:
        keys += (f"model.units[1].blocks={model.blocks}",)
    name = f"peer-{model.name}-{row.ranks}-{row.stage}-{row.precision}"
    return Case(model.spec, name, keys)


def saving(row: Row) -> dict[str, Case]:
    case = case_of(row)
    return {
        name: Case(case.spec, f"peer-saves-{n}", (*case.keys, *more))
        for n, (name, more) in enumerate(SAVING.items())
    }


def ours(case: Case, steps: int, data: Path, *more: object) -> Ran:
    log = MADE / f"{case.name}.jsonl"
    log.unlink(missing_ok=True)
    words = [MADE / case.name, "--data", data, "--steps", steps + 1]
    words += ["--tokens", "uint16"]
    called, memory = timed([*words, "--log", log, *more])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    order = re.findall(r"train.products: .\"(\w+)", log.read_text())
    made = [line for line in lines if "loss" in line]
    return Ran(
        statistics.median(line["seconds"] for line in made[1:]),
        lines[-1]["started"] + lines[-1]["start_step"] - called,
        memory,
        made[0]["loss"],
        lines[-1]["started"] + lines[-1]["start_arena"] - called,
        ", ".join([lines[0]["kernels"], *order[:1]]),
    )


def other_order(ran: Ran) -> str:
    """Return the order of products that a run in bf16 did not use."""
    return "pairs" if ran.by.endswith("tiles") else "tiles"


def objects(row: Row) -> str:
    """Return a sentence about the CPU's kernels that the rows do not use."""
    program = MADE / case_of(row).name
    taken = bench.sh(program, "--version").split("kernels ")[1].split()[0]
    out = []
    for isa in ("avx2", "avx512", "avx512bf16", "amx"):
        words = [program, "--isa", isa, "--version"]
        runs = not subprocess.run(words, capture_output=True).returncode
        if isa != taken:
            out.append(f"{isa} ({'not taken' if runs else 'does not run'} here)")
    return f"Ours by {taken}, whose bits are those of {', '.join(out)}."


def torch(row: Row, steps: int, data: Path) -> Ran:
    model = row.model
    out = PEERS / "out.json"
    words: list[object] = [VENV / "python"]
    if row.ranks > 1:
        words = [VENV / "torchrun", "--standalone", "--nproc-per-node"]
        words.append(row.ranks)
    words += [ROOT / "bench" / "cpu_peer.py", model.spec]
    words += ["--sequence", model.sequence, "--blocks", model.blocks]
    words += ["--batch", TOKENS // model.sequence // row.ranks, "--data", data]
    words += ["--steps", steps + 1, "--out", out, *row.words]
    threads = max(1, CORES // row.ranks)
    called, memory = timed(words, OMP_NUM_THREADS=threads, DS_ACCELERATOR="cpu")
    said = json.loads(out.read_text())
    return Ran(
        statistics.median(said["seconds"][1:]),
        said["first"] - called,
        memory,
        said["losses"][0],
    )


# ---- llm.c

CHANGED = {
    "int T = 64;": f"int T = {SEQUENCE};",
    "int B = 4;": f"int B = {TOKENS // SEQUENCE};",
    "int val_num_batches = 5;": "int val_num_batches = 1;",
    "step <= 40;": "step < atoi(argv[1]);",
    "step % 20 == 0": "0",  # samples
    "int main() {": "int main(int argc, char **argv) {",
}


def write_llmc(folder: Path, data: Path) -> None:
    """Write the input of train_gpt2.c: random weights in its format of version 3, and these
    tokens."""
    V, P, L, H, C, T = 50257, 50304, 12, 12, 768, 1024
    head = np.zeros(256, np.int32)
    head[:8] = (20240326, 3, T, V, L, H, C, P)
    n = (P + T + 2) * C + L * (12 * C * C + 13 * C)
    drawn = np.random.default_rng(1).standard_normal(n, np.float32)
    with open(folder / "gpt2_124M.bin", "wb") as file:
        file.write(head.tobytes() + (0.02 * drawn).tobytes())
    tokens = np.fromfile(data, np.uint16)
    head[:3] = (20240520, 1, len(tokens))
    there = folder / "dev" / "data" / "tinyshakespeare"
    there.mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        file = there / f"tiny_shakespeare_{part}.bin"
        file.write_bytes(head.tobytes() + tokens.tobytes())


def build_llmc(source: Path, data: Path) -> None:
    """Build llm.c's train_gpt2.c with our batch, by its Makefile's flags."""
    folder = PEERS / "llmc"
    folder.mkdir(exist_ok=True)
    text = (source / "train_gpt2.c").read_text()
    for old, new in CHANGED.items():
        if old not in text:
            sys.exit(f"peers: {source}/train_gpt2.c has no `{old}`")
        text = text.replace(old, new)
    (folder / "train.c").write_text(text)
    flags = "-Ofast -march=native -fopenmp -DOMP -w"
    bench.sh(
        *("gcc", *flags.split(), "-I", source, folder / "train.c"),
        *("-lm", "-o", folder / "train"),
    )
    write_llmc(folder, data)


def llmc(steps: int) -> Ran:
    folder = PEERS / "llmc"
    words = ["env", "-C", folder, "./train", steps + 1]
    began = time.monotonic()
    _, memory = timed(words, OMP_NUM_THREADS=CORES)
    lines = re.findall(
        r"step \d+: train loss (\S+) \(took (\S+) ms\)",
        (PEERS / "said").read_text(),
    )
    took = [1e-3 * float(ms) for _, ms in lines]
    start = time.monotonic() - began - sum(took)
    return Ran(statistics.median(took[1:]), start, memory, float(lines[0][0]))


# ---- figures


def rates(precision: str) -> tuple[float, float]:
    """Return FLOPs and bytes a second of all cores, by the faster GEMM of 2048^3 and a copy of 256
    MB."""
    ours = float(bench.sh("out/train-peak", CORES, 2048, 2, precision))
    word = {"f32": "float32", "bf16": "bfloat16"}[precision]
    one = {"OMP_NUM_THREADS": "1"}
    theirs = bench.together([VENV / "python", "-c", PRODUCT, 2, word], CORES, one)
    copied = bench.together([sys.executable, "-c", bench.COPY], CORES, {})
    return 1e9 * max(ours, sum(theirs)), 1e9 * sum(copied)


def floors(plans: dict[Case, Plan]) -> dict[str, float]:
    """Return the floor of each of our programs' steps in seconds, from its FLOPs and the bytes of
    all ranks' updates."""
    kinds = {real: rates(real) for real in {p.head.real for p in plans.values()}}
    return {
        case.name: cost.flops(p) / kinds[p.head.real][0]
        + p.head.ranks * cost.update(p) / kinds[p.head.real][1]
        for case, p in plans.items()
    }


def figures(
    row: Row, rounds: list[dict[str, Ran]], mine: str, floor: float
) -> dict[str, Any]:
    """Return a peer's row with ours beside it."""
    theirs = [r[key(row)] for r in rounds]
    own = [r[mine] for r in rounds]
    ratios = sorted(t.step / o.step for t, o in zip(theirs, own, strict=True))
    return {
        **asdict(row),
        "step": statistics.median(t.step for t in theirs),
        "ours": statistics.median(o.step for o in own),
        "by": own[0].by,
        "ratio": statistics.median(ratios),
        "between": [ratios[0], ratios[-1]],
        "floor": floor,
        "start": statistics.median(t.start for t in theirs),
        "our_start": statistics.median(o.start for o in own),
        "our_placed": statistics.median(o.placed for o in own),
        "memory": theirs[0].memory,
        "our_memory": own[0].memory,
        "rounds": [[asdict(t), asdict(o)] for t, o in zip(theirs, own, strict=True)],
    }


def key(row: Row) -> str:
    return f"{row.model.name}, {row.name}, {row.ranks}, {row.precision}"


def orders(rounds: list[dict[str, Ran]], row: Row) -> list[dict[str, Any]]:
    """Return ours in bf16, with products summed in either order."""
    name = case_of(row).name
    return [
        {
            "by": rounds[0][of].by,
            "step": statistics.median(r[of].step for r in rounds),
        }
        for of in (name, f"{name} otherwise")
    ]


def saved(rounds: list[dict[str, Ran]], row: Row) -> list[dict]:
    """Return ours with less memory, beside a peer."""
    names = {"as it is": case_of(row).name}
    names |= {name: case.name for name, case in saving(row).items()}
    return [
        {
            "name": name,
            "step": statistics.median(r[of].step for r in rounds),
            "memory": rounds[0][of].memory,
            "share": rounds[0][of].memory / rounds[0][key(row)].memory,
        }
        for name, of in names.items()
    ]


def tables(result: dict) -> list[Block]:
    rows = (
        f"{x['model']['name']} | {x['name']} | {x['ranks']} | {x['precision']} "
        f"| {x['step']:.3f} | {x['ours']:.3f} | {x['by']} | {x['ratio']:.2f} "
        f"| {x['between'][0]:.2f} to {x['between'][1]:.2f} "
        f"| {x['floor']:.3f} | {x['ours'] / x['floor']:.2f} "
        f"| {1e-6 * x['memory']:.0f} | {1e-6 * x['our_memory']:.0f} "
        f"| {x['start']:.1f} | {x['our_start']:.2f} | {x['our_placed']:.2f}"
        for x in result["rows"]
    )
    found: list[Block] = [
        results.table(
            "model | peer | ranks |  | step, s | ours, s | by | ratio | of rounds | our floor, s "
            "| ours over it | memory, MB | ours | to step 1, s | ours "
            "| ours, memory in place, s",
            rows,
        ),
        result["objects"],
    ]
    if result["orders"]:
        rows = (f"{x['by']} | {x['step']:.3f}" for x in result["orders"])
        found.append(results.table("ours, 1 rank, bf16, by | step, s", rows))
    if result["saved"]:
        rows = (
            f"{x['name']} | {x['step']:.2f} | {1e-6 * x['memory']:.0f} "
            f"| {100 * x['share']:.0f} %"
            for x in result["saved"]
        )
        columns = "ours, 1 rank, f32 | step, s | memory, MB | of PyTorch's"
        found.append(results.table(columns, rows))
    return found


def picture(result: dict) -> str:
    """Return a bar chart of seconds a step, ours beside each peer."""
    bars: dict[str, tuple[float, bool]] = {}
    for x in result["rows"]:
        model, way = x["model"]["name"], f"{x['ranks']} x {x['precision']}"
        own = f"{model}, ours, {way}, ZeRO-{x['stage']}"
        bars.setdefault(own, (x["ours"], True))
        bars[f"{model}, {x['name']}, {way}"] = (x["step"], False)
    scale = 430 / max(seconds for seconds, _ in bars.values())
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="860" '
        f'height="{20 * len(bars) + 30}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="320" y="16">seconds a step (less is better)</text>',
    ]
    for i, (name, (seconds, own)) in enumerate(bars.items()):
        y, width = 20 * i + 26, scale * seconds
        out += [
            f'<text x="310" y="{y + 12}" text-anchor="end">{name}</text>',
            f'<rect x="320" y="{y}" width="{width:.0f}" height="15" '
            f'fill="{"#2a78b5" if own else "#b9c4ce"}"/>',
            f'<text x="{326 + width:.0f}" y="{y + 12}">{seconds:.2f}</text>',
        ]
    return "\n".join([*out, "</svg>"]) + "\n"


def check_loss(row: Row, theirs: Ran, own: Ran) -> None:
    """Require that a peer with random weights as small as ours starts with a loss like ours."""
    if abs(theirs.loss - own.loss) > 0.5:
        sys.exit(f"peers: {key(row)}: loss {theirs.loss}, ours {own.loss}")


def has_orders(row: Row) -> bool:
    return (row.ranks, row.precision, row.model.times) == (1, "bf16", 1) and (
        not row.model.blocks
    )


def one_round(
    rows: list[Row], steps: dict[Case, int], data: dict[Case, Path]
) -> dict[str, Ran]:
    """Run each of our programs, each followed by the peers that it is compared with."""
    ran: dict[str, Ran] = {}
    for case, n in steps.items():
        print(case.name, file=sys.stderr)
        ran[case.name] = own = ours(case, n, data[case])
        if any(case_of(row) == case and has_orders(row) for row in rows):
            more = ("--products", other_order(own))
            ran[f"{case.name} otherwise"] = ours(case, n, data[case], *more)
        for row in rows:
            if case_of(row) != case:
                continue
            print(key(row), file=sys.stderr)
            ran[key(row)] = torch(row, n, data[case]) if row.words else llmc(n)
            check_loss(row, ran[key(row)], ran[case.name])
    return ran


def chosen(given: argparse.Namespace) -> tuple[list[Row], Row | None]:
    """Return the rows that --only selects, and the very first row if it is among them."""
    model = replace(GPT2, name=Path(given.spec).stem, spec=given.spec)
    every = [
        replace(row, model=model) if row.model == GPT2 else row
        for row in ((*ROWS, LLMC) if given.llmc else ROWS)
    ]
    rows = [row for row in every if given.only in key(row)]
    return rows, every[0] if every[0] in rows else None


def main() -> int:
    parser = bench.options(__doc__, 3, 3)
    parser.add_argument("--llmc", type=Path, help="a checkout of llm.c")
    parser.add_argument("--only", default="", help="only rows whose names contain this")
    given = parser.parse_args()
    rows, first = chosen(given)
    if not rows:
        parser.error(f"--only {given.only}: no row's name contains it")
    MADE.mkdir(parents=True, exist_ok=True)
    venv()
    steps = {case_of(row): given.steps * row.model.times for row in rows}
    if first:
        steps |= dict.fromkeys(saving(first).values(), given.steps)
    plans = {case: bench.build(case) for case in steps}
    data = {case: bench.tokens(p, steps[case], case.name) for case, p in plans.items()}
    for row in rows:
        if not row.words:
            build_llmc(given.llmc, data[case_of(row)])
    bench.sh("ninja", "--quiet", "out/train-peak")
    floor = floors(plans)
    rounds: list[dict[str, Ran]] = []
    for n in range(given.rounds):
        print(f"round {n + 1} of {given.rounds}", file=sys.stderr)
        rounds.append(one_round(rows, steps, data))
    result = {
        "rows": [
            figures(row, rounds, own, floor[own])
            for row in rows
            for own in (case_of(row).name,)
        ],
        "saved": saved(rounds, first) if first else [],
        "orders": next((orders(rounds, row) for row in rows if has_orders(row)), []),
        "objects": objects(rows[0]),
    }
    code = bench.finish(result, "peers", tables, given.out)
    for path in filter(None, (ROOT / "out" / "peers.json", given.out)):
        path.with_suffix(".svg").write_text(picture(result))
    return code


if __name__ == "__main__":
    sys.exit(main())
