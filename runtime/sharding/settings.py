"""How a model is sharded beside its strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.policies.strategy import Level, Strategy

if TYPE_CHECKING:
    import torch

    from paro_advise.runtime.sharding.exchange.channels import GroupGrid
    from paro_advise.runtime.sharding.parameters.units import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the user of ``shard`` asks for.

    Attributes:
        param_dtype: type to compute in and to keep parameters in; None for the parameters' own.
        cast_modules: names of modules whose inputs are cast to ``param_dtype``; None for the model and its units.
        output_dtypes: names of modules, and the types that their outputs are cast to.
        keep_types: sharded parameters rest in their own type where the optimizer updates those very shards.
        reduce_dtype: type gradients are added up and reduced in; None for the parameters' own.
        reshard_root: free the root's parameters after forward too, as those of all other units.
        overlap_updates: let the next forward wait for the updated parameters of each unit, not
            ``optimizer.step()``; parameters must not be read in between.
        offload_optimizer: keep the optimizer's parameters and states in the host's memory and step there.
        native_collectives: use the backend's own collectives, not HO-Ring.
    """

    param_dtype: torch.dtype | None = None
    cast_modules: tuple[str, ...] | None = None
    output_dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    keep_types: bool = False
    reduce_dtype: torch.dtype | None = None
    reshard_root: bool = False
    overlap_updates: bool = False
    offload_optimizer: bool = False
    native_collectives: bool = False

    def has_own_masters(self, levels: Strategy) -> bool:
        """Tell whether the optimizer's parameters have memory of their own, of another type or place."""
        return self.resting_dtype(levels) is not None or self.offload_optimizer

    def resting_dtype(self, levels: Strategy) -> torch.dtype | None:
        """Return the type in which parameters rest; None for their own."""
        is_updated_there = levels.parameter == levels.optimizer != Level.N and not self.offload_optimizer
        return None if self.keep_types and is_updated_there else self.param_dtype

    def gradient_dtype(self, slot: Slot) -> torch.dtype:
        """Return the type in which a parameter's gradients are added up and reduced."""
        return self.reduce_dtype or self.param_dtype or slot.dtype


def effective(strategy: Strategy, grid: GroupGrid) -> Strategy:
    """Return a strategy with level I only where groups differ from ranks and from the world."""
    if 1 < grid.group_size < grid.world_size:
        return strategy
    letter = Level.N if grid.group_size == 1 else Level.G
    levels = (
        letter if level == Level.I else level for level in (strategy.parameter, strategy.gradient, strategy.optimizer)
    )
    return Strategy.parse("".join(levels))
