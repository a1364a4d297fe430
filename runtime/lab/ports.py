"""A TCP port of this machine that stays free until the job it is meant for listens on it."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that the system gives to nobody else while the context lasts.

    A port that was only looked up can be gone seconds later, when a job's first rank has imported torch. Here a
    socket stays bound to it and never listens. Whoever asks for any port gets another one, and a server that asks
    for this one gets it: Linux lets sockets share an address when all have SO_REUSEADDR and none listens yet
    (socket(7)). torch's stores have it.

    Raises:
        OSError: the machine has no port left.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])
