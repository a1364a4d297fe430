"""What is said beside torch's own errors about sharded tensors, whose words name nothing of the script."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paro_advise.errors import ParoAdviseError
from paro_advise.runtime.messages import write_lines
from paro_advise.runtime.sharding.parameters.whole import OF_LAYOUTS

if TYPE_CHECKING:
    from types import TracebackType

    from paro_advise.runtime.adapters.session import Session

_WORDS = (*OF_LAYOUTS, "DTensor", "WholeTensor")
_OF_DTENSORS = ("device_mesh", "full_tensor", "placements", "redistribute", "to_local")
_WHOLE = "parameters that the plan replicates are plain tensors, and so is what is made of them; the script asks for"
_WHOLE_HINT = "take the tensor as it is, the parameter's own full_tensor(), or choose a strategy that shards it (G..)"
_IN_STEP = "an optimizer meets sharded parameters and gradients, of which each rank holds rows; this one uses"
_ELSEWHERE = "parameters and gradients may be sharded tensors; the script uses"
_STEP_HINT = (
    "take its form for a single device, without collectives and flat buffers, which makes what it keeps of a parameter "
    "in state[parameter], in its first step; or train without a plan"
)
_HINT = "see docs/runtime.md, what differs for a script; choose NNN, which shards nothing, or train without a plan"


def install(session: Session) -> None:
    """Explain what ends the process, after whatever shows it."""
    shown_by = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shown_by(kind, error, traceback)
        if session.models and asks_for_what_dtensors_have(error):
            write_lines(
                f"paro-advise: rank {_rank()}: under a plan {_WHOLE} what only DTensors have", f"  hint: {_WHOLE_HINT}"
            )
        elif session.models and is_of_sharded_tensors(error):
            write_lines(*explanation(in_step=any(model.engine.shards.is_stepping for model in session.models)))

    sys.excepthook = show


def asks_for_what_dtensors_have(error: BaseException) -> bool:
    """Tell whether a script has taken a plain tensor for a DTensor."""
    return isinstance(error, AttributeError) and isinstance(error.obj, torch.Tensor) and error.name in _OF_DTENSORS


def is_of_sharded_tensors(error: BaseException) -> bool:
    """Tell whether an error, or what led to it, is torch's own about sharded tensors."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ParoAdviseError):
            return False
        if isinstance(seen, Exception) and any(words in str(seen) for words in _WORDS):
            return True
        seen = seen.__cause__
    return False


def explanation(*, in_step: bool) -> tuple[str, str]:
    """Return the lines to print beneath such an error.

    Args:
        in_step: an optimizer was stepping.
    """
    what, hint = (_IN_STEP, _STEP_HINT) if in_step else (_ELSEWHERE, _HINT)
    return (
        f"paro-advise: rank {_rank()}: under a plan {what} an operation that torch does not support on them",
        f"  hint: {hint}",
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
