"""hosts.py -- simulates hosts on one machine, and starts programs on them with mpirun.

Each host has its own network, name and memory; a switch joins them. A host is a process in its own
namespaces (network, UTS, IPC, mounts), which ends with the test. Creating them needs root, or a
user namespace (unshare -r).
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

from tests.lib import namespaces, program
from tests.lib.patience import LIMIT

NAME = "10.99.0.{}"
# Command of a host: it waits until the process that made it ends.
BODY = "hostname {name}; echo ready; exec sleep 1000000"
DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
APART = ("unshare", "-n", "-u", "-i", "-m")
INSIDE = ("-n", "-u", "-i", "-m")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1}


def sh(*words: object) -> None:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"


def is_root() -> bool:
    return not os.geteuid()


def enter(pid: int, *spaces: str) -> tuple[str, ...]:
    """Return the start of a command that runs in a process's namespaces."""
    user = () if is_root() else ("-U", "--preserve-credentials")
    return ("nsenter", "-t", str(pid), *user, *spaces, "--")


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    body: subprocess.Popen[str]

    def at(self) -> tuple[str, ...]:
        """Return the start of a command that runs on the host."""
        return enter(self.body.pid, *INSIDE)

    def received(self) -> int:
        """Return the bytes that its interface has received."""
        text = subprocess.run(
            [*self.at(), "cat", "/proc/net/dev"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return int(re.search(rf"^ *{self.name}: *(\d+)", text, re.M)[1])

    def slow_down(self, bits: float) -> None:
        """Limit its sending rate to `bits` a second. Data of a hundredth of a second may go at
        once."""
        words = ("tc", "qdisc", "add", "dev", self.name, "root", "tbf")
        burst = max(32768, int(bits / 8 / 100))
        sh(
            *(*self.at(), *words, "rate", f"{bits:.0f}bit"),
            *("burst", burst, "latency", "400ms"),
        )

    def kill(self) -> None:
        """Kill all processes on the host at once."""
        own = os.readlink(f"/proc/{self.body.pid}/ns/net")
        for at in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(at / "ns/net") == own:
                    os.kill(int(at.name), signal.SIGKILL)


def made(name: str, address: str, switch: Host | None) -> Host:
    """Return a host. Without root it is created in the switch's user namespace, which allows it to
    join."""
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
    """Connect host and switch by a cable."""
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
    """Create `count` hosts and the switch between them."""
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
    """Return the command with which mpirun starts its daemons instead of ssh: it takes a host's
    address, then the command."""
    cases = "\n".join(
        f'{host.address}) exec {" ".join(host.at())} sh -c "$*" ;;' for host in hosts
    )
    made = folder / "agent"
    made.write_text(f"#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}\nesac\n")
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
    """Start a run in its own process group.

    Ranks are spread evenly over hosts, if there are any, consecutively or by another of mpirun's
    ways. None is bound to a core: each host would give its first rank the same one.
    """
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
    """Run mpirun with these words, perhaps on a host."""
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
    """Return the processes of a program with this argument, for each rank its parent and itself.
    Another test may run the same program."""
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
