"""The socket at which the processes of a node ask."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paro_advise.errors import InputError, UsageError
from paro_advise.runtime.attach.constants import MAX_MESSAGE_BYTES, MAX_PROCESSES
from paro_advise.runtime.attach.messages import Question, Registration, answer, parse, registered
from paro_advise.runtime.attach.processes import Process, seen

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "dynolog"  # kDynoIpcName, libkineto/src/IpcFabricConfigClient.cpp
FOLDER_VARIABLE = "KINETO_IPC_SOCKET_DIR"  # folder of sockets that have a path; without it they have names only
_CREDENTIALS = struct.Struct("3i")  # of a sender, by the kernel: process, user, group; unix(7)


class Listener:
    """Answers the processes of this user; those of others hear nothing.

    Attributes:
        processes: that have asked, by the address of their socket.
        num_foreign: messages of other users' processes.
        num_unread: messages that are none.

    Raises:
        UsageError: somebody listens already.
        InputError: there can be no such socket.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.processes: dict[str | bytes, Process] = {}
        self.num_foreign, self.num_unread = 0, 0
        self._user = os.geteuid()
        self._path = Path(folder, _NAME) if folder else None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self._bind()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the address to others."""
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def hear(self, until_s: float, wanted: Callable[[Process, bool], str]) -> None:
        """Answer questions.

        Args:
            until_s: by the monotonic clock; returns then, or after the first question.
            wanted: settings for the process that asks, empty for none; the second argument tells whether it is free.
        """
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                data, extras, _, address = self._socket.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except TimeoutError:
                return
            if self._answered(data, extras, address, wanted):
                return

    def _answered(
        self,
        data: bytes,
        extras: list[tuple[int, int, bytes]],
        address: str | bytes,
        wanted: Callable[[Process, bool], str],
    ) -> bool:
        number, user = _sender(extras)
        if user != self._user:
            self.num_foreign += 1
            return False
        message = parse(data)
        if message is None or not address:
            self.num_unread += 1
        elif isinstance(message, Registration):
            self._send(registered(1), address)
        else:
            process = self._known(message, number, address)
            if process is not None:
                self._send(answer(wanted(process, message.is_free)), address)
                return True
        return False

    def _known(self, question: Question, number: int, address: str | bytes) -> Process | None:
        known = self.processes.get(address)
        if known is None and len(self.processes) < MAX_PROCESSES:
            known = seen(number, question.processes, question.job)
            self.processes[address] = known
        return known

    def _send(self, data: bytes, address: str | bytes) -> None:
        try:
            self._socket.settimeout(1.0)
            self._socket.sendto(data, address)
        except OSError:  # it has ended, or takes nothing
            self.processes.pop(address, None)

    def _bind(self) -> None:
        if self._path is None:
            place: str = f"\0{_NAME}\0"  # its sockets' names end with a zero, see dynolog ipcfabric/Endpoint.h
        else:
            place = str(self._path)
            _remove_left_over(self._path)
        try:
            self._socket.bind(place)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    "attach must be the only listener of this node, another process listens for Kineto already",
                    hint="end it, or record by its own command: `dyno gputrace` where it is dynolog's daemon",
                ) from error
            raise InputError(f"{FOLDER_VARIABLE} must name a folder for sockets: {error}", where=place) from error
        if self._path is not None:
            self._path.chmod(stat.S_IRUSR | stat.S_IWUSR)


def _remove_left_over(path: Path) -> None:
    """Remove the socket of a listener that has ended; one that lives keeps its own."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _sender(extras: list[tuple[int, int, bytes]]) -> tuple[int, int]:
    """Return process and user of a sender; -1 where the kernel does not say."""
    for level, kind, data in extras:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) >= _CREDENTIALS.size:
            number, user, _ = _CREDENTIALS.unpack_from(data)
            return number, user
    return -1, -1
