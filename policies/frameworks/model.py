"""What is known of a training framework: how it is recognised, and which strategies its settings express."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paro_advise.core.framework import Framework


class Fidelity(StrEnum):
    """Exact, an approximation that must be predicted as what it really is, or not at all."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    UNSUPPORTED = "unsupported"


class Variant(StrEnum):
    """How a framework's setting departs from its triple (docs/strategies.md, framework settings)."""

    PLAIN = ""
    KEPT = "kept_for_backward"  # parameters gathered for forward stay whole until backward is over
    SECOND_COPY = "second_copy"  # backward gathers from a copy inside the group, made in each forward
    HPZ = "hpz"  # the same, and the copy serves all micro-batches of a step
    QUANTISED = "quantised"  # ZeRO++: 8-bit parameters, 4-bit gradients, and hpZ

    @property
    def label(self) -> str:
        """Return the variant for people; the triple itself by the backend's own collectives is native."""
        return _TITLES[self]

    @property
    def keeps_copy(self) -> bool:
        """Tell whether each group holds a second copy of the parameters."""
        return self in (Variant.SECOND_COPY, Variant.HPZ, Variant.QUANTISED)

    @property
    def changes_numbers(self) -> bool:
        """Tell whether training computes something else with it."""
        return self == Variant.QUANTISED


_TITLES = {
    Variant.PLAIN: "native",
    Variant.KEPT: "kept for backward",
    Variant.SECOND_COPY: "second copy",
    Variant.HPZ: "hpZ",
    Variant.QUANTISED: "ZeRO++ quantised",
}


class Offload(StrEnum):
    """Which model states a strategy keeps in the host's memory."""

    NONE = ""
    OPTIMIZER = "optimizer"  # its states and its step
    PARAMETERS = "optimizer+parameter"  # the parameters as well

    @property
    def moves_parameters(self) -> bool:
        """Tell whether parameters rest on the host."""
        return self == Offload.PARAMETERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is to be expressed.

    Attributes:
        triple: the strategy.
        group_size: ranks of a group.
        world_size: ranks that share the data: all, but where ranks share a model too.
        model_parallel_ranks: that hold one copy of the model by tensor, context or pipeline parallelism.
        micro_batches: per step.
        offload: states on the host.
        variant: what a framework's own setting makes of the triple.
    """

    triple: str
    group_size: int
    world_size: int
    micro_batches: int
    offload: Offload = Offload.NONE
    variant: Variant = Variant.PLAIN
    model_parallel_ranks: int = 1

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return self.world_size // self.group_size

    @property
    def num_ranks(self) -> int:
        """Return the number of all ranks."""
        return self.world_size * self.model_parallel_ranks

    @property
    def mesh(self) -> str:
        """Return the expression that makes a device mesh of the ranks that share the data, without its import.

        Ranks that hold a model together are taken to be neighbours, as all frameworks place them by default.
        """
        shape: tuple[int, ...] = (self.num_groups, self.group_size) if self.is_hybrid else (self.world_size,)
        names: tuple[str, ...] = ("replicate", "shard") if self.is_hybrid else ("shard",)
        part = ""
        if self.model_parallel_ranks > 1:
            part = f"[{', '.join(map(_quote, names))}]"
            shape, names = (*shape, self.model_parallel_ranks), (*names, "model")
        listed = f"({', '.join(map(_quote, names))}{',' if len(names) == 1 else ''})"
        return f"init_device_mesh(device, {shape}, mesh_dim_names={listed}){part}"

    @property
    def is_hybrid(self) -> bool:
        """Tell whether parameters are sharded inside groups and replicated across them."""
        return self.triple in ("III", "NII", "NNI")


def _quote(name: str) -> str:
    return f'"{name}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A strategy as text for one framework.

    Attributes:
        text: the file, the code or the flags.
        suffix: of a file that would hold it.
        min_version: the oldest version that understands it.
        caveats: what really happens where it is not an exact expression, and what to check.
    """

    text: str
    suffix: str
    min_version: str
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFramework:
    """One framework.

    Attributes:
        name: as options name it; "" where it has no settings to export.
        observed_as: what a run of it is recognised as, None where it cannot be told from another one.
        trace_marks: parts of annotations, groups or stacks that only it leaves in a trace.
        fidelity: of each triple that its settings express; all others are unsupported.
        variants: (triple, variant) that its settings have.
        render: turns a target that it supports into text.
    """

    name: str
    observed_as: Framework | None = None
    trace_marks: tuple[str, ...] = ()
    fidelity: Mapping[str, Fidelity] | None = None
    variants: frozenset[tuple[str, Variant]] = frozenset()
    render: Callable[[Target], Rendered] | None = None


def fidelities(*, exact: str, approximate: str = "") -> dict[str, Fidelity]:
    """Return the fidelity of triples, given as words."""
    return dict.fromkeys(exact.split(), Fidelity.EXACT) | dict.fromkeys(approximate.split(), Fidelity.APPROXIMATE)
