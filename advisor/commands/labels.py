"""Labels that a user gives to all samples of a metrics file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paro_advise.advisor.metrics.measures import Measure

_EXAMPLE = "such as run=llama"
_LABEL = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)


def labels_of(texts: Iterable[str]) -> dict[str, str]:
    """Return labels given as NAME=VALUE.

    Raises:
        UsageError: one is not written so.
    """
    return dict(_label(text) for text in texts)


def refuse_own_labels(measures: Sequence[Measure], labels: Mapping[str, str]) -> None:
    """Raise where a label of the user's is one that a metric has itself.

    Raises:
        UsageError: one is.
    """
    own = {name for measure in measures for sample in measure.samples for name in sample.labels}
    if taken := sorted(own & set(labels)):
        raise UsageError(f"a label must not be one that a metric has itself, got {', '.join(taken)}", hint=_EXAMPLE)


def _label(text: str) -> tuple[str, str]:
    found = _LABEL.match(text)
    if found is None:
        raise UsageError(f"a label must be NAME=VALUE, got {text!r}", hint=_EXAMPLE)
    return found[1], found[2]
