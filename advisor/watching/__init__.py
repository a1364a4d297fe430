"""Watches a running job: when its steps become slower, since when, and whether a rank's host is why."""
