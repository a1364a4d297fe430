"""Where inputs are read: on this machine, on a Ray or Dask cluster, or by a Slurm job array.

An engine reads each input by itself and hands back its facts, a few kilobytes, or why it could not be used. What is
made of them does not depend on the engine: results are told by the input's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from paro_advise.advisor.facts.model import RankFacts
from paro_advise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.trace_parsers.bytes.blocks import SourceRef

Result: TypeAlias = RankFacts | InputError


class InputReader(Protocol):
    """Reads inputs, each in any of its processes."""

    def read(
        self, refs: Sequence[SourceRef], cache: str | None, done: Callable[[int, Result], None], *, alone: bool
    ) -> dict[int, str]:
        """Read inputs.

        Args:
            refs: the inputs.
            cache: folder or address of cached facts that its processes share, None to read every input anew.
            done: called with an input's place and its result, in any order.
            alone: give each input a process of its own, since some of them ended theirs before.

        Returns:
            Places of inputs whose process ended before it told a result, and how it ended.

        Raises:
            UsageError: the engine cannot be used here.
        """
