"""Takes off what launchers, containers and loggers put before a line of a rank's output, and terminals' colours."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from paro_advise.trace_parsers.logs.constants import DOCKER_PART_BYTES, MAX_JOINED

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PREFIXES = re.compile(
    r"""(?:
        \s*\d{1,6}:\s                                     # srun --label
      | \s*\[\d{1,6},\d{1,6}\]<\w{1,8}>:\s?               # mpirun --tag-output
      | \s*\[(?:default|rank)\d{0,6}\]:\s?                # torchrun --tee, torch's own logs
      | \s*\((?:[\w.-]{1,80}\s)?pid=\d{1,9}(?:,\sip=[\d.]{1,15})?\)\s   # Ray
      | \s*\[?\d{4}-\d\d-\d\d[T\s]\d\d:\d\d:\d\d[.,\d]{0,10}(?:Z|[+-]\d\d:?\d\d)?\]?\s
      | std(?:out|err)\s[FP]\s                            # CRI, behind its time
      | \[pod/[\w./-]{1,200}\]\s                          # kubectl --prefix
      | \[[A-Za-z][\w.-]{0,80}[-_]\d{1,6}\]\s            # names of workers
      | [A-Za-z][\w.-]{0,80}:\s(?=\s*\S)                  # pdsh
      | [A-Za-z][\w.-]{0,80}[-_]\d{1,6}\s{1,40}\|\s       # docker compose
    ){0,6}""",
    re.VERBOSE,
)
# mpirun --tag-output tags what a rank flushes: a line of a table may be printed in several parts.
_INNER_TAG = re.compile(r"\[\d{1,6},\d{1,6}\]<std(?:out|err)>:")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_CRI = re.compile(r"\S{10,40}\s(std(?:out|err))\s([FP])\s")
_MAX_CRI_HEAD = 64  # characters, of a time with nanoseconds and the tags
_DOCKER = '{"log":'


class _DockerLine(msgspec.Struct):
    """A line in the files of Docker's json-file driver."""

    log: str
    stream: str = ""


def whole_lines(lines: Iterable[str]) -> Iterator[str]:
    """Unpack Docker's lines, take colours off, and join the parts into which container runtimes cut long lines.

    CRI tags parts P until F ends the line; a part that Docker writes is full and ends without a line break.
    """
    for line in _join(lines):
        yield _COLOUR.sub("", line) if "\x1b" in line else line


def _join(lines: Iterable[str]) -> Iterator[str]:
    begun: dict[str, str] = {}
    for line in lines:
        if line.startswith(_DOCKER) and (found := _of_docker(line)) is not None:
            so_far = begun.pop(found.stream, "") + found.log
            is_part = not found.log.endswith("\n") and len(found.log.encode()) >= DOCKER_PART_BYTES
            if not is_part or len(so_far) >= MAX_JOINED:
                yield so_far.rstrip("\n")
            else:
                begun[found.stream] = so_far
            continue
        tag = _CRI.match(line) if begun or " P " in line[:_MAX_CRI_HEAD] else None
        if tag is None:
            yield line
            continue
        before = begun.pop(tag[1], None)
        so_far = line if before is None else before + line[tag.end() :]
        if tag[2] == "P" and len(so_far) < MAX_JOINED:
            begun[tag[1]] = so_far
        else:
            yield so_far
    yield from begun.values()


def _of_docker(line: str) -> _DockerLine | None:
    try:
        return msgspec.json.decode(line.encode(), type=_DockerLine)
    except (msgspec.DecodeError, UnicodeError):
        return None


def strip_prefix(line: str) -> str:
    """Return a whole line as the rank printed it, with the spaces of its own."""
    found = _PREFIXES.match(line)
    rest = line[found.end() :] if found else line
    return _INNER_TAG.sub("", rest) if "]<std" in rest else rest
