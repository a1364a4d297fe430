"""A plan as a page."""
