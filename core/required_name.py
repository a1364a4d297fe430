"""Names of files and folders that a command cannot do without."""

from __future__ import annotations

from paro_advise.errors import UsageError


def refuse_empty(name: str, what: str) -> None:
    """Refuse an empty name, as an unset variable of the shell leaves it.

    Args:
        name: as typed.
        what: is named, for a sentence: "an output".

    Raises:
        UsageError: it is empty.
    """
    if not name:
        raise UsageError(f"{what} must have a name, got an empty one", hint="is a variable of the shell not set?")
