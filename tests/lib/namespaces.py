"""namespaces.py -- skips tests that need namespaces if none can be created.

A container without privileges and a chroot allow none. Failures inside a namespace are no reason to
skip.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import pytest


@functools.cache
def refusal(*command: str) -> str:
    """Run a command that creates namespaces. Return its error, "" if it succeeds."""
    if not shutil.which(command[0]):
        return f"{command[0]} is missing"
    done = subprocess.run(command, capture_output=True, text=True)
    assert "--help" not in done.stderr, done.stderr  # no such option
    return done.stderr.strip() if done.returncode else ""


def need(*commands: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first command that succeeds. Skip the test if all fail."""
    errors = [refusal(*command) for command in commands]
    if all(errors):
        pytest.skip(f"no namespaces here: {'; '.join(errors)}")
    return commands[errors.index("")]


def need_own_root(*inside: str) -> None:
    """Skip the test in a chroot, which a process leaves when it enters a mount namespace. inside:
    the start of a command that does so."""
    said = subprocess.run(
        [*inside, "stat", "-c", "%d:%i", "/"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    own = os.stat("/")
    if said.strip() != f"{own.st_dev}:{own.st_ino}":
        pytest.skip("no hosts here: this is a chroot")


def mounts(at: str = "/tmp") -> tuple[str, ...]:
    """Return the start of a command that may mount at a folder: as a user, or as root."""
    return need(
        *[("unshare", flags, "mount", "--bind", at, at) for flags in ("-rm", "-m")]
    )[:2]
