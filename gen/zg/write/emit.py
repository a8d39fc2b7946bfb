"""emit.py -- renders train.c from a view, and reports from a page, by templates. It alone imports
jinja2."""

from __future__ import annotations

import functools

import jinja2

from .. import home
from .page import Page


def _is_html(name: str | None) -> bool:
    return name is not None and name.endswith(".html.j2")


@functools.cache
def templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(home.HOME / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=_is_html,
    )


def train(view: dict[str, object]) -> str:
    """Return the text of train.c."""
    return templates().get_template("train.c.j2").render(view)


def page(page: Page) -> str:
    """Return a report as one HTML file."""
    return templates().get_template("report.html.j2").render(page=page)
