"""The inflater in use: isal's is about three times as fast as zlib's; an optional extra."""

from __future__ import annotations

import zlib
from typing import Any, cast

inflate: Any  # either of two modules with the same functions; isal has no types
try:
    from isal import isal_zlib as inflate
except ImportError:
    inflate = zlib

INFLATE_ERRORS: tuple[type[Exception], ...] = (zlib.error, cast("type[Exception]", inflate.error))
