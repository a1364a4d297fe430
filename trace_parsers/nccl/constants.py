"""Limits of reading the dumps of NCCL's tools: ``NAME = value  # unit; meaning; origin``."""

from __future__ import annotations

UINT64_MAX = (1 << 64) - 1  # none; largest identifier of a communicator; NCCL's type is uint64_t
MAX_OPEN = 1 << 20  # events; most that may have begun without an end; assumed
MAX_KERNELS_OF_ONE = 1024  # events; most kernels of one collective; assumed
MAX_LABELS = 64  # names; most format versions or timing sources; assumed

MAX_TOPOLOGY_BYTES = 16 << 20  # bytes; largest topology file; assumed
MAX_DEPTH = 64  # levels; deepest nesting of a topology; assumed
MAX_ELEMENTS = 500_000  # elements; most of a topology; assumed
MAX_LISTED = 64  # items; most GPUs, ports or links that remarks list; assumed
