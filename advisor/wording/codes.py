"""Reads the explanations of all codes from the documentation that ships with the package."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import resources

_HEADING = re.compile(r"^## (\S+): (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a code means."""

    code: str
    title: str
    text: str


@cache
def known_codes() -> dict[str, Explanation]:
    """Return all codes in the order of the documentation."""
    text = resources.files("paro_advise.advisor.wording").joinpath("codes.md").read_text(encoding="utf-8")
    marks = list(_HEADING.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return {
        mark.group(1): Explanation(
            code=mark.group(1),
            title=mark.group(2),
            text=re.split(r"^# ", text[mark.end() : end], flags=re.MULTILINE)[0].strip(),
        )
        for mark, end in zip(marks, ends, strict=True)
    }


def close_codes(code: str) -> list[str]:
    """Return known codes that a mistyped or unfinished one may stand for."""
    begun = [known for known in known_codes() if known.startswith(code)][:3]
    return begun or get_close_matches(code, known_codes(), n=3)
