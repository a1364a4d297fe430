"""From the facts of all inputs to the analysis: one stage after the other, each a function of values (pure)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.critical_path import critical_path
from paro_advise.advisor.analysis.data_quality import data_quality
from paro_advise.advisor.analysis.efficiency import efficiency, efficiency_notices
from paro_advise.advisor.analysis.gather_gaps import hidden_by_prefetch_us
from paro_advise.advisor.analysis.judgement.findings import findings
from paro_advise.advisor.analysis.judgement.verdict import verdict_entry
from paro_advise.advisor.analysis.model import FORMAT, Analysis
from paro_advise.advisor.analysis.observed.training import observe_training
from paro_advise.advisor.analysis.parallel import exchange_of, parallel_entries
from paro_advise.advisor.analysis.state_summary import state_summaries
from paro_advise.advisor.analysis.summary import (
    breakdown,
    collective_entries,
    computing,
    copied_us,
    device_lag,
    device_update,
    idle_parts,
    memory_peaks,
    module_entries,
    pass_times,
    rank_entries,
    run_entry,
    step_time,
    uneven_us,
)
from paro_advise.advisor.facts.capture_log import NO_LOGS, StepLogs
from paro_advise.advisor.ranks.clocks.clock_alignment import align_clocks
from paro_advise.advisor.ranks.links.link_fit import fabric_of, find_links
from paro_advise.advisor.ranks.run import assemble_run
from paro_advise.advisor.ranks.slow_groups import find_slow_groups
from paro_advise.advisor.ranks.source import decode
from paro_advise.advisor.ranks.stack_join import join_stacks
from paro_advise.advisor.ranks.stragglers import find_stragglers
from paro_advise.advisor.ranks.topology import find_topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.trace_parsers.notice import Notice


def build_analysis(
    facts: Sequence[RankFacts], notices: Sequence[Notice], options: Options, step_logs: StepLogs = NO_LOGS
) -> Analysis:
    """Build the analysis.

    Args:
        facts: of all usable inputs, in order of path.
        notices: from reading them.
        options: see Options.
        step_logs: that lie among the inputs.
    """
    sources, stack_notices = join_stacks([decode(item) for item in facts])
    run = assemble_run(sources, options.skip_steps)
    captured, log_notices = step_logs.of_run(run.places, facts)
    topology = find_topology(run, options.gpus_per_node, captured.local_world_size if captured else None)
    aligned = align_clocks(run, topology, captured.machines if captured else ())
    links, num_impossible = find_links(aligned, run, fabric := fabric_of(run, topology))
    lateness, slow_groups = find_stragglers(aligned, run, topology.node_of), tuple(find_slow_groups(aligned, run))
    training, states = observe_training(run), state_summaries(aligned, run, links, fabric)
    parts, idle, work, collectives = breakdown(run), idle_parts(run), computing(run), collective_entries(aligned, run)
    reached = efficiency(aligned, run, training.parameter_count, work, options)
    notes = (*notices, *log_notices, *stack_notices, *run.notices, *training.notices, *efficiency_notices(reached))
    (copied_out_us, copied_in_us), uneven = copied_us(run), uneven_us(run)
    analysis = Analysis(
        format=FORMAT.name,
        format_version=FORMAT.version,
        run=run_entry(sources, run, topology, training, collectives),
        step_time_us=step_time(run),
        collectives=collectives,
        ranks=rank_entries(aligned, run, topology),
        breakdown_us=parts,
        states={state.value: summary.entry for state, summary in states.items()},
        links=tuple(links),
        stragglers=lateness.stragglers,
        clock_offsets_us={str(rank): value for rank, value in aligned.offset_us.items()} if aligned else {},
        clock_error_us=aligned.clock_error_us if aligned else None,
        verdict=verdict_entry(
            run,
            parts,
            idle,
            states,
            links,
            topology,
            training.strategy,
            lateness.stragglers,
            collectives,
            exchange_of(aligned, run),
            slow_groups,
        ),
        efficiency=reached,
        findings=(),
        data_quality=data_quality(notes, aligned, run, topology, num_impossible),
        idle_us=idle,
        lag_us=device_lag(run),
        update=device_update(run),
        modules=module_entries(aligned, run),
        work=work,
        captured=captured,
        model_parallel=parallel_entries(aligned, run),
        critical_path=critical_path(aligned, run),
        memory=memory_peaks(run),
        slow_groups=slow_groups,
        late_once_us=lateness.once_us,
        uneven_us=uneven[0],
        uneven_anew_us=uneven[1],
        passes=pass_times(run),
        copied_out_us=copied_out_us,
        copied_in_us=copied_in_us,
    )
    return replace(analysis, findings=tuple(findings(analysis, lateness, hidden_by_prefetch_us(aligned, run))))
