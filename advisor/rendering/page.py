"""What every page is made of: tables, the embedded data, the frame around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paro_advise.core.documents import embedded

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column head."""

    name: str
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell: text for people, raw value for sorting."""

    text: str
    raw: float | None = None
    css: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of cells; ``id`` makes it a link target."""

    cells: tuple[Cell, ...]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as the template draws it."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What the analysis itself cannot know: when, by what and how it was made."""

    version: str
    created_utc: str
    command: str


def number(value: float | None, text: str) -> Cell:
    """Return a right-aligned cell with its raw value."""
    return Cell(text=text, raw=None if value is None else round(value, 6), css="n")


def make_table(table_id: str, caption: str, names: Sequence[str], rows: Sequence[Row]) -> Table:
    """Make a table; a head that ends in "#" is a number column (the sign is not shown)."""
    columns = tuple(Column(name=name.rstrip("#").strip(), is_number=name.endswith("#")) for name in names)
    return Table(id=table_id, caption=caption, columns=columns, rows=tuple(rows))


def render_page(template: str, data: object, provenance: Provenance, **view: Any) -> str:
    """Render a page.

    Args:
        template: file name.
        data: what the page shows, embedded as JSON.
        provenance: see Provenance.
        view: the template's own variables.
    """
    from paro_advise.templates import asset, render, script_hash

    content, media_type = embedded(data)
    script, theme_js = asset("script.js"), asset("theme.js")
    return render(
        template,
        version=provenance.version,
        data=content,
        data_type=media_type,
        css=asset("style.css"),
        script=script,
        theme_js=theme_js,
        script_hash=script_hash(script),
        theme_hash=script_hash(theme_js),
        **view,
    )
