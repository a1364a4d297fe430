"""Which of a chunk's events are kept, decided by category and name before anything is decoded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.trace_parsers.kernel_kinds import NORM_OPERATOR, TENSOR_PARALLEL_FUNCTIONS
from paro_advise.trace_parsers.kineto.columns import HostKind
from paro_advise.trace_parsers.kineto.constants import MEMORY_EVENT
from paro_advise.trace_parsers.kineto.event_scan import WORD_BYTES, WordTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.event_scan import EventScan


class Detail(IntEnum):
    """How much of a trace is read."""

    LEAN = 0  # GPU run: device rows, runtime calls, annotations, collectives, autograd; other operators skipped
    FULL = 1  # CPU run: all operators, no runtime calls
    OPERATORS = 2  # GPU run with all operators, where these tell more: see ``needs_operators`` (launches.py)


@dataclass(slots=True)
class RoutedTexts:
    """The texts of a chunk's events by destination."""

    device: list[bytes]
    host: list[tuple[HostKind, list[bytes]]]
    described: list[bytes]  # operators whose arguments are needed
    other: list[bytes]
    products: list[bytes]  # operators that multiply matrices, of device runs
    memory: list[bytes]  # instants at which memory was allocated or freed
    route: NDArray[np.uint8]  # where each event went

    @property
    def num_calls(self) -> int:
        """Return how many runtime calls there are, kept or not."""
        return int(np.count_nonzero(self.route == _Route.RUNTIME))


class _Route(IntEnum):
    """Where a category's rows go."""

    UNKNOWN = 0
    SKIP = 1
    DEVICE = 2
    OPERATOR = 3
    ANNOTATION = 4
    RUNTIME = 5
    PYTHON = 6
    DEVICE_SPAN = 7
    INSTANT = 8


# By the first six letters of the category.
_ROUTES = {
    b"kernel": _Route.DEVICE,
    b"gpu_me": _Route.DEVICE,
    b"cpu_op": _Route.OPERATOR,
    b"user_a": _Route.ANNOTATION,
    b"cuda_r": _Route.RUNTIME,
    b"cuda_d": _Route.RUNTIME,
    b"cuda_s": _Route.SKIP,
    b"python": _Route.PYTHON,
    b"gpu_us": _Route.DEVICE_SPAN,
    b"cuda_p": _Route.SKIP,
    b"overhe": _Route.SKIP,
    b'Trace"': _Route.SKIP,
    b"cpu_in": _Route.INSTANT,
    b'ac2g",': _Route.SKIP,
    b"fwdbwd": _Route.SKIP,
}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "mtia_ccp_events", "hpu_op", "xpu_runtime_kernel"}
_RUNTIME = {"cuda_runtime", "cuda_driver", "runtime"}
# The first four letters of operators that a lean reading keeps, and of those whose arguments are needed.
_KEEP_NAME = (
    "Prof", "Opti", "c10d", "_c10", "reco", "paro", "auto", "fsdp", "torc", "Dist", "deep", "nccl", "enum",
    *sorted({name[:4] for name in TENSOR_PARALLEL_FUNCTIONS}),
)  # fmt: skip
_WIDE_NAME = ("c10d", "reco", "paro", "_c10")
# Matrix products by the first eight letters of an operator's name, and those of "add..." by five after "aten::"; norms,
# by which a collective inside one is told, by the eight after it.
_OPERATOR_SPACE = len("aten::")
_MAYBE = 2
_NORMS = {NORM_OPERATOR[_OPERATOR_SPACE:][:WORD_BYTES].encode(): 1}
_PRODUCTS = {b"aten::mm": 1, b"aten::bm": 1, b"aten::ba": 1, b"aten::ad": _MAYBE}
_PRODUCTS_OF_ADD = {b"addmm": 1}
_STACK_OF_INTEREST = re.compile(rb"deepspeed|megatron", re.IGNORECASE)
_LAYOUT = re.compile(rb'^(\s*"ph":\s*")X(",\s*"cat":\s*")(\w[\w ]*)(",\s*"name":\s*")')
# Of the spans of annotations on the device, only the optimizer's are of interest.
_DEVICE_SPAN_CATEGORY, _DEVICE_SPAN_NAME = "gpu_user_annotation", "Optimizer.step#"
_KEEP, _WIDE = 1, 2  # values of names in a WordTable
_SPAN, _SPANLESS = 1, 2  # values of phases; flow and instant events carry no time span


def is_device_category(category: str) -> bool:
    """Tell whether rows of a category (lower case) ran on an accelerator."""
    return category in _DEVICE


def is_runtime_category(category: str) -> bool:
    """Tell whether rows of a category (lower case) are calls of an accelerator's runtime."""
    return category in _RUNTIME


def host_kind(category: str, name: str, detail: Detail) -> HostKind | None:
    """Return the kind of a host row, None for one that is not kept.

    Args:
        category: lower case.
        name: as recorded.
        detail: how much is read.
    """
    match category:
        case "user_annotation":
            return HostKind.ANNOTATION
        case "cpu_op" | "operator":
            keep = detail != Detail.LEAN or name.startswith((*_KEEP_NAME, NORM_OPERATOR))
            return HostKind.OPERATOR if keep else None
        case _ if is_runtime_category(category):
            return None if detail == Detail.FULL else HostKind.RUNTIME
        case _ if category == _DEVICE_SPAN_CATEGORY:
            return HostKind.DEVICE_SPAN if name.startswith(_DEVICE_SPAN_NAME) else None
        case "python_function":
            return HostKind.PYTHON if _STACK_OF_INTEREST.search(name.encode()) else None
        case _:
            return None


class EventLayout:
    """The learned text in front of an event's category and name, and where rows go by it."""

    def __init__(self, found: re.Match[bytes], detail: Detail) -> None:
        self._detail = detail
        self._before_phase = found.group(1)
        self._prefix = found.group(1) + b"X" + found.group(2)
        self._name_at = len(self._prefix) + len(b"cpu_op") + len(found.group(4))
        self._phases = _phase_table(self._before_phase)
        self._categories = _category_table(detail)
        names = dict.fromkeys(_KEEP_NAME, _KEEP) | dict.fromkeys(_WIDE_NAME, _WIDE)
        self._device_name_at = self._name_at + len(_DEVICE_SPAN_CATEGORY) - len("cpu_op")
        self._device_names = WordTable({_DEVICE_SPAN_NAME[:4].encode(): _KEEP})
        self._products = WordTable(_PRODUCTS)
        self._products_of_add = WordTable(_PRODUCTS_OF_ADD)
        self._norms = WordTable(_NORMS)
        self._names = WordTable({name.encode(): value for name, value in names.items()})

    @classmethod
    def learn(cls, parts: list[bytes], detail: Detail) -> EventLayout | None:
        """Learn from the first complete event that has the usual key order; None without one."""
        for part in parts:
            if found := _LAYOUT.match(part):
                return cls(found, detail)
        return None

    def route(self, scan: EventScan) -> RoutedTexts:
        """Sort events by destination. What does not fit the layout is decoded in full."""
        route = self._routes(scan)
        kept, wide, products = self._operators(scan, np.flatnonzero(route == _Route.OPERATOR))
        plain, shaped = self._annotations(scan, np.flatnonzero(route == _Route.ANNOTATION))
        other = scan.texts(np.flatnonzero(route == _Route.UNKNOWN)) + shaped
        host = [(HostKind.OPERATOR, kept), (HostKind.ANNOTATION, plain)]
        host.append((HostKind.RUNTIME, scan.texts(np.flatnonzero(route == _Route.RUNTIME))))
        stacks = scan.texts(np.flatnonzero(route == _Route.PYTHON))
        host.append((HostKind.DEVICE_SPAN, self._device_spans(scan, np.flatnonzero(route == _Route.DEVICE_SPAN))))
        host.append((HostKind.PYTHON, [row for row in stacks if _STACK_OF_INTEREST.search(row)]))
        device = scan.texts(np.flatnonzero(route == _Route.DEVICE))
        instants = scan.texts(np.flatnonzero(route == _Route.INSTANT))
        return RoutedTexts(
            device=device,
            host=host,
            described=wide,
            other=other,
            products=products,
            memory=[row for row in instants if MEMORY_EVENT in row],
            route=route,
        )

    def skipped(self, texts: RoutedTexts) -> NDArray[np.intp]:
        """Return the places of events that nothing decodes; operators and stacks of which some are kept count all."""
        routes = [_Route.SKIP, _Route.INSTANT, _Route.OPERATOR, _Route.PYTHON, _Route.DEVICE_SPAN]
        return np.flatnonzero(np.isin(texts.route, routes))

    def _routes(self, scan: EventScan) -> NDArray[np.uint8]:
        """Return where each event goes; what does not look as learned is UNKNOWN."""
        phase_at, category_at = len(self._before_phase), len(self._prefix)
        if scan.num_bytes < category_at + WORD_BYTES:
            return np.zeros(len(scan), dtype=np.uint8)
        phase = self._phases.values(scan.words(phase_at + 1 - self._phases.size))
        category = self._categories.values(scan.words(category_at))
        route: NDArray[np.uint8] = category * ((phase == _SPAN) & scan.have(category_at, self._prefix))
        route[phase == _SPANLESS] = _Route.SKIP
        route[(phase == _SPANLESS) & (category == _Route.INSTANT)] = _Route.INSTANT
        route[scan.shorter_than(category_at + WORD_BYTES)] = _Route.UNKNOWN
        return route

    def _operators(self, scan: EventScan, rows: NDArray[np.intp]) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Return the operators to keep, those whose arguments are needed, and those that multiply matrices."""
        begin = scan.words(self._name_at, rows)
        value = self._names.values(begin)
        kept = self._keeps(scan, rows, value) if self._detail == Detail.LEAN else value != _WIDE
        products = rows[self._multiply(scan, rows, begin)] if self._detail != Detail.FULL else rows[:0]
        return scan.texts(rows[kept]), scan.texts(rows[value == _WIDE]), scan.texts(products)

    def _keeps(self, scan: EventScan, rows: NDArray[np.intp], value: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Mark the operators that a lean reading keeps, by the values of their names."""
        kept: NDArray[np.bool_] = value == _KEEP
        others = np.flatnonzero(value == 0)
        after = self._norms.values(scan.words(self._name_at + _OPERATOR_SPACE, rows[others]))
        kept[others[after > 0]] = True
        return kept

    def _multiply(self, scan: EventScan, rows: NDArray[np.intp], begin: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Mark the operators that multiply matrices, by the first letters of their names."""
        product = self._products.values(begin)
        unsure = np.flatnonzero(product == _MAYBE)
        product[unsure] = self._products_of_add.values(scan.words(self._name_at + _OPERATOR_SPACE, rows[unsure]))
        mask: NDArray[np.bool_] = product > 0
        return mask

    def _device_spans(self, scan: EventScan, rows: NDArray[np.intp]) -> list[bytes]:
        named = self._device_names.values(scan.words(self._device_name_at, rows)) == _KEEP
        return [text for text in scan.texts(rows[named]) if _DEVICE_SPAN_NAME.encode() in text]

    def _annotations(self, scan: EventScan, rows: NDArray[np.intp]) -> tuple[list[bytes], list[bytes]]:
        """Return the annotations, and those that carry a collective's shape.

        These are gloo's always, NCCL's where kernels lack the shape.
        """
        texts = scan.texts(rows)
        mark = b'"nccl:' if self._detail == Detail.OPERATORS else b'"gloo:'
        plain = [row for row in texts if mark not in row and b'"gloo:' not in row]
        if len(plain) == len(texts):
            return plain, []
        return plain, [row for row in texts if mark in row or b'"gloo:' in row]


def _phase_table(before_phase: bytes) -> WordTable:
    """Return the letters of phases, each with as much of what precedes it as fits into a word."""
    before = before_phase[-(WORD_BYTES - 1) :]
    phases = {before + letter: _SPANLESS for letter in (b"s", b"t", b"f", b"i", b"C")}
    return WordTable({**phases, before + b"X": _SPAN})


def _category_table(detail: Detail) -> WordTable:
    routes = dict(_ROUTES)
    if detail == Detail.FULL:
        routes |= {b"cuda_r": _Route.SKIP, b"cuda_d": _Route.SKIP}
    return WordTable({word: int(route) for word, route in routes.items()})
