"""One task of a Slurm job array, and the folder through which it is given work and tells results.

python -m paro_advise.advisor.facts.reading.slurm_task FOLDER TASK
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORK = "work.msgpack"
_RESULT = ".result"


def write_work(folder: Path, refs: bytes, cache: str | None, num_tasks: int) -> None:
    """Write what all tasks are to read."""
    import msgspec

    (folder / _WORK).write_bytes(msgspec.msgpack.encode((refs, cache, num_tasks)))


def results(folder: Path, places: set[int]) -> Iterator[tuple[int, bytes]]:
    """Give the results of these places that are there."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.name.endswith(_RESULT)]
    for name in names:
        place = int(name.removesuffix(_RESULT))
        if place in places:
            yield place, (folder / name).read_bytes()


def main(folder: Path, task: int) -> None:
    """Read every so many-th input; write each result whole, under its place."""
    import msgspec

    from paro_advise.advisor.facts.reading.packing import read_packed, unpacked_refs

    packed, cache, num_tasks = msgspec.msgpack.decode((folder / _WORK).read_bytes(), type=tuple[bytes, str | None, int])
    refs = unpacked_refs(packed)
    for place in range(task, len(refs), num_tasks):
        temporary = folder / f"{place}.part"
        temporary.write_bytes(read_packed(refs[place], cache))
        temporary.rename(folder / f"{place}{_RESULT}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
