"""What the analysis could not know, and everything that was skipped, repaired or guessed on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import STALLED_SHARE
from paro_advise.advisor.analysis.model import QualityEntry
from paro_advise.advisor.analysis.summary import step_time
from paro_advise.advisor.facts.model import REPLAYED_CODE, SEVERAL_JOBS_CODE
from paro_advise.advisor.ranks.constants import IMPOSSIBLE_GBPS
from paro_advise.advisor.ranks.links.link_fit import unlike_benchmarks
from paro_advise.advisor.ranks.stalled_steps import STALLED_CODE
from paro_advise.advisor.wording.quantities import number_ranges, time_text
from paro_advise.core.plural import plural
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import StepTime
    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.topology import Topology


# They decide which inputs the figures are of, so they come before all others.
_DECISIVE = ("Q304", "Q307", "Q323")
# What nothing tells of kernels that graphs replay; recording more of the host would not help.
_UNKNOWN_OF_GRAPHS = ("Q320", "Q321")


def data_quality(
    notices: Sequence[Notice], aligned: AlignedRun | None, run: Run, topology: Topology, num_impossible: int
) -> tuple[QualityEntry, ...]:
    """Return all notes, the weightiest first.

    Args:
        notices: from reading and from earlier stages.
        aligned: None without ranks that time steps.
        run: all ranks.
        topology: their nodes.
        num_impossible: collectives that the link fit left out.
    """
    order = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
    told = (*unlike_benchmarks(run), *_unknowns(aligned, run, topology, num_impossible), *_overruled(topology))
    notes = {*notices, *told}
    if any(note.code == REPLAYED_CODE for note in notes):
        notes = {replace(note, help="") if note.code in _UNKNOWN_OF_GRAPHS else note for note in notes}
    return tuple(
        QualityEntry(code=note.code, severity=note.severity.value, message=note.message, help=note.help)
        for note in sorted(
            notes, key=lambda note: (note.code not in _DECISIVE, order[note.severity], note.code, note.message)
        )
    )


def _overruled(topology: Topology) -> list[Notice]:
    """Say that the user's number of ranks per node is not what the inputs tell."""
    if not topology.overruled:
        return []
    says = f"{topology.gpus_per_node} ranks per node, as --gpus-per-node says"
    return [
        Notice(
            code="Q342",
            severity=Severity.INFO,
            message=f"{says}; the inputs tell {topology.overruled}",
            help="leave the flag out unless names of hosts or lists of devices mislead, as in containers",
        )
    ]


def _heavy_start(times: StepTime) -> list[Notice]:
    """Say that first steps compute far longer than the others, where that is much of the mean step."""
    number, ratio, beyond_us = times.heavy_start
    if not number or beyond_us <= STALLED_SHARE * sum(times.values) / len(times.values):
        return []
    message = (
        f"the first {'step computes' if number == 1 else f'{number} steps compute'} {ratio:.1f} times as long as the "
        f"others, as where kernels are tuned or compiled: the means hold {time_text(beyond_us)} of that"
    )
    help_text = f"pass --skip-steps {number}, or record later steps"
    return [Notice(code="Q343", severity=Severity.WARNING, message=message, help=help_text)]


def _unknowns(aligned: AlignedRun | None, run: Run, topology: Topology, num_impossible: int) -> list[Notice]:
    """Return what cannot be known from these inputs, and what would tell it."""
    notes: list[Notice] = []

    def note(code: str, severity: Severity, message: str, help_text: str = "") -> None:
        notes.append(Notice(code=code, severity=severity, message=message, help=help_text))

    if not run.timed:
        note("Q312", Severity.WARNING, "no input times the steps: breakdown and exposure are unknown",
             "record torch profiler traces of the same run")  # fmt: skip
        return notes
    times = step_time(run)
    num_stalled, stalled_us = times.stalled
    if times.has_stalls:
        note(STALLED_CODE, Severity.WARNING,
             f"{num_stalled} of {plural(len(times.values), 'step')} took {time_text(max(times.values))} at the most, "
             f"half of all steps up to {time_text(times.median)}: the means hold {time_text(stalled_us)} of stalls",
             "record a few usual steps, or pass --skip-steps where the first ones stall")  # fmt: skip
    notes += _heavy_start(times)
    says_others = run.world_size is not None or (aligned is not None and len(aligned.table) > 0)
    if len(run.timed) == 1 and says_others and (run.world_size or 2) > 1:
        note("Q313", Severity.WARNING,
             "one rank only: waiting cannot be told from transferring, stragglers and clock offsets are unknown",
             "add the trace of at least one more rank, best one per node")  # fmt: skip
    elif aligned is not None and aligned.partial_groups > 0.01:
        note("Q314", Severity.WARNING,
             f"{aligned.partial_groups:.0%} of the joined collectives "
             + ("are not in the traces of all their ranks: " if run.sees_all else "have ranks without a trace: ")
             + "waiting for such a rank counts as transfer, and bandwidths are lower bounds")  # fmt: skip
    if aligned is not None and aligned.num_alone and len(run.timed) > 1:
        note("Q315", Severity.INFO,
             f"{aligned.num_alone} of {plural(len(aligned.table), 'collective')} were found on one rank only"
        )  # fmt: skip
    if not topology.gpus_per_node and not (aligned and aligned.knows_spans) and (run.world_size or 1) > 1:
        note("Q316", Severity.WARNING, "the nodes of the ranks are unknown: intra- and inter-node cannot be told apart",
             "pass --gpus-per-node")  # fmt: skip
    if aligned is not None and aligned.parted:
        note("Q339", Severity.WARNING,
             f"ranks {number_ranges(aligned.parted)} name one host, and their collectives end at times that differ by "
             "the same all along: each is taken to have a clock of its own",
             "pass --gpus-per-node if machines of one name are several nodes")  # fmt: skip
    elif topology.source == "hosts" and len(set(topology.node_of.values())) == 1 and len(run.timed) > 1:
        note("Q319", Severity.INFO,
             "all ranks name the same host, so they count as one node; containers and cloned machines may share a name",
             "pass --gpus-per-node if they are several nodes")  # fmt: skip
    if aligned is not None and any(aligned.drift.values()):
        rates = [1e6 * rate for rate in aligned.drift.values()]
        note("Q340", Severity.INFO,
             f"the hosts' clocks drift apart by up to {max(rates) - min(rates):.3g} us a second, as ends of "
             "collectives show: times of all ranks are on one clock, with that taken off")  # fmt: skip
    if num_impossible:
        note("Q317", Severity.WARNING,
             plural(num_impossible, "collective claims", "collectives claim")
             + f" more than {IMPOSSIBLE_GBPS:g} GB/s, left out of the link fit")  # fmt: skip
    if aligned is not None and aligned.num_unequal:
        num_joined = aligned.table["match"].drop_nulls().n_unique()
        if aligned.num_unequal > num_joined:
            note(SEVERAL_JOBS_CODE, Severity.WARNING,
                 f"the ranks agree on the bytes of {plural(num_joined, 'collective')} and disagree on those of "
                 f"{aligned.num_unequal}: the traces are of several jobs", "pass the files of one job")  # fmt: skip
        else:
            note("Q311", Severity.WARNING,
                 f"{aligned.num_unequal} collectives were not joined: the ranks disagree on their bytes")  # fmt: skip
    return notes
