"""Writes big GPU traces in torch 2.13's layout, made from a training that it records itself.

    python benchmarks/make_traces.py OUT --mb 60 --ranks 1

The recorded steps are copied in time until the text has the wanted size. ``ProfilerStep`` rows are
kept in the first and last copy only: HTA's iteration column loops over all steps for every event.
With several ranks all share one body, as rank 0 recorded it; head and clock differ.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gpu_layout import KINDS, head, labels, tail
from gpu_rendering import BACKWARD_THREAD, MAIN_THREAD, STREAMS, GpuTimeline, Rendered
from recording import record

if TYPE_CHECKING:
    from collections.abc import Iterator

_MARK = re.compile(r"\x01([A-Z])(\d+)\x02")
_BASE_NS = 1_798_761_600_000_000_000
_JITTER_NS = 200_000
DEFAULT_WORLD = 64


class Copies:
    """Renders copy after copy of the recorded steps."""

    def __init__(self, rows: list[str], shift: dict[str, int]) -> None:
        text = ",\n".join(rows)
        found = _MARK.findall(text)
        self._shift = shift
        self._kinds = np.array([KINDS.index(kind) for kind, _ in found])
        self._numbers = np.array([int(number) for _, number in found], dtype=np.uint64)
        literal = _MARK.sub(lambda match: "\x03T" if match[1] == "T" else "\x03", text.replace("%", "%%"))
        self._template = literal.replace("\x03T", "%d.%03d").replace("\x03", "%d")

    def text(self, copy: int) -> str:
        """Return the rows of one copy."""
        shifts = [copy * self._shift[kind] % (1 << 64) for kind in KINDS]
        numbers = self._numbers + np.array(shifts, dtype=np.uint64)[self._kinds]  # wraps, as a hash may
        is_time = self._kinds == KINDS.index("T")
        places = np.arange(len(numbers)) + np.concatenate(([0], np.cumsum(is_time)[:-1]))
        values = np.empty(len(numbers) + int(is_time.sum()), dtype=np.uint64)
        values[places] = np.where(is_time, numbers // 1000, numbers)
        values[places[is_time] + 1] = numbers[is_time] % 1000
        return self._template % tuple(values.tolist())


def body(rendered: Rendered, megabytes: float, *, every_step: bool) -> Iterator[str]:
    """Yield the text after the head, about ``megabytes`` of 10^6 bytes in all."""
    whole = Copies(rendered.rows, rendered.shift)
    unmarked = [row for place, row in enumerate(rendered.rows) if place not in rendered.steps]
    plain = whole if every_step else Copies(unmarked, rendered.shift)
    count = max(2, round(megabytes * 1e6 / len(whole.text(0))))
    yield labels({MAIN_THREAD: "python", BACKWARD_THREAD: "pt_autograd_0"}, STREAMS)
    for copy in range(count):
        yield (whole if copy in (0, count - 1) else plain).text(copy) + ",\n"
    yield tail(count * rendered.shift["T"])


def gzipped(texts: Iterator[str], level: int) -> Iterator[bytes]:
    """Compress to one gzip member without a time stamp."""
    stream = zlib.compressobj(level, zlib.DEFLATED, 31)
    for text in texts:
        yield stream.compress(text.encode())
    yield stream.flush()


def write_traces(
    folder: Path,
    megabytes: float,
    ranks: int = 1,
    *,
    world: int = DEFAULT_WORLD,
    seed: int = 0,
    level: int = 4,
    every_step: bool = False,
) -> list[Path]:
    """Record, render and write one file a rank; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    rendered = GpuTimeline(seed, world).render(record(seed))
    clock = random.Random(seed)
    shared = folder / "body.part"
    with shared.open("wb") as file:
        for block in gzipped(body(rendered, megabytes, every_step=every_step), level):
            file.write(block)
    paths = []
    for rank in range(ranks):
        path = folder / f"rank{rank}_trace.json.gz"
        base_ns = _BASE_NS + (clock.randrange(-_JITTER_NS, _JITTER_NS) if rank else 0)
        with path.open("wb") as file:
            # Members of one gzip file follow each other: the body is compressed only once.
            file.writelines(gzipped(iter([head(rank, world, base_ns)]), level))
            with shared.open("rb") as source:
                while block := source.read(1 << 20):
                    file.write(block)
        paths.append(path)
    shared.unlink()
    return paths


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    parser.add_argument("--mb", type=float, default=60.0, help="size of one file's JSON in 10^6 bytes")
    parser.add_argument("--ranks", type=int, default=1, help="files to write")
    parser.add_argument("--world", type=int, default=DEFAULT_WORLD, help="ranks of the job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=int, default=4, choices=range(1, 10), help="of gzip")
    parser.add_argument("--every-step", action="store_true", help="keep the step rows of every copy")
    args = parser.parse_args()
    if not 0 < args.ranks <= args.world:
        parser.error(f"--ranks must lie between 1 and the world size {args.world}, got {args.ranks}")
    paths = write_traces(
        args.out, args.mb, args.ranks,
        world=args.world, seed=args.seed, level=args.level, every_step=args.every_step,
    )  # fmt: skip
    total = sum(path.stat().st_size for path in paths)
    print(f"{len(paths)} files in {args.out}, {total / 1e6:.1f} MB compressed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
