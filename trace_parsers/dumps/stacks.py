"""The Python stacks of one process, as ``py-spy dump`` or Python's faulthandler print them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.constants import MAX_STACK_CALLS, MAX_THREADS
from paro_advise.trace_parsers.dumps.flight_recorder import rank_in_dump_name
from paro_advise.trace_parsers.values import bounded_text

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable

# py-spy: Thread 42 (idle): "MainThread"; faulthandler: Current thread 0x00007f0a (most recent call first):
_SPY_THREAD = re.compile(r'\s*Thread (?:0x)?[0-9A-Fa-f]{1,20} \([^)]{1,80}\)(?:: "(?P<name>[^"]{0,200})")?\s*$')
_FAULT_THREAD = re.compile(r"\s*(?P<current>Current t|T)hread 0x[0-9a-f]{1,20} .{0,200}?\(most recent call first\):")
_SPY_FRAME = re.compile(r"\s{2,}(?P<function>\S.{0,200}?) \((?P<file>[^()]{1,1000}?)(?::(?P<line>\d{1,9}))?\)\s*$")
_FAULT_FRAME = re.compile(r'\s{2,}File "(?P<file>[^"]{1,1000})", line (?P<line>\d{1,9}) in (?P<function>.{1,200})$')
_HEAD = re.compile(rb"\AProcess \d+: [^\n]*\n|(?m:^[ \t]{0,8}(?:Current t|T)hread (?:0x)?[0-9A-Fa-f]{1,20} \()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A call: its function, and the file and line that it stands in."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The threads of a process.

    Attributes:
        path: of the file.
        rank: that the file is named after; None where it is after none.
        main: frames of the main thread, the innermost first.
        others: frames of each other thread.
    """

    path: str
    rank: int | None
    main: tuple[Frame, ...]
    others: tuple[tuple[Frame, ...], ...]


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB name a thread as one of the two does."""
    return _HEAD.search(head) is not None


def read_stacks(data: Readable, path: str) -> Stacks | None:
    """Return the stacks of the first process in a text that is no launcher's; None where it shows no frame."""
    threads: list[tuple[bool, list[Frame]]] = []  # whether it is the main one
    for line in data.lines():
        if line.startswith("Process ") and any(frames for _, frames in threads):
            if not any(_is_of_launcher(frame) for _, frames in threads for frame in frames):
                break
            threads = []
        if len(threads) > MAX_THREADS:
            break
        if (spy := _SPY_THREAD.match(line)) is not None:
            threads.append((spy["name"] == "MainThread", []))
        elif _FAULT_THREAD.match(line) is not None:
            threads.append((False, []))
        elif threads and len(threads[-1][1]) < MAX_STACK_CALLS and (frame := _frame(line)) is not None:
            threads[-1][1].append(frame)
    shown = [(is_main, tuple(frames)) for is_main, frames in threads if frames]
    if not shown:
        return None
    # faulthandler names none; the one that began with the script is the main one.
    main = next((place for place, (is_main, _) in enumerate(shown) if is_main), None)
    if main is None:
        main = next(
            (place for place, (_, frames) in enumerate(shown) if frames[-1].function == "<module>"), len(shown) - 1
        )
    others = tuple(frames for place, (_, frames) in enumerate(shown) if place != main)
    return Stacks(path=path, rank=rank_in_dump_name(path), main=shown[main][1], others=others)


def _is_of_launcher(frame: Frame) -> bool:
    """Tell whether a call is of torchrun's, which py-spy lists before its ranks (``--subprocesses``)."""
    return any(part in frame.file for part in ("torch/distributed/elastic/agent/", "torch/distributed/launcher/"))


def _frame(line: str) -> Frame | None:
    """Return a call of Python's; None for those of libraries (``--native``), variables (``--locals``) and all else."""
    found = _SPY_FRAME.match(line) or _FAULT_FRAME.match(line)
    if found is None or not found["file"].endswith((".py", ".pyc", ">")):
        return None
    return Frame(
        function=bounded_text(found["function"], 200),
        file=bounded_text(found["file"], 1000),
        line=int(found["line"] or 0),
    )
