"""DeepSpeed's config: what a plan takes from it, what it refuses, and what it sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.constants import NO_PLAN

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim.optimizer import ParamsT

    from paro_advise.policies.plan import Choice
    from paro_advise.runtime.torch_types import StateDict

Table: TypeAlias = dict[str, Any]  # Any: what JSON decodes to

STAGES = {"NNN": 0, "NNG": 1, "NGG": 2, "GGG": 3}
ZERO_3 = STAGES["GGG"]  # the stage that shards parameters
# Keys that a plan takes over, or that change nothing that is computed; what else is switched on is refused.
_KNOWN = frozenset(
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "bf16",
        "bfloat16",
        "fp16",
        "zero_optimization",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "steps_per_print",
        "wall_clock_breakdown",
        "memory_breakdown",
        "dump_state",
        "comms_logger",
        "flops_profiler",
        "tensorboard",
        "wandb",
        "comet",
        "csv_monitor",
        "checkpoint",
        "activation_checkpointing",
        "aio",
        "autotuning",
        "dataloader_drop_last",
        "disable_allgather",
        "nebula",
        "seed",
    ]
)
_KNOWN_OF_ZERO = frozenset(
    [
        "stage",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "reduce_scatter",
        "reduce_bucket_size",
        "contiguous_gradients",
        "round_robin_gradients",
        "use_multi_rank_bucket_allreduce",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold",
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "prefetch_bucket_size",
        "max_live_parameters",
        "max_reuse_distance",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "ignore_unused_parameters",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "memory_efficient_linear",
        "zero_hpz_partition_size",
        "mics_shard_size",
        "mics_hierarchical_params_gather",
        "offload_param",
        "offload_optimizer",
        "pipeline_loading_checkpoint",
        "override_module_apply",
        "log_trace_cache_warnings",
        "use_all_reduce_for_fetch_params",
    ]
)
_KNOWN_OF_BF16 = frozenset({"enabled", "immediate_grad_update", "check_grad_overflow"})


# What writes files or lines of its own.
_OUTPUTS = ("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "comms_logger")


class Scheduler(Protocol):
    """What an engine uses of a learning-rate scheduler: torch's and DeepSpeed's both have it."""

    def step(self, **kwargs: Any) -> None:  # Any: the script's own
        """Change the learning rate."""

    def state_dict(self) -> StateDict:
        """Return how far it is."""

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Go on from there."""


def read_table(config: Table | str | Path | None) -> Table:
    """Return a config as a table.

    Args:
        config: a table, or the path of a JSON file, which may have comments as in Hjson.

    Raises:
        TrainingError: there is none, or it cannot be read.
    """
    if isinstance(config, dict):
        return config
    if config is None:
        raise TrainingError("deepspeed.initialize must get a config", hint="pass config= or --deepspeed_config")
    try:
        import hjson  # DeepSpeed, which needs it, reads its files by it
    except ImportError:
        import json as hjson
    try:
        table: Table = hjson.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"DeepSpeed's config must be a file of JSON: {error}", where=str(config)) from None
    return dict(table)


def outputs_of(table: Table) -> list[str]:
    """Return the sections that are switched on of what our engine does not write."""
    return [name for name in _OUTPUTS if isinstance(table.get(name), dict) and table[name].get("enabled")]


def set_strategy(table: Table, chosen: Choice) -> Table:
    """Return a config whose ZeRO section runs what a plan has chosen.

    Args:
        table: the script's config.
        chosen: one of DeepSpeed's stages.
    """
    zero = {**table.get("zero_optimization", {}), "stage": STAGES[chosen.triple]}
    table = {**table, "zero_optimization": zero}
    for state, setting in (("optimizer", "offload_optimizer"), ("parameter", "offload_param")):
        if state in chosen.offload:
            zero[setting] = {"device": "cpu", "pin_memory": True}
            # Else DeepSpeed refuses the script's own optimizer.
            table.setdefault("zero_force_ds_cpu_optimizer", False)
    return table


def check_table(table: Table, **arguments: object) -> None:
    """Refuse settings that a plan would silently ignore.

    Args:
        table: DeepSpeed's config.
        arguments: of ``deepspeed.initialize`` that must be None, by name.

    Raises:
        TrainingError: it names the key.
    """
    zero = table.get("zero_optimization", {})
    low = low_precision(table)
    if table.get("managed_gradient_accumulation") is False:
        raise TrainingError("a plan cannot express DeepSpeed's managed_gradient_accumulation: false", hint=NO_PLAN)
    if _is_on(low) and not zero_stage(table):
        raise TrainingError(
            "a plan cannot express DeepSpeed's bf16 without ZeRO, whose optimizer steps on zero gradients first",
            hint='set "zero_optimization": {"stage": 1}, which does not, or train without a plan',
        )
    for name, value in (
        ("fp16", table.get("fp16", {}).get("enabled")),
        ("zero_optimization.offload_param", zero.get("offload_param", {}).get("device", "none") != "none"),
        ("zero_optimization.offload_optimizer", zero.get("offload_optimizer", {}).get("device", "none") != "none"),
        *((name, value is not None) for name, value in arguments.items()),
        *((key, value) for key, value in table.items() if key not in _KNOWN),
        *((f"zero_optimization.{key}", value) for key, value in zero.items() if key not in _KNOWN_OF_ZERO),
        *((f"bf16.{key}", value) for key, value in low.items() if key not in _KNOWN_OF_BF16),
    ):
        if _is_on(value):
            raise TrainingError(f"a plan cannot express DeepSpeed's {name}", hint=NO_PLAN)


def zero_stage(table: Table) -> int:
    """Return the stage of ZeRO that a config asks for."""
    return int(table.get("zero_optimization", {}).get("stage", 0) or 0)


def shows_as_much(stage: int, of_script: int) -> bool:
    """Tell whether a stage of ZeRO shows a script all that the stage shows for which it was written.

    Gradients between backward and step are there at stage 0 only; parameters outside of passes, and so whole state
    dicts, penalties and norms of weights, up to stage 2.
    """
    return (stage == 0 or of_script > 0) and (stage < ZERO_3 or of_script == ZERO_3)


def low_precision(table: Table) -> Table:
    """Return the section about bfloat16, by either of its names."""
    found: Table = table.get("bf16") or table.get("bfloat16") or {}
    return found


def _is_on(value: object) -> bool:
    """Tell whether a setting asks for something: a section may say itself that it does not."""
    if isinstance(value, dict):
        return bool(value.get("enabled", any(_is_on(item) for item in value.values())))
    return value not in (None, False, 0, 1, 1.0, "", "none") or value is True


def gradient_clipping(table: Table) -> float:
    """Return the norm to which gradients are clipped, 0 for none: what a config says, else DeepSpeed's own default.

    The default differs between versions: 0.0 for long, 1.0 in 0.19.8 (deepspeed/runtime/constants.py).

    Raises:
        TrainingError: neither says.
    """
    if "gradient_clipping" in table:
        return float(table["gradient_clipping"] or 0.0)
    try:
        from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
    except ImportError as error:
        raise TrainingError(
            "a plan must know how DeepSpeed clips gradients, this version does not tell its default",
            hint="set gradient_clipping in DeepSpeed's config",
        ) from error
    return float(GRADIENT_CLIPPING_DEFAULT)


def make_optimizer(table: Table, parameters: ParamsT) -> torch.optim.Optimizer:
    """Make the optimizer that a config names.

    Raises:
        TrainingError: our runtime has none like it.
    """
    section = table.get("optimizer") or {}
    kind, settings = str(section.get("type", "")).lower(), dict(section.get("params", {}))
    decoupled = settings.pop("adam_w_mode", True)  # DeepSpeed's Adam is AdamW unless told otherwise
    is_torchs = settings.pop("torch_adam", False)
    if not settings.pop("bias_correction", True):
        raise TrainingError("a plan cannot express DeepSpeed's Adam without bias_correction", hint=NO_PLAN)
    classes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.AdamW if decoupled else torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    if kind not in classes:
        got = section.get("type") or "none, as for a model that is not trained"
        raise TrainingError(
            f"a plan needs an optimizer of type Adam, AdamW or SGD, got {got}",
            hint="pass optimizer= to deepspeed.initialize",
        )
    if kind in ("adam", "adamw") and not is_torchs:
        settings.setdefault("weight_decay", 0.0)  # as DeepSpeed's own, unlike torch's AdamW
    return classes[kind](parameters, **settings)


def make_scheduler(section: Table, optimizer: torch.optim.Optimizer) -> Scheduler:
    """Make the scheduler that a config's section names.

    Raises:
        TrainingError: neither DeepSpeed nor torch has it.
    """
    from deepspeed.runtime import lr_schedules

    cls = getattr(lr_schedules, section["type"], None) or getattr(torch.optim.lr_scheduler, section["type"], None)
    if cls is None:
        raise TrainingError(f"the scheduler must be one of DeepSpeed's or torch's, got {section['type']!r}")
    scheduler: Scheduler = cls(optimizer, **section.get("params", {}))
    return scheduler


def batch_sizes(table: Table) -> tuple[int, int]:
    """Return the samples per rank in a micro-batch and the micro-batches per step, by DeepSpeed's rule.

    Raises:
        TrainingError: the config does not tell.
    """
    whole, micro, passes = (
        table.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    world = dist.get_world_size()
    if micro is None and whole is not None:
        micro = whole // (world * (passes or 1))
    if passes is None:
        passes = 1 if whole is None or micro is None else whole // (world * micro)
    if micro is None or not passes:
        raise TrainingError("DeepSpeed's config must tell train_batch_size or train_micro_batch_size_per_gpu")
    if whole is not None and whole != micro * passes * world:
        raise TrainingError(
            f"train_batch_size must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks, "
            f"got {whole} for {micro} x {passes} x {world}",
            hint="leave one of the three out of DeepSpeed's config, which is told by the others",
        )
    return int(micro), int(passes)
