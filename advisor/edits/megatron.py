"""A Megatron launch script: the flags that say how states are sharded are taken out, the plan's put in their place."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from paro_advise.advisor.edits.result import check_fact, target_of
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.megatron import FLAGS, flags
from paro_advise.policies.frameworks.registry import as_written

if TYPE_CHECKING:
    from paro_advise.policies.plan import Plan

_TAKEN = "\0"
# A plain word, a variable, or either in quotes; anything cleverer is refused rather than guessed.
_VALUE = r"""(?:[\w./-]+|\$\w+|\$\{\w+\}|"[\w./${}-]+"|'[\w./-]+')"""
_MEGATRON_PATTERN = re.compile(
    r"(?<![^\s\"'(=])(?:"
    + "|".join(re.escape(flag) + (rf"[ =]{_VALUE}" if takes else "") for flag, takes in FLAGS.items())
    + r")(?=[\s\\\"')]|$)"
)
_MODEL_PARALLEL = re.compile(r"--((?:tensor|pipeline)-model-parallel-size|context-parallel-size)[ =](\d{1,6})(?!\S)")
_MEGATRON_NAMES = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, FLAGS)) + r")(?![\w-])")


def edit_megatron(text: str, plan: Plan) -> str:
    """Change flags of a launch script: take those of sharding out, put the plan's where the first stood.

    Raises:
        UsageError: the script is cleverer than that.
    """
    wanted = list(flags(as_written(target_of(plan))))
    hidden = re.sub(r"(?m)^[ \t]*#.*$", lambda line: " " * len(line.group()), text)  # comments, at equal places
    _check_model_parallel(plan, hidden)
    found = []
    for match in _MEGATRON_PATTERN.finditer(hidden):
        words = match.group(0).replace("=", " ").split()
        if words[0] != "--ckpt-format" or "--ckpt-format" in wanted:
            found.append((match.start(), match.end(), words))
    matched = {start for start, _, _ in found}
    names = [
        m.group() for m in _MEGATRON_NAMES.finditer(hidden) if m.start() not in matched and m.group() != "--ckpt-format"
    ]
    names_found = [words[0] for _, _, words in found]
    if names or len(set(names_found)) < len(names_found):
        raise UsageError(
            f"a Megatron script must name each flag once and plainly, {(names or names_found)[0]} is not",
            hint=f"change it by hand to: {' '.join(wanted) or '(none: plain data parallelism)'}",
        )
    if [word for _, _, words in found for word in words] == wanted:
        return text
    if not found:
        raise UsageError(
            "a Megatron script must name one of the flags that say how states are sharded, this one names none",
            hint=f"add to its arguments: {' '.join(wanted) or '(none: plain data parallelism)'}",
        )
    for number, (start, end, _) in reversed(list(enumerate(found))):
        text = text[:start] + (_TAKEN if number else " ".join(wanted) or _TAKEN) + text[end:]
    return _without_taken(text)


def _check_model_parallel(plan: Plan, script: str) -> None:
    """Refuse a script that cuts its model among another number of ranks than the plan was made for.

    Raises:
        StalePlanError: it does.
    """
    degrees = [int(degree) for _, degree in _MODEL_PARALLEL.findall(script)]
    if plan.origin is not None and degrees:
        check_fact(plan, "model-parallel ranks", plan.origin.model_parallel_ranks, prod(degrees))


def _without_taken(text: str) -> str:
    """Remove the marks of flags that were taken out, and lines that held nothing else."""
    kept: list[str] = []
    for line in text.splitlines(keepends=True):
        if _TAKEN not in line:
            kept.append(line)
            continue
        rest = line.replace(f"{_TAKEN} ", "").replace(_TAKEN, "")
        if rest.strip() not in ("", "\\"):
            kept.append(rest)
        elif rest.strip() == "" and kept and kept[-1].rstrip().endswith("\\"):
            # It was the last of a continued command: the line before now is.
            kept[-1] = kept[-1].rstrip()[:-1].rstrip() + "\n"
    return "".join(kept)
