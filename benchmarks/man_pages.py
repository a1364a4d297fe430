"""Writes a man page for each verb, from the same text as ``--help``: ``make man``."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import click
from click_man.core import write_man_pages

from paro_advise.advisor.cli import VERBS, cli


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    context = click.Context(cli, info_name="paro-advise")
    # Verbs are imported when they are used; a man page needs all of them.
    commands = {verb: found for verb in VERBS if (found := cli.get_command(context, verb)) is not None}
    whole = click.Group("paro-advise", commands=commands, help=cli.help, params=cli.params)
    write_man_pages("paro-advise", whole, version=version("paro-advise"), target_dir=folder)


if __name__ == "__main__":
    main(sys.argv[1])
