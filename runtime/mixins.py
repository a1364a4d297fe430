"""The order of the classes that are mixed into one module: FSDP2's, a sharded model's, and an adapter's.

A class that something was mixed into keeps its name: libraries choose by it what to compute (transformers the loss of
label smoothing), and saved files hold it (the architecture in a model's config.json).
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

_SHOWN = "_paro_shown_as_base"
_PLAIN = "_paro_plain_class"


class Outermost:
    """Marks what is mixed into a module for its script to call: it stays before whatever else is mixed in."""


class _Remaking(type):
    """The class of classes that something was mixed into: to call one makes an object of the plain class.

    So does FSDP2 (``FSDPModule.__new__``): ``type(model)(config)`` is a new model, which nobody has sharded.
    """

    def __call__(cls, *args: object, **kwargs: object) -> object:
        if _PLAIN not in vars(cls):  # derived by a script, or not shown to it
            return super().__call__(*args, **kwargs)
        return vars(cls)[_PLAIN](*args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        return inspect.signature(getattr(cls, _PLAIN))


@cache
def _remaking(meta: type) -> type:
    """Return such a class of classes beside another one."""
    if issubclass(meta, _Remaking):
        return meta
    made: type = _Remaking if meta is type else type(f"_Remaking{meta.__name__}", (_Remaking, meta), {})
    return made


def _plain(cls: type) -> type:
    """Return a class without what we, or FSDP2, have mixed in."""
    known: type | None = getattr(cls, _PLAIN, None)
    is_of_fsdp2 = cls.__bases__[0].__module__.startswith("torch.distributed.fsdp")
    return known or (without_first(cls) if is_of_fsdp2 and len(cls.__bases__) > 1 else cls)


def mixed_in(mixin: type, cls: type, *, shown_as: type | None = None, **members: object) -> type:
    """Return a class with another one mixed in and further members, which shows itself as that class, or as another."""
    return derived(shown_as or cls, (mixin, cls), members)


def derived(shown_as: type, bases: tuple[type, ...], members: Mapping[str, object]) -> type:
    """Return a class that shows itself as another one.

    It is made under a name that no other class has: registries that classes enter as they are made
    (``__init_subclass__``) keep what they hold under the name of the other one.
    """
    name, plain = f"_Paro{shown_as.__name__}_{uuid4().hex}", _plain(bases[-1])
    made: type = _remaking(type(bases[-1]))(name, bases, {"__doc__": shown_as.__doc__, **members, _PLAIN: plain})
    made.__name__, made.__qualname__, made.__module__ = shown_as.__name__, shown_as.__qualname__, shown_as.__module__
    return made


def shown_as_base(cls: type, **own: object) -> type:
    """Return a class that something was mixed into as one of the name of what it was mixed into, always the same.

    Args:
        cls: the class.
        own: members in the place of its own, the same at each call.
    """
    found: type | None = vars(cls).get(_SHOWN)
    if found is None:
        members = {name: value for name, value in vars(cls).items() if name not in ("__module__", "__qualname__")}
        found = derived(without_first(cls), cls.__bases__, members | own)
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
    return derived(outer, (outer.__bases__[0], inner), members)
