"""The order of the classes that are mixed into one module: FSDP2's, a sharded model's, and an adapter's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


class Outermost:
    """Marks what is mixed into a module for its script to call: it stays before whatever else is mixed in."""


@contextmanager
def beneath(module: nn.Module) -> Iterator[None]:
    """Take the outermost class off a module while others are mixed in or taken out, each as a base of its class."""
    outer = type(module)
    if not _is_outermost(outer):
        yield
        return
    module.__class__ = without_first(outer)
    try:
        yield
    finally:
        module.__class__ = _over(outer, type(module))


def without_first(cls: type) -> type:
    """Return the class that something was mixed into."""
    found: type = cls.__bases__[1]
    return found


def without_second(cls: type) -> type:
    """Return a class without what was mixed in last, beneath the outermost one if there is such."""
    inner = without_first(cls)
    return _over(cls, without_first(inner)) if _is_outermost(cls) else inner


def _is_outermost(cls: type) -> bool:
    return issubclass(cls.__bases__[0], Outermost)


def _over(outer: type, inner: type) -> type:
    members = {name: value for name, value in vars(outer).items() if not name.startswith("__")}
    return type(outer.__name__, (outer.__bases__[0], inner), members)
