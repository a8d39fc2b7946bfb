"""commandline.py -- argparse whose errors are one line: what is wrong, and what tells more."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from .read.node import meant, printable

UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    def __init__(self, **more: Any) -> None:
        """Options are written out: a part of one is an error."""
        super().__init__(allow_abbrev=False, **more)

    def error(self, message: str) -> NoReturn:
        word = message.removeprefix(UNKNOWN).partition("=")[0]
        near = meant(word, list(self._option_string_actions))
        hint = near if message.startswith(UNKNOWN) else ""
        self.exit(
            2,
            printable(f"{self.prog}: {message}")
            + f"; {hint}{self.prog} --help tells more\n",
        )
