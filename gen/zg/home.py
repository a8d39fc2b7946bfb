"""home.py -- finds templates, runtime and kernels: in a checkout, or in the package that pip
installed."""

from importlib import metadata
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
_IN_CHECKOUT = (_CHECKOUT / "templates").is_dir()
HOME = _CHECKOUT if _IN_CHECKOUT else Path(__file__).parent / "share"


def version() -> str:
    """Return this generator's version."""
    if _IN_CHECKOUT:
        return (_CHECKOUT / "VERSION").read_text().strip()
    return metadata.version("zgen")


def license() -> str:
    """Return the text of the licence, under which everyone gets a generated program."""
    if _IN_CHECKOUT:
        return (_CHECKOUT / "LICENSE").read_text()
    of = metadata.distribution("zgen")
    text = of.read_text("LICENSE") or of.read_text("licenses/LICENSE")
    assert text, "pip puts it beside the package's METADATA"
    return text
