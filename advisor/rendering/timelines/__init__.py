"""Timelines on pages: a picture that is complete by itself, and the values that make it one to explore."""
