"""A Megatron launch script: the flags that say how states are sharded are taken out, the plan's put in their place."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING

from paro_advise.advisor.edits.result import check_fact, target_of
from paro_advise.core.plural import plural
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.megatron import FLAGS, FSDP_CHECKPOINTS, FSDP_FLAGS, flags
from paro_advise.policies.frameworks.registry import as_written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.policies.plan import Plan

_TAKEN = "\0"
# A plain word, a variable, or either in quotes; anything cleverer is refused rather than guessed.
_VALUE = r"""(?:[\w./-]+|\$\w+|\$\{\w+\}|"[\w./${}-]+"|'[\w./-]+')"""
_ALL_FLAGS = FLAGS | FSDP_FLAGS
_MEGATRON_PATTERN = re.compile(
    r"(?<![^\s\"'(=])(?:"
    + "|".join(re.escape(flag) + (rf"[ =]{_VALUE}" if takes else "") for flag, takes in _ALL_FLAGS.items())
    + r")(?=[\s\\\"')]|$)"
)
_MODEL_PARALLEL = re.compile(
    r"""--((?:tensor|pipeline)-model-parallel-size|context-parallel-size)[ =]{1,20}["']?([^\s"'\\)]{1,80})"""
)
_OWN_FLAGS = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--use-distributed-optimizer")
_ONE_CONNECTION = re.compile(r"\bCUDA_DEVICE_MAX_CONNECTIONS=[\"']?1\b")
_NUMBER = re.compile(r"\d{1,6}")
_VARIABLE = re.compile(r"\$(?:(\w{1,80})|\{(\w{1,80})\})")
_BRANCH, _BRANCH_END = (re.compile(rf"(?m)(?:^|;)[ \t]*(?:{words})\b") for words in ("if|case", "fi|esac"))
_MEGATRON_NAMES = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, _ALL_FLAGS)) + r")(?![\w-])")


def is_of_megatron(name: str, text: str) -> bool:
    """Tell whether a launch script starts Megatron-LM: it says so, or has flags that only that one has."""
    return "megatron" in f"{name}\n{text}".lower() or any(flag in text for flag in _OWN_FLAGS)


def edit_megatron(text: str, plan: Plan) -> str:
    """Change flags of a launch script: take those of sharding out, put the plan's where the first stood.

    Raises:
        UsageError: the script is cleverer than that.
    """
    wanted = list(flags(as_written(target_of(plan))))
    hidden = _without_comments(text)
    _check_model_parallel(plan, hidden)
    found, kept = [], set[int]()
    for match in _MEGATRON_PATTERN.finditer(hidden):
        words = match.group(0).replace("=", " ").split()
        if _stays(words, wanted):
            kept.add(match.start())
        else:
            found.append((match.start(), match.end(), words))
    matched = kept | {start for start, _, _ in found}
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
    if branch := next((words[0] for start, _, words in found if _is_in_branch(hidden, start)), None):
        raise UsageError(
            f"a Megatron script must name its flags wherever it goes, {branch} stands under a condition",
            hint=f"change it by hand to: {' '.join(wanted)}",
        )
    for number, (start, end, _) in reversed(list(enumerate(found))):
        text = text[:start] + (_TAKEN if number else " ".join(wanted) or _TAKEN) + text[end:]
    return _drop_marks(text)


def _stays(words: Sequence[str], wanted: Sequence[str]) -> bool:
    """Tell whether a plan leaves a flag as it is: formats of checkpoints, and what Megatron-FSDP may have beside."""
    if words[0] == "--ckpt-format":
        is_of_fsdp = "".join(words[1:]).strip("\"'") == FSDP_CHECKPOINTS
        return "--ckpt-format" not in wanted and not is_of_fsdp
    return words[0] in FSDP_FLAGS and "--use-megatron-fsdp" in wanted


def _is_in_branch(script: str, place: int) -> bool:
    """Tell whether a place of a script is run under a condition only."""
    before = script[:place]
    return len(_BRANCH.findall(before)) > len(_BRANCH_END.findall(before))


def megatron_caveats(text: str, plan: Plan) -> list[str]:
    """Say which sizes of model parallelism only whoever starts the script knows, and what to change by hand."""
    hidden = _without_comments(text)
    caveats = []
    if "--use-megatron-fsdp" in flags(as_written(target_of(plan))) and _ONE_CONNECTION.search(hidden):
        caveats.append("take CUDA_DEVICE_MAX_CONNECTIONS=1 out of the script: Megatron-FSDP does not start with it")
    unknown = [flag for flag, size in _sizes_in(hidden).items() if size is None]
    if plan.origin is not None and unknown:
        ranks = plural(plan.origin.model_parallel_ranks, "model-parallel rank")
        caveats.append(f"the script leaves {' and '.join(unknown)} open: the plan is for {ranks}")
    return caveats


def _check_model_parallel(plan: Plan, script: str) -> None:
    """Refuse a script that cuts its model among another number of ranks than the plan was made for.

    Raises:
        StalePlanError: it does.
    """
    sizes = _sizes_in(script).values()
    if plan.origin is None or not sizes:
        return
    told, ranks = prod(size for size in sizes if size is not None), plan.origin.model_parallel_ranks
    if None not in sizes or not told or ranks % told:
        check_fact(plan, "model-parallel ranks", ranks, told)


def _sizes_in(script: str) -> dict[str, int | None]:
    """Return what each flag of model parallelism says, None where that is not one number."""
    told: dict[str, set[int | None]] = {}
    for flag, word in _MODEL_PARALLEL.findall(script):
        told.setdefault(f"--{flag}", set()).add(_number_of(word, script))
    return {flag: numbers.pop() if len(numbers) == 1 else None for flag, numbers in told.items()}


def _number_of(word: str, script: str) -> int | None:
    if _NUMBER.fullmatch(word):
        return int(word)
    if not (variable := _VARIABLE.fullmatch(word)):
        return None
    assigned = re.findall(rf"(?<![\w$]){variable[1] or variable[2]}=[\"']?([^\s\"';)]{{0,80}})", script)
    return int(assigned[0]) if len(set(assigned)) == 1 and _NUMBER.fullmatch(assigned[0]) else None


def _without_comments(text: str) -> str:
    """Return a script with blanks for its comments, all else at equal places.

    A # begins one where it begins a word in no quotes, or a line.
    """
    out, quote, place, begins_line = list(text), "", 0, True
    while place < len(text):
        sign = text[place]
        if sign == "\\" and quote != "'":
            place += 1
            sign = text[place : place + 1]
        elif sign == quote:
            quote = ""
        elif sign in "\"'" and not quote:
            quote = sign
        elif sign == "#" and (begins_line or (not quote and text[place - 1 : place] in " \t;&|(")):
            end = text.find("\n", place)
            end = len(text) if end < 0 else end
            out[place:end] = " " * (end - place)
            place, sign = end, "\n"
        begins_line = sign == "\n" or (begins_line and sign in " \t")
        place += 1
    return "".join(out)


def _drop_marks(text: str) -> str:
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
