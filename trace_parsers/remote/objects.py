"""Objects in stores, and the addresses by which users name them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

_SCHEMES = re.compile(r"^(?:s3|s3a|gs|az|azure|abfss?|https?)://", re.IGNORECASE)
_WEB = ("http", "https")
_CONTAINERS = ("az", "azure")  # az://account/container/key
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObject:
    """An object of a store.

    Attributes:
        url: its address, without credentials.
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
        root: scheme and bucket, or a web server.
        key: the object, folder or pattern in it.
    """

    root: str
    key: str

    @property
    def is_web(self) -> bool:
        """Tell whether it names a single file of a web server, which lists nothing."""
        return self.root.split("://")[0] in _WEB

    @property
    def is_pattern(self) -> bool:
        """Tell whether the key is a pattern; web addresses hold "?" for other reasons."""
        return not self.is_web and _WILD.search(self.key) is not None

    @property
    def prefix(self) -> str:
        """Return the folder in which a pattern's objects lie, the key itself without a pattern."""
        if not self.is_pattern:
            return self.key
        return self.key[: _WILD.search(self.key).start()].rpartition("/")[0]  # type: ignore[union-attr]  # it is one

    def url_of(self, key: str) -> str:
        """Return the address of another key of the same store."""
        return f"{self.root}/{key}"


def is_remote(text: str) -> bool:
    """Tell whether a path is an address of a store or web server."""
    return _SCHEMES.match(text) is not None


def refuse_remote(paths: Iterable[str], what: str) -> None:
    """Raise where a path is an address although the work needs a file.

    Raises:
        UsageError: one is.
    """
    if address := next((path for path in paths if is_remote(path)), None):
        raise UsageError(
            f"{what} needs files on this machine", where=shown_address(address), hint="copy them here first"
        )


def parse_address(text: str) -> Address:
    """Part an address into store and key.

    Raises:
        UsageError: it names no bucket or server, or holds a password, which would end up in reports.
    """
    parts = urlsplit(text)
    if parts.username or parts.password:
        raise UsageError(
            "an address must hold no user or password",
            where=shown_address(text),
            hint="give credentials by the store's environment variables, a profile or a role",
        )
    if not parts.netloc:
        raise UsageError(f"an address must name a bucket or server, got {text!r}", hint="such as s3://bucket/run/")
    scheme = parts.scheme.lower()
    if scheme in _WEB:
        query = f"?{parts.query}" if parts.query else ""
        return Address(root=f"{scheme}://{parts.netloc}", key=parts.path.lstrip("/") + query)
    bucket, _, key = text.split("://", 1)[1].partition("/")
    if scheme in _CONTAINERS and "@" not in bucket:
        container, _, key = key.partition("/")
        bucket = f"{bucket}/{container}"
    return Address(root=f"{scheme}://{bucket}", key=key)


def shown_address(text: str) -> str:
    """Return an address without user, password and query, which may hold signatures."""
    parts = urlsplit(text)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
