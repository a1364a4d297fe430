"""Run by Python at start when ``paro-advise capture`` or ``run`` put this folder on the path.

Does nothing but wait for torch to be imported; a process that never imports torch sees nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

_HERE = Path(__file__).resolve().parent
_HOOKS = "paro_advise.runtime.import_hooks"


def _run_hidden_sitecustomize() -> None:
    """Run the one that Python would have run without us."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _import_hooks() -> ModuleType:
    """Load the hooks by their path, and as the module that the rest of the runtime will find."""
    spec = importlib.util.spec_from_file_location(_HOOKS, _HERE.parents[1] / "import_hooks.py")
    if spec is None or spec.loader is None:
        raise ImportError(_HOOKS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[_HOOKS] = module
    spec.loader.exec_module(module)
    return module


def _activate(_: ModuleType) -> None:
    try:
        from paro_advise.runtime.launch.activation import activate
    except ImportError as error:
        if os.environ.get("PARO_PLAN"):
            sys.exit(f"paro-advise: the plan cannot be applied, this Python has no paro-advise: {error}")
        print(f"paro-advise: nothing is captured, this Python has no paro-advise: {error}", file=sys.stderr)
        return
    activate()


def _wait_for_torch() -> None:
    hooks = _import_hooks()
    hooks.when_imported("torch", _activate)
    # It imports torch in the middle of its own import, when it is too late to wait for its end.
    hooks.when_imported("deepspeed", lambda _: None)


if os.environ.get("PARO_CAPTURE") or os.environ.get("PARO_PLAN"):
    _wait_for_torch()
_run_hidden_sitecustomize()
