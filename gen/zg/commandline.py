"""commandline.py -- an argparse parser with errors of one line: the mistake, and a hint at
--help."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from .read.node import meant, printable

UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """Parser of a command. An abbreviated option is an error."""

    def __init__(self, **more: Any) -> None:
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
