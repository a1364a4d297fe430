"""Keeps the facts of files read before, in a folder or in an object store that several machines share."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.constants import CACHE_BYTES
from paro_advise.errors import InputError, OutputError
from paro_advise.trace_parsers.notice import Notice, Severity
from paro_advise.trace_parsers.remote.objects import is_remote, parse_address, shown_address
from paro_advise.trace_parsers.remote.store import exists, read_whole, upload

if TYPE_CHECKING:
    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.trace_parsers.bytes.blocks import SourceRef

# Change it whenever facts made from the same file would differ.
READER_VERSION = 60


def default_cache() -> str:
    """Return the place of cached facts, a folder or an address: PARO_ADVISE_CACHE, or the user's cache folder."""
    chosen = os.environ.get("PARO_ADVISE_CACHE")
    if chosen:
        return chosen
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # The XDG specification: a relative path is invalid and ignored.
    home = base if base.is_absolute() else Path(os.path.expanduser("~")) / ".cache"  # noqa: PTH111
    return str(home / "paro-advise")


def usable_cache(cache: str | None) -> tuple[str | None, Notice | None]:
    """Return the cache, None where its store cannot be asked, which is said: each input would wait for it.

    Raises:
        UsageError: its address cannot be, or obstore is not installed.
    """
    if cache is None or not is_remote(cache):
        return cache, None
    parse_address(cache)
    try:
        exists(f"{cache.rstrip('/')}/none.facts")
    except OutputError as error:
        message = f"the cache {shown_address(cache)} cannot be asked, nothing is kept: {error.what}"
        return None, Notice(code="Q308", severity=Severity.WARNING, message=message, help="see PARO_ADVISE_CACHE")
    return cache, None


def entry_name(ref: SourceRef) -> str:
    """Return the name of an input's entry, "" where nothing tells its content from another one's.

    Raises:
        OSError: its file cannot be looked at.
    """
    if ref.remote is not None:
        return _hash(f"{READER_VERSION}|{ref.remote.identity}") if ref.remote.identity else ""
    stat = ref.path.stat()
    member = ref.member.name if ref.member else ""
    return _hash(f"{READER_VERSION}|{ref.path.resolve()}|{member}|{stat.st_size}|{stat.st_mtime_ns}|{ref.label}")


def _hash(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest() + ".facts"


def load(cache: str, name: str) -> RankFacts | None:
    """Return the facts that an entry holds, None where there is none that can be read."""
    import msgspec

    from paro_advise.advisor.facts.model import RankFacts

    try:
        data = read_whole(f"{cache.rstrip('/')}/{name}") if is_remote(cache) else (Path(cache) / name).read_bytes()
        facts = msgspec.msgpack.decode(data, type=RankFacts)
    except (InputError, OSError, msgspec.DecodeError, RecursionError):
        return None
    return facts


def store(cache: str, name: str, facts: RankFacts) -> None:
    """Write an entry; a cache that cannot be written is no reason to fail."""
    import msgspec

    data = msgspec.msgpack.encode(facts)
    if is_remote(cache):
        with suppress(OutputError):
            upload(f"{cache.rstrip('/')}/{name}", data)
        return
    folder = Path(cache)
    temporary = folder / f"{name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(folder / name)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def prune(cache: str) -> None:
    """Remove the oldest entries of a folder beyond 2 GiB; what lies in a store goes by the store's own rules."""
    if is_remote(cache):
        return
    try:
        entries = sorted((item.stat().st_mtime, item.stat().st_size, item) for item in Path(cache).glob("*.facts"))
        total = sum(size for _, size, _ in entries)
        for _, size, item in entries:
            if total <= CACHE_BYTES:
                return
            item.unlink(missing_ok=True)
            total -= size
    except OSError:
        return
