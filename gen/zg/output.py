"""output.py -- a text to stdout or to a file, which is then whole or as it was."""

from __future__ import annotations

import errno
import os
import stat
import tempfile


def write(text: str, path: str | None) -> None:
    """To stdout, or to a file: beside it first, then in its place. OSError: it cannot be."""
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
    if not stat.S_ISREG(mode):  # a device or a pipe; a folder says what it is
        with open(path, "wb") as there:
            _into(there.fileno(), text)
        return
    path = os.path.realpath(path)  # a link stays one
    os.makedirs(os.path.dirname(path), exist_ok=True)
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
    """The input that a path is, if any."""
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
