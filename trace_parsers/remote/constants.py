"""How patiently stores are asked, with unit and reason."""

from __future__ import annotations

MAX_OBJECTS = 20_000  # of one analysis, as for files
MAX_RETRIES = 6  # of one request that a store refuses for now (503, 429) or that breaks off; assumed
RETRY_S = 60.0  # s in which these retries must succeed; assumed
BACKOFF_S = 0.25  # s before the first retry, doubled each time; assumed
STORE_CONNECT_S = 10.0  # s; assumed
TIMEOUT_S = 120.0  # s for one request; assumed
READ_TRIES = 4  # times an object is asked for, each from where the last one broke off; assumed
