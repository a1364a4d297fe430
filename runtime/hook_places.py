"""Places among a module's hooks, kept for functions that come later: hooks run in their order."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

# A module's own: functions by the numbers of their handles, in the order of the calls.
HookTable = MutableMapping[int, Callable[..., object]]


def held_place(*_: object) -> None:
    """Hold a place: a hook that changes nothing."""


def take_held_place(table: HookTable, key: int) -> None:
    """Move a hook to the place that is held in its table, if one is."""
    place = next((held for held, hook in table.items() if hook is held_place), None)
    if place is not None:
        move_after(table, key, place)


def move_after(table: HookTable, key: int, anchor: int) -> None:
    """Move a hook behind another one of its table."""
    order = [other for other in table if other != key]
    order.insert(order.index(anchor) + 1, key)
    hooks = {other: table[other] for other in order}
    table.clear()
    table.update(hooks)
