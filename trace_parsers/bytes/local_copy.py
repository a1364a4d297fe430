"""An input as a file of this machine: what lies in a store is copied for as long as it is read."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.remote.store import download

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paro_advise.trace_parsers.bytes.blocks import SourceRef


@contextmanager
def local_copy(ref: SourceRef) -> Iterator[SourceRef]:
    """Give a file of this machine that holds an input; of a remote one a copy that lives as long as the block.

    Raises:
        InputError: the object cannot be read at all.
    """
    if ref.remote is None:
        yield ref
        return
    with tempfile.TemporaryDirectory(prefix="paro-advise-") as folder:
        path = Path(folder) / (ref.path.name or "object")
        missing = download(ref.remote, path)
        yield replace(ref, path=path, remote=None, shown=ref.label, missing_bytes=missing)
