"""Run by Python at start when ``paro-advise capture`` or ``run`` put this folder on the path.

Does nothing but wait for torch to be imported; a process that never imports torch sees nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)


def _run_hidden_sitecustomize():
    """Run the one that Python would have run without us."""
    elsewhere = [entry for entry in sys.path if str(Path(entry or ".").resolve()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _AfterTorch(MetaPathFinder, Loader):
    """Lets torch be imported as ever and calls us afterwards."""

    def __init__(self):
        self._loader = None

    def find_spec(self, fullname, path, target=None):  # noqa: ARG002 - Python's signature
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _activate()


def _activate():
    try:
        from paro_advise.runtime.launch import activate
    except ImportError as error:
        if os.environ.get("PARO_PLAN"):
            sys.exit(f"paro-advise: the plan cannot be applied, this Python has no paro-advise: {error}")
        print(f"paro-advise: nothing is captured, this Python has no paro-advise: {error}", file=sys.stderr)
        return
    activate()


if os.environ.get("PARO_CAPTURE") or os.environ.get("PARO_PLAN"):
    sys.meta_path.insert(0, _AfterTorch())
_run_hidden_sitecustomize()
