"""Runs a user's command in a changed environment, as if it had been typed without us."""

from __future__ import annotations

import signal
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def run_job(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end; its output stays its own, signals reach it.

    Returns:
        Its exit code; 128 and the signal's number if a signal ended it.

    Raises:
        UsageError: there is no such command.
    """
    try:
        child = subprocess.Popen(list(command), env=dict(environment))
    except OSError as error:
        raise UsageError(
            f"the command after -- must be one that can be run, got {command[0]!r}: {error.strerror or error}",
            hint="for example: -- torchrun --nproc-per-node 8 train.py",
        ) from error
    with _forwarding(child):
        code = child.wait()
    return 128 - code if code < 0 else code


@contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[None]:
    def forward(number: int, _: Any) -> None:
        child.send_signal(number)

    # Schedulers announce the end by SIGUSR1 or SIGUSR2. Ctrl-C reaches the child by itself; we only must
    # not end before it.
    told = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in told}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
