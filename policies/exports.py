"""A strategy in the words of the framework that a user runs (reference prediction, section 5).

An export is exact, or an approximation that says what really happens; what a framework cannot express
is refused, never left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError
from paro_advise.policies.fidelity import Fidelity, exports_of
from paro_advise.policies.strategy import Strategy
from paro_advise.policies.variants import approximated

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is to be expressed.

    Attributes:
        triple: the strategy.
        group_size: ranks of a group.
        world_size: all ranks.
        micro_batches: per step.
        offload: "optimizer" if its states are on the host, "optimizer+parameter" if the parameters are, too.
        variant: what a framework's own setting makes of the triple.
    """

    triple: str
    group_size: int
    world_size: int
    micro_batches: int
    offload: str = ""
    variant: str = ""

    @property
    def num_groups(self) -> int:
        """Return the number of groups."""
        return self.world_size // self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A strategy as one framework wants it.

    Attributes:
        framework: which.
        fidelity: exact or approximate.
        text: the file, the code or the flags.
        suffix: of a file that would hold it.
        min_version: the oldest version that understands it.
        caveats: what really happens where it is no exact expression, and what to check.
    """

    framework: str
    fidelity: str
    text: str
    suffix: str
    min_version: str
    caveats: tuple[str, ...]


def export(framework: str, target: Target) -> Export:
    """Return a strategy in a framework's words.

    Raises:
        UsageError: it does not know the framework, or the framework does not know the strategy.
    """
    if framework not in _WRITERS:
        raise UsageError(f"a framework must be one of {', '.join(_WRITERS)}, got {framework!r}")
    if target.offload and framework != "deepspeed":
        raise UsageError(
            f"{framework} must be able to keep states on the host as the plan does, its export cannot say so",
            hint="deepspeed can; the optimizer's alone also paro_advise.runtime.shard(offload_optimizer=True)",
        )
    fidelities = exports_of(Strategy.parse(target.triple), "native", target.variant)
    fidelity = fidelities[framework]
    if fidelity == Fidelity.UNSUPPORTED:
        known = [name for name, value in fidelities.items() if value != fidelity]
        raise UsageError(
            f"{framework} must be able to express {target.triple}, it has no settings for it",
            hint=f"these have: {', '.join(known) or 'none'}; paro_advise.runtime.shard runs every strategy",
        )
    text, suffix, version, caveats = _WRITERS[framework](
        replace(target, triple=approximated(target.triple, target.variant), variant="")
    )
    return Export(
        framework=framework,
        fidelity=fidelity,
        text=text,
        suffix=suffix,
        min_version=version,
        caveats=(*caveats, "keep the global batch: ranks x micro-batch x accumulation steps"),
    )


_WHOLE_STAGE = 3
_Written = tuple[str, str, str, tuple[str, ...]]


def _deepspeed(target: Target) -> _Written:
    stages = {"NNN": 0, "NNG": 1, "NGG": 2, "GGG": 3, "III": 3, "IGG": 3}
    zero: dict[str, object] = {"stage": stages[target.triple]}
    caveats: tuple[str, ...] = ()
    version = "0.9"
    if target.triple == "III":
        zero |= {"mics_shard_size": target.group_size, "mics_hierarchical_params_gather": False}
        caveats = (
            "MiCS was removed in DeepSpeed 0.19.8, which refuses this file",
            "sharded initialisation needs deepspeed.zero.MiCS_Init",
        )
    if target.triple == "IGG":
        zero |= {"zero_hpz_partition_size": target.group_size}
        caveats = (
            "hpZ keeps a second copy of the parameters in each group; the first gather of a step is over all ranks",
        )
        version = "0.10"
    if zero["stage"] == 3:
        zero["overlap_comm"] = True
    if target.offload:
        if not zero["stage"]:
            raise UsageError("DeepSpeed must shard the optimizer to offload it, the plan wants stage 0")
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if "parameter" in target.offload:
        if zero["stage"] != _WHOLE_STAGE:
            raise UsageError(f"DeepSpeed must run stage 3 to offload parameters, the plan wants stage {zero['stage']}")
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    body = {"gradient_accumulation_steps": target.micro_batches, "zero_optimization": zero}
    return json.dumps(body, indent=2) + "\n", ".json", version, caveats


def _fsdp2(target: Target) -> _Written:
    hybrid = target.triple in ("III", "NII", "NNI")
    reshard = {"GGG": "True", "III": "True", "IGG": str(target.group_size)}.get(target.triple, "False")
    if target.triple == "NNN":
        code = '''from torch.nn.parallel import DistributedDataParallel


def apply(model):
    """Wrap a model."""
    return DistributedDataParallel(model)
'''
        return code, ".py", "2.0", ("put all micro-batches but the last under model.no_sync()",)
    mesh = (
        f'init_device_mesh(device, ({target.num_groups}, {target.group_size}), mesh_dim_names=("replicate", "shard"))'
        if hybrid
        else f'init_device_mesh(device, ({target.world_size},), mesh_dim_names=("shard",))'
    )
    code = f'''import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def apply(model, blocks, device="cuda"):
    """Shard a model; blocks are its repeated layers."""
    mesh = {mesh}
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward={reshard})
    return fully_shard(model, mesh=mesh, reshard_after_forward={reshard})
'''
    caveats: tuple[str, ...] = ()
    if hybrid:
        code += '''

def before_backward(model, is_last_micro_batch):
    """Add gradients up across groups at the accumulation boundary only."""
    model.set_requires_all_reduce(is_last_micro_batch)
'''
        caveats = ("call before_backward in every micro-batch, or gradients cross groups each time",)
    if target.triple in ("NGG", "NII", "NNG", "NNI"):
        caveats += ("parameters are sharded between steps and gathered once per micro-batch, not once per step",)
    if target.triple in ("NNG", "NNI"):
        code += '''

def hold_gradients(model, is_last_micro_batch):
    """Keep whole gradients until the boundary."""
    model.set_requires_gradient_sync(is_last_micro_batch)
'''
        caveats += ("call hold_gradients in every micro-batch",)
    if target.triple == "IGG":
        caveats += ("only the gather in backward stays inside the group; the one in forward is over all ranks",)
    return code, ".py", "2.6", caveats


def _torchtitan(target: Target) -> _Written:
    hybrid = target.triple in ("III", "NII")
    replicate, shards = (target.num_groups, target.group_size) if hybrid else (1, target.world_size)
    if target.triple == "NNN":
        replicate, shards = target.world_size, 1
    after = "never" if target.triple in ("NII", "NGG") else "always"
    code = f'''def {target.triple.lower()}(base_config):
    """Return the run's configuration with this strategy."""
    config = base_config()
    config.parallelism.data_parallel_replicate_degree = {replicate}
    config.parallelism.data_parallel_shard_degree = {shards}
    config.parallelism.fsdp_reshard_after_forward = "{after}"
    return config
'''
    return code, ".py", "0.2", _kept_for_backward(target)


def _accelerate(target: Target) -> _Written:
    if target.triple == "NNN":
        text = f"compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: {target.world_size}\n"
        return text, ".yaml", "1.0", ()
    reshard = "false" if target.triple in ("NGG", "NII") else "true"
    hybrid = target.triple in ("III", "NII")
    replicate, shards = (target.num_groups, target.group_size) if hybrid else (1, target.world_size)
    text = f"""compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: {target.world_size}
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: {reshard}
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
parallelism_config:
  parallelism_config_dp_replicate_size: {replicate}
  parallelism_config_dp_shard_size: {shards}
"""
    nodes = "on more than one node, add --num_machines, --machine_rank and --main_process_ip to accelerate launch"
    return text, ".yaml", "1.10", (nodes, *_kept_for_backward(target))


def _megatron(target: Target) -> _Written:
    instances = f" --num-distributed-optimizer-instances {target.num_groups}"
    fsdp = (
        "--use-megatron-fsdp --ckpt-format fsdp_dtensor --init-model-with-meta-device --data-parallel-sharding-strategy"
    )
    flags = {
        "NNN": "",
        "NNG": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "NNI": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather" + instances,
        "NGG": f"{fsdp} optim_grads",
        "GGG": f"{fsdp} optim_grads_params",
        "III": f"{fsdp} optim_grads_params --outer-dp-sharding-strategy no_shard" + instances,
        "IIG": f"{fsdp} optim_grads_params --outer-dp-sharding-strategy optim" + instances,
    }[target.triple]
    return flags + "\n", ".txt", "core 0.14", ()


def _fsdp1(target: Target) -> _Written:
    names = {
        "NNN": "NO_SHARD",
        "NGG": "SHARD_GRAD_OP",
        "GGG": "FULL_SHARD",
        "III": "HYBRID_SHARD",
        "NII": "_HYBRID_SHARD_ZERO2",
    }
    hybrid = target.triple in ("III", "NII")
    shape = f"({target.num_groups}, {target.group_size})" if hybrid else f"({target.world_size},)"
    dims = '("replicate", "shard")' if hybrid else '("shard",)'
    code = f'''from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def apply(model, device="cuda", **options):
    """Wrap a model; options go to FSDP."""
    mesh = init_device_mesh(device, {shape}, mesh_dim_names={dims})
    return FullyShardedDataParallel(
        model, device_mesh=mesh, sharding_strategy=ShardingStrategy.{names[target.triple]}, **options
    )
'''
    caveats = _kept_for_backward(target)
    if hybrid:
        caveats += ("gradients cross groups in every micro-batch unless all but the last run under no_sync()",)
    return code, ".py", "2.2", caveats


def _lightning(target: Target) -> _Written:
    if target.triple == "NNN":
        return 'strategy = "ddp"  # Trainer(strategy=strategy)\n', ".py", "2.0", ()
    code, suffix, _, caveats = _fsdp2(target)
    code += f"""

from lightning.pytorch.strategies import ModelParallelStrategy

strategy = ModelParallelStrategy(data_parallel_size={target.world_size}, tensor_parallel_size=1)
# In the LightningModule:
#     def configure_model(self):
#         apply(self.model, self.model.layers)
"""
    return code, suffix, "2.4", (*caveats, "configure_model must name the repeated layers of your model")


def _kept_for_backward(target: Target) -> tuple[str, ...]:
    if target.triple in ("NGG", "NII"):
        return ("parameters are sharded between steps and gathered once per micro-batch, not once per step",)
    return ()


_WRITERS: dict[str, Callable[[Target], _Written]] = {
    "deepspeed": _deepspeed,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "torchtitan": _torchtitan,
    "accelerate": _accelerate,
    "megatron": _megatron,
    "lightning": _lightning,
}
FRAMEWORKS = tuple(_WRITERS)
