"""Prints the structure of the source: sizes of files and functions, files a room, floors and arrows, uses of ``Any``.

`make structure` runs it. A floor of a room is the longest chain of rooms that it imports from, itself counted.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("errors", "core", "policies", "trace_parsers", "runtime", "templates", "advisor")


def main() -> None:
    files = {path: path.read_text(encoding="utf-8") for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))}
    modules = {path: text for path, text in files.items() if text.count("\n") > 1}
    lines = [text.count("\n") for text in modules.values()]
    functions = [
        node.end_lineno - node.lineno + 1
        for text in modules.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    ]
    print(f"source lines            {sum(text.count(chr(10)) for text in files.values()):,} in {len(files)} files")
    print(f"lines a file            {_spread(lines)}")
    print(f"lines a function        {_spread(functions)}")
    print(f"uses of Any             {sum(map(_uses_of_any, files.values()))}")
    largest = max(_rooms(), key=lambda item: item[1])
    print(f"files in a room         at most {largest[1]} ({largest[0]})")
    arrows = _arrows("paro_advise.advisor")
    floors = _floors(arrows)
    print(
        f"rooms in advisor/       {len(floors)} on {max(floors.values())} floors, "
        f"{sum(map(len, arrows.values()))} arrows among them"
    )


def _spread(values: list[int]) -> str:
    """Return median, 95th percentile and maximum."""
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1]
    return f"median {statistics.median(values):g}, p95 {p95:.0f}, max {max(values)}"


def _uses_of_any(text: str) -> int:
    """Count what is said to be of any type; imports of the name do not count."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(text)))


def _rooms() -> list[tuple[str, int]]:
    """Return each folder with its modules, ``__init__`` left out."""
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    return [
        (str(folder.relative_to(ROOT)), sum(path.name != "__init__.py" for path in folder.glob("*.py")))
        for folder in sorted(folders)
    ]


def _arrows(parent: str) -> dict[str, set[str]]:
    """Return for each room inside a room the others that it imports from."""
    graph = grimp.build_graph("paro_advise")
    arrows = {}
    for child in sorted(graph.find_children(parent)):
        inside = {child, *graph.find_descendants(child)}
        imported = {name for module in inside for name in graph.find_modules_directly_imported_by(module)} - inside
        others = graph.find_children(parent) - {child}
        arrows[child] = {other for other in others if imported & {other, *graph.find_descendants(other)}}
    return arrows


def _floors(arrows: dict[str, set[str]]) -> dict[str, int]:
    floors: dict[str, int] = {}

    def floor(room: str) -> int:
        if room not in floors:
            floors[room] = 1 + max(map(floor, arrows[room]), default=0)
        return floors[room]

    for room in arrows:
        floor(room)
    return floors


if __name__ == "__main__":
    main()
