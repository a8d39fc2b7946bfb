"""checkpoint.py -- lists, verifies and compares checkpoints of out/train.

checkpoint.py list DIR       a line for each checkpoint in DIR of --checkpoints DIR
checkpoint.py verify DIR     checks every checksum of every tensor; DIR/step-00001000: only that one
checkpoint.py diff A B       compares two checkpoints: their run.json and their elements

Exit codes: 0 all is whole, or equal; 1 something is missing, damaged or different; 2 an argument is
wrong, or its file cannot be read; 3 stdout cannot be written.

Invariants
 1. Files are not trusted: a size is checked before it is used, and an error is a line that names
    the file.
 2. Nothing is written.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import math
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from zg.commandline import Parser
from zg.output import naming, why

# Most bytes of a header or of run.json, as in zr_safetensors.h.
HEADER_MAX = 100_000_000
DIMS = 8
# Type of an element's bits.
TYPES = {"F32": "<u4", "BF16": "<u2", "F16": "<u2"}
STEP = re.compile(r"step-(\d{8,10})")
CHUNK = 1 << 15  # elements at a time: intermediate results stay in the cache
PROGRESS_S = 10
STDOUT = "standard output"
# Errors that are no fault of the command line.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

Bits = NDArray[Any]
Run = dict[str, Any]


class Bad(Exception):
    """An error of a file, which its text names."""


def printable(text: object) -> str:
    """Return text with control codes, and letters that the terminal lacks, replaced. Names may come
    from untrusted files."""
    kept = "".join(c if c.isprintable() else "?" for c in str(text))
    letters = getattr(sys.stdout, "encoding", None) or "ascii"
    return kept.encode(letters, "replace").decode(letters)


def tell(text: str, end: str = "\n") -> None:
    """Write to stdout and flush."""
    with naming(STDOUT):
        print(text, end=end, flush=True)


def say(text: str) -> None:
    with naming(STDOUT):
        print(printable(text))


# ---- files


def size_of(path: Path) -> int:
    """Return the size of a regular file."""
    try:
        found = path.stat()
    except OSError as e:
        raise Bad(f"{path}: {why(e)}") from None
    if not stat.S_ISREG(found.st_mode):
        raise Bad(f"{path}: not a regular file")
    return found.st_size


def part(path: Path, at: int, n: int) -> bytes:
    """Return n bytes of a file from `at` on."""
    try:
        with open(path, "rb") as file:
            file.seek(at)
            found = file.read(n)
    except OSError as e:
        raise Bad(f"{path}: {why(e)}") from None
    if len(found) < n:
        raise Bad(f"{path}: the file has become shorter")
    return found


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a duplicate key in an object")
    return found


def parsed(text: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise Bad(f"{what}: not JSON: {e}") from None
    if not isinstance(found, dict):
        raise Bad(f"{what}: not a JSON object")
    return found


def is_count(x: object) -> bool:
    return type(x) is int and 0 <= x < 2**63


def is_text(x: object) -> TypeGuard[str]:
    return isinstance(x, str)


def is_lines(x: object) -> bool:
    return isinstance(x, list) and all(map(is_text, x))


def is_numbers(x: object) -> bool:
    return isinstance(x, dict) and all(is_count(n) or is_text(n) for n in x.values())


def is_sums(x: object) -> bool:
    """Return whether x is {STATE: {TENSOR: 16 hex digits}}, with states that can be file names."""
    return isinstance(x, dict) and all(
        re.fullmatch("[a-z_]{1,40}", state)
        and isinstance(sums, dict)
        and all(
            isinstance(s, str) and re.fullmatch("[0-9a-f]{16}", s)
            for s in sums.values()
        )
        for state, sums in x.items()
    )


FIELDS: Mapping[str, Callable[[object], bool]] = {
    "steps": is_count,
    "skipped": is_count,
    "skips": is_count,
    "data": is_text,
    "recipe": is_lines,
    "control": is_numbers,
    "sums": is_sums,
}
SEAL = len(b'"checksum": "0123456789abcdef"}\n')


def seal(text: bytes) -> bytes:
    """Return the end of run.json: the checksum of the text before it."""
    total = sum(
        mixture(np.frombuffer(text[at : at + CHUNK], np.uint8), at)
        for at in range(0, len(text), CHUNK)
    )
    return b'"checksum": "%016x"}\n' % (total % 2**64)


def read_run(folder: Path) -> Run:
    """Return the content of a checkpoint's run.json.

    Raises Bad if it is malformed or damaged.
    """
    path = folder / "run.json"
    size = size_of(path)
    if size > HEADER_MAX:
        raise Bad(f"{path}: {size} bytes are not a record of a run")
    text = part(path, 0, size)
    found = parsed(text, str(path))
    if found.get("format") != 1:
        raise Bad(f"{path}: its format is not 1, the only supported one")
    for field, is_good in FIELDS.items():
        if not is_good(found.get(field)):
            raise Bad(f"{path}: {field}: is missing or invalid")
    if step_of(folder) not in (-1, found["steps"]):
        raise Bad(f"{path}: is a checkpoint of step {found['steps']}")
    if text[-SEAL:] != seal(text[:-SEAL]):
        raise Bad(f"{path}: is damaged: its checksum is wrong")
    return found


@dataclass(frozen=True)
class Tensor:
    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int  # offset in the file

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * np.dtype(TYPES[self.dtype]).itemsize

    def chunks(self) -> Iterator[Bits]:
        """Yield all elements. A chunk is valid until the next one."""
        room = np.empty(min(CHUNK, self.elements), TYPES[self.dtype])
        try:
            with open(self.path, "rb") as file:
                file.seek(self.at)
                for at in range(0, self.elements, CHUNK):
                    bits = room[: self.elements - at]
                    if file.readinto(bits.data) < bits.nbytes:
                        raise Bad(f"{self.path}: the file has become shorter")
                    yield bits
        except OSError as e:
            raise Bad(f"{self.path}: {why(e)}") from None


def is_counts(x: object, most: int) -> TypeGuard[list[int]]:
    return isinstance(x, list) and len(x) <= most and all(map(is_count, x))


def entry(path: Path, name: str, given: object, start: int) -> Tensor:
    """Return a tensor of a header. start: offset of the data."""
    where = f"{path}: tensor {name}"
    keys = ("dtype", "shape", "data_offsets")
    if not isinstance(given, dict):
        raise Bad(f"{where}: not a JSON object")
    dtype, shape, place = map(given.get, keys)
    if not is_text(dtype) or dtype not in TYPES:
        raise Bad(f"{where}: dtype: allowed: {', '.join(TYPES)}")
    if not is_counts(shape, DIMS):
        raise Bad(f"{where}: shape: not a list of at most {DIMS} sizes")
    if not is_counts(place, 2) or len(place) != 2:
        raise Bad(f"{where}: data_offsets: not [begin, end]")
    begin, end = place
    found = Tensor(path, name, dtype, tuple(shape), start + begin)
    if found.bytes != end - begin:
        raise Bad(f"{where}: {end - begin} bytes of data do not make {dtype} {shape}")
    return found


def read_state(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, in file order. They must fill it without
    gaps."""
    size = size_of(path)
    if size < 8:
        raise Bad(f"{path}: {size} bytes are not a safetensors file")
    header = int.from_bytes(part(path, 0, 8), "little")
    start = 8 + header
    if not 2 <= header <= HEADER_MAX:
        raise Bad(f"{path}: not a safetensors file (a header of {header} bytes)")
    if start > size:
        raise Bad(f"{path}: truncated: a header of {header} bytes in a file of {size}")
    found = parsed(part(path, 8, header), f"{path}: header")
    found.pop("__metadata__", None)
    tensors = [entry(path, name, x, start) for name, x in found.items()]
    tensors.sort(key=lambda t: (t.at, t.bytes))
    at = start
    for tensor in tensors:
        if tensor.at != at:
            raise Bad(
                f"{path}: tensor {tensor.name}: its data does not follow the previous "
                f"tensor's"
            )
        at += tensor.bytes
    if at != size:
        raise Bad(
            f"{path}: the header describes {at - start} bytes of data, but the file "
            f"has {size - start}{' (truncated?)' if at > size else ''}"
        )
    return {tensor.name: tensor for tensor in tensors}


# ---- a checkpoint

State = dict[str, Tensor]


def states(folder: Path, run: Run) -> Iterator[tuple[str, State | str]]:
    """Yield each state with its tensors, or with the error of its file."""
    for state, sums in run["sums"].items():
        path = folder / f"{state}.safetensors"
        try:
            found = read_state(path)
            for name in sorted(found.keys() ^ sums.keys()):
                where = "run.json" if name in found else path.name
                raise Bad(f"{path}: tensor {name} is not in {where}")
        except Bad as e:
            yield state, str(e)
        else:
            yield state, found


def step_of(folder: Path) -> int:
    """Return the step in a checkpoint's name, -1 if it is no checkpoint's."""
    found = STEP.fullmatch(folder.absolute().name)
    return int(found[1]) if found else -1


def inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda p: (step_of(p), p.name))
    except OSError as e:
        raise Bad(f"{folder}: {why(e)}") from None


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, sorted by step."""
    found = [path for path in inside(folder) if step_of(path) >= 0]
    if not found:
        raise Bad(f"{folder}: has no checkpoint (a folder step-00001000)")
    return found


def bytes_of(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in inside(folder)
        if path.suffix == ".safetensors" or path.name == "run.json"
    )


# ---- list


def tokens(run: Run) -> str:
    """Return the number of tokens trained on, by the recipe; "-" if it is unknown."""
    lines = dict(line.partition(": ")[::2] for line in run["recipe"])
    sizes = [lines.get(f"train.{x}", "") for x in ("global_batch", "sequence")]
    if not all(re.fullmatch("[0-9]{1,18}", size) for size in sizes):
        return "-"
    return str(run["steps"] * math.prod(map(int, sizes)))


def row(folder: Path) -> tuple[str, str]:
    """Return the tokens and the error of a checkpoint, "" if it is whole."""
    try:
        run = read_run(folder)
        wrong = [x for _, x in states(folder, run) if isinstance(x, str)]
        return tokens(run), "; ".join(wrong)
    except Bad as e:
        return "-", str(e)


def is_locked(folder: Path) -> bool:
    """Return whether a run is writing to the folder."""
    try:
        with open(folder / ".lock", "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def show(folder: Path) -> int:
    found = checkpoints(folder)
    whole = [path for path in found if (path / "run.json").exists()]
    form = "{:>10} {:>16} {:>16}  {:<20}  {}"
    say(form.format("step", "tokens", "bytes", "written", "state"))
    bad = 0
    for path in found:
        took, wrong = row(path)
        seconds = path.stat().st_mtime
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
        told = wrong.replace(f"{path}/", "") or "whole"
        if path in whole[-1:]:
            told += "; --resume auto takes it"
        step, size = step_of(path), bytes_of(path)
        say(form.format(step, took, size, when, told))
        bad |= bool(wrong)
    why = "a run is writing here" if is_locked(folder) else "the next run removes it"
    for path in inside(folder):
        name = path.name
        if name.startswith(".step-"):
            say(f"{name}: unfinished, or being removed; {why}")
        if name.startswith(".room-"):
            say(f"{name}: space reserved for another checkpoint; {why}")
    return bad


# ---- verify: the checksum of zr_sum.h

FIRST, SECOND = 0x9E3779B97F4A7C15, np.uint64(0xBF58476D1CE4E5B9)
KEYS = np.arange(1, CHUNK + 1, dtype=np.uint64) * np.uint64(FIRST)
ROOM = np.empty((2, CHUNK), np.uint64)


def mixture(bits: Bits, at: int) -> int:
    """Return the checksum of elements whose first index is `at`."""
    n = len(bits)
    x, y = ROOM[:, :n]
    np.add(KEYS[:n], np.uint64(at * FIRST % 2**64), out=x)
    x ^= bits
    x ^= np.right_shift(x, np.uint64(31), out=y)
    x *= SECOND
    x ^= np.right_shift(x, np.uint64(29), out=y)
    return int(x.sum())


class Progress:
    """Reports progress on stderr from time to time."""

    def __init__(self, what: str, size: int) -> None:
        self.what, self.size, self.done = what, size, 0
        self.said = time.monotonic()

    def add(self, n: int) -> None:
        self.done += n
        if time.monotonic() >= self.said + PROGRESS_S:
            self.said = time.monotonic()
            told = f"{self.what}: {self.done} of {self.size} bytes"
            print(told, file=sys.stderr)


def checksum(tensor: Tensor, progress: Progress) -> str:
    total = at = 0
    for bits in tensor.chunks():
        total += mixture(bits, at)
        at += len(bits)
        progress.add(bits.nbytes)
    return f"{total % 2**64:016x}"


def damages(folder: Path, run: Run, progress: Progress) -> Iterator[str]:
    for state, found in states(folder, run):
        if isinstance(found, str):
            yield found
            continue
        for name, tensor in found.items():
            wanted = run["sums"][state][name]
            try:
                sum_ = checksum(tensor, progress)
            except Bad as e:
                yield str(e)
                break
            if sum_ != wanted:
                yield (
                    f"{tensor.path}: tensor {name} is damaged: its checksum is "
                    f"{sum_}, but run.json has {wanted}"
                )


def verify(folder: Path) -> int:
    one = step_of(folder) >= 0 or (folder / "run.json").exists()
    found = [folder] if one else checkpoints(folder)
    progress = Progress("verify", sum(map(bytes_of, found)))
    bad = 0
    for path in found:
        try:
            run = read_run(path)
            wrong = list(damages(path, run, progress))
        except Bad as e:
            wrong = [str(e)]
        for line in wrong:
            say(line)
        if not wrong:
            n = sum(map(len, run["sums"].values()))
            say(f"{path}: the checksums of all {n} tensors are right")
        bad |= bool(wrong)
    return bad


# ---- diff


def value(tensor: Tensor, bits: Any) -> str:
    """Return an element as a number and as its bits."""
    if tensor.dtype == "BF16":
        number = (np.uint32(bits) << np.uint32(16)).view(np.float32)
    else:
        number = bits.view({2: np.float16, 4: np.float32}[bits.itemsize])
    return f"{number!s} (0x{bits:0{2 * bits.itemsize}x})"


def place(tensor: Tensor, at: int) -> str:
    return f"[{', '.join(map(str, np.unravel_index(at, tensor.shape)))}]"


def tensor_difference(a: Tensor, b: Tensor) -> str:
    """Return how two tensors differ, "" if they are equal."""
    old = f"{a.dtype} {list(a.shape)}"
    new = f"{b.dtype} {list(b.shape)}"
    if old != new:
        return f": {old} -> {new}"
    first, count, at = "", 0, 0
    for x, y in zip(a.chunks(), b.chunks(), strict=True):
        other = np.flatnonzero(x != y)
        if len(other) and not count:
            i = other[0]
            where = place(a, at + i)
            old = value(a, x[i])
            new = value(b, y[i])
            first = f"{where}: {old} -> {new}"
        count += len(other)
        at += len(x)
    return f"{first}; {count} of {at} elements differ" if count else ""


def state_difference(a: State, b: State) -> str:
    """Return the first difference of two states and the number of different tensors, "" if
    equal."""
    told = []
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            told.append(f"{name}: only in {'A' if name in a else 'B'}")
        elif other := tensor_difference(a[name], b[name]):
            told.append(name + other)
    n = len({**a, **b})
    return f"{told[0]}; {len(told)} of {n} tensors differ" if told else ""


def told_by(run: Run) -> dict[str, str]:
    """Return the lines of run.json that two checkpoints of one run share."""
    found = {line.partition(": ")[0]: line for line in run["recipe"]}
    for key in ("data", "steps", "skipped", "skips"):
        found[key] = f"{key}: {run[key]}"
    for key, n in run["control"].items():
        found[f"control.{key}"] = f"control.{key}: {n}"
    return found


def whole(folder: Path, run: Run) -> dict[str, State]:
    found = {}
    for name, state in states(folder, run):
        if isinstance(state, str):
            raise Bad(state)
        found[name] = state
    return found


def diff(one: Path, other: Path) -> int:
    folders = (one, other)
    runs = [read_run(folder) for folder in folders]
    a, b = map(told_by, runs)
    bad = 0
    for key in dict.fromkeys((*a, *b)):
        if a.get(key) != b.get(key):
            bad = 1
            say(f"A  {a.get(key, f'{key}: none')}")
            say(f"B  {b.get(key, f'{key}: none')}")
    c, d = map(whole, folders, runs)
    for name in dict.fromkeys((*c, *d)):
        if told := state_difference(c.get(name, {}), d.get(name, {})):
            bad = 1
            say(f"{name}: {told}")
    if not bad:
        say(f"equal: {', '.join(c)}, and the data in run.json")
    return bad


# ---- the command


def arguments(words: Sequence[str]) -> argparse.Namespace:
    head = __doc__.partition("\n\nInvariants")[0].partition("-- ")[2]
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="run checkpoint", description=head, formatter_class=form)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, of in (
        ("list", ["DIR"]),
        ("verify", ["DIR"]),
        ("diff", ["A", "B"]),
    ):
        one = verbs.add_parser(verb)
        for name in of:
            one.add_argument(name, type=Path)
    return parser.parse_args(words)


VERBS: Mapping[str, Callable[..., int]] = {
    "list": show,
    "verify": verify,
    "diff": diff,
}


def code_of(prog: str, verb: Callable[..., int], *given: object) -> int:
    """Return the exit code of a verb. Errors go to stderr."""
    try:
        code = verb(*given)
        with naming(STDOUT):
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except Bad as e:
        code, told = 2, str(e)
    except OSError as e:
        code = 3 if e.errno in DISK else 2
        told = why(e) if e.filename is None else f"{e.filename}: {why(e)}"
        if e.filename == STDOUT:
            # Prevents Python's flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    print(printable(f"{prog}: {told}"), file=sys.stderr)
    return code


def main(words: Sequence[str]) -> int:
    args = vars(arguments(words))
    verb = VERBS[args.pop("verb")]
    return code_of("run checkpoint", verb, *args.values())


def command(main: Callable[[Sequence[str]], int]) -> None:
    """Run a command that ends silently if its reader goes away or it is interrupted."""
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    command(main)
