"""namespaces.py -- the skip of tests that need namespaces of their own where none can be made.

A container without privileges and a chroot make none. What a test does in its namespaces is no
reason for a skip.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess

import pytest


@functools.cache
def refusal(*command: str) -> str:
    """Runs a command that makes namespaces; returns its error, empty where it succeeds."""
    if not shutil.which(command[0]):
        return f"{command[0]} is missing"
    done = subprocess.run(command, capture_output=True, text=True)
    assert "--help" not in done.stderr, done.stderr  # no such option
    return done.stderr.strip() if done.returncode else ""


def need(*commands: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the first command that succeeds; skips the test where all fail."""
    errors = [refusal(*command) for command in commands]
    if all(errors):
        pytest.skip(f"no namespaces here: {'; '.join(errors)}")
    return commands[errors.index("")]


def need_own_root(*inside: str) -> None:
    """Skips the test in a chroot, which who enters a namespace of mounts leaves; inside: the
    beginning of a command that does."""
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
    """Returns the beginning of a command that may mount at a folder: as a user, or as root."""
    return need(
        *[
            ("unshare", flags, "mount", "--bind", at, at)
            for flags in ("-rm", "-m")
        ]
    )[:2]
