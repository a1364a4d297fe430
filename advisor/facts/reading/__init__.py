"""Reads the inputs of a run into facts: here or where an engine puts it, from the cache when it can."""
