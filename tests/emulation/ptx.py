"""ptx.py -- writes PTX, as nvcc compiles kernels/cuda to it, as C++ for a CPU: ptx.py IN.ptx OUT.cpp

    ninja out/train-ptx-sm_{80,90,100}-kernels.so
    python3 tests/emulation/ptx.py --list out/o/ptx/sm_{80,90,100} > tests/golden/ptx.txt

lists the instructions of each processor's files.

Each kernel becomes a function that runs one thread: its registers are a struct, and it returns
wherever the lanes of a warp must meet, to be called again from there. ptx.h is the C++'s header,
ptx.cpp runs grids of it.

Invariants
 1. An instruction that neither TABLE nor SPECIAL has, a modifier included, is an error with its
    spelling and its line; so is a directive, an operand or a space of memory that is not known.
 2. The result depends on the PTX alone, not on the numbers by which nvcc tells files apart; OUT is
    not touched if it would not change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

C_TYPES = {
    "pred": "bool",
    "f32": "float",
    "f64": "double",
    "f16": "uint16_t",
    **{
        f"{sign}{bits}": f"{'int' if sign == 's' else 'uint'}{bits}_t"
        for sign in "bus"
        for bits in (8, 16, 32, 64)
    },
}
PLACES = {
    "%tid.x": "t.tid",
    "%ntid.x": "ptx_now.ntid",
    **{f"%ctaid.{x}": f"ptx_now.ctaid.{x}" for x in "xyz"},
    **{f"%nctaid.{x}": f"ptx_now.nctaid.{x}" for x in "xyz"},
}
SHARED_FIRST = 1024  # address of a block's first byte of shared memory
GAP = 1024  # bytes of nothing after an array there, so that an access beyond its end is found
DYNAMIC = "zk_shared"


class Unknown(Exception):
    """PTX that the translator does not know."""


# ---- instructions that compute

# Spelling (a regular expression), type of the result, types of operands, C++ of the operands
# {0} {1} {2}. Types: T is the spelling's last word, U the unsigned type of its size, W the type of
# twice its size; any other is named.
TABLE = (
    # integers
    ("add.([su](32|64)|s16)", "T", "UU", "{0} + {1}"),
    ("sub.(s32|s64)", "T", "UU", "{0} - {1}"),
    ("mul.lo.(s32|s64)", "T", "UU", "{0} * {1}"),
    ("mul.wide.([su]32|u16)", "W", "TT", "({W}){0} * ({W}){1}"),
    ("mad.lo.(s32|s64)", "T", "UUU", "{0} * {1} + {2}"),
    ("div.([su](32|64))", "T", "TT", "quotient({0}, {1}, {line})"),
    ("rem.([su]32|s64)", "T", "TT", "remainder({0}, {1}, {line})"),
    ("neg.(s32|s64)", "T", "U", "0 - {0}"),
    ("(min|max).([su](32|64))", "T", "TT", "std::{word}({0}, {1})"),
    # bits
    ("and.(b16|b32|b64|pred)", "T", "TT", "{0} & {1}"),
    ("or.(b32|b64|pred)", "T", "TT", "{0} | {1}"),
    ("xor.(b32|b64|pred)", "T", "TT", "{0} ^ {1}"),
    ("not.(b32|b64)", "T", "T", "~{0}"),
    ("not.pred", "T", "T", "!{0}"),
    ("shl.(b32|b64)", "T", ("T", "u32"), "shifted_left({0}, {1})"),
    ("shr.([su](16|32|64))", "T", ("T", "u32"), "shifted_right({0}, {1})"),
    ("popc.b64", "u32", "T", "(uint32_t)__builtin_popcountll({0})"),
    ("clz.(b32|b64)", "u32", "T", "leading_zeros({0})"),
    ("brev.b32", "T", "T", "reversed({0})"),
    ("bfind.shiftamt.u32", "u32", "T", "shift_to_top({0})"),
    ("bfi.(b32|b64)", "T", ("T", "T", "u32", "u32"), "inserted({0}, {1}, {2}, {3})"),
    ("prmt.b32", "T", "TTT", "permuted({0}, {1}, {2})"),
    # floats: IEEE unless `approx`
    ("add.rn.(f32|f64)", "T", "TT", "{0} + {1}"),
    ("sub.rn.(f32|f64)", "T", "TT", "{0} - {1}"),
    ("mul.rn.(f32|f64)", "T", "TT", "{0} * {1}"),
    ("div.rn.(f32|f64)", "T", "TT", "{0} / {1}"),
    ("fma.rn.(f32|f64)", "T", "TTT", "std::fma({0}, {1}, {2})"),
    ("rcp.rn.(f32|f64)", "T", "T", "({T})1 / {0}"),
    ("sqrt.rn.(f32|f64)", "T", "T", "std::sqrt({0})"),
    ("(min|max).f32", "T", "TT", "{word}imum({0}, {1})"),
    ("neg.(f32|f64)", "T", "T", "-{0}"),
    ("abs.f32", "T", "T", "std::fabs({0})"),
    ("copysign.f32", "T", "TT", "std::copysign({1}, {0})"),
    ("ex2.approx.ftz.f32", "T", "T", "flushed(exp2f(flushed({0})))"),
    ("rcp.approx.ftz.f32", "T", "T", "flushed(1 / flushed({0}))"),
    # choices: a comparison with NaN is false, one that ends in u true
    ("selp.([bsu](32|64)|f32|f64)", "T", ("T", "T", "pred"), "{2} ? {0} : {1}"),
    ("setp.eq.(s16|s32|s64|b32|b64|f32|f64)", "pred", "TT", "{0} == {1}"),
    ("setp.ne.(s16|s32|s64|b32)", "pred", "TT", "{0} != {1}"),
    ("setp.lt.([su](32|64)|u16|f32|f64)", "pred", "TT", "{0} < {1}"),
    ("setp.le.(s32|[su]64)", "pred", "TT", "{0} <= {1}"),
    ("setp.gt.([su](32|64)|[su]16|f32|f64)", "pred", "TT", "{0} > {1}"),
    ("setp.ge.([su]32|s64|f64)", "pred", "TT", "{0} >= {1}"),
    ("setp.leu.(f32|f64)", "pred", "TT", "!({0} > {1})"),
    ("setp.geu.(f32|f64)", "pred", "TT", "!({0} < {1})"),
    ("setp.ltu.f64", "pred", "TT", "!({0} >= {1})"),
    ("setp.neu.(f32|f64)", "pred", "TT", "!({0} == {1})"),
    # conversions, to nearest even
    ("cvt.s32.(s8|s16)", "s32", "T", "{0}"),
    ("cvt.s64.(s16|s32)", "s64", "T", "{0}"),
    ("cvt.u64.u32", "u64", "T", "{0}"),
    ("cvt.u32.(u64|u16)", "u32", "T", "{0}"),
    ("cvt.u16.u32", "u16", "T", "{0}"),
    ("cvt.rn.f32.([su]32|u16|f64)", "f32", "T", "{0}"),
    ("cvt.rn.f64.(s32|[su]64)", "f64", "T", "{0}"),
    ("cvt.f64.f32", "f64", "T", "{0}"),
    ("cvt.f32.f16", "f32", "T", "from_f16({0})"),
    ("cvt.rn.f16.f32", "u16", "T", "to_f16({0})"),
    ("cvt.rn.f16x2.f32", "u32", "TT", "pair(to_f16({0}), to_f16({1}))"),
    ("cvt.rn.bf16x2.f32", "u32", "TT", "pair(to_bf16({0}), to_bf16({1}))"),
    ("cvta.to.global.u64", "T", "T", "{0}"),
)


class Row(NamedTuple):
    """An instruction of TABLE: types by name, C++."""

    result: str
    operands: tuple[str, ...]
    cpp: str


def resolved(name: str, last: str) -> str:
    """Return the type that a type of TABLE stands for."""
    if name not in "TUW":
        return name
    bits = int(last[1:]) if last[1:].isdigit() else 0
    return {"T": last, "U": f"u{bits}", "W": f"{last[0]}{2 * bits}"}[name]


def row_of(spelling: str) -> Row | None:
    """Return the row of TABLE for an instruction's full spelling."""
    words = spelling.split(".")
    last = words[-1]
    for pattern, result, operands, cpp in TABLE:
        if re.fullmatch(pattern.replace(".", r"\."), spelling):
            types = tuple(resolved(name, last) for name in operands)
            made = resolved(result, last)
            cpp = cpp.replace("{T}", C_TYPES[last]).replace("{word}", words[0])
            return Row(made, types, cpp.replace("{W}", C_TYPES[made]))
    return None


# ---- a kernel


class Kernel:
    """A kernel on its way to C++. shared: the file's variables there, name -> (alignment, bytes)"""

    def __init__(self, name: str, shared: dict[str, tuple[int, int]]) -> None:
        self.name, self.shared = name, dict(shared)
        self.params: dict[str, tuple[int, int]] = {}  # name -> (place, bytes)
        self.param_bytes = 0
        self.most, self.depot = 1024, ""  # depot: name of the local memory
        self.fields: list[str] = []  # of the struct of registers
        self.registers: dict[str, str] = {}  # letters -> type
        self.scopes: list[dict[str, str]] = []  # own registers of open braces -> type
        self.body: list[str] = []
        self.sites = ['{ptx_meeting::START, "the start", 0, nullptr}']
        self.products: list[str] = []  # tables that sites point to
        self.addresses: dict[str, int] = {}
        self.arrays: list[tuple[int, int]] = []  # static ones there: (place, bytes)
        self.line = 0

    def wrong(self, what: str) -> Unknown:
        return Unknown(f"{what} (kernel {self.name}, line {self.line})")

    # ---- declarations

    def param(self, text: str) -> None:
        """Read a parameter; all lie one after the other, each at its alignment."""
        found = re.fullmatch(
            r"\.param (?:\.align (\d+) )?\.([bufs])(\d+) (?:\.ptr (?:\.align \d+ )?)?(\w+)"
            r"(?:\[(\d+)\])?",
            text,
        )
        if not found:
            raise self.wrong(f"parameter {text!r}")
        align, _, bits, name, count = found.groups()
        size = int(bits) // 8 * int(count or 1)
        at = -(-self.param_bytes // int(align or size)) * int(align or size)
        self.params[name] = at, size
        self.param_bytes = at + size

    def declare(self, text: str) -> bool:
        """Read a declaration; return whether `text` is one."""
        if found := re.fullmatch(r"\.reg \.(\w+)\s+%([A-Za-z]+)(?:<(\d+)>)?", text):
            kind, letters, count = found.groups()
            self.registers[letters] = kind.replace("b", "u")
            self.fields.append(f"{stored(kind)} {letters}[{count or 1}];")
        elif found := re.fullmatch(r"\.reg \.(\w+)\s+(\w+(?:\s*,\s*\w+)*)", text):
            self.declare_own(found[1], split(found[2]))
        elif found := re.fullmatch(
            r"\.local \.align (\d+) \.b8\s+(\w+)\[(\d+)\]", text
        ):
            align, self.depot, size = found.groups()
            self.fields.append(f"alignas({align}) char depot[{size}];")
        elif found := re.fullmatch(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
            self.shared[found[2]] = int(found[1]), int(found[3])
        else:
            return text == '.pragma "nounroll"'
        return True

    def declare_own(self, kind: str, names: list[str]) -> None:
        """Declare registers of the innermost braces; they begin as bytes of 0xff."""
        if not self.scopes:
            raise self.wrong(f"registers {names} outside of braces")
        for name in names:
            self.scopes[-1][name] = kind.replace("b", "u")
            place = self.place(name)
            field = f"{stored(kind)} {place.removeprefix('t.')};"
            if field not in self.fields:
                self.fields.append(field)
            self.emit(f"memset(&{place}, 0xff, sizeof {place});")

    def lay_out(self, text: str) -> None:
        """Give addresses to the shared variables that the kernel's text names."""
        at = SHARED_FIRST
        for name, (align, size) in self.shared.items():
            if re.search(rf"\b{re.escape(name)}\b", text):
                at = -(-at // align) * align
                self.addresses[name] = at
                self.arrays.append((at - SHARED_FIRST, size))
                at += size + GAP
        self.addresses[DYNAMIC] = -(-at // 1024) * 1024

    # ---- operands

    def depth(self, name: str) -> int:
        """Return the number of braces around the ones that declare a register; -1: none do."""
        inner = (i for i, own in enumerate(self.scopes) if name in own)
        return max(inner, default=-1)

    def type_of(self, register: str) -> str:
        if (depth := self.depth(register)) >= 0:
            return self.scopes[depth][register]
        found = re.fullmatch(r"%([A-Za-z]+)\d*", register)
        if not found or found[1] not in self.registers:
            raise self.wrong(f"register {register}")
        return self.registers[found[1]]

    def place(self, register: str) -> str:
        if (depth := self.depth(register)) >= 0:
            return f"t.own{depth}_{self.type_of(register)}_{register}"
        letters, number = re.fullmatch(r"%([A-Za-z]+)(\d*)", register).groups()
        return f"t.{letters}[{number or 0}]"

    def value(self, text: str, kind: str) -> str:
        """Return an operand as C++ of a type."""
        to = C_TYPES[kind]
        if text in PLACES:
            return f"as<{to}>({PLACES[text]})"
        if text.startswith("%") or self.depth(text) >= 0:
            has, place = self.type_of(text), self.place(text)
            if kind == "pred":
                return f"({place} != 0)"
            return place if C_TYPES[has] == to else f"as<{to}>({place})"
        if found := re.fullmatch(r"0[fFdD]([0-9a-fA-F]{8}|[0-9a-fA-F]{16})", text):
            return f"as<{to}>(UINT{4 * len(found[1])}_C(0x{found[1]}))"
        if re.fullmatch(r"-?\d+", text):
            return f"({to})({int(text) % (1 << 64)}u)"
        if text in self.addresses:
            return f"({to})({self.addresses[text]}u)"
        if text in self.params:
            return f"({to})({self.params[text][0]}u)"
        if text == self.depot:
            return f"({to})(0)"
        raise self.wrong(f"operand {text}")

    def address(self, text: str) -> str:
        """Return [BASE+OFFSET] as C++."""
        found = re.fullmatch(r"\[([%$\w]+)(?:\+(-?\d+))?\]", text)
        if not found:
            raise self.wrong(f"address {text}")
        wide = (
            "u64"
            if not found[1].startswith("%") or self.type_of(found[1]) == "u64"
            else "u32"
        )
        base = f"(uint64_t){self.value(found[1], wide)}"
        return f"{base} + {int(found[2] or 0)}ll"

    def put(self, register: str, kind: str, cpp: str) -> None:
        """Emit an assignment of a value of a type."""
        if register == "_":
            return
        has, place = self.type_of(register), self.place(register)
        if kind == "pred" or C_TYPES[has] == C_TYPES[kind]:
            self.emit(f"{place} = ({C_TYPES[kind]})({cpp});")
        else:
            self.emit(f"{place} = as<{C_TYPES[has]}>(({C_TYPES[kind]})({cpp}));")

    def emit(self, cpp: str) -> None:
        self.body.append(cpp)

    def meet(
        self, kind: str, spelling: str, operands: list[str], product: str = "nullptr"
    ) -> None:
        """Emit a return to the driver, which acts for all lanes of a warp together, or for all
        warps of a warpgroup."""
        for i, cpp in enumerate(operands):
            self.emit(f"t.in[{i}] = {cpp};")
        number = len(self.sites)
        self.sites.append(
            f'{{ptx_meeting::{kind}, "{spelling}", {self.line}, {product}}}'
        )
        self.emit(f"t.pc = {number};\nreturn;\ncase {number}:;")

    # ---- instructions

    def statement(self, text: str) -> None:
        """Translate one line of a kernel's body, without its semicolon."""
        if found := re.fullmatch(r"\$(\w+):", text):
            self.emit(f"{found[1]}:;")
            return
        if text == "{":
            self.scopes.append({})
            return
        if text == "}":
            self.scopes.pop()
            return
        if self.declare(text):
            return
        guard = re.match(r"@(!?)(%?\w+)\s+", text)
        if guard:
            text = text[guard.end() :]
            self.emit(f"if ({guard[1]}{self.value(guard[2], 'pred')}) {{")
        spelling, _, rest = text.partition(" ")
        spelling, rest = spelling.strip(), rest.strip()
        if not re.fullmatch(r"[a-z][\w.:]*", spelling):
            raise self.wrong(f"statement {text!r}")
        self.instruction(spelling, split(rest), bool(guard))
        if guard:
            self.emit("}")

    def instruction(self, spelling: str, operands: list[str], guarded: bool) -> None:
        for pattern, translate, meets in SPECIAL:
            if re.fullmatch(pattern.replace(".", r"\."), spelling):
                if meets and guarded:
                    raise self.wrong(f"{spelling} under a predicate")
                return translate(self, spelling, operands)
        row = row_of(spelling)
        if not row or len(operands) != 1 + len(row.operands):
            raise self.wrong(f"instruction {spelling} of {len(operands)} operands")
        given = [
            self.value(x, t) for x, t in zip(operands[1:], row.operands, strict=True)
        ]
        self.put(operands[0], row.result, row.cpp.format(*given, line=self.line))

    def cpp(self, number: int) -> str:
        """Return the kernel's struct, function and tables."""
        fields, body, sites = (
            "\n".join(self.fields),
            "\n".join(self.body),
            ",\n".join(self.sites),
        )
        products = "".join(self.products)
        params, arrays = (
            ", ".join(f"{{{at}, {size}}}" for at, size in some)
            for some in (self.params.values(), [*self.arrays, (0, 0)])
        )
        return (
            f"namespace k{number} {{\n"
            f"struct registers : ptx_thread {{\n{fields}\n}};\n"
            f"void run(ptx_thread &all)\n{{\nregisters &t = static_cast<registers &>(all);\n"
            f"switch (t.pc) {{\ncase 0:;\n{body}\n}}\nt.pc = PTX_ENDED;\n}}\n{products}"
            f"const ptx_site sites[] = {{\n{sites}\n}};\n"
            f"const ptx_given params[] = {{{params}}};\n"
            f"const ptx_given arrays[] = {{{arrays}}};\n}}\n"
        )

    def entry(self, number: int) -> str:
        """Return the kernel's entry in the file's table."""
        return (
            f'{{"{self.name}", k{number}::run, sizeof(k{number}::registers), {self.most}, '
            f"{self.addresses[DYNAMIC] - SHARED_FIRST}, k{number}::arrays, {len(self.arrays)}, "
            f"k{number}::params, {len(self.params)}, {self.param_bytes}, k{number}::sites}}"
        )


def stored(kind: str) -> str:
    """Return the C++ type of a register's field."""
    return "uint8_t" if kind == "pred" else C_TYPES[kind]


def split(text: str) -> list[str]:
    """Return operands: those in braces or brackets are one."""
    return [
        x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text) if x
    ]


def listed(text: str) -> list[str]:
    """Return the registers in braces, or the only one."""
    return [x.strip() for x in text.strip("{}").split(",")]


# ---- instructions that move data, jump or meet


def move(k: Kernel, spelling: str, operands: list[str]) -> None:
    """Translate mov; registers in braces are packed or unpacked, the first in the lowest bits."""
    to, source = operands
    kind = spelling.split(".")[-1]
    bits = int(kind[1:]) if kind != "pred" else 0
    if to.startswith("{"):
        parts = listed(to)
        size = bits // len(parts)
        k.emit(f"{{ uint{bits}_t all = {k.value(source, f'u{bits}')};")
        for i, part in enumerate(parts):
            k.put(part, f"u{size}", f"all >> {i * size}")
        k.emit("}")
    elif source.startswith("{"):
        parts = listed(source)
        size = bits // len(parts)
        cpp = " | ".join(
            f"(uint{bits}_t){k.value(part, f'u{size}')} << {i * size}"
            for i, part in enumerate(parts)
        )
        k.put(to, f"u{bits}", cpp)
    else:
        k.put(to, kind, k.value(source, kind))


def memory(k: Kernel, spelling: str, operands: list[str]) -> None:
    """Translate ld and st of 1, 2 or 4 registers."""
    word, space, *_, kind = spelling.split(".")
    at, registers = operands if word == "st" else operands[::-1]
    registers = listed(registers)
    size = int(kind[1:]) // 8
    count = int(spelling.split(".")[2][1:]) if ".v" in spelling else 1
    if count != len(registers):
        raise k.wrong(f"{spelling} of {len(registers)} registers")
    given = (
        f"{k.address(at)}, {count * size}, ptx_{'writes' if word == 'st' else 'reads'}"
    )
    inside = {"local": "t.depot, sizeof t.depot, "}.get(space, "")
    k.emit(f"{{ char *p = ptx_{space}({inside}{given}, {k.line});")
    for i, register in enumerate(registers):
        if word == "ld":
            k.put(register, kind, f"loaded<{C_TYPES[kind]}>(p + {i * size})")
        else:
            k.emit(
                f"store<{C_TYPES[kind]}>(p + {i * size}, {k.value(register, kind)});"
            )
    k.emit("}")


def atomic(k: Kernel, spelling: str, operands: list[str]) -> None:
    _, space, _, kind = spelling.split(".")
    to, at, x = operands
    k.emit(
        f"{{ char *p = ptx_{space}({k.address(at)}, sizeof({C_TYPES[kind]}), ptx_both, {k.line});"
    )
    k.emit(f"{C_TYPES[kind]} old = loaded<{C_TYPES[kind]}>(p);")
    k.emit(f"store<{C_TYPES[kind]}>(p, old + {k.value(x, kind)});")
    k.put(to, kind, "old")
    k.emit("}")


def copy(k: Kernel, spelling: str, operands: list[str]) -> None:
    to, source, size, some = operands
    k.emit(
        f"ptx_copy(t, {k.address(to)}, {k.address(source)}, {int(size)}, "
        f"{k.value(some, 'u32')}, {k.line});"
    )


def wait(k: Kernel, spelling: str, operands: list[str]) -> None:
    k.emit("ptx_arrive(t);")


def jump(k: Kernel, spelling: str, operands: list[str]) -> None:
    k.emit(f"goto {operands[0].removeprefix('$')};")


def end(k: Kernel, spelling: str, operands: list[str]) -> None:
    k.emit("t.pc = PTX_ENDED;\nreturn;")


def trap(k: Kernel, spelling: str, operands: list[str]) -> None:
    k.emit(f'ptx_fail({k.line}, "a trap");')


def barrier(k: Kernel, spelling: str, operands: list[str]) -> None:
    if operands != ["0"]:
        raise k.wrong(f"{spelling} {operands}")
    k.meet("BARRIER", spelling, [])


def warp_barrier(k: Kernel, spelling: str, operands: list[str]) -> None:
    k.meet("WARP", spelling, [k.value(operands[0], "u32")])


def shuffle(k: Kernel, spelling: str, operands: list[str]) -> None:
    """Translate shfl: value, lane, clamp and segment, mask."""
    to, _, valid = operands[0].partition("|")
    *given, mask = (k.value(x, "u32") for x in operands[1:])
    k.meet("SHFL_" + spelling.split(".")[2].upper(), spelling, [mask, *given])
    k.put(to, "u32", "t.out[0]")
    if valid:
        k.put(valid, "pred", "t.out[1] != 0")


def vote(k: Kernel, spelling: str, operands: list[str]) -> None:
    to, yes, mask = operands
    how = spelling.split(".")[2]
    given = [k.value(mask, "u32"), f"(uint32_t){k.value(yes, 'pred')}"]
    k.meet("VOTE_" + how.upper(), spelling, given)
    k.put(to, *(("u32", "t.out[0]") if how == "ballot" else ("pred", "t.out[0] != 0")))


def load_matrices(k: Kernel, spelling: str, operands: list[str]) -> None:
    kind = "LOAD_TURNED" if ".trans." in spelling else "LOAD_MATRICES"
    k.meet(kind, spelling, [f"(uint32_t)({k.address(operands[1])})"])
    for i, register in enumerate(listed(operands[0])):
        k.put(register, "u32", f"t.out[{i}]")


def multiply(k: Kernel, spelling: str, operands: list[str]) -> None:
    """Translate mma: four registers of A, two of B, four floats of C."""
    to, *factors = map(listed, operands)
    if [len(x) for x in (to, *factors)] != [4, 4, 2, 4]:
        raise k.wrong(f"{spelling} {operands}")
    given = [k.value(x, "u32") for x in sum(factors, [])]
    k.meet("MULTIPLY_BF16" if "bf16" in spelling else "MULTIPLY_F16", spelling, given)
    for i, register in enumerate(to):
        k.put(register, "f32", f"as<float>(t.out[{i}])")


def fence(k: Kernel, spelling: str, operands: list[str]) -> None:
    k.emit("ptx_fence(t);")


# ---- products of a warpgroup


def registers_of(k: Kernel, registers: list[str], name: str) -> str:
    """Emit a table of the numbers of registers of one kind, and the thread's pointer to that kind.
    Return the table's name."""
    found = [re.fullmatch(r"%([A-Za-z]+)(\d+)", x) for x in registers]
    letters = {x and x[1] for x in found}
    if (
        len(letters) > 1
        or None in letters
        or len({*registers}) < len(registers)
        or C_TYPES[k.type_of(registers[0])] not in ("float", "uint32_t")
    ):
        raise k.wrong(f"registers {registers} of a product")
    table = f"{name}{len(k.sites)}"
    numbers = ", ".join(x[2] for x in found)
    k.products.append(f"const uint16_t {table}[] = {{{numbers}}};\n")
    k.emit(f"t.{name} = (char *)t.{letters.pop()};")
    return table


def multiply_async(k: Kernel, spelling: str, operands: list[str]) -> None:
    """Translate wgmma.mma_async: A is a descriptor or four registers, B a descriptor."""
    columns = int(re.search(r"m64n(\d+)k16", spelling)[1])
    d, a, b, add, *ones = operands
    held = a.startswith("{")
    turned = ones[2:]
    if (
        columns % 8
        or not 8 <= columns <= 256
        or len(listed(d)) != columns // 2
        or (held and len(listed(a)) != 4)
        or ones[:2] != ["1", "1"]
        or len(turned) != 2 - held
        or not {*turned} <= {"0", "1"}
    ):
        raise k.wrong(f"{spelling} {operands}")
    d_table = registers_of(k, listed(d), "d")
    a_table = registers_of(k, listed(a), "a") if held else "nullptr"
    product = f"product{len(k.sites)}"
    k.products.append(
        f"const ptx_product {product} = {{{columns}, {str('bf16' in spelling).lower()}, "
        f"{turned[0] if not held else 0}, {turned[-1]}, {d_table}, {a_table}}};\n"
    )
    first = (
        [k.value(x, "u32") for x in listed(a)]
        if held
        else [f"(uint32_t)({k.value(a, 'u64')} >> {at})" for at in (0, 32)] + ["0", "0"]
    )
    second = [f"(uint32_t)({k.value(b, 'u64')} >> {at})" for at in (0, 32)]
    given = [*first, *second, f"(uint32_t){k.value(add, 'pred')}"]
    k.meet("PRODUCT", spelling, given, f"&{product}")


def product_step(k: Kernel, spelling: str, operands: list[str]) -> None:
    """Translate wgmma.fence, commit_group and wait_group."""
    kind = spelling.split(".")[1].upper()
    if len(operands) != (kind == "WAIT_GROUP") or not all(map(str.isdigit, operands)):
        raise k.wrong(f"{spelling} {operands}")
    k.meet(kind, spelling, [f"{x}u" for x in operands])


Translate = Callable[[Kernel, str, list[str]], None]
_HALF = "m16n8k16.row.col.f32"
# Spelling, its function, whether the lanes of a warp meet there
SPECIAL: tuple[tuple[str, Translate, bool], ...] = (
    ("mov.(b16|b32|b64|u16|u32|u64|f32|f64|pred)", move, False),
    ("ld.param.(v2.)?(u32|s32|u64|f32|f64)", memory, False),
    ("(ld|st).global.((v4.)?u16|s32|u64|f64|(v[24].)?(u32|f32))", memory, False),
    ("(ld|st).shared.(b32|u64|f64|(v[24].)?(u32|b32|f32))", memory, False),
    ("(ld|st).local.(v[24].)?u32", memory, False),
    ("atom.(shared|global).add.(u32|u64)", atomic, False),
    ("cp.async.c[ag].shared.global", copy, False),
    ("cp.async.wait_all", wait, False),
    ("bra(.uni)?", jump, False),
    ("ret", end, False),
    ("trap", trap, False),
    ("bar.sync", barrier, True),
    ("bar.warp.sync", warp_barrier, True),
    ("shfl.sync.(bfly|idx|up).b32", shuffle, True),
    ("vote.sync.(ballot.b32|any.pred)", vote, True),
    ("ldmatrix.sync.aligned.m8n8.x4.(trans.)?shared.b16", load_matrices, True),
    (f"mma.sync.aligned.{_HALF}.(f16.f16|bf16.bf16).f32", multiply, True),
    ("fence.proxy.async(.shared::cta)?", fence, False),
    ("wgmma.(fence|commit_group|wait_group).sync.aligned", product_step, True),
    (
        r"wgmma.mma_async.sync.aligned.m64n\d+k16.f32.(f16.f16|bf16.bf16)",
        multiply_async,
        True,
    ),
)


# ---- a file


class Line(NamedTuple):
    number: int
    text: str


def pieces(line: str) -> list[str]:
    """Return the statements of a line: a brace that begins one stands alone."""
    found = re.findall(r"\s*([{}]|[^;]+;?)", line)
    return [x.strip() for x in found if x.strip()]


def lines_of(text: str) -> list[Line]:
    """Return lines without comments, and names without nvcc's numbers of files."""
    text = re.sub(
        r"(_GLOBAL__N__)\w{8}(_\d+_\w+?_cu_)\w{8}", r"\g<1>00000000\g<2>00000000", text
    )
    found: list[Line] = []
    started = ""
    for n, line in enumerate(text.split("\n"), 1):
        for piece in pieces(" ".join(re.sub(r"//.*", "", line).split())):
            started = f"{started} {piece}".strip()
            if not re.fullmatch(
                r"[a-z@][^;]*", started
            ):  # else it goes on in the next line
                found.append(Line(n, started))
                started = ""
    return [*found, Line(n, started)] if started else found


def kernel_of(lines: list[Line], shared: dict[str, tuple[int, int]]) -> Kernel:
    """Translate one kernel, from its .entry to its closing brace."""
    name = re.fullmatch(r"\.entry (\w+)\(", lines[0].text)
    k = Kernel(name[1] if name else "?", shared)
    inside = False
    for k.line, text in lines:
        if inside and (text != "}" or k.scopes):
            if not text.endswith((";", ":", "{", "}")):
                raise k.wrong(f"statement {text!r}")
            k.statement(text.removesuffix(";").strip())
        elif text.startswith(".param "):
            k.param(text.removesuffix(","))
        elif found := re.fullmatch(r"\.maxntid (\d+)(?:, 1, 1)?", text):
            k.most = int(found[1])
        elif text == "{":
            inside = True
            declared = [x for x in lines if x.text.startswith(".shared ")]
            for x in declared:
                k.declare(x.text.removesuffix(";"))
            k.lay_out("\n".join(x.text for x in lines if x not in declared))
        elif not re.fullmatch(r"\.entry .*|\)|\}|\.minnctapersm \d+", text):
            raise k.wrong(f"directive {text!r}")
    return k


def kernels_of(text: str) -> list[Kernel]:
    """Translate all kernels of a file."""
    found, shared, lines = [], {}, lines_of(text)
    starts = [i for i, line in enumerate(lines) if ".entry " in line.text]
    for line in lines[: starts[0] if starts else len(lines)]:
        if one := re.fullmatch(
            r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];", line.text
        ):
            shared[one[2]] = int(one[1]), int(one[3])
        elif not re.match(
            r"\.(version|target|address_size|extern \.shared) ", line.text
        ):
            raise Unknown(f"directive {line.text!r} (line {line.number})")
    for start, end_ in pairwise([*starts, len(lines)]):
        found.append(kernel_of(lines[start:end_], shared))
    return found


def spellings_of(text: str) -> set[str]:
    """Return the spellings of all instructions in PTX."""
    words = (
        re.sub(r"^@!?%?\w+\s+", "", line.text).split()[0] for line in lines_of(text)
    )
    return {x.removesuffix(";") for x in words if re.fullmatch(r"[a-z][\w.:]*;?", x)}


def translated(text: str, name: str) -> str:
    """Return the C++ of a file of PTX."""
    kernels = kernels_of(text)
    head = f'#include "ptx.h"\n/* from {name}.cu, by nvcc and ptx.py */\n'
    if not kernels:
        return head
    rows = ",\n".join(k.entry(i) for i, k in enumerate(kernels))
    return (
        f"{head}namespace {{\n{''.join(k.cpp(i) for i, k in enumerate(kernels))}"
        f"const ptx_kernel table[] = {{\n{rows}\n}};\n"
        f"const bool known = ptx_know(table, {len(kernels)});\n}}\n"
    )


def listing(folders: list[Path]) -> str:
    """Return a line for each instruction, with the names of folders where a file has it."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        files = (path.read_text() for path in sorted(folder.glob("kept/*.ptx")))
        for spelling in set().union(*map(spellings_of, files)):
            found.setdefault(spelling, []).append(folder.name)
    return "".join(f"{x} {' '.join(found[x])}\n" for x in sorted(found))


def main(source: str, out: str) -> None:
    to = Path(out)
    try:
        cpp = translated(Path(source).read_text(), Path(source).stem)
    except Unknown as error:
        sys.exit(f"{source}: {error}")
    if not to.exists() or to.read_text() != cpp:
        to.write_text(cpp)


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(listing([Path(name) for name in sys.argv[2:]]), end="")
    else:
        main(*sys.argv[1:])
