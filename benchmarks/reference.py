"""Writes the reference pages of the documentation from the code: `docs/commands.md` and `docs/codes.md`.

`make reference` runs it; a test compares the pages with the code.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from paro_advise.advisor.cli import VERBS, cli
from paro_advise.advisor.wording.codes import known_codes

ROOT = Path(__file__).resolve().parents[1]
_KINDS = (("PARO", "Findings"), ("Q", "Notes on the data"), ("E", "Errors"))


def commands_page() -> str:
    """Return the reference of all verbs."""
    context = click.Context(cli, info_name="paro-advise")
    about = (
        "Made from the code by `make reference`. Every option can also be set by an environment variable, "
        "`PARO_ADVISE_<VERB>_<OPTION>`, such as `PARO_ADVISE_ANALYZE_GPUS_PER_NODE`. `--color` may stand before or after "
        "the verb. Exit codes: [formats](formats.md#exit-codes)."
    )
    lines = ["# Commands", "", about]
    for verb in VERBS:
        command = cli.get_command(context, verb)
        assert command is not None
        lines += ["", f"## {verb}", "", *_about(command, verb), *_options(command)]
    return "\n".join(lines) + "\n"


def _about(command: click.Command, verb: str) -> list[str]:
    with click.Context(command, info_name=f"paro-advise {verb}") as context:
        usage = " ".join(command.collect_usage_pieces(context))
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\n")
    shown = [line.strip() for line in examples.splitlines()[1:] if line.strip()]
    out = ["```", f"paro-advise {verb} {usage}", "```", "", " ".join(text.split())]
    return [*out, "", "```", *shown, "```"] if shown else out


def _options(command: click.Command) -> list[str]:
    rows = []
    with click.Context(command) as context:
        for parameter in command.get_params(context):
            record = (
                parameter.get_help_record(context)
                if isinstance(parameter, click.Option) and parameter.name != "help"
                else None
            )
            if record is not None and "--help" not in parameter.opts:
                names, about = (" ".join(text.split()).replace("|", "\\|") for text in record)
                rows.append(f"| `{names}` | {about} |")
    return ["", "| option | meaning |", "|---|---|", *rows] if rows else []


def codes_page() -> str:
    """Return the meaning of every code."""
    about = "Made from the code by `make reference`. Codes keep their meaning for ever; `paro-advise explain` prints the same."
    lines = ["# Codes", "", about]
    for begin, title in _KINDS:
        lines += ["", f"## {title}"]
        for code, entry in known_codes().items():
            if code.startswith(begin):
                lines += ["", f"### {code}", "", f"**{entry.title}.** {entry.text.strip()}"]
    return "\n".join(lines) + "\n"


PAGES = {"commands.md": commands_page, "codes.md": codes_page}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
