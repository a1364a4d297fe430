"""A notebook that holds the evidence of a comparison and recomputes its figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paro_advise.core.documents import to_json

if TYPE_CHECKING:
    from paro_advise.advisor.comparison.model import Comparison


def notebook_bytes(comparison: Comparison) -> bytes:
    """Return a Jupyter notebook (format 4.5): data in the first cell, one section a question after it.

    It needs nothing but Python: what is recomputed is plain arithmetic on the embedded numbers.
    """
    data = json.loads(to_json(comparison))
    cells: list[dict[str, Any]] = [
        _text(
            f"# Before and after\n\n{comparison.text}\n\nRun all cells: each figure is computed from the data below."
        ),
        _code("import json, statistics\n\ndata = json.loads(r'''" + _embed(data) + "''')"),
        _text("## Baseline"),
        _code(_BASELINE),
        _text("## Cluster"),
        _code(_CLUSTER),
        _text("## Strategy and states"),
        _code(_POLICIES),
        _text("## Memory"),
        _code(_BUDGETS),
        _text("## Collectives before and after"),
        _code(_COLLECTIVES),
        _text("## Numerical parity"),
        _code(_PARITY),
        _text("## Acceptance"),
        _code(_ACCEPTANCE),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    book = {
        "cells": cells,
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(book, indent=1, sort_keys=True).encode() + b"\n"


def _embed(data: object) -> str:
    """Return JSON that cannot end the raw string around it."""
    return json.dumps(data, sort_keys=True).replace("'", "\\u0027")


def _text(source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": source.splitlines(keepends=True)}


def _code(source: str) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": source.splitlines(keepends=True),
    }


_BASELINE = """\
def typical(steps):
    "The mean of the middle half of the steps."
    cut = len(steps) // 4
    return statistics.mean(sorted(steps)[cut : len(steps) - cut])


for name in ("before", "after"):
    side = data[name]
    steps = side["step_time_us"]["values"]
    print(f"{name}: {side['run']['framework']}, {side['run']['strategy']['triple_at_rest']}, "
          f"{len(steps)} {side['steps_source']} steps")
    if steps:
        print(f"  {typical(steps) / 1e3:.1f} ms, {min(steps) / 1e3:.1f} to {max(steps) / 1e3:.1f}")
"""
_CLUSTER = """\
run = data["after"]["run"]
print(f"{run['world_size']} ranks, {run['gpus_per_node']} a node ({run['gpus_per_node_source']}), "
      f"backend {run['backend']}, device {run['device_name']}")
"""
_POLICIES = """\
plan = data["plan"]
if plan is None:
    print("no plan was given to compare")
else:
    for name in ("baseline", "chosen"):
        choice = plan[name]
        print(f"{name}: {choice['triple']}, groups of {choice['group_size']}, {choice['collectives']}")
    print(plan["text"])
for state, entry in data["before"]["states"].items():
    if entry["count"]:
        print(f"{state}: {entry['regime']} - {entry['text']}")
"""
_BUDGETS = """\
if plan is not None:
    for choice in plan["candidates"][:12]:
        total = choice["predicted"]["memory_bytes"] / 2**20
        print(f"{choice['triple']} {choice['collectives']:<8} {total:9.1f} MiB  "
              f"{choice['predicted']['step_time_us']['p50'] / 1e3:9.1f} ms  {choice['reason']}")
for name in ("before", "after"):
    peak = data[name]["peak_memory_bytes"]
    print(f"{name}: measured peak", "unknown" if peak is None else f"{peak / 2**20:.0f} MiB")
"""
_COLLECTIVES = """\
for item in data["collectives"]:
    print(item["state"], item["op"], "p50", item["p50_us_before"], "->", item["p50_us_after"], "us, calls",
          item["count_before"], "->", item["count_after"])
"""
_PARITY = """\
parity = data["parity"]
if parity is None:
    print("not both runs were captured")
else:
    print(f"{parity['num_steps']} losses, largest difference {parity['loss_max_pct']} %")
    print(f"gradient norms: largest difference {parity['gradient_norm_max_pct']} %")
"""
_ACCEPTANCE = """\
before, after = (data[name]["step_time_us"]["values"] for name in ("before", "after"))
if before and after:
    print(f"speed-up: {typical(before) / typical(after):.3f}")
for item in data["predicted_vs_measured"]:
    print(f"{item['name']}: predicted {item['predicted']:.4g} ({item['low']:.4g} to {item['high']:.4g}), "
          f"measured {item['measured']:.4g}, inside: {item['inside']}")
for item in data["acceptance"]:
    print(item["criterion"], "limit", item["threshold"], "measured", item["measured"], "passed", item["passed"])
print(data["verdict"], "-", data["text"])
"""
