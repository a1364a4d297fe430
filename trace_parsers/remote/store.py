"""Lists, reads and writes objects of S3, Google Cloud Storage, Azure, and files of web servers, by obstore.

Credentials and endpoints come from each store's usual environment variables and roles; none is printed.
Reading streams in blocks to a file, goes on where it broke off, and keeps what it got of an object that ends early.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn

from paro_advise.errors import InputError, NoInputError, OutputError, UsageError
from paro_advise.trace_parsers.remote.constants import (
    BACKOFF_S,
    MAX_OBJECTS,
    MAX_RETRIES,
    READ_TRIES,
    RETRY_S,
    STORE_CONNECT_S,
    TIMEOUT_S,
)
from paro_advise.trace_parsers.remote.objects import (
    Address,
    RemoteObject,
    parse_address,
    shown_address,
    without_addresses,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from obstore.store import ObjectStore

# In what a store's error says. Numbers of its times may hold these digits, too.
_DENIED = re.compile(r"(?<![\d.])403(?!\d)|Forbidden|AccessDenied")
_TOO_OFTEN = re.compile(r"(?<![\d.])(?:503|429)(?!\d)|SlowDown")
_CREDENTIALS = "give credentials by the store's environment variables or a role"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _open(address: Address) -> ObjectStore:
    """Return the store of an address.

    Raises:
        UsageError: obstore is not installed, or the store's variables are not what it takes.
    """
    try:
        from obstore.store import HTTPStore, from_url
    except ImportError as error:
        raise UsageError(
            "reading from object stores and web servers needs obstore",
            where=shown_address(address.root),
            hint="pip install 'paro-advise[cloud]'",
        ) from error
    endpoint = _endpoint() if address.root.startswith("s3") else ""
    # Its types part stores by overloads, which an address does not tell.
    make: Callable[..., Any] = HTTPStore.from_url if address.is_web else from_url
    known = {} if address.is_web else {"config": {"endpoint": endpoint} if endpoint else None}
    try:
        store: ObjectStore = make(
            address.root,
            **known,
            client_options={
                "allow_http": address.root.startswith("http://") or endpoint.startswith("http://"),
                "timeout": timedelta(seconds=TIMEOUT_S),
                "connect_timeout": timedelta(seconds=STORE_CONNECT_S),
            },
            retry_config={
                "max_retries": MAX_RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_S),
                "backoff": {
                    "init_backoff": timedelta(seconds=BACKOFF_S),
                    "max_backoff": timedelta(seconds=16 * BACKOFF_S),
                    "base": 2,
                },
            },
        )
    except Exception as error:  # obstore raises errors of Rust's own types too
        raise UsageError(
            f"a store must be named and set up so that it can be asked: {_reason(error)}",
            where=shown_address(address.root),
            hint="check the address and the store's environment variables (account, key, file of credentials)",
        ) from error
    return store


def _endpoint() -> str:
    """Return the S3 endpoint that the environment names, "" for Amazon's own.

    Raises:
        UsageError: it holds a user or password.
    """
    name, endpoint = next(((name, os.environ[name]) for name in _ENDPOINTS if os.environ.get(name)), ("", ""))
    if "@" in endpoint:
        raise UsageError(f"an endpoint must hold no user or password, {name} does", hint=_CREDENTIALS)
    return endpoint


def list_objects(text: str) -> list[RemoteObject]:
    """Return the objects that an address names: one, all of a folder, or those of a pattern; by address.

    Raises:
        NoInputError: there is none.
        InputError: the store cannot be asked.
        UsageError: the address cannot be, or obstore is not installed.
    """
    address = parse_address(text)
    store = _open(address)
    try:
        found = _find_object(store, address) or _list_objects(store, address)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - obstore raises errors of Rust's own types too
        _fail(error, text)
    if not found:
        raise NoInputError(
            "nothing found at this address",
            where=shown_address(text),
            hint="check bucket and prefix; a folder is read with all that lies below it",
        )
    return sorted(found, key=lambda item: item.url)


def _find_object(store: ObjectStore, address: Address) -> list[RemoteObject]:
    """Return the object of exactly this key, [] where there is none."""
    import obstore

    if not address.is_object:
        return []
    try:
        meta = obstore.head(store, address.key)
    except FileNotFoundError:
        return []
    except Exception:
        if not address.is_web:
            raise
        # A signature is for one method: what may be read need not tell its size first.
        return [RemoteObject(url=address.root, size_bytes=None, etag="")]
    return [RemoteObject(url=address.url_of(address.key), size_bytes=meta["size"], etag=meta["e_tag"] or "")]


def _list_objects(store: ObjectStore, address: Address) -> list[RemoteObject]:
    """Return all objects below a prefix that a pattern, if there is one, fits."""
    import obstore

    if address.is_web:
        return []
    prefix = address.prefix.rstrip("/")
    found = []
    for batch in obstore.list(store, prefix or None):
        for meta in batch:
            key = meta["path"]
            if address.is_pattern and not fnmatchcase(key, address.key):
                continue
            if any(part.startswith(".") for part in key[len(prefix) :].split("/")):
                continue
            found.append(RemoteObject(url=address.url_of(key), size_bytes=meta["size"], etag=meta["e_tag"] or ""))
            if len(found) > MAX_OBJECTS:
                raise InputError(
                    f"one analysis takes at most {MAX_OBJECTS} objects",
                    where=address.root,
                    hint="name a narrower prefix",
                )
    return found


def download(source: RemoteObject, target: Path) -> int:
    """Write an object to a file; where the store breaks off for good, what came of it.

    Returns:
        The bytes that the store did not give.

    Raises:
        InputError: nothing of it could be read.
    """
    address = parse_address(source.url)
    store = _open(address)
    done, size = 0, source.size_bytes
    with target.open("wb") as file:
        for tries_left in reversed(range(READ_TRIES)):
            try:
                told, blocks = _blocks(store, address.key, done)
                size = told if size is None else size
                for block in blocks:
                    file.write(block)
                    done += len(block)
            except Exception as error:  # noqa: BLE001 - obstore raises errors of Rust's own types too
                if tries_left and not isinstance(error, FileNotFoundError | PermissionError):
                    continue
                if not done:
                    _fail(error, source.url)
            # A stream that ended early is asked for the rest; one that is all there is done.
            if size is None or done >= size:
                break
    return max(0, (size or 0) - done)


def _blocks(store: ObjectStore, key: str, begin: int) -> tuple[int, Iterator[bytes]]:
    """Return an object's whole size, and its content from an offset on in the network's blocks."""
    import obstore

    options = {"range": {"offset": begin}} if begin else None
    result = obstore.get(store, key, options=options)  # type: ignore[arg-type]  # a typed dictionary of obstore's
    # What obstore still gathers is lost when a connection breaks, so blocks are taken as they come.
    return result.meta["size"], (bytes(block) for block in result.stream(min_chunk_size=1))


def read_head(text: str, num_bytes: int) -> bytes:
    """Return the first bytes of the object of exactly this address, b"" where there is none or nothing tells.

    Raises:
        UsageError: the address cannot be, or obstore is not installed.
    """
    address = parse_address(text)
    store = _open(address)
    import obstore  # `_open` says what to do where it is not installed

    if not address.is_object:
        return b""
    try:
        return bytes(obstore.get_range(store, address.key, start=0, length=num_bytes))
    except Exception:  # noqa: BLE001 - as of a web server that gives whole files only
        pass
    try:
        first = next(iter(obstore.get(store, address.key).stream(min_chunk_size=num_bytes)), b"")
        return bytes(first)[:num_bytes]
    except Exception:  # noqa: BLE001 - whoever reads the address next says what is wrong with it
        return b""


def read_whole(text: str) -> bytes:
    """Return the content of an object.

    Raises:
        InputError: it cannot be read.
        UsageError: the address cannot be, or obstore is not installed.
    """
    address = parse_address(text)
    store = _open(address)
    import obstore  # `_open` says what to do where it is not installed

    try:
        return bytes(obstore.get(store, address.key).bytes())
    except Exception as error:  # noqa: BLE001 - obstore raises errors of Rust's own types too
        _fail(error, text)


def upload(text: str, data: bytes) -> None:
    """Write an object, whole or not at all.

    Raises:
        OutputError: the store does not take it.
        UsageError: the address cannot be, or obstore is not installed.
    """
    address = parse_address(text)
    store = _open(address)
    import obstore  # `_open` says what to do where it is not installed

    try:
        obstore.put(store, address.key, data)
    except Exception as error:  # obstore raises errors of Rust's own types too
        raise OutputError(f"an output must be writable: {_reason(error)}", where=shown_address(text)) from error


def exists(text: str) -> bool:
    """Tell whether an object is there.

    Raises:
        OutputError: the store cannot be asked.
        UsageError: the address cannot be, or obstore is not installed.
    """
    address = parse_address(text)
    store = _open(address)
    try:
        return bool(_find_object(store, address))
    except Exception as error:  # obstore raises errors of Rust's own types too
        raise OutputError(f"an output must be writable: {_reason(error)}", where=shown_address(text)) from error


def _reason(error: Exception) -> str:
    """Return why a store failed, in a line and without what it echoes of requests, which may hold signatures."""
    from obstore import exceptions

    named = (
        (exceptions.PermissionDeniedError, "access denied"),
        (PermissionError, "access denied"),
        (exceptions.UnauthenticatedError, "not authenticated"),
        (FileNotFoundError, "no such object"),
    )
    known = next((text for kind, text in named if isinstance(error, kind)), None)
    text = str(error)
    if known is None and _DENIED.search(text):
        known = "access denied"
    if known is None and _TOO_OFTEN.search(text):
        known = "the store refuses for being asked too often"
    return known or f"{type(error).__name__}: {without_addresses(text.splitlines()[0])[:160] if text else ''}"


def _fail(error: Exception, url: str) -> NoReturn:
    reason = _reason(error)
    hint = _CREDENTIALS if "denied" in reason else None
    raise InputError(f"an object must be readable: {reason}", where=shown_address(url), hint=hint) from error
