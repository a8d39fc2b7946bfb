#!/usr/bin/env python3
"""chaos.py -- breaks off runs at arbitrary points and restarts them until they end, with the bits
of an undisturbed run.

Each life has a recipe. Each start takes another program of it (stage, ranks, offloading) and a
fault drawn from FAULTS. A run may end with its hash or in the way of its fault; then its ranks must
be gone, and every earlier checkpoint must be there. One line reports the events of a life, or an
error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

TESTS = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / "gen")]

from tests.law import test_resume  # noqa: E402
from tests.lib import law, program, trainer  # noqa: E402
from tests.lib.patience import LIMIT  # noqa: E402

STEPS = 60
# Recipes of each type and each kind of states; their ways combine all stages, ranks and offloads.
RECIPES = (
    "AdamW",
    "frozen, bf16",
    "f16, a scale that falls",
    "Adagrad",
    "shared samples",
)
DIED, ASKED, WRONG, UNSAVED = 5, 75, 2, 3  # exit codes
KILLED = -signal.SIGKILL
# Places where a process kills itself, each with the highest call that is drawn.
PLACES = {"collective": 4000, "write": 2000, "sync": 100, "rename": 60}
# Places where the disk fails from a call on, with the highest call that is drawn and the run's
# message.
DISK = {"write": 2000, "sync": 100, "rename": 60, "folder": 30}
SAYS = {
    "write": "No space left on device",
    "sync": "Input/output error",
    "rename": "Read-only file system",
    "folder": "Read-only file system",
}
STRUCK = "chaos: struck"  # printed by faults/chaos.c when the disk has failed


class Lost(AssertionError):
    """Raised for an outcome that must not happen."""


@dataclass
class Chaos:
    folder: pathlib.Path
    rnd: random.Random
    recipes: Sequence[str] = RECIPES
    recipe: str = ""  # of this life
    wanted: dict[str, str] = field(default_factory=dict)
    befell: Counter[str] = field(default_factory=Counter)

    def prepare(self) -> None:
        """Make tokens, and a library that kills."""
        trainer.write_tokens(self.folder / "tokens", law.tokens(256, 24000))
        program.chaos_library(self.folder)

    def drawn(self) -> pathlib.Path:
        """Return a program of the recipe."""
        return made(self.recipe, self.rnd.choice(test_resume.ways(self.recipe)))

    def begin(self) -> None:
        """Draw a recipe and find the hash of its undisturbed run."""
        self.recipe = self.rnd.choice(self.recipes)
        if self.recipe in self.wanted:
            return
        with self.running(made(self.recipe, test_resume.ALONE)) as run:
            out = run.communicate(timeout=LIMIT)[0]
        self.wanted[self.recipe] = self.weights(out)
        shutil.rmtree(self.checkpoints)

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.folder / "checkpoints"

    @contextlib.contextmanager
    def running(
        self, binary: pathlib.Path, **settings: object
    ) -> Iterator[subprocess.Popen[str]]:
        """Yield a run in a process group of its own. Assert that nothing is left of it."""
        command = [binary, "--data", self.folder / "tokens", "--hash"]
        command += ["--steps", STEPS, "--checkpoints", self.checkpoints]
        command += ["--save-every", self.rnd.choice([1, 1, 3, 7])]
        command += ["--keep", self.rnd.choice([1, 2, 3])]
        with subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=program.environment(**settings),
            start_new_session=True,
        ) as run:
            try:
                yield run
            finally:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)

    def newest(self) -> int:
        found = self.checkpoints.glob("step-*")
        return max((int(path.name[5:]) for path in found), default=0)

    def weights(self, out: str) -> str:
        lines = [x for x in out.splitlines() if x.startswith("weights ")]
        if len(lines) != 1:
            raise Lost(f"no hash: {out!r}")
        return lines[0]

    def wait(self, run: subprocess.Popen[str]) -> tuple[int, str, str]:
        """Wait for the end of a run and of all its ranks. Return the result."""
        out, err = run.communicate(timeout=LIMIT)
        until = time.monotonic() + LIMIT
        while alive(run.pid):
            if time.monotonic() > until:
                raise Lost(f"ranks outlive the program: {err}")
            time.sleep(0.01)
        return run.returncode, out, err

    def life(self) -> None:
        """Run a life from its beginning to an end with the hash."""
        self.begin()
        want, ended = self.wanted[self.recipe], False
        while not ended:
            before = self.newest()
            name = self.rnd.choice([*FAULTS][: None if before else -1])
            binary = self.drawn()
            code, out, err = FAULTS[name](self, binary)
            told = f"{self.recipe}, {name}, {binary}: exit code {code}\n{err}"
            ended = code == 0
            if ended and self.weights(out) != want:
                raise Lost(f"{self.weights(out)}, not {want}: {told}")
            if not ended and code not in ENDS.get(name, ()):
                raise Lost(told)
            if name != "damage" and self.newest() < before:
                raise Lost(f"{self.newest()} is newest, {before} was: {told}")
            left = [*self.checkpoints.glob(".[rs]*")]
            if ended and left:
                raise Lost(f"{left} stay: {told}")
            spared = ended and name in ENDS
            if name.startswith("bad "):
                spared = STRUCK not in err
            self.befell["none" if spared else name] += 1
        shutil.rmtree(self.checkpoints)


def made(recipe: str, way: test_resume.Way) -> pathlib.Path:
    with contextlib.redirect_stderr(io.StringIO()):  # zgen's notes
        return test_resume.program(recipe, way)


def alive(group: int) -> bool:
    """Return whether a process of the group is alive; a zombie without a parent is soon gone."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# ---- faults of a run, each returning (exit code, stdout, stderr)

Ended = tuple[int, str, str]


def at(
    what: str, places: Mapping[str, int], place: str
) -> Callable[[Chaos, pathlib.Path], Ended]:
    """Return a fault that sets KILL or FAIL at a call of a place; few calls are as likely as
    many."""

    def fault(c: Chaos, binary: pathlib.Path) -> Ended:
        n = int(places[place] ** c.rnd.random())
        library = {"LD_PRELOAD": c.folder / "chaos.so"}
        with c.running(binary, **library, **{what: f"{place}:{n}"}) as run:
            return c.wait(run)

    return fault


def bad(place: str) -> Callable[[Chaos, pathlib.Path], Ended]:
    """Return a fault of the disk that is reported while the run goes on."""
    run = at("FAIL", DISK, place)

    def fault(c: Chaos, binary: pathlib.Path) -> Ended:
        code, out, err = run(c, binary)
        if STRUCK in err and SAYS[place] not in err:
            raise Lost(f"a bad {place} is not told: exit code {code}\n{err}")
        return code, out, err

    return fault


def slow(c: Chaos, binary: pathlib.Path) -> Ended:
    """Run with a slow disk, and kill while it probably writes."""
    library = {"LD_PRELOAD": c.folder / "chaos.so"}
    with c.running(binary, **library, SLOW=c.rnd.choice([100, 3000])) as run:
        time.sleep(c.rnd.uniform(0.1, 2))
        os.killpg(run.pid, signal.SIGKILL)
        return c.wait(run)


def two(c: Chaos, binary: pathlib.Path) -> Ended:
    """Start two runs in one folder and kill one, perhaps before its turn."""
    other = c.drawn()
    with c.running(binary) as first, c.running(other) as second:
        time.sleep(c.rnd.uniform(0.01, 0.5))
        first.kill()
        c.wait(first)
        return c.wait(second)


def sent(*signals: int) -> Callable[[Chaos, pathlib.Path], Ended]:
    """Return a fault that sends signals at any time, each a while after the one before, to the
    program or one of its ranks."""

    def fault(c: Chaos, binary: pathlib.Path) -> Ended:
        with c.running(binary) as run:
            time.sleep(c.rnd.uniform(0.01, 0.5))
            one = c.rnd.choice([run.pid, *ranks(run.pid) * 2])
            for number in signals:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, number)
                time.sleep(0.2 if number == signal.SIGSTOP else 0)
            return c.wait(run)

    return fault


def ranks(pid: int) -> list[int]:
    """Return the existing ranks, which may be none yet or no more."""
    with contextlib.suppress(OSError):
        return program.children(pid)
    return []


def damage(c: Chaos, binary: pathlib.Path) -> Ended:
    """Damage the newest checkpoint, which is refused and removed by hand."""
    folder = c.checkpoints / f"step-{c.newest():08d}"
    path = c.rnd.choice(sorted(folder.glob("*.safetensors")))
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    if c.rnd.random() < 0.5:
        del data[c.rnd.randrange(len(data)) :]
    else:
        data[c.rnd.randrange(begin, len(data))] ^= 1 << c.rnd.randrange(8)
    path.write_bytes(data)
    with c.running(binary) as run:
        code, out, err = c.wait(run)
    if code != WRONG or path.name not in err:
        raise Lost(f"damage to {path} is not told: exit code {code}\n{err}")
    shutil.rmtree(folder)
    return code, out, err


# The last one needs a checkpoint.
FAULTS: dict[str, Callable[[Chaos, pathlib.Path], Ended]] = {
    "step": sent(signal.SIGKILL),
    **{place: at("KILL", PLACES, place) for place in PLACES},
    "slow disk": slow,
    "asked": sent(signal.SIGTERM),
    **{f"bad {place}": bad(place) for place in DISK},
    "stopped": sent(signal.SIGSTOP, signal.SIGCONT),
    "two runs": two,
    "damage": damage,
}
KILLS = ("step", *PLACES, "slow disk")
# Allowed ends of a run that is not complete; faults that are missing here must complete it.
ENDS = {
    **dict.fromkeys(KILLS, {KILLED, DIED}),
    # before it handles signals, and a rank's own
    "asked": {ASKED, -signal.SIGTERM, 128 + signal.SIGTERM, DIED},
    "damage": {WRONG},
    # of the last checkpoint
    **{name: {UNSAVED} for name in FAULTS if name.startswith("bad ")},
}


def kills(c: Chaos) -> int:
    return sum(c.befell[name] for name in KILLS)


def report(c: Chaos) -> str:
    each = ", ".join(f"{name} {n}" for name, n in sorted(c.befell.items()))
    return f"{kills(c)} kills, none lost: {each}"


def main(args: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="./run chaos",
        description="Runs are killed, stopped, asked to leave and their checkpoints damaged until "
        "so many kills are done; all end with the bits of an undisturbed one.",
    )
    parser.add_argument("--kills", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    chosen = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as folder:
        c = Chaos(pathlib.Path(folder), random.Random(chosen.seed))
        c.prepare()
        try:
            told, live = 0, sys.stderr.isatty()
            while kills(c) < chosen.kills:
                c.life()
                if live or kills(c) >= told + 50:
                    told = kills(c)
                    end = "\033[K\r" if live else "\n"
                    print(report(c), end=end, file=sys.stderr, flush=True)
        except Lost as e:
            print(f"after {kills(c)} kills: {e}", file=sys.stderr)
            return 1
    print(report(c))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
