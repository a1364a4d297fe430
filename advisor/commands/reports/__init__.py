"""Verbs that read runs and write results."""
