"""Jinja2 templates of the reports, and the one environment that renders them.

Everything is escaped by default; data enters scripts only through ``tojson``.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

# Control and bidi characters, which turn text around or hide it; tabs and line ends stay.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("paro_advise.templates", "."),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    return environment


def _printable(value: object) -> object:
    """Return a value of a view without characters that steer; text that is safe as markup stays so."""
    return type(value)(_STEERING.sub("?", value)) if isinstance(value, str) and _STEERING.search(value) else value


def asset(name: str) -> str:
    """Return the text of a file in this folder, to be inlined."""
    return resources.files("paro_advise.templates").joinpath(name).read_text(encoding="utf-8")


def script_hash(text: str) -> str:
    """Return the Content-Security-Policy source that allows exactly this inline script."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def render(name: str, **view: Any) -> str:
    """Render a template of this folder.

    Args:
        name: file name of the template.
        view: its variables; a missing one is an error.
    """
    return _environment().get_template(name).render(**view)
