"""DeepSpeed's ``zero.Init`` under a plan that is not ZeRO-3: models are made as it makes them, and stay whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    import torch


class MadeWhole:
    """The parameters that ``zero.Init`` has left whole."""

    def __init__(self) -> None:
        self._known: MutableMapping[torch.Tensor, bool] = WeakIdKeyDictionary()

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Tell whether a parameter is one of them."""
        return parameter in self._known

    def stand_in(self, original: type) -> type:
        """Return a class to take the place of DeepSpeed's own, which it inherits from.

        Args:
            original: ``deepspeed.zero.Init``.
        """
        known = self._known

        class Init(original):  # type: ignore[misc]  # a class that is found when a script imports it
            """Makes models in the types and with the values that DeepSpeed gives them, and shards none."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: DeepSpeed's own parameters
                # Its linear layers are for parameters that are freed between uses.
                super().__init__(*args, **{**kwargs, "mem_efficient_linear": False})

            def _zero_init_param(self, param: torch.Tensor) -> None:
                group = self.ds_process_group
                dist.broadcast(param.data, dist.get_global_rank(group, 0) if group else 0, group)
                known[param] = True

        Init.__qualname__ = "Init"
        return Init
