"""hosts.py -- hosts of one machine: a network, a name and memory of their own each, joined by a
switch; and mpirun's start of a program on them.

A host is a process in namespaces of its own (network, UTS, IPC, mounts), which ends with the test.
They need the right to make such: root's, or that of a user in a namespace of its own (unshare -r).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import namespaces
import program
from patience import LIMIT

NAME = "10.99.0.{}"
# What a host does: it waits for its end with the process that made it.
BODY = "hostname {name}; echo ready; exec sleep 1000000"
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
APART = ("unshare", "-n", "-u", "-i", "-m")
INSIDE = ("-n", "-u", "-i", "-m")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}


def sh(*words: object) -> None:
    done = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True
    )
    assert done.returncode == 0, f"{words}: {done.stderr}"


def is_root() -> bool:
    return not os.geteuid()


def enter(pid: int, *spaces: str) -> tuple[str, ...]:
    """The beginning of a command that runs in namespaces of a process"""
    user = () if is_root() else ("-U", "--preserve-credentials")
    return ("nsenter", "-t", str(pid), *user, *spaces, "--")


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    body: subprocess.Popen[str]

    def at(self) -> tuple[str, ...]:
        """The beginning of a command that runs there"""
        return enter(self.body.pid, *INSIDE)

    def received(self) -> int:
        """Bytes, at its interface"""
        text = subprocess.run(
            [*self.at(), "cat", "/proc/net/dev"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return int(re.search(rf"^ *{self.name}: *(\d+)", text, re.M)[1])

    def slow_down(self, bits: float) -> None:
        """What it sends goes at no more than so many bits a second: what is sent in a hundredth of
        a second may go at once."""
        words = ("tc", "qdisc", "add", "dev", self.name, "root", "tbf")
        burst = max(32768, int(bits / 8 / 100))
        sh(
            *(*self.at(), *words, "rate", f"{bits:.0f}bit"),
            *("burst", burst, "latency", "400ms"),
        )

    def kill(self) -> None:
        """All that runs there, at once"""
        own = os.readlink(f"/proc/{self.body.pid}/ns/net")
        for at in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(at / "ns/net") == own:
                    os.kill(int(at.name), signal.SIGKILL)


def made(name: str, address: str, switch: Host | None) -> Host:
    """One by itself, or in the namespace of users in which the switch has the right to join it"""
    if is_root():
        apart = APART
    elif switch:
        apart = (*enter(switch.body.pid), *APART)
    else:
        apart = (*APART, "-r")
    body = subprocess.Popen(
        [*DIES_WITH_US, *apart, "sh", "-c", BODY.format(name=name)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    if body.stdout.readline() != "ready\n":
        raise AssertionError(
            f"a host of its own cannot be made here: {body.communicate()[1]}"
        )
    return Host(name, address, body)


def join(switch: Host, host: Host, port: str) -> None:
    """Host and switch, by a cable"""
    near = (host.name, "netns", host.body.pid)
    sh(
        *(*switch.at(), "ip", "link", "add", *near),
        *("type", "veth", "peer", "name", port),
    )
    sh(*switch.at(), "ip", "link", "set", port, "master", "br0", "up")
    here, address = host.at(), f"{host.address}/24"
    sh(*here, "ip", "addr", "add", address, "dev", host.name)
    sh(*here, "ip", "link", "set", host.name, "up")
    sh(*here, "ip", "link", "set", "lo", "up")


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Host]]:
    """So many hosts, and the switch between them"""
    found: list[Host] = []
    namespaces.need((*APART, *(() if is_root() else ("-r",)), "true"))
    try:
        switch = made("switch", "", None)
        found.append(switch)
        there = switch.at()
        namespaces.need_own_root(*there)
        sh(*there, "ip", "link", "add", "br0", "type", "bridge")
        sh(*there, "ip", "link", "set", "br0", "up")
        for n in range(1, count + 1):
            found.append(made(f"h{n}", NAME.format(n), switch))
            join(switch, found[-1], f"p{n}")
        yield found[1:]
    finally:
        for host in found:
            host.body.kill()
            host.body.communicate()


def agent(folder: pathlib.Path, hosts: Sequence[Host]) -> pathlib.Path:
    """What mpirun starts its daemons with, in ssh's place: a host's address, then the command"""
    cases = "\n".join(
        f'{host.address}) exec {" ".join(host.at())} sh -c "$*" ;;'
        for host in hosts
    )
    made = folder / "agent"
    made.write_text(
        f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}\nesac\n"
    )
    made.chmod(0o755)
    return made


def mpirun(
    binary: pathlib.Path,
    ranks: int,
    *options: object,
    hosts: Sequence[Host] = (),
    folder: pathlib.Path = pathlib.Path(),
    by: str = "slot",
    **settings: object,
) -> subprocess.Popen[str]:
    """A run of its own process group; ranks are spread over hosts evenly, if there are any, in a
    row or by another of mpirun's ways. None has a core of its own: each host would give its first
    one the same."""
    words: list[object] = ["-n", ranks, "--map-by", by]
    if hosts:
        each = -(-ranks // len(hosts))
        words += ["--mca", "plm_rsh_agent", agent(folder, hosts)]
        words += ["--mca", "plm_rsh_no_tree_spawn", 1, "--host"]
        words.append(",".join(f"{host.address}:{each}" for host in hosts))
    at = hosts[0].at() if hosts else ()
    return mpirun_of(*words, binary, *options, at=at, **settings)


def mpirun_of(
    *words: object, at: Sequence[object] = (), **settings: object
) -> subprocess.Popen[str]:
    """mpirun's own words, at a place"""
    own = ["mpirun", "--oversubscribe", "--bind-to", "none"]
    for name in settings:
        own += ["-x", name]
    return subprocess.Popen(
        [str(word) for word in (*at, *own, *words)],
        text=True,
        env=program.environment(**AS_ROOT, **settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def running(made: pathlib.Path, of: object) -> list[int]:
    """Processes of a program with this word behind it (another test may run the same program): of
    each rank its parent and itself"""
    found = []
    for at in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = at.read_bytes().split(b"\0")
            if words[0] == str(made).encode() and str(of).encode() in words:
                found.append(int(at.parent.name))
    return sorted(found)


def ended(run: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = run.communicate(timeout=LIMIT)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(run.args, run.returncode, out, err)
