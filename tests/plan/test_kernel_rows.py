"""test_kernel_rows.py -- tests the kernel table against kernels/zk.h: every kernel that a plan can
call, its operands in order, their names, types and modes, and numbers derived from names. It also
tests the table against the kernels, which touch as many elements as a row says."""

import re
from dataclasses import replace

import numpy as np
import pytest
from zg.facts import kernels, ops
from zg.facts.kernels import BACK, HOST, TWINS, Formal, Kernel

from tests.lib import zk
from tests.lib.plans import planned

KERNELS = {n: row for n, row in kernels.KERNELS.items() if not row.exchange}
C_TYPES = {
    "real": "real",
    "f32": "float",
    "f64": "double",
    "i32": "int32_t",
    "i64": "int64_t",
    "u64": "uint64_t",
    "full": "void",
    "add": "void",
    "moments": "void",
    "span": "zk_span",
    "recipe": "zk_recipe",
    "ctl": "zk_ctl",
}
NUMBERS = {
    "#": {"int64_t", "int"},
    "~": {"int64_t", "uint64_t", "int"},
    ".": {"float"},
}


def prototypes() -> dict[str, list[str]]:
    """Return the operands of zk.h's kernels that have a launch, as they are declared."""
    text = re.sub(r"/\*.*?\*/", "", (zk.ROOT / "kernels/zk.h").read_text(), flags=re.S)
    found = re.findall(
        r"^void (zk_\w+)\(zk \*k, const zk_launch \*L,([^)]*)\);", text, re.M
    )
    return {
        name: [" ".join(word.split()) for word in operands.split(",")]
        for name, operands in found
    }


def declared(f: Formal) -> list[str]:
    """Return the C declarations that an operand of a row may have."""
    if f.number:
        return [f"{type_} {f.name}" for type_ in NUMBERS[f.mode]]
    const = "const " if f.mode in "<@" else ""
    stars = "*const *" if f.name == "src" else "*"
    return [f"{const}{C_TYPES[f.type]} {stars}{f.name}"]


def same(row: Kernel, words: list[str]) -> bool:
    """Return whether a row matches a prototype; spans are two operands."""
    mine = [declared(f) for f in row.formals]
    for n, f in enumerate(row.formals):
        if f.type == "span":
            mine.insert(n + 1, ["int64_t nspans"])
    return len(mine) == len(words) and all(
        word in can for word, can in zip(words, mine, strict=True)
    )


def test_a_row_a_kernel() -> None:
    assert KERNELS.keys() == prototypes().keys() and len(KERNELS) > 30


def test_twins_are_those_of_the_host() -> None:
    text = (zk.ROOT / "kernels/cpu/kernels.def").read_text()
    line = re.search(r"ZK_HOST_KERNELS\(X\)(.*)", text)[1]
    assert kernels.TWINS.keys() == {
        f"zk_host_{name}" for name in re.findall(r"X\((\w+)\)", line)
    }


@pytest.mark.parametrize("targets", ["[cpu]", "[sm_90]"])
def test_twins_take_as_many_elements_as_their_kernels(targets: str) -> None:
    """A thread of the host takes as many elements at a time by both names of a kernel. Tasks of 16
    elements cost more than their work, the more the more threads count them."""
    p = planned(
        "gpt-tiny",
        "cluster.ranks=1",
        "zero.stage=1",
        "zero.offload_optimizer.device=cpu",
        "train.precision=bf16",
        f"targets={targets}",
    )
    kernel_of = {launch.name: launch.kernel for launch in p.launches}
    took = {kernel_of[r.launch]: r.tile for r in p.runs if kernel_of[r.launch] in TWINS}
    assert set(took) == set(TWINS)
    for name, tile in took.items():
        assert tile == (KERNELS["zk_" + name.removeprefix(HOST)].task, 0, 0), name
    assert took["zk_host_round"] == (8192, 0, 0)


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_is_the_prototype(name: str) -> None:
    assert same(KERNELS[name], prototypes()[name])


@pytest.mark.parametrize("name", KERNELS)
def test_a_wrong_row_is_seen(name: str) -> None:
    """A row with two operands swapped, one missing, another type, or read instead of written is
    detected."""
    row, words = KERNELS[name], prototypes()[name]
    formals = row.formals
    for n, f in enumerate(formals):
        assert not same(replace(row, formals=formals[:n] + formals[n + 1 :]), words)
        other = ">" if f.mode in "<@" else "<"
        for wrong in (
            replace(f, name=f"{f.name}2"),
            replace(f, mode=other, type="f32"),
        ):
            assert not same(
                replace(row, formals=(*formals[:n], wrong, *formals[n + 1 :])),
                words,
            )
        if n:
            turned = (*formals[: n - 1], f, formals[n - 1], *formals[n + 1 :])
            assert not same(replace(row, formals=turned), words)


def test_letters_of_a_row_are_its_numbers() -> None:
    """Shapes, flops and grids use only numbers of the kernel or numbers derived from these."""
    for row in KERNELS.values():
        names = {f.name for f in row.formals if f.number}
        known = kernels.letters(dict.fromkeys(names, 8)).keys()
        for text in (row.flops, *(f.elems for f in row.formals)):
            assert set(re.findall(r"[A-Za-z]\w*", text)) <= known, (
                row.name,
                text,
            )
        for f in row.formals:
            assert set(f.alias) <= row.at.keys(), row.name
            if f.type in ("full", "add"):
                assert f.type in row.at, row.name


def test_flops() -> None:
    """A product costs two flops per multiplication. Causal attention costs half of two products
    forward and twice that backward."""
    assert kernels.flops("zk_linear_fwd", (3, 5, 7, 1)) == 2 * 3 * 5 * 7
    assert kernels.flops("zk_slice_bwd_w", (3, 10, 7, 5)) == 2 * 3 * 5 * 7
    assert kernels.flops("zk_attention_fwd", (2, 9, 4, 2, 6)) == 2 * 2 * 4 * 9 * 9 * 6
    assert kernels.flops("zk_attention_bwd", (2, 9, 4, 2, 6)) == 4 * 2 * 4 * 9 * 9 * 6
    # Keys of all queries
    for window, keys in ((1, 9), (4, 9 * 4 - 6), (9, 45)):
        rough = kernels.flops("zk_attention_local_fwd", (2, 9, 4, 2, 6, window))
        assert abs(rough - 4 * 2 * 4 * 6 * keys) <= 2 * 2 * 4 * 6 * window
    assert kernels.flops("zk_add", (8,)) == 0


# For each backward kernel of zk.h: its forward kernel, the operand that is the incoming gradient,
# the forward operand whose gradient it makes, the parameters whose gradients it makes, and the
# operands it shares with forward.
BY_HAND = {
    "zk_layernorm_bwd": (
        "zk_layernorm_fwd",
        3,
        3,
        {1: 5, 2: 6},
        {5: 3, 6: 1, 7: 5},
    ),
    "zk_rmsnorm_bwd": ("zk_rmsnorm_fwd", 2, 3, {1: 5}, {4: 3, 5: 1, 6: 5}),
    "zk_qknorm_bwd": (
        "zk_qknorm_fwd",
        3,
        2,
        {1: 3, 2: 4},
        {4: 2, 5: 1, 6: 3, 7: 4},
    ),
    "zk_rmsnorm1_bwd": ("zk_rmsnorm1_fwd", 2, 3, {1: 5}, {4: 3, 5: 1, 6: 5}),
    "zk_qknorm1_bwd": (
        "zk_qknorm1_fwd",
        3,
        2,
        {1: 3, 2: 4},
        {4: 2, 5: 1, 6: 3, 7: 4},
    ),
    "zk_qknorm_whole_bwd": (
        "zk_qknorm_whole_fwd",
        3,
        2,
        {1: 3, 2: 4},
        {4: 2, 5: 1, 6: 3, 7: 4},
    ),
    "zk_linear_bwd_x": ("zk_linear_fwd", 1, 1, {}, {2: 2}),
    "zk_linear_bwd_w": ("zk_linear_fwd", 1, None, {0: 2}, {2: 1}),
    "zk_linear_bwd_b": ("zk_linear_fwd", 1, None, {0: 3}, {}),
    "zk_slice_bwd_x": ("zk_slice_fwd", 1, 1, {}, {2: 2}),
    "zk_slice_bwd_w": ("zk_slice_fwd", 1, None, {0: 2}, {2: 1}),
    "zk_lora_bwd_x": ("zk_lora_fwd", 1, 2, {}, {2: 3}),
    "zk_lora_bwd_w": ("zk_lora_fwd", 1, None, {0: 3}, {2: 2}),
    "zk_rope": ("zk_rope", 1, 1, {}, {2: 2}),
    "zk_cut_heads_bwd": ("zk_cut_heads_fwd", 1, 1, {}, {}),
    "zk_join_heads": ("zk_join_heads", 1, 1, {}, {}),
    "to_heads_bwd": ("to_heads", 1, 1, {}, {}),
    "to_rows_bwd": ("to_rows", 1, 1, {}, {}),
    "zk_rope_packed": ("zk_rope_packed", 1, 1, {}, {2: 2, 3: 3}),
    "zk_rope_part": ("zk_rope_part", 1, 1, {}, {2: 2, 3: 3, 4: 4}),
    "zk_attention_bwd": ("zk_attention_fwd", 1, 2, {}, {2: 0, 3: 2, 4: 1}),
    "zk_attention_local_bwd": (
        "zk_attention_local_fwd",
        1,
        2,
        {},
        {2: 0, 3: 2, 4: 1, 6: 3},
    ),
    "zk_attention_capped_bwd": (
        "zk_attention_capped_fwd",
        1,
        2,
        {},
        {2: 0, 3: 2, 4: 1, 6: 3},
    ),
    "zk_attention_dropped_bwd": (
        "zk_attention_dropped_fwd",
        1,
        2,
        {},
        {2: 0, 3: 2, 4: 1, 6: 3, 7: 4},
    ),
    "zk_gelu_bwd": ("zk_gelu_fwd", 1, 1, {}, {2: 1}),
    "zk_relu2_bwd": ("zk_relu2_fwd", 1, 1, {}, {2: 1}),
    "zk_scale_bwd": ("zk_scale_fwd", 1, 1, {}, {}),
    "zk_swiglu_bwd": ("zk_swiglu_fwd", 1, 1, {}, {2: 1}),
    "zk_geglu_bwd": ("zk_geglu_fwd", 1, 1, {}, {2: 1}),
    "zk_dropout_bwd": ("zk_dropout_fwd", 1, 1, {}, {2: 2}),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_names_say_of_backward(name: str) -> None:
    back = BACK[name]
    made = back.of, back.dy, back.x, dict(back.params), dict(back.same)
    assert made == BY_HAND[name]
    for n, other in back.numbers:
        of = kernels.KERNELS
        assert of[name].formals[n].name == of[back.of].formals[other].name
    assert BACK.keys() == BY_HAND.keys()


@pytest.mark.parametrize("op", ops.OPS.values(), ids=ops.OPS)
def test_an_ops_calls_are_of_its_kernels(op: ops.OpRow) -> None:
    """An op has one word for each operand of its kernels, and backward calls every backward kernel
    of its forward ones, except those of slices."""
    forward, *backward = [line.split() for line in (op.fwd, *op.bwd)]
    for kernel, *words in (
        forward,
        *(line for line in backward if line[0] != "pass"),
    ):
        assert len(words) == len(kernels.KERNELS[kernel].formals), kernel
    if forward[0] in kernels.FORWARD:
        called = tuple(line[0] for line in backward if line[0] != "pass")
        assert called == kernels.FORWARD[forward[0]]


# ---- kernels touch as many elements as their rows say

NUMBERS_OF = {
    "B": 2,
    "T": 4,
    "M": 8,
    "A": 8,
    "C": 24,
    "V": 24,
    "P": 6,
    "H": 2,
    "G": 1,
    "D": 8,
    "N": 16,
    "K": 24,
    "F": 16,
    "n": 16,
    "at": 0,
    "rows": 8,
    "layout": 1,
    "full": 0,
    "carry": 0,
    "add": 0,
    "kind": 0,
    "m": 65,  # one chunk of int8, in f32
    "format": 1,
    "sign": 1,
    "W": 8,
    "pairs": 1,
    "which": 2,
    "factor": 1.0,
    "factor2": 1.0,
    "window": 3,
    "place": 3,
    "head": 1,
    "p": 0.0,  # all elements stay
    "ranks": 2,
    "copies": 2,
    "eps": 1e-5,
    "scale": 0.5,
    "smoothing": 0.1,
    "penalty": 0.1,
    "cap": 2.0,
}
ROOM, INTS = 64, {"i32": np.int32, "i64": np.int64}


def elements(row: Kernel, f: Formal) -> int:
    numbers = {g.name: NUMBERS_OF[g.name] for g in row.formals if g.number}
    text = f.elems if not f.elems.startswith("*") else f"{NUMBERS_OF['V']}{f.elems}"
    return kernels.value(text, kernels.letters(numbers))


def touched(row: Kernel, spoilt: str = "", short: str = "") -> dict[str, np.ndarray]:
    """Return the operands of an f32 call with the memory around them. All numbers around them, and
    operands to be written, are NaN before the call. spoilt: the last number of this operand is NaN,
    too; short: this operand has one element less than its row says."""
    drawn, made, given = np.random.default_rng(1), {}, []
    for f in row.formals:
        if f.number:
            given.append(NUMBERS_OF[f.name])
            continue
        size = elements(row, f) - (f.name == short)
        kind = INTS.get(f.type, np.float64 if f.type == "f64" else np.float32)
        room = np.full(size + 2 * ROOM, 0 if f.type in INTS else np.nan, kind)
        inside = room[ROOM : ROOM + size]
        if f.mode in "<@":
            inside[:] = (
                drawn.integers(0, 8, size)
                if f.type in INTS
                else drawn.random(size) + 0.5
            )
        if f.name == "position":
            inside[:] = np.arange(size) % NUMBERS_OF["T"]
        if f.name == spoilt:
            inside[-1] = np.nan
        made[f.name] = room
        given.append(inside)
    getattr(zk.Kernels(), row.name)(*given)
    return made


def results(row: Kernel, made: dict[str, np.ndarray]) -> list[np.ndarray]:
    return [made[f.name][ROOM:-ROOM] for f in row.formals if f.mode in ">^"]


CALLED = [name for name, row in KERNELS.items() if not row.own]
# not read to the end: v heads, whose gradient alone backward needs
IN_PART = {
    *((f"zk_{name}_bwd", "in") for name in ("qknorm", "qknorm1", "qknorm_whole")),
    ("zk_rope_part", "table"),  # `which` is 2
}


@pytest.mark.parametrize("name", CALLED)
def test_a_kernel_writes_what_its_row_says(name: str) -> None:
    """A kernel writes all of its outputs and nothing around them, and reads nothing around its
    inputs."""
    row = KERNELS[name]
    made = touched(row)
    for f in row.formals:
        if not f.number and f.type not in INTS:
            around = np.concatenate([made[f.name][:ROOM], made[f.name][-ROOM:]])
            assert np.isnan(around).all(), f.name
        elif not f.number:
            assert not made[f.name][:ROOM].any() and not made[f.name][-ROOM:].any(), (
                f.name
            )
    for found in results(row, made):
        assert np.isfinite(found).all()


@pytest.mark.parametrize("name", CALLED)
def test_a_kernel_reads_what_its_row_says(name: str) -> None:
    """A kernel reads its inputs to the last element; one element less would be noticed."""
    row = KERNELS[name]

    def spoilt(**how):
        return any(np.isnan(x).any() for x in results(row, touched(row, **how)))

    for f in row.formals:
        rows = f.elems.startswith("*") or (name, f.name) in IN_PART
        if (
            f.mode in "<@"
            and f.type in ("real", "f32")
            and not rows
            and name not in kernels.LOSS_SUMS.values()
        ):
            assert spoilt(spoilt=f.name) and spoilt(short=f.name), f.name
