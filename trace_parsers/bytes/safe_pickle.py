"""Reads a pickle of plain values without the means to run anything.

The opcodes are decoded by pickletools and carried out here: dict, list, tuple, str, bytes, int,
float, bool and None can be built, nothing can be imported, called or looked up.
"""

from __future__ import annotations

import pickletools
import warnings

from paro_advise.errors import BrokenInputError, HostileInputError
from paro_advise.trace_parsers.bytes.constants import MAX_OPCODES, MAX_PICKLE_BYTES

_MARK = object()
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE",
        "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    }
)  # fmt: skip
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME"})


class _Machine:
    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def run(self, name: str, argument: object) -> None:
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in {"BINGET", "LONG_BINGET", "GET"}:
            stack.append(self.memo[_slot(argument)])
        elif name in {"BINPUT", "LONG_BINPUT", "PUT"}:
            self.memo[_slot(argument)] = self._top()
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self._top()
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _IGNORED:
            pass
        else:
            self._build(name)

    def _build(self, name: str) -> None:
        stack = self.stack
        if name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in _TUPLES:
            stack.append(tuple(self._take(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name == "LIST":
            stack.append(self._to_mark())
        elif name == "DICT":
            items = self._to_mark()
            stack.append({})
            self._set(items)
        elif name == "APPEND":
            self._extend(self._take(1))
        elif name == "APPENDS":
            self._extend(self._to_mark())
        elif name == "SETITEM":
            self._set(self._take(2))
        elif name == "SETITEMS":
            self._set(self._to_mark())
        else:
            raise HostileInputError(
                f"a flight-recorder dump must hold plain values only, this pickle asks to {name}",
                hint="do not unpickle this file; have the dump written again by the job itself",
            )

    def _top(self) -> object:
        if self.stack[-1] is _MARK:
            raise IndexError("a mark is no value")
        return self.stack[-1]

    def _take(self, count: int) -> list[object]:
        values = self.stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise IndexError("too few values")
        del self.stack[-count:]
        return values

    def _to_mark(self) -> list[object]:
        values: list[object] = []
        while (value := self.stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values

    def _extend(self, values: list[object]) -> None:
        target = self._top()
        if not isinstance(target, list):
            raise TypeError("only a list can be appended to")
        target.extend(values)

    def _set(self, items: list[object]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError("only a dict can be filled, with pairs")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Hashing a deeply nested tuple would overflow the C stack.
            if not isinstance(key, str | int | float | bytes | None):
                raise TypeError("a key must be a plain value")
            target[key] = value


def _slot(argument: object) -> int:
    if not isinstance(argument, int):
        raise TypeError("a place in the memo must be a number")
    return argument


def _carry_out(machine: _Machine, data: bytes) -> None:
    for index, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if index >= MAX_OPCODES:
            raise HostileInputError(f"a pickle must hold at most {MAX_OPCODES} operations")
        if opcode.name == "STOP":
            return
        machine.run(opcode.name, argument)


def load_plain(data: bytes) -> object:
    """Return the value in a pickle of plain values.

    Raises:
        HostileInputError: it would import or call something, or is too large.
        BrokenInputError: it is cut or no pickle.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise HostileInputError(f"a pickle must hold at most {MAX_PICKLE_BYTES} bytes, got {len(data)}")
    machine = _Machine()
    try:
        with warnings.catch_warnings():
            # Old text opcodes may hold escapes that Python warns of; the dump's author cannot read that.
            warnings.simplefilter("ignore", DeprecationWarning)
            _carry_out(machine, data)
        (value,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, EOFError) as error:
        raise BrokenInputError(f"the pickle is cut or damaged ({error})"[:300]) from error
    if value is _MARK:
        raise BrokenInputError("the pickle is cut or damaged (no value)")
    return value
