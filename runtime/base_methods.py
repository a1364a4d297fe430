"""Methods and functions of ours in the place of torch's."""

from __future__ import annotations

from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MARK = "_paro_stands_for_torchs"
T = TypeVar("T")


def stand_beneath(cls: type[T], own: Mapping[str, Callable[..., object]], *, applies: Callable[[T], bool]) -> None:
    """Put methods in the place of a base class's own, once in a process, for the objects that they apply to.

    What derived classes override stays: it reaches ours by ``super()``. Each of ours is called as
    ``method(torchs, self, ...)``, with the class's own methods by name.
    """
    if any(is_ours(getattr(cls, name)) for name in own):
        return
    torchs = MappingProxyType({name: getattr(cls, name) for name in own})
    for name, method in own.items():
        setattr(cls, name, _either(torchs, name, method, applies))


def wrap_once(home: object, name: str, wrapped: Callable[..., Callable[..., object]]) -> None:
    """Put what is made of a function in its place, once however often it is asked for."""
    original = getattr(home, name)
    if not is_ours(original):
        made = wrapped(original)
        setattr(made, _MARK, True)
        setattr(home, name, made)


def is_ours(method: object) -> bool:
    """Tell whether a method or function is what this module put there."""
    return hasattr(method, _MARK)


def _either(
    torchs: Mapping[str, Callable[..., object]], name: str, own: Callable[..., object], applies: Callable[[Any], bool]
) -> Callable[..., object]:
    @wraps(torchs[name])
    def call(self: object, *args: object, **kwargs: object) -> object:
        return own(torchs, self, *args, **kwargs) if applies(self) else torchs[name](self, *args, **kwargs)

    setattr(call, _MARK, True)
    return call
