"""A Python training script: one call, right where its imports begin, makes it run the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.edits.result import Edit
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import libcst

_ENTRY_POINTS = (
    "fully_shard",
    "FullyShardedDataParallel",
    "FSDP",
    "DistributedDataParallel",
    "DDP",
    "ZeroRedundancyOptimizer",
    "deepspeed",
)
_MAX_DEPTH = 100
_MODULE, _CALL = "paro_advise.runtime.redirect", "use_plan"


def edit_script(text: str, plan_name: str) -> Edit:
    """Return a script that runs a plan however it is launched.

    Args:
        text: the script.
        plan_name: path of the plan, from the script's folder.

    Raises:
        UsageError: it is not Python, or names no framework that a plan can redirect.
    """
    try:
        import libcst as cst
    except ImportError as error:
        raise UsageError(
            "editing a script needs libcst, which is not installed",
            hint="pip install 'paro-advise[apply]', or run it with `paro-advise run --plan`",
        ) from error
    _check_nesting(text)
    try:
        module = cst.parse_module(text)
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise UsageError(f"the script must be Python: {str(error)[:200]}") from error
    names = _names(module)
    if not names.intersection(_ENTRY_POINTS):
        raise UsageError(
            f"a script must use one of {', '.join(_ENTRY_POINTS)}, this one names none",
            hint="give the script that wraps the model",
        )
    wanted = cst.parse_statement(f"{_CALL}({plan_name!r}, beside=__file__)")
    is_ours = any(_is_our_import(line) for line in module.body)
    body = [line for line in module.body if not (is_ours and _is_our_call(line))]
    place = _first_import(body)
    had_import = any(_is_our_import(line) for line in body)
    added = [] if had_import else [cst.parse_statement(f"from {_MODULE} import {_CALL}")]
    if had_import:
        place = next(number for number, line in enumerate(body) if _is_our_import(line)) + 1
    else:
        added[0] = added[0].with_changes(leading_lines=getattr(body[place], "leading_lines", ()))
        body[place] = (
            body[place].with_changes(leading_lines=()) if hasattr(body[place], "leading_lines") else body[place]
        )
    new = module.with_changes(body=[*body[:place], *added, wanted, *body[place:]])
    caveats = ("the script needs paro-advise and the plan's file wherever it runs",)
    return Edit(framework="python", text=new.code, caveats=caveats)


def _check_nesting(text: str) -> None:
    """Refuse what is nested deeper than people write; libcst's parser would end the process.

    Raises:
        UsageError: it is, or it is not Python.
    """
    import ast

    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"the script must be Python: {str(error)[:200]}") from error
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise UsageError(f"a script must not nest deeper than {_MAX_DEPTH} brackets")


def _names(module: libcst.Module) -> set[str]:
    import libcst as cst

    found: set[str] = set()

    class Collect(cst.CSTVisitor):
        def visit_Name(self, node: cst.Name) -> None:  # noqa: N802 - libcst's name
            found.add(node.value)

    module.visit(Collect())
    return found


def _code(line: libcst.CSTNode) -> str:
    import libcst as cst

    plain = line.with_changes(leading_lines=()) if hasattr(line, "leading_lines") else line
    return cst.Module(body=[]).code_for_node(plain).strip()


def _is_our_call(line: libcst.CSTNode) -> bool:
    return _code(line).startswith(f"{_CALL}(")


def _is_our_import(line: libcst.CSTNode) -> bool:
    return _code(line).startswith(f"from {_MODULE} import {_CALL}")


def _first_import(body: Sequence[libcst.CSTNode]) -> int:
    """Return where the first import is that is not of the future; it must come before torch's names are taken."""
    for number, line in enumerate(body):
        code = _code(line)
        if code.startswith(("import ", "from ", "try:")) and not code.startswith("from __future__"):
            return number
    raise UsageError("a script must import something, this one does not", hint="give the script that wraps the model")
