"""view.py -- turns a rolled Plan into ready strings of C for the templates.

Every choice is made here, in calls.py, steps.py and tables.py; a template only lays lines out.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..facts import ops, reserve
from ..plan import plan
from ..plan.operand import Operand
from ..plan.plan import BLOCKS, STEP, Order, Plan
from ..plan.text import digest, layout_digest
from . import arrays
from .calls import Calls, enum
from .letters import letters as of_plan
from .sizes import Sizes
from .steps import QUEUES, listed, micro_batches, sections
from .tables import (
    classes,
    columns,
    filed,
    files,
    functions,
    groups,
    inbox,
    owners,
    real,
    recipe,
    slots,
    spans,
    states,
    wrap,
)
from .words import group_name, lower, number, upper


def sample(p: Plan) -> list[str]:
    """Return the lines that sample a token from the last row of logits of an evaluation."""
    fn = next(f for f in p.fns if f.name == "eval.head")
    row = fn.calls[-1].args[0]
    assert isinstance(row, Operand)
    at = f" + {number(row.at)}" if row.at else ""
    return wrap(
        f"d->token = zk_sample(k, a + {upper(row.base)}(0){at}, V, "
        "(float)d->temperature, d->top_k, d->top_p, d->u);",
        4,
    )


def left(p: Plan) -> list[str]:
    """Return the fields of zr_program for the SMs that GEMMs leave to NCCL."""
    n, kept = p.head.margin, reserve.kept(p.head)
    share = f".blocks = {reserve.blocks(kept)}, .channels = {reserve.channels(kept)}"
    return [f".margin = {n}, {share},"] if n else []


def order(p: Plan) -> list[str]:
    """Return the fields of zr_program for random draws: the order of samples, and their keys."""
    drawn = [".shuffle = 1,"] * p.head.shuffle
    drawn += [".keys = KEYS(0),"] * p.head.keyed
    seed = f".seed = {number(p.head.seed)},"
    return [" ".join([*drawn, seed])] if drawn else []


def packed(p: Plan) -> list[str]:
    """Return the fields of zr_program for positions, if documents or blocks of samples need
    them."""
    if p.head.end < 0:
        return [".end = -1, .positions = POSITIONS(0),"] * (p.head.blocks > 1)
    return [f".packed = 1, .end = {p.head.end}, .positions = POSITIONS(0),"]


def blocks(p: Plan) -> list[str]:
    """Return the fields of zr_program for samples that are cut into blocks."""
    if p.head.blocks == 1:
        return []
    cut = f".sequence_blocks = {p.head.blocks}, .context = {p.head.context},"
    if p.head.context > 1:
        cut += f" .sharing = {group_name(p.sharing)},"
    have = {c.name for c in p.classes}
    samples = [f".{c} = {upper(c)}(0)," for c in ops.OF_SAMPLES.values() if c in have]
    return [f"{cut} .batch_step = SIZE(TOKENS),", *samples]


def samples(p: Plan) -> list[str]:
    """Return the fields of zr_program for samples: their order, and their documents."""
    return [*order(p), *packed(p), *blocks(p)]


def formats(p: Plan) -> list[str]:
    """Return the field of zr_program for the formats of quantized tensors, if there are any."""
    all_ = [t.quantized.format for t in p.tensors for _ in t.parts]
    if not any(all_):
        return []
    said = [f"ZK_{name.upper()}" if name else "0" for name in all_]
    return [
        ".quantized = zk_quantized, .quantize = zk_host_quantize,",
        ".keep = zk_host_keep, .keeps = zk_host_keeps,",
        *by_tensor(".formats = (const uint8_t[]){", said),
    ]


def by_head(p: Plan) -> list[str]:
    """Return the field of zr_program for tensors whose rows in files are by head, if there are
    any."""
    all_ = [t.heads for t in p.tensors for _ in t.parts]
    return by_tensor(".heads = (const int32_t[]){", map(str, all_)) if any(all_) else []


def marks(p: Plan, of: Callable[[str], str]) -> list[str]:
    """Return the field of zr_program for the marks of tensors, if there are any. of: the mark of a
    tensor's name, in C."""
    names = (part.split("=")[0] for t in p.tensors for part in t.parts)
    all_ = [of(ops.layer(name, 0)) for name in names]
    return by_tensor(".marks = (const uint8_t[]){", all_) if {*all_} - {"0"} else []


def by_tensor(field: str, values: Iterable[str]) -> list[str]:
    """Return the lines of a field with a value for each row of zr_tensor."""
    lines = textwrap.wrap(f"{', '.join(values)}}},", 92)
    return [field, *(f"    {line}" for line in lines)]


def used(p: Plan) -> list[str]:
    """Return the queues that the plan's steps use. A run's hash also loads masters from the
    file."""
    found = {step.queue for s in p.sections for step in s.steps} | {"main"}
    found |= {
        "load" for f in p.flats for s in p.masters(f) if p.cls(s.cls).arena == "file"
    }
    return [q for q in QUEUES if q in found]


def queue_bits(p: Plan) -> str:
    """Return the bits of the queues that are used."""
    return " | ".join(f"1 << {QUEUES[q]}" for q in used(p)) + ","


# Names of the states of a Store; any other is an optimizer state.
STATES = {"params": "parameters", "sum": "gradients"}
# States that each stage of ZeRO shards, besides those of the stage before.
SHARDED = ("optimizer states", "gradients", "parameters")


def sharded(p: Plan) -> str:
    """Describe which states are sharded, and over how many ranks."""
    over = dict.fromkeys(SHARDED[: p.head.zero], p.head.ranks)
    for s in p.stores:
        what = STATES.get(s.what, SHARDED[0])
        if s.over and p.parts(s) > 1 and what in over:
            over[what] = p.group(s.over).ranks
    kept = whole(p) if p.head.zero == 3 else 0
    if kept == p.head.params:
        del over["parameters"]
    if p.head.ranks == 1 or not over:
        return "every rank has all parameters, gradients and optimizer states"
    said = []
    for n in dict.fromkeys(over.values()):
        names = listed([what for what in over if over[what] == n])
        said.append(f"{names} are sharded over {n} ranks")
    if kept:
        some = "all" if kept == p.head.params else f"{kept:,}"
        said.append(f"{some} parameters are persistent: whole on each rank")
    return "; ".join(said)


def whole(p: Plan) -> int:
    """Return how many parameters each rank has whole for the length of a run."""
    kept = {s.flat for s in p.stores if s.what == "params" and s.whole}
    return sum(t.params * t.count for t in p.tensors if t.flat in kept)


def rounded(n: int) -> str:
    """Return bytes in the largest unit that is not above them."""
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit = next((u for u, size in units.items() if n >= size), "KiB")
    return f"{n / units[unit]:.2f} {unit}"


def memory_of(p: Plan) -> str:
    """Describe a rank's memory on each target, in its host's memory and in its file."""
    arenas = {t: p.arena(t) for t in p.head.targets}
    said = []
    for size in dict.fromkeys(arenas.values()):
        on = [t for t in arenas if arenas[t] == size]
        said.append(f"{rounded(size)} on {', '.join(on)}")
    beside = max(reserve.device(p, t) - size for t, size in arenas.items())
    mpi = p.end("device", targets=("all", "unshared"))
    others = {
        "{} more over MPI": mpi - arenas.get("cpu", mpi),
        "about {} beside it on a GPU": beside,
        "{} of the host's memory": p.hosted,
        "{} in a file": p.filed,
    }
    said += [where.format(rounded(n)) for where, n in others.items() if n]
    return "; ".join(said)


def uncommented(text: str) -> str:
    """Return a text without the marks that begin and end a comment."""
    return text.replace("*/", "* /").replace("/*", "/ *")


def unbroken(text: str) -> list[str]:
    """Return lines whose words are whole: a command in them can be copied."""
    return textwrap.wrap(text, 84, break_long_words=False, break_on_hyphens=False)


def model(p: Plan) -> str:
    """Describe the model's size."""
    h = p.head
    trained = sum(t.params * t.count for t in p.tensors if not t.frozen)
    some = f" ({trained:,} of them trained)" if trained < h.params else ""
    return f"{h.params:,} parameters{some}, width {h.width}, vocabulary {h.vocab}"


def ranks_of(p: Plan) -> str:
    """Describe how many ranks there are, and how many on a host if they are on several."""
    h = p.head
    on = f" on {h.ranks // h.local} hosts" if h.local else ""
    return "1 rank" if h.ranks == 1 else f"{h.ranks} ranks{on}"


def options(p: Plan) -> str:
    """Describe settings that few programs have; '' if this one has none."""
    h = p.head
    said = {
        "samples are shuffled": h.shuffle,
        "dropout": h.keyed,
        "documents are kept apart": h.end >= 0,
        "NCCL adds gradients, and weights depend on the layout": h.reduction == "fast",
        f"{h.margin} SMs are left to NCCL": h.margin,
    }
    return "; ".join(text for text, has in said.items() if has)


def wired(p: Plan, cost: dict[str, object]) -> str:
    """Describe the data that a rank receives; '' for a rank alone."""
    if p.head.ranks == 1:
        return ""
    far = f", {cost['far']:,} of them from other hosts" if p.head.local else ""
    return (
        f"a rank receives {cost['wire']:,} bytes in a training step{far}, "
        f"in {cost['messages']:,} collectives"
    )


def steps(p: Plan) -> int:
    """Return the steps of a schedule whose last learning rate is 0, else 1000."""
    *earlier, last = p.recipe.rate
    return earlier[-1].until if earlier and last.begin == last.end == 0 else 1000


def builds(p: Plan) -> str:
    """Return how to compile the file for each of its targets."""
    programs = {"out/train or out/train-mpi for a CPU": "cpu" in p.head.targets}
    programs["out/train-cuda for GPUs"] = {*p.head.targets} != {"cpu"}
    return (
        f"as out/train.c: ninja {', ninja '.join(x for x in programs if programs[x])}"
    )


def described(p: Plan) -> dict[str, str]:
    """Return the run in plain words, by subject; '' if there is nothing to say."""
    h = p.head
    samples = h.ranks * h.micro_batches * h.batch // h.blocks
    tokens = f"{samples} sequences of {h.sequence} tokens"
    many = f"{h.micro_batches} micro-batch{'es' * (h.micro_batches > 1)}"
    ahead = f"; prefetch distance {h.prefetch}" if h.zero == 3 else ""
    return {
        "Model": model(p),
        "Ranks": f"{ranks_of(p)}; ZeRO stage {h.zero}: {sharded(p)}{ahead}",
        "Numbers": f"{h.real}; optimizer {p.recipe.optimizer}; seed {h.seed}",
        "Step": f"{tokens}: {many} of {h.batch} on each rank",
        "Sums": sums_of(p),
        "Recompute": again(p),
        "Offload": away(p),
        "Options": options(p),
    }


def head(p: Plan, origin: str, cost: dict[str, object]) -> list[str]:
    """Return the comment at the head of the file: the run in plain words. origin: the command that
    made it, if known."""
    told = described(p) | {
        "Recipe": "all settings that determine the weights' bits: recipe_lines below",
        "Memory": f"a rank's arena: {memory_of(p)}",
        "Wire": wired(p, cost),
        "Build": builds(p),
        "Run": f"out/train --data tokens.bin --steps {steps(p)}; out/train --help has all options",
        "From": uncommented(origin),
        "Plan": f"{digest(p)}, the SHA-256 of the plan that `--emit plan` writes",
    }
    title = (
        f"train.c -- {p.head.spec} in training, as zgen planned it; do not edit it: "
        "regenerate it."
    )
    lines = [f" * {line}" for line in textwrap.wrap(title, 96)] + [" *"]
    for word, text in told.items():  # nothing is printed for ''
        for line in unbroken(text):
            lines.append(f" * {word:<11}{line}")
            word = ""
    return [f"/*{lines[0][2:]}", *lines[1:], " */"]


def levels(p: Plan) -> str:
    """Describe the levels over which gradients are summed, in order."""
    order = p.head.order
    if order == Order.read("ranks"):
        return "over ranks first, then over micro-batches"
    if order == Order.read("local"):
        return "over a rank's micro-batches first, then over ranks"
    own = {STEP: "micro-batches"}
    if BLOCKS in order.levels:
        own = {BLOCKS: "a rank's blocks of a sample", STEP: "samples"}
    said = [own.get(x) or f"{p.group(x).ranks} ranks of {x}" for x in order.levels]
    return f"over {', then '.join(said)}"


def _events(p: Plan) -> dict[str, object]:
    """Return the template fields for events."""
    first, lines = 0, []
    for e in p.events:
        lines.append(f"#define {upper(e.name)}(i) ({first} + (int)(i))")
        first += e.index
    return {"events": lines, "nevents": first}


def _groups(p: Plan) -> dict[str, object]:
    """Return the template fields for groups of ranks."""
    place = "#define PLACE(group) ((int64_t)zr_place(z, group))"
    return {
        "group_names": ", ".join(group_name(g.name) for g in p.groups),
        "all": group_name(plan.ALL),
        "groups": groups(p),
        "place": [place] * bool(p.axes),
    }


PRODUCTS = "static int products(void *k, int order) { return zk_products(k, order); }"


def _stored(p: Plan) -> dict[str, object]:
    """Return the template fields for the stored type."""
    return {
        "dtype": ops.TYPES[p.head.real],
        "products": [PRODUCTS] * (p.head.real == "bf16"),
    }


def _products(p: Plan) -> list[str]:
    """Return the field for the order of products of bf16; -1: the run chooses."""
    if p.head.real != "bf16":
        return []
    known = {"pairs": "ZK_PAIRS", "tiles": "ZK_TILES"}
    order = known.get(p.head.products, -1)
    return [f".products = products, .order = {order},"]


def _grid(p: Plan, cost: dict[str, object]) -> list[str]:
    """Return the fields for a grid of several axes and for several hosts."""
    out = [f".owners = {owners(p)}, ZR_TABLE(axes), .meets = meets,"]
    out *= bool(p.axes)
    if p.head.local:
        out.append(f".local = {p.head.local}, .far = {cost['far']},")
    return out


def sums_of(p: Plan) -> str:
    """Describe the order of accumulation; '' if there is none."""
    h = p.head
    if h.micro_batches == 1 and len(h.order.groups) < 2:
        return ""
    order = f" {levels(p)}" if h.ranks > 1 else " micro-batch by micro-batch"
    every = p.section("micro_batch").repeat == 1
    those = "they" if every else "those of a sample"
    through = f"; {those} go through each unit together" if p.together > 1 else ""
    return f"gradients are added{order}{through}"


def again(p: Plan) -> str:
    """Describe which ops backward recomputes; '' if none."""
    found: set[str] = set()
    for fn in p.fns:
        if fn.body == "bwd":
            kernels = [c.kernel for c in fn.calls]
            found.update(x[3:-4] for x in kernels if x.endswith("_fwd"))
    said = ", ".join(sorted(found))
    return f"backward computes again: {said}" if said else ""


WHERE = {"host": "on the host", "file": "in a file"}


def away(p: Plan) -> str:
    """Describe the states and activations that are offloaded; '' if none are."""
    lies = {c.name: c.arena for c in p.classes}
    found: dict[str, dict[str, None]] = {at: {} for at in WHERE}
    for s in p.stores:
        what = STATES.get(s.what, SHARDED[0])
        if s.first:
            what = f"a part of the {what}"
        found.setdefault(lies[s.cls], {})[what] = None
    if any(name.startswith("far.") for name in lies):
        found["host"]["activations"] = None
    said = []
    for at, where in WHERE.items():
        if found[at]:
            said.append(f"{where}: {', '.join(found[at])}")
    return "; ".join(said)


# Macro for a call that takes several operands and gets one.
ONE = "#define ONE(p) ((const void *const[]){p}) /* an array of one */"


def escaped(c: str) -> str:
    """Return a character as a C string has it."""
    if c in '"\\':
        return f"\\{c}"
    if c.isascii() and c.isprintable():
        return c
    return "".join(f"\\{byte:03o}" for byte in c.encode())


def element(text: str) -> list[str]:
    """Return an element of an array of strings, over lines. Several literals stand in parentheses,
    or a compiler would suspect a missing comma."""
    lines = [""]
    for c in map(escaped, text):
        if len(lines[-1] + c) > 90:
            lines.append("")
        lines[-1] += c
    literals = "\n".join(f'"{line}"' for line in lines)
    return (f"({literals})," if lines[1:] else f"{literals},").split("\n")


def quoted(text: str) -> list[str]:
    """Return a C string over several lines."""
    *lines, last = textwrap.wrap(text, 84)
    return [*(f'"{line} "' for line in lines), f'"{last}",']


def said(name: str, value: object) -> list[str]:
    """Return a field: a number, a word, or a text with one C line for each of its own; none if the
    text is empty."""
    if not isinstance(value, str):
        return [f".{name} = {value},"]
    if "\n" not in value:
        return [f'.{name} = "{value}",'] if value else []
    made = ["".join(map(escaped, line)) for line in value.splitlines()]
    *first, last = [f'    "{line}\\n"' for line in made]
    return [f".{name} =", *first, f"{last},"]


def target(p: Plan, name: str, step: float) -> str:
    """Return a row of the table of targets. step: its predicted seconds, 0 if unknown."""
    memory = number(p.arena(name)), number(reserve.nccl_of(p, name))
    return f'{{"{name}", {", ".join(memory)}, {step:.4g}}},'


def view(
    p: Plan,
    cost: dict[str, object],
    memory: str,
    flat: bool,
    recipe_lines: Sequence[str] = (),
    fields: Sequence[tuple[str, object]] = (),
    origin: str = "",
    predicted: Mapping[str, float] = {},
    mark: Callable[[str], str] = lambda name: "0",
) -> dict[str, object]:
    """Return everything that the templates need. recipe_lines: config.recipe of the spec; fields:
    fields of zr_program that the plan lacks (hf.fields, peft.fields); origin: the command line, for
    the head; predicted: seconds of a step by target, where known; mark: see marks."""
    called = arrays.of_first(p)
    letters, sizes = of_plan(called), Sizes(called)
    blocks = Calls(called, letters).blocks()
    return {
        "name": p.head.spec,
        "plan": digest(p),
        "layout": layout_digest(p),
        "memory": quoted(memory),
        "head": p.head,
        "summary": f"ZeRO {p.head.zero}, ranks {p.head.ranks}, "
        f"micro-batches {p.head.micro_batches} of "
        f"{p.head.shape}, {p.head.real}, prefetch {p.head.prefetch}",
        "head_lines": head(p, origin, cost),
        "classes": classes(p),
        **_events(p),
        **_groups(p),
        "letters": enum(letters.rows()),
        "flats": enum(sizes.rows()),
        "target_names": ", ".join(upper(t) for t in p.head.targets),
        "launches": columns(p, letters),
        "columns": [target(p, t, predicted.get(t, 0.0)) for t in p.head.targets],
        "host": number(p.host),
        "pinned_batches": p.cls("pinned_batch").slots,
        "spans": [{"name": lower(f.name), "rows": spans(p, f)} for f in p.flats],
        "tables": [
            {
                "name": lower(t.name).replace("table", "freq"),
                "rows": [real(x) + "," for x in t.freq],
            }
            for t in p.tables
        ],
        "recipe": recipe(p),
        "one": [ONE] * any("ONE(" in x for block in blocks for x in block),
        "blocks": blocks,
        "type": upper(p.head.real),
        "lines": [line for text in recipe_lines for line in element(text)],
        **sections(called, sizes, flat),
        "micro_batches": micro_batches(p, sizes),
        "functions": functions(p),
        "states": states(p),
        "slots": slots(p),
        "besides": [
            *_grid(p, cost),
            *_products(p),
            *inbox(p),
            *left(p),
            *filed(p, cost),
            *samples(p),
            *formats(p),
            *by_head(p),
            *marks(p, mark),
            *itertools.chain(*(said(*field) for field in fields)),
        ],
        "files": files(p),
        "sample": sample(p),
        "skips": p.recipe.skips,
        **_stored(p),
        "shared": number(p.shared),
        "hosted": number(p.hosted),
        "queues": textwrap.wrap(queue_bits(p), 84),
        "cost": cost,
    }
