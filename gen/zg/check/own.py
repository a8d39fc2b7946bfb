"""own.py -- plays the plan's own functions: each is a list of kernels with their operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..facts.kernels import HOST, KERNELS, NULL, TWINS, Formal
from ..facts.kernels import kernel as row_of
from ..plan import operand as plan
from ..plan.operand import Arg, Index, bases, elements
from ..plan.plan import Call, Fn, Ref, Step
from .operands import Array, Number, Operand, Sources
from .order import Memory, Place
from .play import Act, Action

# Types whose operands are words: spans.F, recipe, freq.N, out.
WORDS = ("span", "recipe", "f64", "u64")
# A kernel's name, its arguments, and operand index -> the largest number it was launched for.
Called = tuple[str, tuple[Arg, ...], dict[int, int]]


@dataclass
class Own:
    """Plays calls of the plan's own functions. kernels: methods by the name of their kernel in
    zk.h."""

    m: Memory
    kernels: Mapping[str, Act]
    called: dict[str, list[Called]] = field(default_factory=dict)

    def calling(
        self,
        fn: Fn,
        s: Step,
        numbers: dict[str, int],
    ) -> Action:
        """Prepare one of the plan's own functions: its calls in order, with their operands."""
        if fn.name not in self.called:
            self.called[fn.name] = self.calls_of(fn)
        if any(c.kernel.startswith(HOST) != (s.queue == "host") for c in fn.calls):
            self.m.fail("the queue runs other kernels")
        refs = dict(zip((*fn.ins, *fn.outs), s.refs, strict=True))
        work = []
        for name, args, most in self.called[fn.name]:
            operands = [self.operand_of(a, refs, numbers) for a in args]
            numbers_of = [a.n if isinstance(a, Number) else 0 for a in operands]
            short = any(numbers_of[at] > n for at, n in most.items())
            # On a host, a kernel's size is its argument, not its launch.
            if short and s.queue != "host":
                self.m.fail(f"{name} is launched for fewer elements")
            work.append((self.kernels[name], operands))
        return _all, work

    def calls_of(self, fn: Fn) -> list[Called]:
        """Return a function's calls with their arguments. Every operand of the function must be
        used."""
        m = self.m
        used = set()
        out = []
        launches = {l.name: l for l in m.p.launches}
        for c in fn.calls:
            launch = launches.get(c.launch)
            if c.rounds != 1 or not launch or launch.kernel != c.kernel:
                m.fail(f"{c.kernel} is launched as another kernel")
            row = TWINS.get(c.kernel) or KERNELS.get(c.kernel)
            if not row or row.name not in self.kernels:
                m.fail(f"no function has {c.kernel}")
            used |= {b for a in c.args for b in bases(a)}
            self.fits(fn, c)
            if len(launch.shape) != len(row.shape):
                m.fail(f"{c.kernel} is launched for another shape")
            most = {
                row.at[name]: n for name, n in zip(row.shape, launch.shape, strict=True)
            }
            out.append((row.name, c.args, most))
        if not {*fn.ins, *fn.outs} <= used:
            m.fail("has operands that no call uses")
        return out

    def fits(self, fn: Fn, call: Call) -> None:
        """Require numbers, places and words where the kernel's row has them."""
        formals = row_of(call.kernel).formals
        if len(formals) != len(call.args):
            self.m.fail(f"{call.kernel} has {len(call.args)} operands")
        for f, arg in zip(formals, call.args, strict=True):
            want = "number" if f.number else "word" if f.type in WORDS else "place"
            null = f.optional and arg == NULL
            # Only calls in rounds may have by_round.
            rounds = getattr(arg, "by_round", 0)
            if not null and sort_of(arg, fn, f) != want or rounds:
                self.m.fail(f"{call.kernel}: {f.name} is {arg}, which is no {want}")

    def operand_of(
        self,
        arg: Arg,
        refs: Mapping[str, Ref],
        numbers: Mapping[str, int],
    ) -> Operand:
        """Return the operand that an argument of a call stands for in this step."""
        m = self.m
        if isinstance(arg, int):
            return Number(arg)
        if isinstance(arg, plan.Operand):
            ref = refs.get(arg.base) or Ref(arg.base, 0)
            group = m.groups[arg.group]
            return Place(m.slot(ref), ref.at + arg.at, arg.by_rank, group)
        if isinstance(arg, Index):
            more = numbers[arg.more] if arg.more else 0
            layer = arg.by_layer * numbers["l"]
            return Number(layer + arg.at + more, arg.by_rank, arg.group)
        word = str(arg)
        if names := elements(word):
            return self.array([refs[n] for n in names])
        if word == "sources":
            return Sources(m.place(refs[word]))
        number = numbers.get(word)
        return word if number is None else Number(number)

    def array(self, refs: Sequence[Ref]) -> Array:
        """Return the places of an array. C has its first: the others lie in the slots after it."""
        first = refs[0]
        for n, ref in enumerate(refs):
            if (ref.cls, ref.index, ref.at) != (first.cls, first.index + n, first.at):
                self.m.fail(f"{ref} is not {n} slots after {first}")
        return Array(tuple(map(self.m.place, refs)))


def _all(*calls: tuple[Act, list[Operand]]) -> None:
    for kernel, operands in calls:
        kernel(*operands)


def sort_of(arg: Arg, fn: Fn, f: Formal) -> str:
    """Return the kind of a call's argument: "number", "place", "word" or "none"."""
    if isinstance(arg, plan.Operand):
        return "place"
    if isinstance(arg, (int, Index)):
        return "number"
    if not isinstance(arg, str):
        return "none"
    if arg == "sources":
        return "place" if f.name == "src" else "none"
    if arg.startswith("&"):
        return "place"
    return "number" if arg in fn.ints and f.type not in WORDS else "word"
