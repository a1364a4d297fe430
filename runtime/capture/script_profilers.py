"""The profilers that a script runs itself: torch has one at a time, and the script's comes first."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import profile as inner_profile
from torch.profiler import ProfilerAction, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Torch's own, by which every kind of its profilers begins and ends; a schedule is known from the start of ``profile``.
_BEGIN, _END, _START, _STOP = "_prepare_trace", "__exit__", "start", "stop"


class ScriptProfilers:
    """Watches torch's profilers in this process.

    Args:
        give_way: called before one of the script's begins to record.
    """

    def __init__(self, give_way: Callable[[], None]) -> None:
        self._give_way = give_way
        self._recording: set[int] = set()
        self._scheduled: weakref.WeakSet[profile] = weakref.WeakSet()
        self._are_own = False
        self._replaced: list[tuple[type, str, Any]] = []

    def install(self) -> None:
        """Start watching."""
        self._wrap(inner_profile, _BEGIN, before=self._begin)
        self._wrap(inner_profile, _END, after=self._end)
        self._wrap(profile, _START, before=self._start)
        self._wrap(profile, _STOP, after=self._scheduled.discard)

    def remove(self) -> None:
        """Stop watching."""
        while self._replaced:
            setattr(*self._replaced.pop())

    @contextmanager
    def own(self) -> Iterator[None]:
        """Let what is called inside be no profiler of the script's."""
        self._are_own = True
        try:
            yield
        finally:
            self._are_own = False

    @property
    def are_recording(self) -> bool:
        """Tell whether one of the script's has begun, and not ended."""
        return bool(self._recording)

    def are_busy_for(self, num_steps: int) -> bool:
        """Tell whether one of the script's records, or will by its schedule within so many steps."""
        if self.are_recording or torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - has no public name
            return True
        return any(
            other.schedule(other.step_num + ahead) != ProfilerAction.NONE
            for other in self._scheduled
            for ahead in range(num_steps + 1)
        )

    def _begin(self, profiler: object) -> None:
        if not self._are_own:
            self._give_way()
            self._recording.add(id(profiler))

    def _end(self, profiler: object) -> None:
        self._recording.discard(id(profiler))

    def _start(self, profiler: profile) -> None:
        if not self._are_own:
            self._scheduled.add(profiler)

    def _wrap(
        self,
        home: type,
        name: str,
        before: Callable[[Any], None] | None = None,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        original = getattr(home, name)

        @wraps(original)
        def call(profiler: object, *args: object, **kwargs: object) -> object:
            if before is not None:
                before(profiler)
            result = original(profiler, *args, **kwargs)
            if after is not None:
                after(profiler)
            return result

        setattr(home, name, call)
        self._replaced.append((home, name, original))
