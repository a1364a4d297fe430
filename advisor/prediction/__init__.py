"""From an analysis to a plan: calibration, replay of a step under every strategy, decision."""
