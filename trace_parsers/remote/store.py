"""Lists, reads and writes objects of S3, Google Cloud Storage, Azure, and files of web servers, by obstore.

Credentials and endpoints come from each store's usual environment variables, profiles and roles; none is printed.
Reading streams in blocks to a file, goes on where it broke off, and keeps what it got of an object that ends early.
"""

from __future__ import annotations

import os
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NoReturn

from paro_advise.errors import InputError, NoInputError, OutputError, UsageError
from paro_advise.trace_parsers.remote.constants import (
    BACKOFF_S,
    CONNECT_S,
    MAX_OBJECTS,
    MAX_RETRIES,
    READ_TRIES,
    RETRY_S,
    TIMEOUT_S,
)
from paro_advise.trace_parsers.remote.objects import Address, RemoteObject, parse_address, shown_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from obstore.store import ObjectStore

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def _open(address: Address) -> ObjectStore:
    """Return the store of an address.

    Raises:
        UsageError: obstore is not installed.
    """
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise UsageError(
            "reading from object stores and web servers needs obstore",
            where=address.root,
            hint="pip install 'paro-advise[cloud]'",
        ) from error
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    is_plain = address.root.startswith("http://") or (address.root.startswith("s3") and endpoint.startswith("http://"))
    config = {"endpoint": endpoint} if address.root.startswith("s3") and endpoint else None
    make: Callable[..., Any] = from_url  # its types part stores by overloads, which an address does not tell
    store: ObjectStore = make(
        address.root,
        config=config,
        client_options={
            "allow_http": is_plain,
            "timeout": timedelta(seconds=TIMEOUT_S),
            "connect_timeout": timedelta(seconds=CONNECT_S),
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
    return store


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
        found = _named(store, address) or _listed(store, address)
    except (InputError, UsageError):
        raise
    except Exception as error:  # noqa: BLE001 - obstore raises errors of Rust's own types too
        _fail(error, text)
    if not found:
        raise NoInputError(
            "an address must lead to at least one object, this one leads to none",
            where=shown_address(text),
            hint="check bucket and prefix; a folder is read with all that lies below it",
        )
    return sorted(found, key=lambda item: item.url)


def _named(store: ObjectStore, address: Address) -> list[RemoteObject]:
    """Return the object of exactly this key, [] where there is none."""
    import obstore

    if address.is_pattern or not address.key or address.key.endswith("/"):
        return []
    try:
        meta = obstore.head(store, address.key)
    except FileNotFoundError:
        return []
    return [RemoteObject(url=address.url_of(address.key), size_bytes=meta["size"], etag=meta["e_tag"] or "")]


def _listed(store: ObjectStore, address: Address) -> list[RemoteObject]:
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
        The bytes written.

    Raises:
        InputError: nothing of it could be read.
    """
    address = parse_address(source.url)
    store = _open(address)
    done = 0
    with target.open("wb") as file:
        for tries_left in reversed(range(READ_TRIES)):
            try:
                for block in _blocks(store, address.key, done, source.size_bytes):
                    file.write(block)
                    done += len(block)
            except Exception as error:  # noqa: BLE001 - obstore raises errors of Rust's own types too
                if tries_left and not isinstance(error, FileNotFoundError | PermissionError):
                    continue
                if not done:
                    _fail(error, source.url)
            # A stream that ended early is asked for the rest; one that is all there is done.
            if source.size_bytes is None or done >= source.size_bytes:
                break
    return done


def _blocks(store: ObjectStore, key: str, begin: int, size: int | None) -> Iterator[bytes]:
    """Yield an object from an offset on, in the network's blocks."""
    import obstore

    if begin and (size is None or begin >= size):
        return
    options = {"range": {"offset": begin}} if begin else None
    result = obstore.get(store, key, options=options)  # type: ignore[arg-type]  # a typed dictionary of obstore's
    # What obstore still gathers is lost when a connection breaks, so blocks are taken as they come.
    for block in result.stream(min_chunk_size=1):
        yield bytes(block)


def upload(text: str, data: bytes) -> None:
    """Write an object, whole or not at all.

    Raises:
        OutputError: the store does not take it.
    """
    import obstore

    address = parse_address(text)
    try:
        obstore.put(_open(address), address.key, data)
    except Exception as error:  # obstore raises errors of Rust's own types too
        raise OutputError(f"an output must be writable: {_reason(error)}", where=shown_address(text)) from error


def exists(text: str) -> bool:
    """Tell whether an object is there.

    Raises:
        OutputError: the store cannot be asked.
    """
    address = parse_address(text)
    try:
        return bool(_named(_open(address), address))
    except UsageError:
        raise
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
    if known is None and any(code in text for code in ("403", "Forbidden", "AccessDenied")):
        known = "access denied"
    if known is None and any(code in text for code in ("503", "SlowDown", "429")):
        known = "the store refuses for being asked too often"
    return known or f"{type(error).__name__}: {text.splitlines()[0].split('?')[0][:160] if text else ''}"


def _fail(error: Exception, url: str) -> NoReturn:
    reason = _reason(error)
    hint = "give credentials by the store's environment variables, a profile or a role" if "denied" in reason else None
    raise InputError(f"an object must be readable: {reason}", where=shown_address(url), hint=hint) from error
