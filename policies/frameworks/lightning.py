"""Lightning: FSDP2 through ``ModelParallelStrategy``.

Source: Lightning documentation, lightning.pytorch.strategies.ModelParallelStrategy.
"""

from __future__ import annotations

from paro_advise.policies.frameworks import fsdp2
from paro_advise.policies.frameworks.model import Rendered, Target, TrainingFramework


def render(target: Target) -> Rendered:
    """Return code for a LightningModule."""
    if target.triple == "NNN":
        return Rendered(text='strategy = "ddp"  # Trainer(strategy=strategy)\n', suffix=".py", min_version="2.0")
    sharded = fsdp2.render(target)
    code = f"""{sharded.text}

from lightning.pytorch.strategies import ModelParallelStrategy

strategy = ModelParallelStrategy(
    data_parallel_size={target.world_size}, tensor_parallel_size={target.model_parallel_ranks}
)
# In the LightningModule:
#     def configure_model(self):
#         apply(self.model, self.model.layers)
"""
    caveats = (*sharded.caveats, "configure_model must name the repeated layers of your model")
    return Rendered(text=code, suffix=".py", min_version="2.4", caveats=caveats)


LIGHTNING = TrainingFramework(name="lightning", fidelity=fsdp2.FIDELITY, variants=fsdp2.VARIANTS, render=render)
