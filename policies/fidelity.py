"""How well a framework's own settings express a strategy (reference prediction, section 5.8)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from paro_advise.policies.variants import frameworks_of

if TYPE_CHECKING:
    from paro_advise.policies.strategy import Strategy


class Fidelity(StrEnum):
    """Exact, an approximation that must be predicted as what it really is, or not at all."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    UNSUPPORTED = "unsupported"


_TABLE: dict[str, dict[str, str]] = {
    # NNN NNI NNG NII NIG NGG III IIG IGG GGG; e exact, a approximate.
    "deepspeed": {"NNN": "e", "NNG": "e", "NGG": "e", "III": "e", "IGG": "a", "GGG": "e"},
    "fsdp1": {"NNN": "e", "NII": "a", "NGG": "a", "III": "e", "GGG": "e"},
    "fsdp2": {"NNN": "e", "NNI": "a", "NNG": "a", "NII": "a", "NGG": "a", "III": "e", "IGG": "a", "GGG": "e"},
    "torchtitan": {"NNN": "e", "NII": "a", "NGG": "a", "III": "e", "GGG": "e"},
    "accelerate": {"NNN": "e", "NII": "a", "NGG": "a", "III": "e", "GGG": "e"},
    "lightning": {"NNN": "e", "NNI": "a", "NNG": "a", "NII": "a", "NGG": "a", "III": "e", "IGG": "a", "GGG": "e"},
    "megatron": {"NNN": "e", "NNI": "e", "NNG": "e", "NGG": "e", "III": "e", "IIG": "e", "GGG": "e"},
}
_LETTERS = {"e": Fidelity.EXACT, "a": Fidelity.APPROXIMATE}
RUNTIME = "paro_advise"


def exports_of(strategy: Strategy, collectives: str, variant: str = "", offload: str = "") -> dict[str, str]:
    """Return the fidelity by framework; our own runtime runs every kept strategy.

    Args:
        strategy: the triple.
        collectives: "ho_ring" only our runtime has.
        variant: only some frameworks have.
        offload: the optimizer's states DeepSpeed and our runtime keep on the host, parameters DeepSpeed alone.
    """
    native = collectives == "native"
    if variant:
        having = frameworks_of(str(strategy), variant)
        found = {name: (Fidelity.EXACT if name in having else Fidelity.UNSUPPORTED).value for name in _TABLE}
    else:
        letters = {name: row.get(str(strategy), "") if native else "" for name, row in _TABLE.items()}
        found = {name: _LETTERS.get(letter, Fidelity.UNSUPPORTED).value for name, letter in letters.items()}
    if offload:
        shards_optimizer = str(strategy)[2] != "N"
        can = shards_optimizer and ("parameter" not in offload or str(strategy) == "GGG")
        found = {
            name: value if name == "deepspeed" and can else Fidelity.UNSUPPORTED.value for name, value in found.items()
        }
    ours = not native and "parameter" not in offload
    return {RUNTIME: (Fidelity.EXACT if ours else Fidelity.UNSUPPORTED).value, **found}
