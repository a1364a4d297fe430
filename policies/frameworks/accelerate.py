"""Hugging Face accelerate's configuration file.

Source: accelerate documentation, "Fully Sharded Data Parallel" and ``ParallelismConfig``.
"""

from __future__ import annotations

from dataclasses import dataclass

from paro_advise.policies.frameworks.fsdp1 import FIDELITY, KEPT_VARIANTS
from paro_advise.policies.frameworks.fsdp2 import kept_for_backward_caveats
from paro_advise.policies.frameworks.model import Rendered, Target, TrainingFramework

_NODES = "on more than one node, add --num_machines, --machine_rank and --main_process_ip to accelerate launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateSettings:
    """The keys of an accelerate file that say how states are sharded.

    Attributes:
        distributed_type: MULTI_GPU or FSDP.
        num_processes: all ranks.
        fsdp_config, parallelism_config: tables; None where the file needs none.
    """

    distributed_type: str
    num_processes: int
    fsdp_config: dict[str, object] | None = None
    parallelism_config: dict[str, object] | None = None


def settings(target: Target) -> AccelerateSettings:
    """Return the settings of a target."""
    if target.triple == "NNN":
        return AccelerateSettings(distributed_type="MULTI_GPU", num_processes=target.num_ranks)
    replicate, shards = (target.num_groups, target.group_size) if target.is_hybrid else (1, target.world_size)
    return AccelerateSettings(
        distributed_type="FSDP",
        num_processes=target.num_ranks,
        fsdp_config={
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": target.triple not in ("NGG", "NII"),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
        parallelism_config={
            "parallelism_config_dp_replicate_size": replicate,
            "parallelism_config_dp_shard_size": shards,
        },
    )


def render(target: Target) -> Rendered:
    """Return a configuration file."""
    found = settings(target)
    lines = [
        "# Add the other lines of your own file, mixed_precision among them: without it training is in fp32.",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {found.distributed_type}",
        f"num_processes: {found.num_processes}",
    ]
    for name, table in (("fsdp_config", found.fsdp_config), ("parallelism_config", found.parallelism_config)):
        if table is not None:
            lines += [f"{name}:", *(f"  {key}: {_plain(value)}" for key, value in table.items())]
    text = "\n".join(lines) + "\n"
    if found.fsdp_config is None:
        return Rendered(text=text, suffix=".yaml", min_version="1.0")
    caveats = (_NODES, *kept_for_backward_caveats(target))
    return Rendered(text=text, suffix=".yaml", min_version="1.10", caveats=caveats)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


ACCELERATE = TrainingFramework(name="accelerate", fidelity=FIDELITY, variants=KEPT_VARIANTS, render=render)
