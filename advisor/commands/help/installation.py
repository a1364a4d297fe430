"""Checks of the installation."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of ``doctor``: what was looked for, what was found, what to do about it, and what it is for."""

    name: str
    ok: bool
    found: str
    help: str
    use: str = ""


_CORE = ("polars", "msgspec", "numpy", "click", "jinja2")
# Optional packages: what needs them, and the extra that installs them.
_OPTIONAL = (
    ("isal", "reads gzip faster", "fast"),
    ("zstandard", "reads .zst files", "fast"),
    ("torch", "capture, run, switch, demo and the lab", "runtime"),
    ("HolisticTraceAnalysis", "analyze --with-hta", "hta"),
    ("libcst", "apply to Python scripts", "apply"),
    ("ruamel.yaml", "apply to YAML files", "apply"),
    ("tomlkit", "apply to TOML files", "apply"),
    ("obstore", "traces in object stores and on web servers", "cloud"),
    ("ray", "--engine ray", "ray"),
    ("distributed", "--engine dask", "dask"),
    ("prometheus-client", "export --prometheus", "metrics"),
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
    checks += [_package(name, "pip install paro-advise") for name in _CORE]
    checks += [_package(name, f"{use}: pip install 'paro-advise[{extra}]'", use) for name, use, extra in _OPTIONAL]
    if _version("HolisticTraceAnalysis") is not None:
        checks.append(_pandas())
    return [*checks, _cache()]


def _package(name: str, help_text: str, use: str = "") -> Check:
    found = _version(name)
    return Check(name=name, ok=found is not None, found=found or "not installed", help=help_text, use=use)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _pandas() -> Check:
    found = _version("pandas")
    return Check(
        name="pandas",
        ok=found is not None and int(found.split(".")[0]) < 3,
        found=found or "not installed",
        help="HolisticTraceAnalysis 0.5.0 needs pandas 2 and fails on pandas 3: pip install 'pandas<3'",
    )


def _cache() -> Check:
    from paro_advise.advisor.facts.reading.cache import default_cache
    from paro_advise.errors import UsageError
    from paro_advise.trace_parsers.remote.objects import is_remote, parse_address, shown_address

    place = default_cache()
    shown, wrong = place, ""
    if is_remote(place):
        shown = shown_address(place)
        try:
            parse_address(place)
        except UsageError as error:
            wrong = f"PARO_ADVISE_CACHE: {error.what}"
    else:
        folder = Path(place)
        parent = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        wrong = "" if os.access(parent, os.W_OK) else "set PARO_ADVISE_CACHE to a writable folder"
    return Check(name="cache of facts", ok=not wrong, found=shown, help=wrong)
