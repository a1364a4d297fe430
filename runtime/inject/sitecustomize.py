"""Run by Python at start when ``paro-advise capture`` or ``run`` put this folder on the path.

Does nothing but wait for torch to be imported; a process that never imports torch sees nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).resolve().parent)


def _run_hidden_sitecustomize() -> None:
    """Run the one that Python would have run without us."""
    elsewhere = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _After(MetaPathFinder, Loader):
    """Lets a module be imported as ever and calls us afterwards."""

    def __init__(self, name: str, call: Any) -> None:
        self._name = name
        self._call = call
        self._loader: Any = None
        self._is_looking = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002 - Python's signature
        if fullname != self._name or self._is_looking:
            return None
        # Looking is not importing: whoever only asks whether the module is there must not use this up.
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is None or spec.loader is None:
            return spec
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._loader.exec_module(module)
        self._call(module)


def _activate(_: Any) -> None:
    try:
        from paro_advise.runtime.launch import activate
    except ImportError as error:
        if os.environ.get("PARO_PLAN"):
            sys.exit(f"paro-advise: the plan cannot be applied, this Python has no paro-advise: {error}")
        print(f"paro-advise: nothing is captured, this Python has no paro-advise: {error}", file=sys.stderr)
        return
    activate()


def _tell(module: Any) -> None:
    if "paro_advise.runtime.imports" in sys.modules:
        sys.modules["paro_advise.runtime.imports"].was_imported(module)


if os.environ.get("PARO_CAPTURE") or os.environ.get("PARO_PLAN"):
    sys.meta_path.insert(0, _After("torch", _activate))
    # It imports torch in the middle of its own import, when it is too late to wait for its end.
    sys.meta_path.insert(0, _After("deepspeed", _tell))
_run_hidden_sitecustomize()
