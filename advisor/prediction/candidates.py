"""All ways to run that a plan compares, and which of them it may recommend (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.prediction.constants import (
    HOST_UPDATES_PER_S,
    QUANTISED_GRADIENT_BYTES,
    QUANTISED_PARAMETER_BYTES,
)
from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Fidelity, Offload, Variant
from paro_advise.policies.frameworks.registry import RUNTIME, exports_of, family_of, variants
from paro_advise.policies.memory import shards
from paro_advise.policies.procedure import procedure_of
from paro_advise.policies.strategy import KEPT, PARTIAL_ONLY, CollectiveBackend, Level, Strategy
from paro_advise.policies.traffic import Shape

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.calibration import Calibration

# What our runtime does on the host beside the model's operators over what a framework does (`make bench-host`),
# where that differs by more than its own noise: FSDP1's is of the size of ours, DDP does little.
_HOST_SHARES = {
    Framework.DEEPSPEED: 0.25,
    Framework.FSDP2: 0.5,
    Framework.DDP: 1.6,
    Framework.DDP_ZERO: 1.6,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A way to run.

    Attributes:
        strategy: the triple.
        group_size: ranks of a group (m).
        collectives: what moves the bytes.
        gathers_once: parameters gathered for forward are kept for backward.
        replicates_each_pass: gradients are added up across groups on every micro-batch.
        overlaps_reductions: reductions run beside backward, in order.
        overlaps_gathers: gathers run one unit ahead of compute; beside a GPU.
        prefetches: in backward too, before the reduction of the unit before.
        holds_back: FSDP2 runs it: see ``Queues`` (device_replay.py).
        scatters_by_all_reduce: gradients of which each rank keeps a part are all-reduced.
        separate_queues: reductions do not wait for gathers.
        unit_bytes: sent at once; None for the units of the model.
        reduce_bucket_bytes: of units whose gradients are reduced at once; None for one by one.
        published_us: what bringing updated parameters back took where it was measured; None to model it.
        publishes_ahead: they come back beside the next forward, unit by unit before its compute.
        offload: states on the host.
        host_us: what that adds to a step.
        variant: what a framework's setting makes of the triple.
        backward_level: from which parameters are gathered in backward; None for the triple's.
        copy_lasts: from there in later micro-batches' forward, too.
        gather_share, reduce_share: of the bytes, that quantised parameters and gradients have.
        host_share: of the host's gaps in the run, that are left when the framework's own code is replaced.
        by_runtime: our runtime runs it with the backend's own collectives, as it does beside GPUs; of what ran, no
            setting does, or it was our runtime itself.
    """

    strategy: Strategy
    group_size: int
    collectives: CollectiveBackend
    gathers_once: bool = False
    replicates_each_pass: bool = False
    overlaps_reductions: bool = True
    overlaps_gathers: bool = True
    prefetches: bool = True
    holds_back: bool = False
    scatters_by_all_reduce: bool = False
    separate_queues: bool = True
    unit_bytes: tuple[float, ...] | None = None
    reduce_bucket_bytes: float | None = None
    published_us: float | None = None
    publishes_ahead: bool = False
    offload: Offload = Offload.NONE
    host_us: float = 0.0
    variant: Variant = Variant.PLAIN
    backward_level: Level | None = None
    copy_lasts: bool = False
    gather_share: float = 1.0
    reduce_share: float = 1.0
    host_share: float = 1.0
    by_runtime: bool = False

    @property
    def uses_groups(self) -> bool:
        """Tell whether its group size means anything: a state or a copy of the parameters rests in groups."""
        return Level.I in _levels(self.strategy) or self.variant.keeps_copy

    @property
    def name(self) -> str:
        """Return it for a column: "III/8 native"."""
        groups = f"/{self.group_size}" if self.uses_groups else ""
        moved_by = "HO-Ring" if self.collectives == CollectiveBackend.HO_RING else self.variant.label
        each = " each micro-batch" if self.replicates_each_pass else ""
        return f"{self.strategy}{groups} {moved_by}{' host' if self.offload else ''}{each}"


def baseline_candidate(calibration: Calibration) -> Candidate:
    """Return how the run itself was executed."""
    is_own, variant = calibration.framework == Framework.RUNTIME, _variant(calibration)
    has_ring = is_own and not calibration.is_gpu  # on GPUs our runtime uses the backend's own collectives
    # FSDP on a CPU waits for every collective; DDP's reducer and our runtime do not.
    overlaps = calibration.overlaps_reductions if calibration.is_gpu else is_own or calibration.framework.is_ddp
    return Candidate(
        strategy=calibration.baseline,
        group_size=calibration.copy_group_size or calibration.baseline_group_size,
        collectives=CollectiveBackend.HO_RING if has_ring else CollectiveBackend.NATIVE,
        gathers_once=calibration.gathers_once,
        replicates_each_pass=calibration.replicates_each_pass,
        overlaps_reductions=overlaps,
        overlaps_gathers=calibration.overlaps_gathers,
        prefetches=calibration.prefetches,
        holds_back=_holds_back(calibration, calibration.baseline, variant)
        and not is_own
        and calibration.framework != Framework.FSDP1,
        scatters_by_all_reduce=calibration.scatters_by_all_reduce,
        # Collectives of one process group queue behind each other, as far as no trace shows otherwise. A second copy is
        # gathered in a group of its own (FSDP2's post-forward mesh, hpZ's secondary group).
        separate_queues=is_own or variant.keeps_copy or not (calibration.framework.is_fsdp or calibration.is_described),
        unit_bytes=calibration.bucket_bytes,
        reduce_bucket_bytes=None if calibration.bucket_bytes else calibration.reduce_bucket_bytes,
        published_us=calibration.published_us,
        publishes_ahead=calibration.publishes_ahead,
        variant=variant,
        backward_level=Level.I if variant.keeps_copy else None,
        copy_lasts=variant == Variant.HPZ,
    )


def _variant(calibration: Calibration) -> Variant:
    """Return how the run departs from its triple."""
    if calibration.gathers_once and calibration.baseline.parameter != Level.N:
        return Variant.KEPT
    if calibration.copy_group_size is None:
        return Variant.PLAIN
    return Variant.HPZ if calibration.framework == Framework.DEEPSPEED else Variant.SECOND_COPY


def candidates(calibration: Calibration) -> list[Candidate]:
    """Return all kept strategies with all aligned group sizes, as HO-Ring and as frameworks run them."""
    per_node, sizes = calibration.ranks_per_node, aligned_sizes(calibration)
    usual = [per_node if per_node in sizes else sizes[0]]
    proper = [size for size in sizes if size < calibration.world_size]  # one group of all ranks is sharding globally
    found = []
    for strategy in KEPT:
        if strategy in PARTIAL_ONLY and calibration.trained_share == 1.0:  # they pay only with frozen parameters
            continue
        for size in proper if Level.I in _levels(strategy) else usual:
            ours = Candidate(strategy=strategy, group_size=size, collectives=CollectiveBackend.HO_RING)
            found.append(replace(ours, host_share=_host_share(calibration)))
            native = _native(calibration, strategy, size)
            is_ours = calibration.framework == Framework.RUNTIME or not is_at_hand(native, calibration.framework)
            if calibration.is_gpu and is_ours:
                found.append(replace(ours, collectives=CollectiveBackend.NATIVE, by_runtime=True))
            elif Fidelity.EXACT in exports_of(strategy, CollectiveBackend.NATIVE).values():
                found.append(native)
    for strategy, variant in variants():
        if variant.changes_numbers and not calibration.is_gpu:
            continue
        adds_up = strategy.gradient == Level.N and strategy != calibration.baseline
        if variant == Variant.KEPT and adds_up and calibration.micro_batches == 1:
            continue  # one reduction a step either way: the same program as with sharded gradients
        has_groups = Level.I in _levels(strategy) or variant.keeps_copy
        found += [_vary(calibration, strategy, variant, size) for size in (proper if has_groups else usual)]
    return found


def aligned_sizes(calibration: Calibration) -> list[int]:
    """Return the group sizes whose groups fill nodes and pods, or are parts of them."""
    world = calibration.world_size
    levels = [calibration.ranks_per_node]
    if calibration.has_pods and calibration.nodes_per_pod:
        levels.append(calibration.nodes_per_pod * calibration.ranks_per_node)
    sizes = [size for size in range(2, world) if world % size == 0]
    return [size for size in sizes if all(level % size == 0 or size % level == 0 for level in levels)] or [world]


def is_proposable(candidate: Candidate, framework: Framework) -> bool:
    """Tell whether `paro-advise run` trains with it, so that a plan may choose it.

    Parameters on the host are left to DeepSpeed, for scripts that use it.
    """
    if candidate.offload.moves_parameters:
        return framework == Framework.DEEPSPEED and is_at_hand(candidate, framework)
    exports = exports_of(candidate.strategy, candidate.collectives, candidate.variant, candidate.offload)
    return candidate.by_runtime or exports[RUNTIME] == Fidelity.EXACT


def may_choose(candidate: Candidate, calibration: Calibration, *, allow_untested: bool) -> bool:
    """Tell whether a plan may choose a candidate.

    Beside a GPU that is what settings of the framework that ran express, and for our own runtime what it runs there:
    HO-Ring was not timed on any, our runtime not on several.
    """
    framework = calibration.framework
    runs_there = framework == Framework.RUNTIME and candidate.collectives == CollectiveBackend.NATIVE
    if not calibration.is_gpu or runs_there:
        return is_proposable(candidate, framework)
    return is_at_hand(candidate, framework) or (allow_untested and is_proposable(candidate, framework))


def is_at_hand(candidate: Candidate, framework: Framework) -> bool:
    """Tell whether the settings of the framework that ran, or of one of its family, express a candidate exactly."""
    exports = exports_of(candidate.strategy, candidate.collectives, candidate.variant, candidate.offload)
    return any(exports[name] == Fidelity.EXACT for name in family_of(framework))


def offloaded(calibration: Calibration, candidate: Candidate, host_gbps: float, *, parameters: bool) -> Candidate:
    """Return a candidate with states on the host.

    Each step moves this rank's gradients down and its updated parameters up, and the host's cores do the
    arithmetic of all ranks of a node (ZeRO-Offload, arXiv 2101.06840, section 4). Parameters that rest there
    as well come up before every gather (ZeRO-Infinity, arXiv 2104.07857, section 5).

    Args:
        calibration: the run.
        candidate: with all states on the device.
        host_gbps: what one device moves to or from its host, 1e9 bytes/s.
        parameters: they are moved as well as the optimizer's states.
    """
    shape = Shape(group_size=candidate.group_size, num_groups=max(1, calibration.world_size // candidate.group_size))
    mine = calibration.parameters / shards(candidate.strategy.optimizer, shape)
    moved = mine * (4.0 + calibration.element_bytes)
    if parameters:
        gathers = calibration.micro_batches * (calibration.forwards + (not candidate.gathers_once))
        held = calibration.parameters / shards(candidate.strategy.parameter, shape)
        moved += gathers * held * calibration.element_bytes
    updated = mine * calibration.ranks_per_node / HOST_UPDATES_PER_S * 1e6
    return replace(
        candidate,
        offload=Offload.PARAMETERS if parameters else Offload.OPTIMIZER,
        host_us=moved / (host_gbps * 1e3) + updated,
    )


def longer_us(calibration: Calibration, candidate: Candidate) -> float:
    """Return how much longer than ranks on average those compute in a step that the others wait for.

    Ranks that meet in each micro-batch wait for the longest in each. Of what is another's each time, the square of a
    step's spread is the sum of theirs, as of independent ones: together they are as much wider as the root of their
    number. What is one rank's all the time is waited for once, however often ranks meet.
    """
    strategy = candidate.strategy
    meet = strategy.parameter != Level.N or procedure_of(strategy).reduce or candidate.replicates_each_pass
    more = math.sqrt(calibration.micro_batches) - 1 if meet else 0.0
    return calibration.uneven_us + more * calibration.uneven_anew_us


def _host_share(calibration: Calibration) -> float:
    """Return what is left of the host's gaps when our runtime takes the place of the framework's own code."""
    if calibration.is_gpu:  # never measured beside a GPU
        return 1.0
    return _HOST_SHARES.get(calibration.framework, 1.0)


def _levels(strategy: Strategy) -> tuple[Level, Level, Level]:
    return strategy.parameter, strategy.gradient, strategy.optimizer


def sums_each_pass(framework: Framework, strategy: Strategy, micro_batches: int) -> bool:
    """Tell whether a framework by itself sums gradients between groups in every micro-batch.

    FSDP1 has no setting against it but no_sync(), which keeps whole gradients
    (torch/distributed/fsdp/_runtime_utils.py, ``_reduce_grad``).
    """
    return framework == Framework.FSDP1 and micro_batches > 1 and strategy.gradient == Level.I


def all_reduces_shards(framework: Framework, strategy: Strategy) -> bool:
    """Tell whether a framework by itself all-reduces gradients of which each rank keeps a part.

    DeepSpeed's stages 1 and 2 reduce with the same code, by all-reduce unless ``use_multi_rank_bucket_allreduce`` is
    off (deepspeed/runtime/zero/stage_1_and_2.py, ``average_tensor``), stage 3 by reduce-scatter.
    """
    return framework == Framework.DEEPSPEED and str(strategy) in ("NNG", "NGG")


def _native(calibration: Calibration, strategy: Strategy, size: int, variant: Variant = Variant.PLAIN) -> Candidate:
    framework = calibration.framework
    return Candidate(
        strategy=strategy,
        group_size=size,
        collectives=CollectiveBackend.NATIVE,
        variant=variant,
        replicates_each_pass=calibration.is_gpu and sums_each_pass(framework, strategy, calibration.micro_batches),
        overlaps_reductions=_overlaps(calibration, strategy),
        overlaps_gathers=_gathers_ahead(calibration, strategy),
        prefetches=calibration.prefetches,
        holds_back=_holds_back(calibration, strategy, variant),
        reduce_bucket_bytes=calibration.reduce_bucket_bytes,
        scatters_by_all_reduce=_scatters_by_all_reduce(calibration, strategy),
        separate_queues=variant.keeps_copy,
        # Told of the way in which the run keeps parameters between steps, and of no other.
        publishes_ahead=calibration.publishes_ahead and strategy.parameter == calibration.baseline.parameter,
    )


def _scatters_by_all_reduce(calibration: Calibration, strategy: Strategy) -> bool:
    """Tell whether the run's framework all-reduces shards, as it does by itself or as the run shows it does not."""
    if not all_reduces_shards(calibration.framework, strategy):
        return False
    return calibration.scatters_by_all_reduce or not all_reduces_shards(calibration.framework, calibration.baseline)


def _holds_back(calibration: Calibration, strategy: Strategy, variant: Variant = Variant.PLAIN) -> bool:
    """Tell whether a strategy is FSDP2's to run, that of an FSDP1 script too where FSDP1 has no setting for it."""
    if not calibration.is_gpu or strategy.parameter == Level.N:
        return False
    if calibration.framework == Framework.FSDP1:
        return exports_of(strategy, CollectiveBackend.NATIVE, variant)["fsdp1"] != Fidelity.EXACT
    return calibration.framework not in (Framework.DEEPSPEED, Framework.MEGATRON)


def _gathers_ahead(calibration: Calibration, strategy: Strategy) -> bool:
    """Tell whether a framework's gathers run beside compute: as those of the run, where it has some."""
    has_seen = Level.N not in (calibration.baseline.parameter, strategy.parameter)
    is_set = calibration.framework == Framework.DEEPSPEED  # by what is exported
    return calibration.overlaps_gathers or not (calibration.is_gpu and has_seen) or is_set


def _overlaps(calibration: Calibration, strategy: Strategy) -> bool:
    """Tell whether a framework's reductions run beside backward."""
    if calibration.beside_backward is not None:
        return str(strategy) in calibration.beside_backward
    if calibration.framework == Framework.DEEPSPEED and str(strategy) == "NNN":
        # Stage 0 sums gradients when backward is over (DeepSpeed 0.19.8, engine.allreduce_gradients), whatever is set.
        return calibration.is_gpu and str(calibration.baseline) == "NNN" and calibration.overlaps_reductions
    if calibration.is_gpu and not calibration.overlaps_reductions:
        # What keeps them from it in the run is taken to do so under its framework's other settings as well. DeepSpeed's
        # ``overlap_comm`` is exported for stage 3; a loop that reduces by itself, as after DDP's, does not beside FSDP.
        if calibration.framework == Framework.DEEPSPEED:
            return strategy.parameter != Level.N
        return calibration.baseline.gradient == Level.N and strategy.gradient != Level.N
    # On a CPU DDP's reducer has a thread of its own; FSDP waits for every collective.
    return calibration.is_gpu or str(strategy) == "NNN"


def _vary(calibration: Calibration, strategy: Strategy, variant: Variant, size: int) -> Candidate:
    width = calibration.element_bytes
    return replace(
        _native(calibration, strategy, size, variant),
        gathers_once=variant == Variant.KEPT,
        backward_level=Level.I if variant.keeps_copy else None,
        copy_lasts=variant in (Variant.HPZ, Variant.QUANTISED),
        gather_share=QUANTISED_PARAMETER_BYTES / width if variant.changes_numbers else 1.0,
        reduce_share=QUANTISED_GRADIENT_BYTES / width if variant.changes_numbers else 1.0,
    )
