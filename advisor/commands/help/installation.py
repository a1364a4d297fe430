"""Checks of the installation."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of ``doctor``: what was looked for, what was found, and what it is needed for."""

    name: str
    ok: bool
    found: str
    help: str


_PACKAGES = (
    ("polars", "pip install paro-advise"),
    ("msgspec", "pip install paro-advise"),
    ("numpy", "pip install paro-advise"),
    ("click", "pip install paro-advise"),
    ("jinja2", "pip install paro-advise"),
    ("isal", "reads gzip faster: pip install 'paro-advise[fast]'"),
    ("zstandard", "reads .zst: pip install 'paro-advise[fast]'"),
    ("torch", "make demo and the lab: pip install 'paro-advise[runtime]'"),
    ("HolisticTraceAnalysis", "analyze --with-hta: pip install 'paro-advise[hta]'"),
)


def check_installation() -> list[Check]:
    """Return all checks; nothing heavy is imported."""
    checks = [
        Check(name="paro-advise", ok=True, found=_version("paro-advise") or "not installed", help=""),
        Check(
            name="python",
            ok=sys.version_info >= (3, 11),
            found=platform.python_version(),
            help="needs Python 3.11 or newer",
        ),
        Check(name="platform", ok=True, found=platform.platform(terse=True), help=""),
    ]
    for package, hint in _PACKAGES:
        found = _version(package)
        checks.append(Check(name=package, ok=found is not None, found=found or "not installed", help=hint))
    checks += [_pandas(), _cache()]
    return checks


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pandas() -> Check:
    found = _version("pandas")
    needed = _version("HolisticTraceAnalysis") is not None
    ok = not needed or (found is not None and int(found.split(".")[0]) < 3)
    return Check(
        name="pandas",
        ok=ok,
        found=found or "not installed",
        help="HolisticTraceAnalysis 0.5.0 fails on pandas 3",
    )


def _cache() -> Check:
    from paro_advise.advisor.facts.reading import default_cache

    folder = default_cache()
    parent = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    return Check(
        name="cache folder",
        ok=os.access(parent, os.W_OK),
        found=str(folder),
        help="set PARO_ADVISE_CACHE to a writable folder",
    )
