"""Training frameworks' own ways in: each records a run, lets it train under a plan, and keeps what came of it.

Importing this package imports no framework; each module in it imports its own.
"""
