"""Ends of jobs for what a plan cannot express."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_R = TypeVar("_R")


def this_session() -> Session:
    """Return the session of this process; only our classes ask, and they are installed with it."""
    assert Session.of_process is not None
    return Session.of_process


def end_job_on_error(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let what a plan cannot express end the job with its reason and no traceback."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except TrainingError as error:
            this_session().refuse(error)

    return call
