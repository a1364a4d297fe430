"""What every page is made of: tables, the embedded data, the frame around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from paro_advise.core.documents import embedded

if TYPE_CHECKING:
    from collections.abc import Sequence


View: TypeAlias = dict[str, Any]  # Any: whatever a template shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column head."""

    name: str
    is_number: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell: text for people, raw value for sorting, and where it links to ("" for nowhere)."""

    text: str
    raw: float | None = None
    css: str = ""
    href: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of cells; ``id`` makes it a link target."""

    cells: tuple[Cell, ...]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as the template draws it.

    Attributes:
        first_rows: shown before a reader asks for all, 0 for all; without scripts and in print all are shown.
    """

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    first_rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What the analysis itself cannot know: when, by what and how it was made."""

    version: str
    created_utc: str
    command: str


def number(value: float | None, text: str) -> Cell:
    """Return a right-aligned cell with its raw value."""
    return Cell(text=text, raw=None if value is None else round(value, 6), css="n")


def make_table(table_id: str, caption: str, names: Sequence[str], rows: Sequence[Row], *, first_rows: int = 0) -> Table:
    """Make a table; a head that ends in "#" is a number column (the sign is not shown)."""
    columns = tuple(Column(name=name.rstrip("#").strip(), is_number=name.endswith("#")) for name in names)
    return Table(id=table_id, caption=caption, columns=columns, rows=tuple(rows), first_rows=first_rows)


def render_page(
    template: str, data: object, provenance: Provenance, *, scripts: Sequence[str] = (), **view: Any
) -> str:
    """Render a page.

    Args:
        template: file name.
        data: what the page shows, embedded as JSON.
        provenance: see Provenance.
        scripts: files that this page runs beside those of all pages.
        view: the template's own variables.
    """
    from paro_advise.templates import asset, render, script_hash

    content, media_type = embedded(data)
    theme_js, texts = asset("theme.js"), [asset(name) for name in ("script.js", *scripts)]
    return render(
        template,
        version=provenance.version,
        data=content,
        data_type=media_type,
        css=asset("style.css"),
        page_scripts=texts,
        theme_js=theme_js,
        script_hashes=[script_hash(text) for text in (theme_js, *texts)],
        **view,
    )
