"""Puts stand-ins in the place of torch's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def replace_name(name: str, substitute: object, *homes: ModuleType | type) -> None:
    """Put something in the place of one of torch's names.

    Args:
        name: the same in all homes.
        substitute: for what stands there.
        homes: modules or classes that hold it.
    """
    for home in homes:
        setattr(home, name, substitute)
