"""Which release of this package runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NOT_INSTALLED = "0+not.installed"  # of a source tree on PYTHONPATH, which knows of no release


def release() -> str:
    """Return the version of this package as it was installed, `NOT_INSTALLED` where it runs from its sources."""
    try:
        return version("paro-advise")
    except PackageNotFoundError:
        return NOT_INSTALLED
