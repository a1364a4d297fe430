"""The order of the classes that are mixed into one module: FSDP2's, a sharded model's, and an adapter's.

A class that something was mixed into keeps its name: libraries choose by it what to compute (transformers the loss of
label smoothing), and saved files hold it (the architecture in a model's config.json).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_SHOWN = "_paro_shown_as_base"


class Outermost:
    """Marks what is mixed into a module for its script to call: it stays before whatever else is mixed in."""


def mixed_in(mixin: type, cls: type, **members: object) -> type:
    """Return a class with another one mixed in and further members, which shows itself as that class."""
    return type(cls.__name__, (mixin, cls), {**members, **named_as(cls)})


def named_as(cls: type) -> dict[str, object]:
    """Return the members by which a class shows itself as another one."""
    return {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}


def shown_as_base(cls: type) -> type:
    """Return a class that something was mixed into as one of the name of what it was mixed into, always the same."""
    found: type | None = vars(cls).get(_SHOWN)
    if found is None:
        base = without_first(cls)
        found = type(base.__name__, cls.__bases__, {**vars(cls), **named_as(base)})
        setattr(cls, _SHOWN, found)  # a class of its own for each module would have each of them compiled anew
    return found


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
    return type(outer.__name__, (outer.__bases__[0], inner), {**members, **named_as(outer)})
