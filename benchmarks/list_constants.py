"""Prints docs/constants.md: every constant of the rooms' ``constants.py`` with value, unit, meaning and origin.

`make constants` writes the page; a test compares it with the code.
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("advisor", "core", "policies", "runtime", "trace_parsers")
HEAD = """# Constants

Made from the code by `make constants`; a test fails when this page and the code differ. "Assumed" marks a
judgement that no measurement supports yet. None of the fitted constants was fitted on GPUs of ours; those that name
`make bench-public` were fitted on what others measured on H100 clusters.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One assignment of a constants module."""

    names: str
    value: str
    about: str


def constants_of(path: Path) -> list[Constant]:
    """Return the constants of a module, each with the comment beside it or, without one, the lines above it."""
    source = path.read_text(encoding="utf-8")
    comments = {
        token.start[0]: token.string.lstrip("# ").rstrip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(("# ---", "# fmt:"))
    }
    lines = source.splitlines()
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            names = ast.unparse(node.targets[0]).strip("()")
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            names = ast.unparse(node.target)
        else:
            continue
        beside = [
            comments[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in comments
        ]
        value = node.value
        text = " ".join(ast.get_source_segment(source, value).split()) if value is not None else ""
        about = " ".join(beside) or " ".join(_above(node.lineno, lines, comments))
        if names.strip("_, ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") == "":
            found.append(Constant(names=names, value=text, about=about))
    return found


def _above(line: int, lines: list[str], comments: dict[int, str]) -> list[str]:
    found: list[str] = []
    while (line := line - 1) in comments and lines[line - 1].startswith("#"):
        found.insert(0, comments[line])
    return found


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("constants.py")):
        rows = [f"| `{item.names}` | `{_short(item.value)}` | {item.about} |" for item in constants_of(path)]
        summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
        name = path.relative_to(ROOT).as_posix()
        parts.append(
            "\n".join(
                [f"## {name}", "", summary, "", "| name | value | unit, meaning, origin |", "|---|---|---|", *rows, ""]
            )
        )
    return "\n".join(parts)


def _short(value: str) -> str:
    value = value.replace("|", "\\|")
    return value if len(value) <= 60 else value[:57] + "..."


if __name__ == "__main__":
    print(page(), end="")
