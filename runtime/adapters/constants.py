"""Thresholds of the adapters (value, unit; meaning; origin), and a hint that several of them give."""

from __future__ import annotations

NOTICE_STEPS = 3  # steps; from a request to its switch; assumed: no host runs further ahead of its device
SAME_COUNT = 0.02  # of the parameters; how far plan and job may differ; assumed: covers padding of uneven shards

NO_PLAN = "run this script without a plan"
