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

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..facts.commands import COLLECTIVES
from ..facts.queues import QUEUES
from ..plan.plan import Event, Step
from . import cost
from .seconds import Clock

# Micro-batches and steps that are played at first, and at most. More are played until the last two
# take the same time, within SAME, and no queue falls further behind.
TURNS, MOST_TURNS = 3, 48
STEPS, MOST_STEPS = 2, 32
SAME = 0.01
REPEATED = "micro_batch"  # the section that is played several times a step


@dataclass(frozen=True)
class Bar:
    """A command in one turn of a section, with its start and end in seconds. cause: the bar of
    another queue for whose end it waits, if any; far: ranks of several hosts meet in it; path: the
    bars that follow each other up to its start while queue main waits, with the seconds of each."""

    section: str
    turn: int
    step: Step
    begin: float
    end: float
    cause: Bar | None = field(compare=False, repr=False)
    far: bool = False
    path: tuple[tuple[Bar, float], ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class Played:
    """A training step after another one. begin, end: the ends of queue main's work in both; more:
    micro-batches that are not played; last: the number of the last one that is; period: seconds
    of each that is not played."""

    begin: float
    end: float
    more: int
    last: int
    period: float
    _issue: _Issue = field(repr=False)
    _alone: _Issue | None = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.end - self.begin + self.more * self.period

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """The step's commands in order of issue."""
        return tuple(self._issue.bars()[-1])

    def counted(self) -> Iterator[tuple[Bar, int]]:
        """Yield bars, and how often each occurs in a step. A micro-batch of a step without others
        before it stands for those that are not played."""
        yield from ((b, 1) for b in self.bars)
        for b in self._alone.bars()[-1] if self._alone else ():
            if b.section == REPEATED and b.turn == self.last:
                yield b, self.more


@dataclass(frozen=True, slots=True)
class _Load:
    """Use that a command makes of the device while it runs. waits, recs: numbers of its events;
    seconds: alone; threads: of a CPU; kernel: whether it runs on a GPU's SMs as kernels; takes:
    share of the SMs that a collective takes; rests: it stands for micro-batches that are not
    played, while those that are do not go on."""

    step: Step
    waits: tuple[int, ...]
    recs: tuple[int, ...]
    seconds: float
    threads: int
    kernel: bool
    takes: float
    rests: bool = False

    @property
    def idle(self) -> bool:
        """Whether it takes no time: a mark."""
        return self.step.op == "mark" and not self.rests


def _load(clock: Clock, step: Step, number: dict[Event, int]) -> _Load:
    """Return the use of a command. number: of each event; new ones are added."""
    waits, recs = (
        tuple(number.setdefault(e, len(number)) for e in events)
        for events in (step.waits, step.recs)
    )
    row = QUEUES[step.queue]
    kernel = row.kernels and row.reads == "device" and step.op not in COLLECTIVES
    seconds = 0.0 if step.op == "mark" else clock.seconds(step)
    return _Load(
        step, waits, recs, seconds, clock.demand(step), kernel, clock.takes(step)
    )


# Of each section's commands.
_Loads = Sequence[Sequence[_Load]]


def _loads(clock: Clock) -> _Loads:
    """Return the use of each command of a training step."""
    number: dict[Event, int] = {}
    return [[_load(clock, s, number) for s in x.steps] for x in clock.p.step]


@dataclass(slots=True)
class _Job:
    """A command to play. after: jobs that it waits for, that before it in its queue among them;
    one may be there twice."""

    section: str
    turn: int
    load: _Load
    after: list[int]
    begin: float = -1.0
    end: float = -1.0


@dataclass
class _Issue:
    """Jobs of some training steps in order of issue, played. loads: of each section; rest:
    seconds of each step's micro-batches that are not played, before the last one; starts: the first
    job of each step; rests: the job of each step that stands for them; last: the last job of each
    queue; done: of each event, by its number."""

    clock: Clock
    loads: _Loads
    turns: int
    steps: int
    rest: float = 0.0
    jobs: list[_Job] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    rests: list[int] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for _ in range(self.steps):
            self.starts.append(len(self.jobs))
            for section, some in zip(self.clock.p.step, self.loads, strict=True):
                turns = min(section.repeat, self.turns)
                for turn in range(turns):
                    if self.rest and section.name == REPEATED and turn == turns - 1:
                        self._rest(turn)
                    self._turn(section.name, turn, some)
        _play(self.clock, self.jobs)

    def _turn(self, section: str, turn: int, loads: Sequence[_Load]) -> None:
        cpu = self.clock.device.target == "cpu"
        graph = not cpu and not self.clock.p.offload
        before = [*self.last.values()] if graph else []
        begun: set[str] = set()
        last, done, jobs = self.last, self.done, self.jobs
        for load in loads:
            queue = load.step.queue
            after = [done[e] for e in load.waits if e in done]
            if queue in last:
                after.append(last[queue])
            if queue not in begun:  # its later commands follow this one
                after += before
                begun.add(queue)
            if cpu and "main" in last:
                after.append(last["main"])
            last[queue] = n = len(jobs)
            jobs.append(_Job(section, turn, load, after))
            for e in load.recs:
                done[e] = n

    def _rest(self, turn: int) -> None:
        """Add the micro-batches that are not played to queue main."""
        load = _Load(Step("main", "mark", ""), (), (), self.rest, 0, False, 0.0, True)
        self.rests.append(len(self.jobs))
        self.jobs.append(_Job(REPEATED, turn, load, [self.last["main"]]))
        self.last["main"] = self.rests[-1]

    def cut(self, step: int, t: float) -> float:
        """Return a time of a step without the micro-batches that are not played."""
        if not self.rest:
            return t
        begin = self.jobs[self.rests[step]].begin
        return t if t < begin else max(begin, t - self.rest)

    def step(self, n: int) -> list[_Job]:
        """Return the jobs of a training step."""
        return self.jobs[self.starts[n] : [*self.starts, len(self.jobs)][n + 1]]

    def bars(self) -> list[list[Bar]]:
        """Return the jobs that do something as bars, by training step. The rest of a step is cut
        out of its times."""
        found: list[list[Bar]] = []
        before: list[int] = []  # of each job: the command at whose end it begins, or -1
        made: dict[int, Bar] = {}
        free = 0.0  # the end of main's last command
        for n, job in enumerate(self.jobs):
            if len(found) < len(self.starts) and n == self.starts[len(found)]:
                found.append([])
            before.append(self._before(n, before))
            if job.load.idle:
                continue
            step, main = job.load.step, job.load.step.queue == "main"
            if not job.load.rests:
                begin, end = (self.cut(len(found) - 1, t) for t in (job.begin, job.end))
                cause = made.get(before[n])
                if cause and cause.step.queue == step.queue:
                    cause = None
                far = step.op in COLLECTIVES and cost.far(self.clock.p, step.group) > 0
                path = [(made[m], s) for m, s in self._path(n, before, free) if main]
                made[n] = Bar(
                    job.section, job.turn, step, begin, end, cause, far, tuple(path)
                )
                found[-1].append(made[n])
            if main:
                free = job.end
        return found

    def _before(self, n: int, before: Sequence[int]) -> int:
        """Return the command at whose end a job begins, that of its own queue if several end then,
        or -1. A mark stands for the command that it waits for."""
        jobs, queue = self.jobs, self.jobs[n].load.step.queue

        def latest(m: int) -> tuple[float, bool]:
            return jobs[m].end, jobs[m].load.step.queue == queue

        last = max(jobs[n].after, key=latest, default=-1)
        return before[last] if last >= 0 and jobs[last].load.idle else last

    def _path(
        self, n: int, before: Sequence[int], since: float
    ) -> Iterator[tuple[int, float]]:
        """Yield the commands that run one after the other from a time to the begin of a job, the
        last one first, and the seconds of each after that time."""
        end = self.jobs[n].begin
        while end > since and before[n] >= 0:
            n = before[n]
            begin = max(since, self.jobs[n].begin)
            yield n, end - begin
            end = begin


def _play(clock: Clock, jobs: Sequence[_Job]) -> None:
    """Set the begin and end of each job."""
    waits = [len(job.after) for job in jobs]
    users: list[list[int]] = [[] for _ in jobs]
    for n, job in enumerate(jobs):
        for m in job.after:
            users[m].append(n)
    loads = [job.load for job in jobs]
    left = [load.seconds for load in loads]  # seconds of work that remain
    slower: dict[tuple[int, ...], list[float]] = {}  # of loads by identity
    ready = [n for n, count in enumerate(waits) if not count]
    running: list[int] = []
    now = 0.0
    while ready or running:
        while ready:
            n = ready.pop()
            jobs[n].begin = now
            if left[n] > 0:
                running.append(n)
            else:
                jobs[n].end = now
                _free(users[n], waits, ready)
        key = tuple([id(loads[n]) for n in running])
        factors = slower.get(key)
        if factors is None:
            factors = slower[key] = _factors(clock, [jobs[n] for n in running])
        times = [s * left[n] for s, n in zip(factors, running, strict=True)]
        passed = min(times, default=0.0)
        now += passed
        going = []
        for n, s in zip(running, factors, strict=True):
            left[n] -= passed / s
            if left[n] > 1e-12:
                going.append(n)
                continue
            jobs[n].end = now
            _free(users[n], waits, ready)
        running = going
    assert not any(waits), "no command can begin: the checker proves that one can"


def _free(users: Sequence[int], waits: list[int], ready: list[int]) -> None:
    """Add the jobs that waited for a job that has ended, and for no other, to those that are
    ready."""
    for n in users:
        waits[n] -= 1
        if not waits[n]:
            ready.append(n)


def _factors(clock: Clock, running: Sequence[_Job]) -> list[float]:
    """Return by which factor each running command takes longer than alone, infinite if it rests."""
    resting = any(job.load.rests for job in running)
    stays = [
        resting and job.section == REPEATED and not job.load.rests for job in running
    ]
    going = [job.load for job, stay in zip(running, stays, strict=True) if not stay]
    factors = iter(_slower(clock, going))
    return [math.inf if stay else next(factors) for stay in stays]


def _slower(clock: Clock, running: Sequence[_Load]) -> list[float]:
    """Return by which factor each running command takes longer than alone."""
    if clock.device.target == "cpu":
        factor = max(1.0, sum(x.threads for x in running) / clock.cores)
        return [factor if x.threads else 1.0 for x in running]
    kernels = sum(x.kernel for x in running)
    if not kernels:
        return [1.0] * len(running)
    factor = kernels / (1 - max(x.takes for x in running))
    return [factor if x.kernel else 1.0 for x in running]


def played(clock: Clock, turns: int, steps: int = 1) -> list[list[Bar]]:
    """Return the bars of some training steps that follow each other, of each at most `turns`
    micro-batches."""
    return _Issue(clock, _loads(clock), turns, steps).bars()


Ends = dict[str, float]  # of each queue: the end of its last command


def _ends(jobs: Iterable[_Job]) -> Ends:
    return {job.load.step.queue: job.end for job in jobs if job.load.step.op != "mark"}


def _settled(ends: Sequence[Ends]) -> bool:
    """Return whether the last two of some steps or micro-batches took the same time on queue main,
    and no queue fell behind main in the last one."""
    *_, first, second, third = ends
    long, before = third["main"] - second["main"], second["main"] - first["main"]
    behind = any(third[q] - second[q] > (1 + SAME) * long for q in third if q in second)
    return not behind and abs(before - long) <= SAME * long


def _micro_batches(clock: Clock, loads: _Loads) -> tuple[int, float, _Issue | None]:
    """Return how many micro-batches of a step are played, the seconds of each further one, and the
    step in which they were found."""
    repeat = clock.p.section(REPEATED).repeat
    turns = min(TURNS, repeat)
    while turns < repeat:
        found = _Issue(clock, loads, turns, 1)
        mine = [job for job in found.jobs if job.section == REPEATED]
        ends = [_ends(job for job in mine if job.turn == n) for n in range(turns)]
        if turns >= MOST_TURNS or _settled(ends):
            return turns, ends[-1]["main"] - ends[-2]["main"], found
        turns = min(2 * turns, repeat, MOST_TURNS)
    return turns, 0.0, None


def step(clock: Clock) -> Played:
    """Return a training step of a run that has settled, or of its first steps if that takes
    many."""
    loads = _loads(clock)
    turns, period, alone = _micro_batches(clock, loads)
    more, steps = clock.p.section(REPEATED).repeat - turns, STEPS
    rest = more * period
    while True:
        found = _Issue(clock, loads, turns, steps, rest)
        ends: list[Ends] = [
            {"main": 0.0},
            *(_ends(found.step(n)) for n in range(steps)),
        ]
        if steps >= MOST_STEPS or _settled(ends):
            break
        steps *= 2
    begin, end = ends[-2]["main"], found.cut(steps - 1, ends[-1]["main"])
    return Played(begin, end, more, turns - 1, period, found, alone)
