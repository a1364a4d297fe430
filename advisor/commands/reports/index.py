"""``paro-advise index``: one page over all comparisons in a folder."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from paro_advise.core.plural import plural
from paro_advise.core.required_name import refuse_empty
from paro_advise.errors import ForeignDataError, NoInputError, WouldOverwriteError
from paro_advise.trace_parsers.discover import files_below
from paro_advise.trace_parsers.remote.objects import is_remote, refuse_remote_folder

if TYPE_CHECKING:
    from paro_advise.advisor.rendering.index_page import Entry

# A report of 10,000 ranks is smaller; what is larger is a trace.
_MAX_BYTES = 32 << 20


@click.command("index", short_help="A page with the history of all comparisons in a folder.")
@click.argument("folder", metavar="DIR")
@click.option("-o", "--output", metavar="FILE", help="The page.  [default: DIR/index.html]")
@click.option("--force", is_flag=True, help="Replace an output file that exists.")
def command(*, folder: str, output: str | None, force: bool) -> None:
    """List the comparisons that `compare --json` or `-o` wrote under DIR, the newest first.

    \b
    Example:
      paro-advise index runs/ --force
    """
    from paro_advise.advisor.commands.output import Targets, write_output
    from paro_advise.advisor.rendering.index_page import render_index
    from paro_advise.advisor.rendering.provenance import provenance
    from paro_advise.advisor.wording.escaping import plain

    refuse_empty(folder, "a folder")
    refuse_remote_folder(folder, "DIR")
    root = Path(folder)
    target = str(root / "index.html") if output is None else output
    targets = Targets.checked(target, force=force)
    found: list[Entry] = []
    problems: list[str] = []
    files, closed = files_below(root)
    files = [path for path in files if path.suffix in (".json", ".html") and _is_small(path)]
    problems += [f"{_path_text(path)}: permission denied" for path in closed]
    is_file = target != "-" and not is_remote(target)
    page_folder = Path(target).parent if is_file else root
    for path in files:
        if is_file and path.resolve() == Path(os.path.realpath(target)):
            _refuse_comparison(path, root)
            continue
        try:
            entry = _entry(path, root, page_folder=page_folder)
        except (ForeignDataError, OSError) as error:
            problems.append(f"{_path_text(path)}: {error}")
            continue
        if entry is not None:
            found.append(entry)
    # A page and a JSON of one comparison are one entry; the page can be opened.
    by_content = {entry.data: entry for entry in sorted(found, key=lambda entry: entry.path.endswith(".html"))}
    for problem in problems:
        click.echo(plain(f"left out {problem}"), err=True)
    if not by_content:
        raise NoInputError("no comparisons found", where=folder, hint="run `compare` first")
    entries = sorted(by_content.values(), key=lambda entry: entry.modified_s, reverse=True)
    write_output(target, render_index(entries, provenance()).encode(), force=force)
    click.echo(", ".join([plural(len(entries), "comparison"), *targets.written()]), err=True)


def _refuse_comparison(path: Path, root: Path) -> None:
    """Refuse to put the page in the place of a comparison, as it may that of an older page.

    Raises:
        WouldOverwriteError: it would.
    """
    with suppress(ForeignDataError):
        if _entry(path, root, page_folder=root) is not None:
            raise WouldOverwriteError(
                "an output must not replace a comparison that the index lists",
                where=_path_text(path),
                hint="name another file",
            )


def _path_text(path: Path) -> str:
    """Return a path for people, whatever bytes its name has."""
    return os.fsencode(path).decode("utf-8", "replace")


def _is_small(path: Path) -> bool:
    """Tell whether a path is a file that could be a result; traces are larger."""
    return path.is_file() and path.stat().st_size <= _MAX_BYTES


def _entry(path: Path, root: Path, *, page_folder: Path) -> Entry | None:
    """Return what a file holds, None if it is not a comparison."""
    from paro_advise.advisor.comparison.model import FORMAT, comparison_from_json
    from paro_advise.advisor.rendering.index_page import Entry
    from paro_advise.core.documents import document_bytes

    data = path.read_bytes()
    if f'"{FORMAT.name}"'.encode() not in data:
        return None
    comparison = comparison_from_json(document_bytes(str(path)), _path_text(path))
    return Entry(
        path=_path_text(path.relative_to(root)),
        link=quote(os.fsencode(os.path.relpath(path.resolve(), page_folder.resolve()))),
        modified_s=path.stat().st_mtime,
        comparison=comparison,
    )
