"""What bounds and thresholds of facts are, with unit and origin."""

from __future__ import annotations

MAX_KERNELS = 24  # kernels of a rank kept by name, the longest; a page shows fewer
MAX_KERNEL_NAME = 100  # characters of a kernel's name that are kept; templates run to thousands
TIMELINE_BOXES = 600  # boxes a lane of a timeline keeps; a picture 1,000 pixels wide shows no more apart
WARM_UP_STEPS = 3  # steps left out at the start of a capture: they allocate, compile and fill caches; assumed
MAX_CAPTURED_STEPS = 5_000  # steps of a capture that are kept, the last ones; bounds the JSON
SCALAR_ELEMENTS = 64  # elements of a norm, a loss or an overflow flag at most; docs/traces.md, attribution
POOL_BYTES = 4 << 20  # bytes of inputs from which processes pay for their start; assumed
CACHE_BYTES = 512 << 20  # bytes that cached facts may take; the oldest go first; assumed
