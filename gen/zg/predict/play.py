"""play.py -- plays a plan's queues on a device: when each command of a training step begins and
ends.

Commands run in order of issue. Each begins when its queue is free and all events that it waits for
are recorded. Commands that run at the same time share a device: threads share a CPU's cores,
kernels of two queues a GPU, and a collective takes some of its SMs.

A GPU plays a section as a graph, one after the other, unless the optimizer lies on the host. A
CPU's main queue is the thread that issues all commands, so a command of another queue is issued
only after the commands of main before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..facts.commands import COLLECTIVES
from ..facts.queues import QUEUES
from ..plan.plan import Event, Plan, Section, Step
from . import cost
from .seconds import Clock

# Micro-batches and steps that are played at first, and at most. More are played until the last two
# take the same time, within SAME, and no queue falls further behind.
TURNS, MOST_TURNS = 3, 48
STEPS, MOST_STEPS = 2, 32
SAME = 0.01


@dataclass(frozen=True)
class Bar:
    """A command in one turn of a section, with its start and end in seconds. cause: the bar whose
    end it waits for after its queue is free, if any. far: ranks of several hosts meet in it."""

    section: str
    turn: int
    step: Step
    begin: float
    end: float
    cause: Bar | None = field(compare=False, repr=False)
    far: bool = False


@dataclass(frozen=True)
class Played:
    """A training step that another one precedes. bars: its commands in order of issue; begin, end:
    the end of queue main's work in the step before, and in this one; more: micro-batches that are
    not played, each of which takes as long as the last one that is; last: number of that one;
    period: its seconds."""

    bars: tuple[Bar, ...]
    begin: float
    end: float
    more: int
    last: int
    period: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin + self.more * self.period

    def times(self, bar: Bar) -> int:
        """Return how often a bar occurs in a step, counting micro-batches that are not played."""
        last = bar.section == "micro_batch" and bar.turn == self.last
        return 1 + self.more * last


@dataclass
class _Job:
    """A command to play. after: jobs that it waits for; left: seconds of work that remain."""

    section: str
    turn: int
    step: Step
    after: tuple[int, ...]
    left: float
    begin: float = -1.0
    end: float = -1.0


@dataclass
class _Issue:
    """Jobs in order of issue, with the last job of each queue and of each event."""

    p: Plan
    clock: Clock
    jobs: list[_Job] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    done: dict[Event, int | None] = field(default_factory=dict)

    def turn(self, section: Section, turn: int) -> None:
        cpu = self.clock.device.target == "cpu"
        graph = not cpu and not self.p.offload
        before = tuple(self.last.values()) if graph else ()
        for step in section.steps:
            waits = [self.done.get(e) for e in step.waits]
            after = {n for n in waits if n is not None} | {*before}
            if cpu and "main" in self.last:
                after.add(self.last["main"])
            seconds = 0.0 if step.op == "mark" else self.clock.seconds(step)
            self.jobs.append(_Job(section.name, turn, step, tuple(after), seconds))
            self.last[step.queue] = len(self.jobs) - 1
            self.done |= dict.fromkeys(step.recs, len(self.jobs) - 1)


def _play(clock: Clock, jobs: Sequence[_Job]) -> None:
    """Set the begin and end of each job."""
    ahead: dict[str, deque[int]] = {}
    for n, job in enumerate(jobs):
        ahead.setdefault(job.step.queue, deque()).append(n)
    running: dict[str, _Job] = {}
    now = 0.0
    while True:
        started = True
        while started:
            started = False
            for queue in [q for q in ahead if q not in running]:
                job = jobs[ahead[queue][0]]
                if any(jobs[n].end < 0 for n in job.after):
                    continue
                ahead[queue].popleft()
                if not ahead[queue]:
                    del ahead[queue]
                job.begin, started = now, True
                if job.left > 0:
                    running[queue] = job
                else:
                    job.end = now
        if not running:
            assert not ahead, "no command can begin: the checker proves that one can"
            return
        slower = _slower(clock, running)
        passed = min(job.left * slower[q] for q, job in running.items())
        now += passed
        for queue, job in [*running.items()]:
            job.left -= passed / slower[queue]
            if job.left <= 1e-12:
                job.end = now
                del running[queue]


def _slower(clock: Clock, running: dict[str, _Job]) -> dict[str, float]:
    """Return by which factor each running command takes longer than alone."""
    if clock.device.target == "cpu":
        threads = {q: clock.demand(job.step) for q, job in running.items()}
        factor = max(1.0, sum(threads.values()) / clock.cores)
        return {q: factor if threads[q] else 1.0 for q in running}
    taken = max(clock.takes(job.step) for job in running.values())
    kernels = [
        q
        for q, job in running.items()
        if QUEUES[q].kernels
        and QUEUES[q].reads == "device"
        and job.step.op not in COLLECTIVES
    ]
    factor = len(kernels) / (1 - taken)
    return {q: factor if q in kernels else 1.0 for q in running}


def _bars(p: Plan, jobs: Sequence[_Job]) -> list[Bar]:
    """Return the jobs that do something as bars."""
    bars: list[Bar] = []
    at: dict[int, Bar | None] = {}  # its bar, or the bar that a mark waited for
    # of each queue: its end, and its last bar
    free: dict[str, tuple[float, Bar | None]] = {}
    for n, job in enumerate(jobs):
        end, mine = free.get(job.step.queue, (0.0, None))
        latest = max(job.after, key=lambda m: jobs[m].end, default=None)
        waited = latest is not None and jobs[latest].end > end
        cause = at[latest] if waited and latest is not None else None
        if job.step.op == "mark":
            at[n] = cause if waited else mine
        else:
            far = job.step.op in COLLECTIVES and cost.far(p, job.step.group) > 0
            bars.append(
                Bar(job.section, job.turn, job.step, job.begin, job.end, cause, far)
            )
            at[n] = bars[-1]
        free[job.step.queue] = job.end, at[n]
    return bars


def played(clock: Clock, turns: int, steps: int = 1) -> list[list[Bar]]:
    """Return the bars of some training steps that follow each other, of each at most `turns`
    micro-batches."""
    issue = _Issue(clock.p, clock)
    ends = []
    for _ in range(steps):
        for section in clock.p.step:
            for turn in range(min(section.repeat, turns)):
                issue.turn(section, turn)
        ends.append(len(issue.jobs))
    _play(clock, issue.jobs)
    bars = _bars(clock.p, issue.jobs)
    marks = [
        sum(job.step.op != "mark" for job in issue.jobs[:end]) for end in (0, *ends)
    ]
    return [bars[a:b] for a, b in zip(marks, marks[1:], strict=False)]


Ends = dict[str, float]  # of each queue: the end of its last command


def _ends(bars: Sequence[Bar]) -> Ends:
    found: Ends = {}
    for b in bars:
        found[b.step.queue] = max(b.end, found.get(b.step.queue, 0.0))
    return found


def _settled(ends: Sequence[Ends]) -> bool:
    """Return whether the last two of some steps or micro-batches took the same time on queue main,
    and no queue fell behind main in the last one."""
    *_, first, second, third = ends
    long, before = third["main"] - second["main"], second["main"] - first["main"]
    behind = any(third[q] - second[q] > (1 + SAME) * long for q in third if q in second)
    return not behind and abs(before - long) <= SAME * long


def step(clock: Clock) -> Played:
    """Return a training step of a run that has settled, or of its first steps if that takes
    many."""
    repeat = clock.p.section("micro_batch").repeat
    turns, steps = min(TURNS, repeat), STEPS
    while True:
        found = played(clock, turns, steps)
        last = found[-1]
        by_turn = [
            _ends([b for b in last if (b.section, b.turn) == ("micro_batch", n)])
            for n in range(turns)
        ]
        if turns < min(repeat, MOST_TURNS) and not _settled(by_turn):
            turns = min(2 * turns, repeat, MOST_TURNS)
            continue
        by_step: list[Ends] = [{"main": 0.0}, *map(_ends, found)]
        if steps < MOST_STEPS and not _settled(by_step):
            steps *= 2
            continue
        more, period = repeat - turns, 0.0
        if more:
            period = by_turn[-1]["main"] - by_turn[-2]["main"]
        begin, end = (ends["main"] for ends in by_step[-2:])
        return Played(tuple(last), begin, end, more, turns - 1, period)
