"""A state's communication in the words of its operations: "2 all-reduces a step for gradients (5.48 to 16.8 MiB)"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.attribution import AVERAGES
from paro_advise.advisor.wording.quantities import bytes_text, count_text
from paro_advise.core.collective import Op
from paro_advise.core.model_state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import CollectiveEntry

_PURPOSE = {
    State.PARAMETER: " for parameters",
    State.GRADIENT: " for gradients",
    State.OPTIMIZER: " for updated parameters",
    State.OTHER: " for no model state",
    State.UNKNOWN: " of unknown purpose",
}
_NAMED_SHARE = 0.95  # of a state's exposed time and of all its time that the named operations stand for; assumed
_TIMES = ("exposed_us", "total_us")
_MAX_NAMED = 2  # operations named at most; a sentence


def operation_name(op: str) -> str:
    """Return an operation as people write it: "all-reduce"."""
    return "collective" if op == Op.UNKNOWN else op.replace("_", "-")


def operations_name(op: str) -> str:
    """Return the plural of an operation: "all-reduces"."""
    name = operation_name(op)
    return f"{name}es" if name.endswith("ch") else f"{name}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """All collectives of one operation."""

    op: str
    count: float
    least_bytes: int | None
    most_bytes: int | None
    exposed_us: float
    total_us: float

    @property
    def text(self) -> str:
        count = count_text(self.count)
        text = f"{count} {operation_name(self.op) if count == '1' else operations_name(self.op)}"
        if self.most_bytes is None:
            return text
        low, high = bytes_text(self.least_bytes), bytes_text(self.most_bytes)
        return f"{text} of {high if low == high else f'{low} to {high}'}"


def operations_text(entries: Sequence[CollectiveEntry], state: State) -> str:
    """Name the operations that carry most of a state's exposed time, "" without any."""
    unsorted = _operations(entries, state)
    if not unsorted:
        return ""
    exposed_us, total_us = (sum(getattr(item, field) for item in unsorted) or 1.0 for field in _TIMES)
    found = sorted(
        unsorted,
        key=lambda item: (-(item.exposed_us / exposed_us + item.total_us / total_us), -item.count, item.op),
    )
    named = next(found[:many] for many in range(1, len(found) + 1) if _stand_for(found[:many], found))
    texts = [item.text for item in named[:_MAX_NAMED]] + ["others"] * (len(named) > _MAX_NAMED)
    details = {entry.detail for entry in entries if entry.state == state.value and entry.exposed_us}
    purpose = " to average parameters" if details == {AVERAGES} else _PURPOSE[state]
    return " and ".join([", ".join(texts[:-1])] * (len(texts) > 1) + texts[-1:]) + " a step" + purpose


def _stand_for(named: Sequence[_Operation], whole: Sequence[_Operation]) -> bool:
    """Tell whether what is said of a state's times is said of the operations that are named."""
    return all(
        sum(getattr(item, field) for item in named) >= _NAMED_SHARE * sum(getattr(item, field) for item in whole)
        for field in _TIMES
    )


def _operations(entries: Sequence[CollectiveEntry], state: State) -> list[_Operation]:
    by_op: dict[str, list[CollectiveEntry]] = {}
    for entry in entries:
        if entry.state == state.value:
            by_op.setdefault(entry.op, []).append(entry)
    out = []
    for op, rows in by_op.items():
        sizes = [row.bytes for row in rows if row.bytes is not None]
        out.append(
            _Operation(
                op=op,
                count=sum(row.count for row in rows),
                least_bytes=min(sizes, default=None),
                most_bytes=max(sizes, default=None),
                exposed_us=sum(row.exposed_us or 0.0 for row in rows),
                total_us=sum(row.count * (row.p50_us or 0.0) for row in rows),
            )
        )
    return out
