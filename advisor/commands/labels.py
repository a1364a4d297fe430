"""Labels that a user gives to all samples of a metrics file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_EXAMPLE = "such as run=llama"
_LABEL = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)


def labels_of(texts: Iterable[str]) -> dict[str, str]:
    """Return labels given as NAME=VALUE.

    Raises:
        UsageError: one is not written so, or given twice.
    """
    pairs = [_label(text) for text in texts]
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UsageError("a label must be given once, got two of one name", hint=_EXAMPLE)
    return found


def refuse_own_labels(own: Iterable[str], labels: Mapping[str, str]) -> None:
    """Raise where a label of the user's is one that a metric has itself.

    Args:
        own: labels of metrics.
        labels: given by the user.

    Raises:
        UsageError: one is.
    """
    if taken := sorted(set(own) & set(labels)):
        raise UsageError(f"a label must not be one that a metric has itself, got {', '.join(taken)}", hint=_EXAMPLE)


def _label(text: str) -> tuple[str, str]:
    found = _LABEL.match(text)
    if found is None or not _is_text(text):
        raise UsageError(
            f"a label must be NAME=VALUE in UTF-8, the name of letters, digits and _, got {text!r}", hint=_EXAMPLE
        )
    return found[1], found[2]


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no text
        return False
    return True
