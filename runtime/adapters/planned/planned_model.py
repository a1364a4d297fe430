"""One model that a plan has sharded, of one or several in a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.runtime.sharding.module import ShardedModule

if TYPE_CHECKING:
    from torch import nn

    from paro_advise.runtime.adapters.planned.boundary import Boundary
    from paro_advise.runtime.adapters.planned.wrapping import Wrapping
    from paro_advise.runtime.sharding.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model under the plan.

    Attributes:
        root: the model.
        wrapping: what the script asked of its framework for it.
        engine: that runs it.
        boundary: tells the engine which pass is the last of a step.
    """

    root: nn.Module
    wrapping: Wrapping
    engine: Engine
    boundary: Boundary

    @property
    def sharded(self) -> ShardedModule:
        """Return the root as what sharding has made of it."""
        assert isinstance(self.root, ShardedModule)
        return self.root

    def has_part(self, module: nn.Module) -> bool:
        """Tell whether a module is a part of the model, or the model."""
        return any(part is module for part in self.root.modules())

    def is_of(self, module: nn.Module) -> bool:
        """Tell whether a module is the model, a part of it, or wraps it."""
        return are_related(self.root, module)


def are_related(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether one of two modules is the other one, or a part of it."""
    if one is other:
        return True
    return any(part is other for part in one.modules()) or any(part is one for part in other.modules())
