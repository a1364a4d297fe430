"""The socket at which the processes of a node ask."""

from __future__ import annotations

import contextlib
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
from paro_advise.runtime.attach.messages import answer, parse
from paro_advise.runtime.attach.processes import Process, seen

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "dynolog"  # kDynoIpcName, libkineto/src/IpcFabricConfigClient.cpp
SOCKETS_VARIABLE = "KINETO_IPC_SOCKET_DIR"  # folder of sockets that have a path; without it they have names only
_CREDENTIALS = struct.Struct("3i")  # of a sender, by the kernel: process, user, group; unix(7)


class Listener:
    """Answers the processes of this user; those of others hear nothing.

    Attributes:
        processes: that have asked, by the address of their socket.
        num_foreign: messages of other users' processes.
        num_elsewhere: questions from sockets that name their folder in another way; torch ends a process that gets an
            answer from a folder of another name.

    Raises:
        UsageError: somebody listens already.
        InputError: there can be no such socket.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.processes: dict[str | bytes, Process] = {}
        self.num_foreign, self.num_elsewhere = 0, 0
        self._user = os.geteuid()
        self._folder = folder or ""
        self._inode = 0
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
        path = Path(self._folder, _NAME)
        with contextlib.suppress(OSError):
            if self._folder and path.lstat().st_ino == self._inode:
                path.unlink()

    def hear(self, until_s: float, wanted: Callable[[Process, bool], str]) -> None:
        """Answer questions.

        Args:
            until_s: by the monotonic clock; returns then, or after the first question.
            wanted: settings for the process that asks, empty for no answer; the second argument tells whether it is
                free.
        """
        while (left_s := until_s - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                data, extras, _, address = self._socket.recvmsg(MAX_MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except TimeoutError:
                return
            if self._answer(data, extras, address, wanted):
                return

    def _answer(
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
        question = parse(data)
        if question is None or not address:
            return False
        if not self._can_answer(address):
            self.num_elsewhere += 1
            return False
        known = self.processes.get(address)
        if known is None:
            if len(self.processes) >= MAX_PROCESSES:
                return False
            known = self.processes[address] = seen(number, question.processes, question.job)
        text = wanted(known, question.is_free)
        if text:
            with contextlib.suppress(OSError):  # it has ended
                self._socket.settimeout(1.0)
                self._socket.sendto(answer(text), address)
        return True

    def _can_answer(self, address: str | bytes) -> bool:
        """Tell whether a process takes an answer: its socket has a name as ours, letter by letter (Endpoint.h)."""
        if not self._folder:
            return isinstance(address, bytes) and address.startswith(b"\0")
        return isinstance(address, str) and address.rpartition("/")[0] == self._folder

    def _bind(self) -> None:
        place = f"{self._folder}/{_NAME}"  # nothing of the folder's name may change
        if self._folder:
            _remove_left_over(Path(place))
        else:
            place = f"\0{_NAME}\0"  # such names end with a zero, see dynolog ipcfabric/Endpoint.h
        try:
            self._socket.bind(place)
            if self._folder:
                Path(place).chmod(stat.S_IRUSR | stat.S_IWUSR)
                self._inode = Path(place).lstat().st_ino
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    "attach must be the only listener of this node, another process listens for Kineto already",
                    hint="end it, or record by its own command: `dyno gputrace` where it is dynolog's daemon",
                ) from error
            raise InputError(f"{SOCKETS_VARIABLE} must name a folder for sockets: {error}", where=place) from error


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
