"""Objects in stores, and the addresses by which users name them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]{1,30}://", re.IGNORECASE)
_WEB = ("http", "https")
_STORES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
_FILE_SYSTEMS = ("abfs", "abfss")  # abfss://container@account.dfs.core.windows.net/key
_WILD = re.compile(r"[*?\[]")
_URL = re.compile(r"\S+://\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObject:
    """An object of a store.

    Attributes:
        url: its address; of a web server with what follows "?", which nobody is shown.
        size_bytes: as the store says, None where it does not (some web servers).
        etag: what changes with its content, "" where the store gives none.
    """

    url: str
    size_bytes: int | None
    etag: str

    @property
    def identity(self) -> str:
        """Return what names this content of it, "" where nothing does, so that it must not be cached."""
        return f"{self.url}|{self.size_bytes}|{self.etag}" if self.etag else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """An address as a store takes it.

    Attributes:
        root: scheme and bucket, or the whole address of a file of a web server.
        key: the object, folder or pattern in it; "" of a web server's file.
    """

    root: str
    key: str

    @property
    def is_web(self) -> bool:
        """Tell whether it names a single file of a web server, which lists nothing."""
        return self.root.split("://")[0] in _WEB

    @property
    def is_object(self) -> bool:
        """Tell whether it may name one object; a bucket or a key that ends in a slash names none."""
        return self.is_web or (self.key != "" and not self.key.endswith("/"))

    @property
    def is_pattern(self) -> bool:
        """Tell whether the key may be a pattern; a key that is there as it stands is none."""
        return _WILD.search(self.key) is not None

    @property
    def prefix(self) -> str:
        """Return the folder in which a pattern's objects lie, the key itself without a pattern."""
        if not self.is_pattern:
            return self.key
        return self.key[: _WILD.search(self.key).start()].rpartition("/")[0]  # type: ignore[union-attr]  # it is one

    def url_of(self, key: str) -> str:
        """Return the address of another key of the same store."""
        return f"{self.root}/{key}" if key else self.root


def is_remote(text: str) -> bool:
    """Tell whether a path is an address, of a store, a web server or what cannot be reached."""
    return _SCHEME.match(text) is not None


def refuse_remote(paths: Iterable[str], what: str) -> None:
    """Raise where a path is an address although the work needs a file.

    Raises:
        UsageError: one is.
    """
    if address := next((path for path in paths if is_remote(path)), None):
        raise UsageError(
            f"{what} needs files on this machine", where=shown_address(address), hint="copy them here first"
        )


def refuse_remote_folder(folder: str | None, what: str) -> None:
    """Raise where a folder that processes of this machine read or write is an address.

    Raises:
        UsageError: it is one.
    """
    if folder is not None and is_remote(folder):
        raise UsageError(
            f"{what} must be a folder of this machine, got an address",
            where=shown_address(folder),
            hint="copy the folder from or to the store by its own tools",
        )


def parse_address(text: str) -> Address:
    """Part an address into store and key.

    Raises:
        UsageError: it is of nothing that can be reached, names no bucket or server, or holds a password, which would
            end up in reports.
    """
    scheme, sign, rest = text.partition("://")
    scheme = scheme.lower()
    if sign and scheme not in (*_WEB, *_STORES):
        raise UsageError(
            f"an address must begin with one of {', '.join((*_STORES, *_WEB))}, got {scheme}",
            where=shown_address(text),
            hint="a file or folder of this machine is given by its path alone",
        )
    place, _, key = rest.partition("/")
    user, at, host = place.rpartition("@")
    if at and (scheme not in _FILE_SYSTEMS or ":" in user):
        raise UsageError(
            "an address must hold no user or password",
            where=shown_address(text),
            hint="give credentials by the store's environment variables or a role",
        )
    if not host or host.startswith(("?", "#")):
        raise UsageError(
            "an address must name a bucket or server, got none",
            where=shown_address(text),
            hint="such as s3://bucket/run/",
        )
    if scheme not in _WEB:
        return Address(root=f"{scheme}://{place}", key=key)
    try:
        is_valid = urlsplit(text).port != 0  # parsing it is what refuses
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError("an address must have a valid host and port", where=shown_address(text))
    return Address(root=f"{scheme}://{rest.partition('#')[0]}", key="")


def shown_address(text: str) -> str:
    """Return an address without user and password, and of a web server without what follows "?" (signatures)."""
    scheme, _, rest = text.partition("://")
    place, slash, key = rest.partition("/")
    if scheme.lower() in _WEB:
        place, key = re.split(r"[?#]", place)[0], re.split(r"[?#]", key)[0]
    if scheme.lower() not in _FILE_SYSTEMS or ":" in place:
        place = place.rpartition("@")[2]
    return f"{scheme}://{place}{slash}{key}"


def without_addresses(text: str) -> str:
    """Return what a store said without the addresses in it, which may hold signatures and passwords."""
    kept = _URL.sub("(address)", text)
    return re.split(r"\?|%3F", kept, maxsplit=1, flags=re.IGNORECASE)[0]
