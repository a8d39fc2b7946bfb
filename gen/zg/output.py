"""output.py -- writes a text to stdout, or to a file that is replaced only as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDERS = "an existing folder, or one below the current folder, which is created"


def why(e: OSError) -> str:
    """Return the reason of an error, for any exception with it."""
    said = e.args[0] if e.args else ""
    if isinstance(e, shutil.Error) and isinstance(said, list):  # of copytree
        *_, said = said[0]
    found = re.fullmatch(r"\[Errno -?\d+\] (.*?)(: ['\"].*)?", str(said), re.S)
    return e.strerror or (found[1] if found else str(said)) or type(e).__name__


@contextlib.contextmanager
def naming(place: object, anew: bool = False) -> Iterator[None]:
    """Name a file or an output in errors that name none; of all calls only open() does by itself.
    anew: in any error."""
    try:
        yield
    except OSError as e:
        if anew or e.filename is None:
            e.filename = str(place)
        raise


def missing(path: str) -> list[str]:
    """Return the missing folders of a path, the innermost first."""
    here = Path(os.path.abspath(path))
    return [str(up) for up in here.parents if not os.path.lexists(up)]


def nowhere(path: str) -> str:
    """Return the outermost missing folder of a path, '' if none is missing or it is below the
    current one."""
    for first in missing(path)[-1:]:
        here = os.path.realpath(".")
        if here not in map(os.path.realpath, Path(first).parents):
            return first
    return ""


@contextlib.contextmanager
def folders(path: str) -> Iterator[None]:
    """Create the missing folders of a path, and remove them again if the body fails."""
    made = missing(path)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise


def write(text: str, path: str | None) -> None:
    """Write to stdout, or to a file: to a temporary file beside it, which then replaces it.

    Raises OSError.
    """
    if path is None:
        _into(1, text)
        return
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG | 0o666 & ~_umask()
    else:
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    # A device or a pipe; opening a folder raises its own error.
    if not stat.S_ISREG(mode):
        with open(path, "wb") as there:
            _into(there.fileno(), text)
        return
    with folders(path):
        _replace(text, os.path.realpath(path), mode)  # a link stays a link


def _replace(text: str, path: str, mode: int) -> None:
    made, beside = tempfile.mkstemp(prefix=".zgen.", dir=os.path.dirname(path))
    try:
        with os.fdopen(made, "wb") as there:
            _into(there.fileno(), text)
            os.fchmod(there.fileno(), stat.S_IMODE(mode))
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def is_one_of(path: str, inputs: list[str]) -> str | None:
    """Return the input that is the same file as the path, or None."""
    return next(
        (
            file
            for file in inputs
            if os.path.exists(path)
            and os.path.exists(file)
            and os.path.samefile(path, file)
        ),
        None,
    )


def _into(fd: int, text: str) -> None:
    with open(fd, "w", encoding="utf-8", closefd=False) as out:
        out.write(text)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
