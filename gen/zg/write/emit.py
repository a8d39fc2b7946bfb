"""emit.py -- renders train.c from a view by templates. It alone imports jinja2."""

from __future__ import annotations

import functools

import jinja2

from .. import home


@functools.cache
def templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(home.HOME / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def train(view: dict[str, object]) -> str:
    """Return the text of train.c."""
    return templates().get_template("train.c.j2").render(view)
