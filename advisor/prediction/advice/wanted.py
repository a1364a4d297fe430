"""A strategy that the user names instead of taking the recommended one (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.prediction.advice.decision import median_us
from paro_advise.advisor.prediction.candidates import is_proposable
from paro_advise.errors import UsageError
from paro_advise.policies.strategy import PARTIAL_ONLY, CollectiveBackend, Strategy, check_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.candidates import Candidate
    from paro_advise.advisor.prediction.scoring import Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A strategy by name.

    Attributes:
        strategy: one of the 14 kept triples.
        group_size: ranks of a group; None for any.
    """

    strategy: Strategy
    group_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Wanted:
        """Read "IIG/8", "IIG" or "GGG".

        Raises:
            UsageError: it names no strategy that a plan can have.
        """
        triple, slash, size = text.partition("/")
        strategy = Strategy.parse(triple)
        check_kept(strategy)
        if not slash:
            return cls(strategy=strategy)
        if "I" not in str(strategy):
            raise UsageError(f"a group size needs a strategy with level I, got {text!r}", hint=f"write {strategy}")
        if not size.isascii() or not size.isdigit() or not int(size[:9]):
            raise UsageError(f"a group size must be a number of ranks, got {text!r}", hint=f"for example {strategy}/8")
        return cls(strategy=strategy, group_size=int(size[:9]))

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"{self.strategy}/{self.group_size}" if self.group_size else str(self.strategy)

    def is_met_by(self, candidate: Candidate) -> bool:
        """Tell whether a candidate is the strategy."""
        return candidate.strategy == self.strategy and self.group_size in (None, candidate.group_size)

    def pick(
        self,
        scored: Sequence[Scored],
        is_eligible: Callable[[Candidate], bool],
        run: Calibration,
    ) -> Scored:
        """Return the fastest way to run it: the triple itself, or a framework's own way where there is no other.

        Args:
            scored: all candidates.
            is_eligible: tells which of them a plan may choose.
            run: beside a GPU the backend's own collectives go before HO-Ring.

        Raises:
            UsageError: there is none, none fits, or a plan may choose none.
        """
        meant = [item for item in scored if self.is_met_by(item.candidate)]
        if not meant:
            self._refuse_partial(scored)
            sizes = sorted({item.candidate.group_size for item in scored if item.candidate.strategy == self.strategy})
            raise UsageError(
                f"--strategy must name a way to run this job, got {self}",
                hint=f"groups of {', '.join(map(str, sizes))} ranks align with its nodes" if sizes else None,
            )
        possible = [item for item in meant if is_eligible(item.candidate)]
        if not possible:
            if any(is_proposable(item.candidate, run.framework) for item in meant):
                raise UsageError(
                    f"--strategy must name what a plan may choose here, got {self}, which was never timed on GPUs",
                    hint="--allow-untested lets the plan choose it all the same",
                )
            self._refuse_partial(scored)
            raise UsageError(
                f"--strategy must name what `run` trains, got {self}, which only a framework's own settings express"
            )
        fitting = [item for item in possible if not item.reason]
        if not fitting:
            raise UsageError(f"--strategy must name what fits, got {self}: {possible[0].reason}")

        def place(item: Scored) -> tuple[bool, bool, float]:
            never_runs = run.is_gpu and item.candidate.collectives == CollectiveBackend.HO_RING
            return bool(item.candidate.variant), never_runs, median_us(item)

        return min(fitting, key=place)

    def _refuse_partial(self, scored: Sequence[Scored]) -> None:
        if better := PARTIAL_ONLY.get(self.strategy):
            is_there = any(item.candidate.strategy == better for item in scored)
            raise UsageError(
                f"--strategy must name what can pay for this job, got {self}, which does where few parameters train",
                hint=f"{better} needs no more memory and sends no more" if is_there else None,
            )
