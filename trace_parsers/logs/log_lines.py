"""Takes off what launchers and loggers put before a line of a rank's output."""

from __future__ import annotations

import re

_PREFIXES = re.compile(
    r"""(?:
        \s*\d{1,6}:\s                                     # srun --label
      | \s*\[\d{1,6},\d{1,6}\]<\w{1,8}>:\s?               # mpirun --tag-output
      | \s*\[(?:default|rank)\d{0,6}\]:\s?                # torchrun --tee, torch's own logs
      | \s*\((?:[\w.-]{1,80}\s)?pid=\d{1,9}(?:,\sip=[\d.]{1,15})?\)\s   # Ray
      | \s*\[?\d{4}-\d\d-\d\d[T\s]\d\d:\d\d:\d\d[.,\d]{0,10}(?:Z|[+-]\d\d:?\d\d)?\]?\s
      | [A-Za-z][\w.-]{0,80}:\s(?=\s*\S)                  # pdsh, kubectl --prefix
    ){0,6}""",
    re.VERBOSE,
)


def strip_prefix(line: str) -> str:
    """Return the line as the rank printed it, with the spaces of its own."""
    found = _PREFIXES.match(line)
    return line[found.end() :] if found else line
