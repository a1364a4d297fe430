"""Calls a function once a module has been imported, now or later.

This file imports nothing of ours: ``sitecustomize`` loads it by its path, before it is known whether this
Python has paro-advise at all.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Call = Callable[[ModuleType], object]


def when_imported(name: str, call: Call) -> None:
    """Call a function with a module right after it is first imported.

    Args:
        name: full name of the module.
        call: gets the module.
    """
    waiting = next((finder for finder in sys.meta_path if isinstance(finder, _After) and finder.name == name), None)
    if waiting is not None:
        waiting.calls.append(call)
    elif name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _After(name, call))


class _After(MetaPathFinder, Loader):
    """Lets a module be imported as ever, and makes the calls that wait for it afterwards.

    It stays on ``sys.meta_path`` until the import is over, so that calls can be added in the middle of it.
    """

    def __init__(self, name: str, call: Call) -> None:
        self.name = name
        self.calls = [call]
        self._loader: Loader | None = None
        self._is_looking = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - Python's signature
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self.name or self._is_looking:
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
        return self._loader.create_module(spec) if self._loader else None

    def exec_module(self, module: ModuleType) -> None:
        if self._loader is None:
            return
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for call in self.calls:
            call(module)
