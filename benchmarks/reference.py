"""Writes the reference pages from the code: `docs/commands.md`, `docs/codes.md` and a page for each finding.

`make reference` runs it; a test compares the pages with the code.
"""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise import analyze
from paro_advise.advisor.analysis.judgement.findings import APPLIES
from paro_advise.advisor.cli import VERBS, cli
from paro_advise.advisor.wording.codes import known_codes
from paro_advise.advisor.wording.quantities import time_text

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
_KINDS = (("Q", "Notes on the data"), ("E", "Errors"))
_PARTS = ("Based on", "To do", "Saving", "When it is wrong")

# Of each finding a run in tests/data that shows it, and what that run is (tests/data/README.md).
EXAMPLES = {
    "PARO010": ("nccl_like/fsdp2-inter-bw/traces", "FSDP2 on four nodes of eight ranks, traces of 16 of them"),
    "PARO011": ("nccl_like/ddp-big/traces", "DDP on four nodes of eight ranks, traces of 16 of them"),
    "PARO012": ("zero_runs/zero1_acc1", "ZeroRedundancyOptimizer with four ranks on one machine"),
    "PARO020": ("zero_runs/fsdp2_hsdp_ungated_ac_acc4", "FSDP2 with hybrid sharding and four micro-batches"),
    "PARO021": ("zero_runs/fsdp2_ggg_stack", "FSDP2 with full sharding and four ranks"),
    "PARO030": ("nccl_like/fsdp2-straggler/traces", "FSDP2 on two nodes of eight ranks, of which one computes longer"),
    "PARO031": ("zero_runs/fsdp2_hsdp_gated_acc4", "FSDP2 with hybrid sharding, all ranks on one machine"),
}


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
    """Return the meaning of every code; findings have pages of their own."""
    about = "Made from the code by `make reference`. Codes keep their meaning for ever; `paro-advise explain` prints the same."
    lines = ["# Codes", "", about, "", "## Findings", "", "| code | finding |", "|---|---|"]
    lines += [f"| [{code}](findings/{code}.md) | {known_codes()[code].title} |" for code in _findings()]
    for begin, title in _KINDS:
        lines += ["", f"## {title}"]
        for code, entry in known_codes().items():
            if code.startswith(begin):
                lines += ["", f"### {code}", "", f"**{entry.title}.** {entry.text.strip()}"]
    return "\n".join(lines) + "\n"


def _findings() -> list[str]:
    return [code for code in known_codes() if code.startswith("PARO")]


def finding_page(code: str) -> str:
    """Return the page of one finding: its explanation by parts, and a recorded run that shows it."""
    entry = known_codes()[code]
    lines = [f"# {code}: {entry.title}"]
    for paragraph in entry.text.strip().splitlines():
        name, mark, text = paragraph.partition(": ")
        if mark and name in _PARTS:
            lines += ["", f"## {name}", "", text[0].upper() + text[1:]]
        else:
            lines += ["", paragraph] if paragraph.startswith(("Cause", "Needs")) or len(lines) == 1 else [paragraph]
    return "\n".join([*lines, "", "## In a recorded run", "", *_example(code)]) + "\n"


def _example(code: str) -> list[str]:
    if code not in EXAMPLES:
        tests = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if path.name != "test_cli.py"]
        shown = ", ".join(f"`tests/{path.name}`" for path in tests if code in path.read_text())
        return [f"No run in the repository shows it; tests build traces that do ({shown})."]
    name, about = EXAMPLES[code]
    analysis = analyze(ROOT / "tests" / "data" / name).analysis
    finding = next(found for found in analysis.findings if found.code == code and found.status == APPLIES)
    saving = "" if finding.saving_us is None else f"  (up to -{time_text(finding.saving_us)})"
    command = f"$ paro-advise analyze tests/data/{name}"
    return [f"{about}:", "", "```", command, "...", f"{code}  {finding.text}{saving}", "```"]


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "codes.md": codes_page,
    **{f"findings/{code}.md": partial(finding_page, code) for code in _findings()},
}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / "docs" / name).parent.mkdir(exist_ok=True)
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
