"""What frameworks' own settings make of a triple: kept gathers, second copies, quantised traffic.

Source: reference strategies 1.1 and 2.4, reference prediction 5; ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_TORCH = frozenset({"fsdp1", "fsdp2", "torchtitan", "accelerate", "lightning"})
_FSDP2 = frozenset({"fsdp2", "lightning"})


class Variant(StrEnum):
    """How a setting departs from its triple."""

    PLAIN = ""
    KEPT = "kept_for_backward"  # parameters gathered for forward stay whole until backward is over
    SECOND_COPY = "second_copy"  # backward gathers from a copy inside the group, made in each forward
    HPZ = "hpz"  # the same, and the copy serves all micro-batches of a step
    QUANTISED = "quantised"  # ZeRO++: 8-bit parameters, 4-bit gradients, and hpZ


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A triple as frameworks run it by their own settings.

    Attributes:
        triple: at rest.
        variant: how it departs from that.
        frameworks: that have it.
    """

    triple: str
    variant: Variant
    frameworks: frozenset[str]

    @property
    def changes_numbers(self) -> bool:
        """Tell whether training computes something else with it."""
        return self.variant == Variant.QUANTISED


SETTINGS = (
    Setting(triple="GGG", variant=Variant.KEPT, frameworks=_TORCH),
    Setting(triple="III", variant=Variant.KEPT, frameworks=_TORCH),
    Setting(triple="GNG", variant=Variant.KEPT, frameworks=_FSDP2),
    Setting(triple="INI", variant=Variant.KEPT, frameworks=_FSDP2),
    Setting(triple="GGG", variant=Variant.SECOND_COPY, frameworks=_FSDP2),
    Setting(triple="GGG", variant=Variant.HPZ, frameworks=frozenset({"deepspeed"})),
    Setting(triple="GGG", variant=Variant.QUANTISED, frameworks=frozenset({"deepspeed"})),
)

# Approximations of a triple, by what they really are; the first that a framework has.
_REALLY = {
    "NGG": (("GGG", Variant.KEPT),),
    "NII": (("III", Variant.KEPT),),
    "NNG": (("GNG", Variant.KEPT),),
    "NNI": (("INI", Variant.KEPT),),
    "IGG": (("GGG", Variant.SECOND_COPY), ("GGG", Variant.HPZ)),
}
# Those that hold a copy of the parameters inside each group.
COPIED = (Variant.SECOND_COPY, Variant.HPZ, Variant.QUANTISED)

_NAMES = {
    Variant.PLAIN.value: "native",
    Variant.KEPT.value: "kept for backward",
    Variant.SECOND_COPY.value: "second copy",
    Variant.HPZ.value: "hpZ",
    Variant.QUANTISED.value: "ZeRO++ quantised",
}

# ZeRO++ sends 8-bit parameters and 4-bit gradients (section 3); bytes per element.
QUANTISED_PARAMETER_BYTES, QUANTISED_GRADIENT_BYTES = 1.0, 0.5


def plain_name(variant: str) -> str:
    """Return a variant for people; the triple itself by the backend's own collectives is native."""
    return _NAMES.get(variant, variant)


def really(triple: str, framework: str) -> tuple[str, Variant] | None:
    """Return what a framework runs that only approximates a triple; None where it does not."""
    return next((item for item in _REALLY.get(triple, ()) if framework in frameworks_of(*item)), None)


def approximated(triple: str, variant: str) -> str:
    """Return the triple that a setting is used for; a plain triple is used for itself."""
    return next((name for name, items in _REALLY.items() if (triple, variant) in items), triple)


def frameworks_of(triple: str, variant: str) -> frozenset[str]:
    """Return the frameworks that have a setting."""
    return next(
        (setting.frameworks for setting in SETTINGS if (setting.triple, setting.variant) == (triple, variant)),
        frozenset(),
    )
