"""torchtitan's parallelism settings.

Source: torchtitan, config ``Parallelism`` (data_parallel_*_degree, fsdp_reshard_after_forward).
"""

from __future__ import annotations

from paro_advise.policies.frameworks.fsdp1 import FIDELITY, KEPT_VARIANTS
from paro_advise.policies.frameworks.fsdp2 import kept_for_backward_caveats
from paro_advise.policies.frameworks.model import Rendered, Target, TrainingFramework


def parallelism_settings(target: Target) -> dict[str, int | str]:
    """Return the keys of torchtitan's table ``parallelism``."""
    replicate, shards = (target.num_groups, target.group_size) if target.is_hybrid else (1, target.world_size)
    if target.triple == "NNN":
        replicate, shards = target.world_size, 1
    return {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "never" if target.triple in ("NII", "NGG") else "always",
    }


def render(target: Target) -> Rendered:
    """Return a configuration function."""
    lines = [
        f"    config.parallelism.{name} = " + (f'"{value}"' if isinstance(value, str) else str(value))
        for name, value in parallelism_settings(target).items()
    ]
    code = "\n".join(
        [
            f"def {target.triple.lower()}(base_config):",
            '    """Return the run\'s configuration with this strategy."""',
            "    config = base_config()",
            *lines,
            "    return config\n",
        ]
    )
    return Rendered(text=code, suffix=".py", min_version="0.2", caveats=kept_for_backward_caveats(target))


TORCHTITAN = TrainingFramework(name="torchtitan", fidelity=FIDELITY, variants=KEPT_VARIANTS, render=render)
