"""A source whose tables are decoded, once for the whole analysis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.frames import read_table

if TYPE_CHECKING:
    import polars as pl

    from paro_advise.advisor.facts.model import RankFacts, StepFacts
    from paro_advise.trace_parsers.tables import SourceHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One input.

    Attributes:
        facts: as read; its tables as bytes are not looked at again.
        steps: of the facts, less the warm-up that the user leaves out.
        typical_step: index into ``steps`` of the one of median length, -1 without any.
        collectives: the table of RankFacts.
        link_samples: likewise.
    """

    facts: RankFacts
    steps: tuple[StepFacts, ...]
    typical_step: int
    collectives: pl.DataFrame
    link_samples: pl.DataFrame

    @property
    def header(self) -> SourceHeader:
        """Return what the input says about itself."""
        return self.facts.header

    @property
    def file_name(self) -> str:
        """Return the last part of the input's path."""
        return self.facts.source.path.replace("\\", "/").rsplit("/", 1)[-1]

    @property
    def is_cut(self) -> bool:
        """Tell whether the input ends early or lost events, so that what is missing would look like idle time."""
        return self.facts.is_cut


def decode(facts: RankFacts) -> Source:
    """Decode the tables of an input."""
    return Source(
        facts=facts,
        steps=facts.steps,
        typical_step=facts.typical_step,
        collectives=read_table(facts.collectives_ipc),
        link_samples=read_table(facts.link_samples_ipc),
    )
