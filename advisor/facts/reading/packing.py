"""Results and inputs as bytes: what travels between machines, and lies in the files of a Slurm job."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The bytes are decoded by these types.
from paro_advise.advisor.facts.model import RankFacts
from paro_advise.advisor.facts.reading.cache import READER_VERSION
from paro_advise.advisor.facts.reading.one_input import read_one
from paro_advise.errors import (
    BrokenInputError,
    ForeignDataError,
    HostileInputError,
    InputError,
    NoInputError,
    UnknownFormatError,
    UsageError,
)
from paro_advise.trace_parsers.bytes.archive import ArchiveMember
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.remote.objects import RemoteObject

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.facts.reading.engine import Result

_KINDS = {
    kind.code: kind
    for kind in (InputError, NoInputError, UnknownFormatError, BrokenInputError, HostileInputError, ForeignDataError)
}
_Failure = tuple[str, str, str | None, str | None]  # code, what, where, hint of an InputError


def read_packed(ref: SourceRef, cache: str | None) -> bytes:
    """Read one input where this runs; return its result as bytes."""
    import msgspec

    result = read_one(ref, cache)
    if isinstance(result, InputError):
        failure = (result.code, result.what, result.where, result.hint)
        return msgspec.msgpack.encode((READER_VERSION, b"", failure))
    return msgspec.msgpack.encode((READER_VERSION, msgspec.msgpack.encode(result), None))


def unpacked(data: bytes) -> Result:
    """Return the result that bytes of ``read_packed`` hold.

    Raises:
        UsageError: another version of this package made them.
    """
    import msgspec

    try:
        version, facts, failure = msgspec.msgpack.decode(data, type=tuple[int, bytes, _Failure | None])
        if version != READER_VERSION:
            raise UsageError(
                f"all machines must have one version of paro-advise, got readers {READER_VERSION} and {version}",
                hint="install the same version where the engine's processes run",
            )
        if failure is None:
            return msgspec.msgpack.decode(facts, type=RankFacts)
    except (msgspec.DecodeError, RecursionError) as error:
        return BrokenInputError(f"the process that read this input must tell facts, got {error}")
    code, what, where, hint = failure
    return _KINDS.get(code, InputError)(what, where=where, hint=hint)


def anywhere(ref: SourceRef) -> SourceRef:
    """Return an input as processes in other folders find it, under the name that it has here."""
    if ref.remote is not None:
        return ref
    member = ref.member and replace(ref.member, data=ref.member.data.absolute())
    return replace(ref, path=ref.path.absolute(), member=member, shown=ref.label)


def packed_refs(refs: Sequence[SourceRef]) -> bytes:
    """Return inputs as bytes."""
    import msgspec

    return msgspec.msgpack.encode(list(refs), enc_hook=os.fsencode)  # paths, of any bytes


def unpacked_refs(data: bytes) -> list[SourceRef]:
    """Return the inputs that bytes of ``packed_refs`` hold."""
    import msgspec

    return [_ref(**fields) for fields in msgspec.msgpack.decode(data)]


def _ref(*, path: bytes, member: dict[str, Any] | None, remote: dict[str, Any] | None, **rest: Any) -> SourceRef:
    return SourceRef(
        path=Path(os.fsdecode(path)),
        member=ArchiveMember(**{**member, "data": Path(os.fsdecode(member["data"]))}) if member else None,
        remote=RemoteObject(**remote) if remote else None,
        **rest,
    )
