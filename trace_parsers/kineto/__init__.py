"""Traces of the torch profiler (Kineto), in every layout since 2020."""
