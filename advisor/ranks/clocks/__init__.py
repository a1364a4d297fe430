"""Clocks of ranks: which share one, and how far the others are apart."""
