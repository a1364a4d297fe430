"""Puts stand-ins in the place of torch's names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

# Torch works on the originals, and so do we.
_KEEP_ORIGINALS = ("torch", "paro_advise")
# But for what asks whose a script's model is: under `run` these are imported after the stand-ins, and see them too.
_ASKING = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed._shard.checkpoint.state_dict",
    "torch.distributed.algorithms._optimizer_overlap.",
    "torch.distributed.algorithms.ddp_comm_hooks.",
    "torch.distributed.pipelining.",
)


def replace_name(name: str, substitute: object, *homes: ModuleType | type) -> None:
    """Put something in the place of one of torch's names.

    Args:
        name: the same in all homes.
        substitute: for what stands there.
        homes: modules or classes that hold it.
    """
    for home in homes:
        setattr(home, name, substitute)


def replace_everywhere(name: str, substitute: object, *homes: ModuleType) -> None:
    """Put something in the place of one of torch's names, also where others have imported it by name already.

    Modules of torch's own keep what they have where they work on the originals.

    Args:
        name: the same in all homes.
        substitute: for what stands there.
        homes: modules that hold it.
    """
    originals = {id(original): original for original in (getattr(home, name) for home in homes)}
    replace_name(name, substitute, *homes)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in _KEEP_ORIGINALS and not module_name.startswith(_ASKING):
            continue
        try:
            held = object.__getattribute__(module, "__dict__")  # does not import a module that is lazy
        except AttributeError:
            continue
        found = [key for key, value in list(held.items()) if id(value) in originals]
        for key in found:
            held[key] = substitute
