"""Reads all inputs of a run into facts: in processes when it pays, from the cache when it can."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.constants import CACHE_BYTES, POOL_BYTES
from paro_advise.advisor.wording.quantities import plural
from paro_advise.errors import BrokenInputError, InputError, UnknownFormatError
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.trace_parsers.bytes.blocks import SourceRef

# Change it whenever facts made from the same file would differ.
READER_VERSION = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadInputs:
    """The facts of all inputs that could be used, in order of path, and what happened to the rest.

    Attributes:
        failure: why the first of those that could not be used could not, None where all could.
    """

    facts: tuple[RankFacts, ...]
    notices: tuple[Notice, ...]
    failure: InputError | None = None

    def require_facts(self) -> None:
        """Raise where nothing could be used.

        Raises:
            InputError: the first reason.
        """
        if not self.facts and self.failure is not None:
            raise self.failure


def read_all(
    refs: Sequence[SourceRef],
    *,
    is_collection: bool,
    cache: Path | None,
    jobs: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> ReadInputs:
    """Read inputs.

    Args:
        refs: the inputs.
        is_collection: a folder or glob was given, so unknown kinds are skipped with a notice.
        cache: folder of cached facts, None to read every file anew.
        jobs: processes to use at most.
        progress: called with (done, total, label) after each input.
    """
    size = sum(ref.size_bytes for ref in refs)
    results: dict[int, RankFacts | InputError] = {}
    if jobs > 1 and len(refs) > 1 and size > POOL_BYTES:
        with ProcessPoolExecutor(min(jobs, len(refs)), mp_context=get_context("spawn")) as pool:
            try:
                futures = {pool.submit(_read_one, ref, cache): index for index, ref in enumerate(refs)}
                for done, future in enumerate(as_completed(futures), start=1):
                    index = futures[future]
                    results[index] = _result_of(future.result, refs[index])
                    if progress:
                        progress(done, len(refs), refs[index].label)
            except BaseException:
                # Interrupted: the workers must not outlive us.
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in active_children():
                    worker.terminate()
                raise
    else:
        for index, ref in enumerate(refs):
            results[index] = _read_one(ref, cache)
            if progress:
                progress(index + 1, len(refs), ref.label)
    return _usable([results[index] for index in range(len(refs))], refs, is_collection=is_collection)


def _result_of(call: Callable[[], RankFacts | InputError], ref: SourceRef) -> RankFacts | InputError:
    try:
        return call()
    except (OSError, RuntimeError, MemoryError) as error:
        return BrokenInputError(f"the process that read this input ended: {error}", where=ref.label)


def _usable(results: Sequence[RankFacts | InputError], refs: Sequence[SourceRef], *, is_collection: bool) -> ReadInputs:
    facts: list[RankFacts] = []
    said: list[tuple[str, Notice]] = []
    notices: list[Notice] = []
    failures: list[InputError] = []
    unknown: list[str] = []
    for result, ref in zip(results, refs, strict=True):
        if not isinstance(result, InputError):
            facts.append(result)
            said.extend((ref.file_name, notice) for notice in result.notices)
        elif isinstance(result, UnknownFormatError) and is_collection:
            unknown.append(ref.file_name)
            failures.append(result)
        else:
            failures.append(result)
            message = f"{ref.file_name} could not be used: {result.what}"
            notices.append(Notice(code="Q301", severity=Severity.ERROR, message=message, help=result.hint or ""))
    if unknown:
        shown = ", ".join(sorted(unknown)[:5]) + (", ..." if len(unknown) > 5 else "")
        notices.append(
            Notice(
                code="Q302",
                severity=Severity.INFO,
                message=f"left out {plural(len(unknown), 'file')} of no known kind: {shown}",
            )
        )
    return ReadInputs(facts=tuple(facts), notices=(*_named(said), *notices), failure=failures[0] if failures else None)


def _named(said: Sequence[tuple[str, Notice]]) -> list[Notice]:
    """Return notices that name their files; what several files say alike is said once."""
    files: dict[Notice, list[str]] = {}
    for name, notice in said:
        files.setdefault(replace(notice, message=notice.message.removeprefix(f"{name}: ")), []).append(name)
    out = []
    for notice, names in files.items():
        names = list(dict.fromkeys(names))
        if len(names) == 1 and names[0] in notice.message:
            out.append(notice)
            continue
        which = (
            names[0] if len(names) == 1 else f"{len(names)} files ({', '.join(names[:2])}{', ...' * (len(names) > 2)})"
        )
        out.append(replace(notice, message=f"{which}: {notice.message}"))
    return out


def _read_one(ref: SourceRef, cache: Path | None) -> RankFacts | InputError:
    """Read one input, or its cached facts. Errors are values so that one file never ends the rest."""
    from paro_advise.advisor.facts.rank_facts import rank_facts
    from paro_advise.trace_parsers.bytes.local_copy import local_copy
    from paro_advise.trace_parsers.read import read_source

    try:
        key = _cache_key(ref) if cache else ""
        entry = cache / key if cache and key else None
        if entry and (known := _load(entry)):
            return known
        with local_copy(ref) as copy:
            facts = _with_missing(rank_facts(read_source(copy)), copy)
        if entry and not copy.missing_bytes:
            _store(entry, facts)
    except InputError as error:
        return error
    except OSError as error:
        return InputError(f"an input must be a readable file: {error.strerror or error}", where=ref.label)
    except Exception as error:
        if os.environ.get("PARO_ADVISE_DEBUG"):
            raise
        return BrokenInputError(
            f"the reader failed on this input ({type(error).__name__}: {str(error)[:200]})",
            where=ref.label,
            hint="this is a defect of paro-advise: please report it with PARO_ADVISE_DEBUG=1",
        )
    return facts


def _with_missing(facts: RankFacts, copy: SourceRef) -> RankFacts:
    """Add what a store did not give."""
    if not copy.missing_bytes:
        return facts
    notice = Notice(
        code="Q109",
        severity=Severity.WARNING,
        message=f"the store broke off: {copy.missing_bytes:,} bytes of it were not read",
        help="read it again when the store answers; what came is not cached",
    )
    return replace(facts, notices=(*facts.notices, notice))


def default_cache() -> Path:
    """Return the folder for cached facts: PARO_ADVISE_CACHE, or the user's cache folder."""
    chosen = os.environ.get("PARO_ADVISE_CACHE")
    if chosen:
        return Path(chosen)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    # The XDG specification: a relative path is invalid and ignored.
    return (base if base.is_absolute() else Path(os.path.expanduser("~")) / ".cache") / "paro-advise"  # noqa: PTH111


def _cache_key(ref: SourceRef) -> str:
    """Return the name of an input's entry, "" where nothing tells its content from another one's."""
    if ref.remote is not None:
        return _hashed(f"{READER_VERSION}|{ref.remote.identity}") if ref.remote.identity else ""
    stat = ref.path.stat()
    member = ref.member.name if ref.member else ""
    identity = f"{READER_VERSION}|{ref.path.resolve()}|{member}|{stat.st_size}|{stat.st_mtime_ns}|{ref.label}"
    return _hashed(identity)


def _hashed(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest() + ".facts"


def _load(entry: Path) -> RankFacts | None:
    import msgspec

    from paro_advise.advisor.facts.model import RankFacts

    try:
        data = entry.read_bytes()
        facts = msgspec.msgpack.decode(data, type=RankFacts)
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    return facts


def _store(entry: Path, facts: RankFacts) -> None:
    """Write facts to the cache; a cache that cannot be written is no reason to fail."""
    import msgspec

    data = msgspec.msgpack.encode(facts)
    temporary = entry.with_name(f"{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(entry)
        _prune(entry.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    """Remove the oldest entries beyond 512 MiB."""
    entries = sorted((item.stat().st_mtime, item.stat().st_size, item) for item in folder.glob("*.facts"))
    total = sum(size for _, size, _ in entries)
    for _, size, item in entries:
        if total <= CACHE_BYTES:
            return
        item.unlink(missing_ok=True)
        total -= size
