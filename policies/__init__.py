"""Strategies as values: what is possible and what it costs."""
