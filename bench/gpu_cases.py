"""gpu_cases.py -- lists and writes the programs that bench/gpu.sh trains: their train.c and plan.

    gpu_cases.py all        writes all of them, for every card
    gpu_cases.py fresh      exits with 1 unless this generator wrote them
    gpu_cases.py names      prints the models whose speed is measured on this card

The generator writes sources here, or elsewhere before (`--prepare DIR`): a machine with a GPU may
lack its packages. `ROOM` is the folder of sources, ZR_BENCH_FROM; ZR_BENCH_CARD is the kind of card
by its memory in GB, 80 or 140.

Invariants
 1. The programs of all checks and measurements are listed here, and nowhere else.
 2. The model of a speed case is the spec of model_specs/, whatever else reads that spec.
 3. A case has one size: a model of another size, for another card, has another name.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu_report import commit

ROOT = Path(__file__).resolve().parent.parent
ROOM = Path(os.environ.get("ZR_BENCH_FROM") or ROOT / "out" / "bench" / "sources")
REHEARSAL = os.environ.get("ZR_BENCH_KIND") == "emulated"
CARD = os.environ.get("ZR_BENCH_CARD", "140")
FAMILIES = ("gpt", "qwen3", "llama")
REALS = ("f32", "bf16", "f16")
# Families and types whose programs are compared.
LOOKED_AT = (
    [(family, real) for family in FAMILIES for real in REALS]
    if not REHEARSAL
    else [("gpt", "bf16")]
)


@dataclass(frozen=True)
class Source:
    """One train.c: a spec, perhaps with another number of blocks, and settings."""

    name: str
    spec: str
    keys: tuple[str, ...]
    blocks: int = 0

    def settings(self) -> list[str]:
        return [word for key in self.keys for word in ("--set", key)]

    def text(self) -> str:
        """Return the text of the spec."""
        text = (ROOT / "model_specs" / f"{self.spec}.yaml").read_text()
        return (
            re.sub(r"\bblocks: \d+", f"blocks: {self.blocks}", text)
            if self.blocks
            else text
        )

    def emit(self, what: str) -> str:
        spec = ROOM / f"{self.name}.yaml"
        return subprocess.run(
            [ROOT / "gen" / "zgen", spec, *self.settings(), "--emit", what],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout

    def prepare(self) -> None:
        ROOM.mkdir(parents=True, exist_ok=True)
        (ROOM / f"{self.name}.yaml").write_text(self.text())
        for suffix, what in ((".plan", "plan"), (".c", "c")):
            made = self.emit(what)
            (ROOM / f"{self.name}{suffix}").write_text(made)

    def read(self, suffix: str) -> str:
        """Return the content of the file with `suffix` .c, .plan or .yaml, written now if it is
        missing."""
        path = ROOM / f"{self.name}{suffix}"
        if not path.exists():
            self.prepare()
        return path.read_text()


# ---- speed: one rank, everything on the device


@dataclass(frozen=True)
class Case:
    """A model to time. steps: steps of one run, `dropped` of which are not counted; card: the only
    one that it is for."""

    source: Source
    batch: int
    sequence: int
    steps: int
    dropped: int = 4
    # unit of torch.compile: the whole model, or a block at a time
    compile: str = "model"
    card: str = ""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence


def case(
    name: str,
    batch: int,
    sequence: int,
    steps: int,
    spec: str = "",
    blocks: int = 0,
    precision: str = "bf16",
    **more: object,
) -> Case:
    keys = {
        "precision": precision,
        "micro_batch": batch,
        "global_batch": batch,
        "sequence": sequence,
        "recompute": "none",
    }
    source = Source(
        name,
        spec or name,
        (
            *(f"train.{key}={value}" for key, value in keys.items()),
            "cluster.ranks=1",
            "zero.stage=0",
        ),
        blocks,
    )
    return Case(source, batch, sequence, steps, **more)


MEASURED = (
    case("gpt2-124m", 64, 1024, 30),
    case("gpt2-1558m", 16, 1024, 16, compile="block", card="140"),
    case("gpt2-1558m-8", 8, 1024, 16, "gpt2-1558m", compile="block", card="80"),
    case("llama3-8b-16", 1, 8192, 16, "llama3-8b", 16, compile="block", card="140"),
    case("llama3-8b-8", 1, 8192, 16, "llama3-8b", 8, compile="block", card="80"),
    case("qwen3-0.6b", 4, 4096, 20, compile="block"),
)
# The same paths in a second or two on a CPU, by the same names.
REHEARSED = (
    case("gpt2-124m", 2, 32, 4, "gpt-tiny", dropped=1),
    case("gpt2-1558m", 1, 32, 3, "gpt-tiny", dropped=1, compile="block"),
    case("llama3-8b-2", 1, 32, 4, "llama-tiny", 2, dropped=1, compile="block"),
    case("qwen3-0.6b", 1, 32, 3, "qwen3-tiny", dropped=1),
)
EVERY = REHEARSED if REHEARSAL else MEASURED
CASES = tuple(c for c in EVERY if c.card in ("", CARD))

_ATTENTION = "model.units[1].ops[0].residual[1].attention"
# Keys of qwen3-tiny: ops of Gemma, Cohere, GLM, OLMo and Granite.
OPS = (
    f"{_ATTENTION}.rope.width=16",
    f"{_ATTENTION}.rope.interleaved=true",
    f"{_ATTENTION}.local_rope={{theta: 50}}",
    f"{_ATTENTION}.window=[8, null]",
    f"{_ATTENTION}.one_plus=true",
    f"{_ATTENTION}.softcap=1.5",
    "model.units[2].head[1].linear.softcap=2",
    "model.units[0].embedding.scale=3",
    "model.units[1].ops[0].residual[0].rmsnorm.one_plus=true",
    "model.units[1].ops[1].residual[2]={geglu: {}}",
    "model.units[2].head[0]={layernorm: {name: model.norm, weight: false}}",
)
HOST = ("zero.offload_optimizer.device=cpu",)
FILE = (
    "zero.offload_optimizer.device=nvme",
    "zero.offload_optimizer.nvme_path=/tmp",
)
LARGEST = "gpt2-1558m"  # with its optimizer on the device and on the host


def places(large: Case) -> dict[str, Source]:
    """Return a model's programs by the place of its optimizer."""
    return {
        place: Source(
            f"{large.name}-{place}",
            large.source.spec,
            (
                *(key for key in large.source.keys if key != "zero.stage=0"),
                "zero.stage=1",
                *more,
            ),
        )
        for place, more in {"device": (), "host": HOST}.items()
    }


# Programs that together call every kernel, for runs on exact allocations.
SMALL = tuple(
    Source(
        f"small-{family}-{real}",
        f"{family}-tiny",
        (
            f"train.precision={real}",
            "train.micro_batch=2",
            "train.global_batch=2",
            "cluster.ranks=1",
            "zero.stage=0",
        ),
    )
    for family in FAMILIES
    for real in ("bf16", "f32")
) + (
    Source(
        "small-slices",
        "llama-tiny",
        (
            "train.micro_batch=2",
            "train.global_batch=2",
            "cluster.ranks=1",
            "zero.stage=3",
            "zero.stage3_param_persistence_threshold=64",
            "zero.stage3_max_live_parameters=22000",
        ),
    ),
    Source(
        "small-context",
        "llama-tiny",
        ("train.sequence_blocks=4", "cluster.ranks=1", "zero.stage=0"),
    ),
    *(
        Source(
            f"small-packed-{family}",
            f"{family}-tiny",
            (
                "data.documents=mask",
                "data.end=0",
                "train.loss_mean=micro_batch",
                "cluster.ranks=1",
                "zero.stage=0",
            ),
        )
        for family in ("gpt", "llama")
    ),
    Source(
        "small-lora",
        "qwen3-tiny",
        (
            "train.lora={rank: 8, alpha: 12}",
            "cluster.ranks=1",
            "zero.stage=0",
        ),
    ),
    Source(
        "small-quantized",
        "llama-tiny",
        (
            "train.lora={rank: 8, alpha: 12, base: nf4}",
            "cluster.ranks=1",
            "zero.stage=0",
        ),
    ),
    Source(
        "small-dropout",
        "gpt-tiny",
        (
            "train.dropout=0.1",
            "train.attention_dropout=0.1",
            "cluster.ranks=1",
            "zero.stage=0",
        ),
    ),
    Source(
        "small-qknorm-whole",
        "qwen3-tiny",
        (
            "model.units[1].ops[0].residual[1].attention.qk_norm=whole",
            "cluster.ranks=1",
            "zero.stage=0",
        ),
    ),
    Source(
        "small-other-ops",
        "qwen3-tiny",
        (*OPS, "cluster.ranks=1", "zero.stage=0"),
    ),
    Source(
        "small-relu2",
        "gpt-tiny",
        (
            "model.units[1].ops[1].residual[2]={relu2: {}}",
            "cluster.ranks=1",
            "zero.stage=0",
        ),
    ),
)


# ---- correctness: eight micro-batches, spread in several ways

RECIPE = ("train.micro_batch=1", "train.global_batch=8")
SPREAD = {
    "plain": (1, 0),
    "stage1": (1, 1),
    "stage2": (1, 2),
    "stage3": (1, 3),
    "stage3-ahead": (1, 3),
    "host": (1, 2),
    "file": (1, 3),
    "two0": (2, 0),
    "two2": (2, 2),
    "two3": (2, 3),
}


def tiny(family: str, real: str, way: str) -> Source:
    ranks, stage = SPREAD[way]
    more = {
        "stage3": ("zero.stage3_prefetch_bucket_size=0",),
        "stage3-ahead": ("zero.stage3_prefetch_bucket_size=500000000",),
        "host": HOST,
        "file": (*FILE, "zero.offload_param.device=cpu"),
    }.get(way, ())
    return Source(
        f"{family}-{real}-{way}",
        f"{family}-tiny",
        (
            f"train.precision={real}",
            *RECIPE,
            f"cluster.ranks={ranks}",
            f"zero.stage={stage}",
            *more,
        ),
    )


def alone() -> list[str]:
    """Return the ways with one rank."""
    return [way for way, (ranks, _) in SPREAD.items() if ranks == 1]


def together() -> list[str]:
    """Return the ways with several ranks."""
    return [way for way in SPREAD if way not in alone()]


# Programs that differ in the number of blocks alone: their memory is the plan's and the libraries'.
LAYERS = tuple(
    Source(
        f"layers-{n}",
        "gpt-tiny",
        (
            "train.precision=bf16",
            "train.micro_batch=1",
            "train.global_batch=2",
            "cluster.ranks=1",
            "zero.stage=3",
        ),
        n,
    )
    for n in ((2, 40) if not REHEARSAL else (2, 9))
)


def all_sources() -> Iterator[Source]:
    for c in EVERY:
        yield c.source
        if c.name.startswith(LARGEST):
            yield from places(c).values()
    yield from LAYERS
    yield from SMALL
    yield from (tiny(*names, way) for names in LOOKED_AT for way in SPREAD)


def origin() -> str:
    """Return a hash of everything that programs depend on, generated or compiled."""
    found = hashlib.sha256()
    for folder, pattern in (
        ("gen/zg", "**/*.py"),
        ("templates", "*.j2"),
        ("model_specs", "*.yaml"),
        ("bench", "gpu_cases.py"),
        ("kernels", "**/*.[ch]*"),
        ("runtime", "**/*.*"),
    ):
        for path in sorted((ROOT / folder).glob(pattern)):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return f"{found.hexdigest()} {'rehearsal' if REHEARSAL else 'measurement'}\n"


def fresh() -> bool:
    note = ROOM / "origin"
    return note.exists() and note.read_text() == origin()


def write_all() -> None:
    sources = list(all_sources())
    (ROOM / "origin").unlink(missing_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Source.prepare, sources))
    (ROOM / "commit").write_text(commit() + "\n")
    (ROOM / "origin").write_text(origin())
    print(f"{len(sources)} programs in {ROOM}")


def main(argv: list[str]) -> int:
    if argv == ["all"]:
        write_all()
    elif argv == ["fresh"]:
        return 0 if fresh() else 1
    elif argv == ["names"]:
        print(*(c.name for c in CASES))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
