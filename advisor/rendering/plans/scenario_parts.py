"""Other clusters and batches on a plan's page: a table that is complete by itself, and values for its sliders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.page import Cell, Row, Table, View, make_table, number
from paro_advise.advisor.wording.quantities import time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.prediction.advice.scenarios import Scenario, Scenarios
    from paro_advise.policies.plan import Quantiles


def scenario_view(scenarios: Scenarios) -> View:
    """Return what the sliders need, as JSON takes it: values, where each begins, and step times (us) with ranges."""
    return {
        "sliders": [
            {"name": name, "values": texts, "at": at}
            for (name, texts), at in zip(_quantities(scenarios), scenarios.now, strict=True)
        ],
        "baseline": [_triple(item.baseline_us) for item in scenarios.grid],
        "chosen": [_triple(item.chosen_us) for item in scenarios.grid],
        "names": [scenarios.baseline, scenarios.chosen],
    }


def scenario_table(scenarios: Scenarios) -> Table:
    """Return the scenarios that differ from the run in one quantity, and the run itself."""
    quantities = _quantities(scenarios)
    sizes = [len(texts) for _, texts in quantities]
    rows = [_row("as it is", _at(scenarios, scenarios.now, sizes))]
    for which, (name, texts) in enumerate(quantities):
        for value, text in enumerate(texts):
            if value != scenarios.now[which]:
                place = tuple(value if index == which else at for index, at in enumerate(scenarios.now))
                rows.append(_row(f"{name}: {text}", _at(scenarios, place, sizes)))
    names = (
        "changed",
        f"step, as it runs: {scenarios.baseline} #",
        f"step, under the plan: {scenarios.chosen} #",
        "speed-up #",
    )
    return make_table("table-scenarios", "One quantity changed at a time; 80 % ranges", names, rows)


def _quantities(scenarios: Scenarios) -> list[tuple[str, list[str]]]:
    return [
        ("nodes", [str(count) for count in scenarios.nodes]),
        ("inter-node bandwidth", [f"{rate:.3g} GB/s" for rate in scenarios.inter_gbps]),
        ("micro-batches", [str(count) for count in scenarios.micro_batches]),
    ]


def _at(scenarios: Scenarios, place: Sequence[int], sizes: Sequence[int]) -> Scenario:
    nodes, rate, batch = place
    return scenarios.grid[(nodes * sizes[1] + rate) * sizes[2] + batch]


def _row(text: str, scenario: Scenario) -> Row:
    base, chosen = scenario.baseline_us, scenario.chosen_us
    gain = base.p50 / chosen.p50 if base and chosen else None
    return Row(
        cells=(
            Cell(text=text),
            _step_cell(base),
            _step_cell(chosen),
            number(gain, "" if gain is None else f"{gain:.2f}x"),
        )
    )


def _step_cell(step: Quantiles | None) -> Cell:
    if step is None:
        return number(None, "groups do not fit")
    return number(step.p50, f"{time_text(step.p50)} ({time_text(step.p10)} to {time_text(step.p90)})")


def _triple(step: Quantiles | None) -> list[float] | None:
    # Digits enough for ratios that are those of the table.
    return None if step is None else [float(f"{value:.8g}") for value in (step.p10, step.p50, step.p90)]
