"""All frameworks: which of them express a strategy, and how its export reads.

An export is exact, or an approximation that says what really happens; what a framework cannot express
is refused, never left out (docs/strategies.md, framework settings).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paro_advise.core.framework import Framework
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.accelerate import ACCELERATE
from paro_advise.policies.frameworks.ddp import DDP, RUNTIME_TRACES, ZERO_REDUNDANCY
from paro_advise.policies.frameworks.deepspeed import DEEPSPEED
from paro_advise.policies.frameworks.fsdp1 import FSDP1
from paro_advise.policies.frameworks.fsdp2 import FSDP2
from paro_advise.policies.frameworks.lightning import LIGHTNING
from paro_advise.policies.frameworks.megatron import MEGATRON
from paro_advise.policies.frameworks.model import Fidelity, Offload, Target, TrainingFramework, Variant
from paro_advise.policies.frameworks.torchtitan import TORCHTITAN
from paro_advise.policies.frameworks.transformers import TRANSFORMERS
from paro_advise.policies.strategy import CollectiveBackend, Level, Strategy

EXPORTED = {
    made.name: made for made in (DEEPSPEED, FSDP1, FSDP2, TORCHTITAN, ACCELERATE, MEGATRON, LIGHTNING, TRANSFORMERS)
}
# In this order: a run of our runtime holds FSDP2's marks as well, ZeroRedundancyOptimizer's holds DDP's.
OBSERVED = (RUNTIME_TRACES, FSDP2, FSDP1, ZERO_REDUNDANCY, DDP, DEEPSPEED, MEGATRON)
RUNTIME = "paro_advise"  # our own runtime among the names of frameworks
_TAKEN_OVER = ("NNN", "III", "GGG")  # triples that it runs with the backend's own collectives, too

_TORCH = frozenset({"fsdp1", "fsdp2", "torchtitan", "accelerate", "lightning", "transformers"})
# Whose settings a run can take; one that was not recognised may be any.
_FAMILIES = {
    Framework.DEEPSPEED: frozenset({"deepspeed"}),
    Framework.MEGATRON: frozenset({"megatron"}),
    Framework.UNKNOWN: frozenset(EXPORTED),
}

# Every variant that some framework has, in the order in which plans compare them.
_VARIANTS = (
    ("GGG", Variant.KEPT),
    ("III", Variant.KEPT),
    ("GNG", Variant.KEPT),
    ("INI", Variant.KEPT),
    ("GGG", Variant.SECOND_COPY),
    ("GGG", Variant.HPZ),
    ("GGG", Variant.QUANTISED),
)
# Approximations of a triple, by what they really are; the first that a framework has.
_APPROXIMATIONS = {
    "NGG": (("GGG", Variant.KEPT),),
    "NII": (("III", Variant.KEPT),),
    "NNG": (("GNG", Variant.KEPT),),
    "NNI": (("INI", Variant.KEPT),),
    "IGG": (("GGG", Variant.SECOND_COPY), ("GGG", Variant.HPZ)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A strategy as one framework wants it.

    Attributes:
        framework: which.
        fidelity: exact or approximate.
        text, suffix, min_version, caveats: see Rendered.
    """

    framework: str
    fidelity: Fidelity
    text: str
    suffix: str
    min_version: str
    caveats: tuple[str, ...]

    @property
    def claim(self) -> str:
        """Return what it needs and how near it comes: "torch 2.6 or later, exact"."""
        package = "torch" if self.framework in ("fsdp1", "fsdp2") else self.framework
        return f"{package} {self.min_version} or later, {self.fidelity}"


def family_of(framework: Framework) -> frozenset[str]:
    """Return the names of the frameworks whose settings a run of one can take."""
    return _FAMILIES.get(framework, _TORCH)


def variants() -> tuple[tuple[Strategy, Variant], ...]:
    """Return every variant of a triple that some framework's settings make of it."""
    return tuple((Strategy.parse(triple), variant) for triple, variant in _VARIANTS)


def frameworks_of(triple: str, variant: Variant) -> frozenset[str]:
    """Return the frameworks that have a variant of a triple."""
    return frozenset(name for name, made in EXPORTED.items() if (triple, variant) in made.variants)


def approximation_of(triple: str, framework: str) -> tuple[str, Variant] | None:
    """Return what a framework runs that only approximates a triple; None where it does not."""
    return next((item for item in _APPROXIMATIONS.get(triple, ()) if framework in frameworks_of(*item)), None)


def approximated(triple: str, variant: Variant) -> str:
    """Return the triple that a variant is used for; a plain triple is used for itself."""
    return next((name for name, items in _APPROXIMATIONS.items() if (triple, variant) in items), triple)


def exports_of(
    strategy: Strategy,
    collectives: CollectiveBackend,
    variant: Variant = Variant.PLAIN,
    offload: Offload = Offload.NONE,
) -> dict[str, Fidelity]:
    """Return the fidelity by framework; our own runtime runs every kept strategy with HO-Ring.

    Args:
        strategy: the triple.
        collectives: HO-Ring only our runtime has, which takes the native ones of some strategies over as they are.
        variant: only some frameworks have.
        offload: the optimizer's states DeepSpeed and our runtime keep on the host, parameters DeepSpeed alone.
    """
    native = collectives == CollectiveBackend.NATIVE
    found = {name: _fidelity(made, str(strategy), variant, native=native) for name, made in EXPORTED.items()}
    if offload:
        shards_optimizer = strategy.optimizer != Level.N
        can = shards_optimizer and (not offload.moves_parameters or str(strategy) == "GGG")
        found = {name: value if name == "deepspeed" and can else Fidelity.UNSUPPORTED for name, value in found.items()}
    takes_over = str(strategy) in _TAKEN_OVER and not variant and not offload
    ours = takes_over if native else not offload.moves_parameters
    return {RUNTIME: Fidelity.EXACT if ours else Fidelity.UNSUPPORTED, **found}


def _fidelity(made: TrainingFramework, triple: str, variant: Variant, *, native: bool) -> Fidelity:
    if variant:
        return Fidelity.EXACT if (triple, variant) in made.variants else Fidelity.UNSUPPORTED
    return (made.fidelity or {}).get(triple, Fidelity.UNSUPPORTED) if native else Fidelity.UNSUPPORTED


def export(framework: str, target: Target) -> Export:
    """Return a strategy in a framework's words.

    Raises:
        UsageError: the framework is not known, or does not know the strategy.
    """
    if framework not in EXPORTED:
        raise UsageError(f"a framework must be one of {', '.join(EXPORTED)}, got {framework!r}")
    if target.offload and framework != "deepspeed":
        raise UsageError(
            f"{framework} exports cannot offload states to the host, as the plan does",
            hint="deepspeed's can; the optimizer's alone also paro_advise.runtime.shard(offload_optimizer=True)",
        )
    fidelities = exports_of(Strategy.parse(target.triple), CollectiveBackend.NATIVE, target.variant)
    fidelity, render = fidelities[framework], EXPORTED[framework].render
    if fidelity == Fidelity.UNSUPPORTED or render is None:
        known = [name for name, value in fidelities.items() if value != Fidelity.UNSUPPORTED]
        way = f", {target.variant.label}" if target.variant else ""
        raise UsageError(
            f"{framework} has no settings for {target.triple}{way}",
            hint=f"these have: {', '.join(known) or 'none'}"
            + ("" if target.variant else "; paro_advise.runtime.shard runs every strategy"),
        )
    made = render(as_written(target))
    return Export(
        framework=framework,
        fidelity=fidelity,
        text=made.text,
        suffix=made.suffix,
        min_version=made.min_version,
        caveats=(*made.caveats, *_of_models(target), "keep the global batch: ranks x micro-batch x accumulation steps"),
    )


def _of_models(target: Target) -> tuple[str, ...]:
    if target.model_parallel_ranks == 1:
        return ()
    shared = f"{target.model_parallel_ranks} ranks hold a model together and {target.world_size} share the data"
    return (f"{shared}: keep the sizes of tensor, context and pipeline parallelism as they are",)


def as_written(target: Target) -> Target:
    """Return the target whose settings a variant is written as: those of the triple that it approximates."""
    return replace(target, triple=approximated(target.triple, target.variant), variant=Variant.PLAIN)
