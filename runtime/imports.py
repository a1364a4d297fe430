"""Calls a function once a module has been imported, now or later."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType


_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


def was_imported(module: ModuleType) -> None:
    """Call what waited for a module whose import had begun before it was waited for."""
    for call in _waiting.pop(module.__name__, []):
        call(module)


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call a function with a module right after it is first imported.

    Args:
        name: full name of the module.
        call: gets the module.
    """
    module = sys.modules.get(name)
    if module is not None and getattr(module.__spec__, "_initializing", False):
        _waiting.setdefault(name, []).append(call)
    elif module is not None:
        call(module)
    else:
        sys.meta_path.insert(0, _After(name, call))


class _After(MetaPathFinder, Loader):
    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._call = call
        self._loader: Any = None
        self._is_looking = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002 - Python's signature
        if fullname != self._name or self._is_looking:
            return None
        # Looking is not importing: whoever only asks whether the module is there must not use this up.
        self._is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._loader.exec_module(module)
        self._call(module)
