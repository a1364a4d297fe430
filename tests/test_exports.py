"""Exports: code that runs, configurations that the real libraries load, refusals."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from test_sharding import run

from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.model import Fidelity, Offload, Target
from paro_advise.policies.frameworks.registry import EXPORTED, export, exports_of
from paro_advise.policies.strategy import KEPT, CollectiveBackend, Strategy


def target(triple, **changes):
    return Target(**({"triple": triple, "group_size": 8, "world_size": 32, "micro_batches": 4} | changes))


@pytest.mark.parametrize("framework", list(EXPORTED))
@pytest.mark.parametrize("strategy", [str(strategy) for strategy in KEPT])
def test_everything_is_expressed_or_refused(framework, strategy):
    fidelity = exports_of(Strategy.parse(strategy), CollectiveBackend.NATIVE)[framework]
    if fidelity == Fidelity.UNSUPPORTED:
        with pytest.raises(UsageError, match="has no settings for"):
            export(framework, target(strategy))
        return
    made = export(framework, target(strategy))
    assert made.fidelity == fidelity
    # An approximation says what really happens, beside the check of the batch.
    assert len(made.caveats) > (1 if fidelity == Fidelity.APPROXIMATE else 0)
    if made.suffix == ".py":
        ast.parse(made.text)
    if made.suffix == ".json":
        assert json.loads(made.text)["gradient_accumulation_steps"] == 4


def test_only_our_runtime_has_ho_ring():
    found = exports_of(Strategy.parse("GGG"), CollectiveBackend.HO_RING)
    assert found.pop("paro_advise") == "exact"
    assert set(found.values()) == {"unsupported"}


def test_an_unknown_framework_is_refused():
    with pytest.raises(UsageError, match="deepspeed, fsdp1"):
        export("mxnet", target("GGG"))


def test_numbers_of_a_hybrid_export():
    assert "--num-distributed-optimizer-instances 4" in export("megatron", target("IIG")).text
    assert "(4, 8)" in export("fsdp2", target("III")).text
    assert "dp_replicate_size: 4" in export("accelerate", target("III")).text
    assert json.loads(export("deepspeed", target("III")).text)["zero_optimization"]["mics_shard_size"] == 8


def test_numbers_of_a_hybrid_export_where_ranks_hold_a_model_together():
    """32 ranks that share the data, each with a neighbour of the same model: 64 ranks, four groups of eight."""
    made = {name: export(name, target("III", model_parallel_ranks=2)) for name in ("fsdp2", "fsdp1", "accelerate")}
    mesh = 'init_device_mesh(device, (4, 8, 2), mesh_dim_names=("replicate", "shard", "model"))["replicate", "shard"]'
    assert all(mesh in made[name].text for name in ("fsdp1", "fsdp2"))
    assert "num_processes: 64" in made["accelerate"].text
    assert "dp_replicate_size: 4" in made["accelerate"].text
    assert all(
        "2 ranks hold a model together and 32 share the data" in " ".join(item.caveats) for item in made.values()
    )
    whole = export("fsdp2", target("GGG", model_parallel_ranks=2)).text
    assert 'init_device_mesh(device, (32, 2), mesh_dim_names=("shard", "model"))["shard"]' in whole
    text = export("lightning", target("GGG", model_parallel_ranks=2)).text
    assert "data_parallel_size=32, tensor_parallel_size=2" in text


@pytest.mark.parametrize("strategy", ["NNN", "NNG", "NGG", "GGG", "IGG"])
def test_deepspeed_loads_its_configuration(strategy):
    config = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed is not installed (make bench-training)")
    made = json.loads(export("deepspeed", target(strategy)).text) | {"train_micro_batch_size_per_gpu": 1}
    loaded = config.DeepSpeedConfig(made)
    assert loaded.zero_config.stage == {"NNN": 0, "NNG": 1, "NGG": 2}.get(strategy, 3)
    if strategy == "IGG":
        assert loaded.zero_config.zero_hpz_partition_size == 8


@pytest.mark.parametrize(
    ("strategy", "sizes", "reshards"),
    [("GGG", (1, 32), "true"), ("NGG", (1, 32), "false"), ("III", (4, 8), "true"), ("NII", (4, 8), "false")],
)
def test_accelerate_loads_its_configuration_and_launches_with_it(strategy, sizes, reshards, tmp_path):
    reason = "accelerate is not installed (make bench-training)"
    arguments = pytest.importorskip("accelerate.commands.config.config_args", reason=reason)
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "accelerate.yaml"
    path.write_text(export("accelerate", target(strategy)).text)
    assert arguments.load_config_from_file(str(path)).num_processes == 32
    parsed = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    given = prepare_multi_gpu_env(_validate_launch_command(parsed)[0])
    assert (given["FSDP_VERSION"], given["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", reshards)
    names = ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "PARALLELISM_CONFIG_DP_SHARD_SIZE")
    assert tuple(int(given[name]) for name in names) == sizes


def test_lightning_makes_its_strategy():
    strategies = pytest.importorskip(
        "lightning.pytorch.strategies", reason="Lightning is not installed (make bench-training)"
    )
    module: dict[str, Any] = {}
    exec(export("lightning", target("GGG")).text, module)
    assert isinstance(module["strategy"], strategies.ModelParallelStrategy)


def test_deepspeed_keeps_parameters_on_the_host_in_stage_3_only():
    wanted = json.loads(export("deepspeed", target("GGG", offload=Offload.PARAMETERS)).text)["zero_optimization"]
    assert (wanted["offload_optimizer"]["device"], wanted["offload_param"]["device"]) == ("cpu", "cpu")
    with pytest.raises(UsageError, match="stage 3"):
        export("deepspeed", target("NGG", offload=Offload.PARAMETERS))
    with pytest.raises(UsageError, match="to the host"):
        export("fsdp2", target("GGG", offload=Offload.PARAMETERS))
    config = pytest.importorskip("deepspeed.runtime.config", reason="DeepSpeed is not installed (make bench-training)")
    made = {"zero_optimization": wanted, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    assert config.DeepSpeedConfig(made).zero_config.offload_param.device == "cpu"


@pytest.mark.distributed
def test_exported_fsdp2_code_trains_as_one_process():
    assert run("exported_fsdp2", warnings="default").count("trained") == 8
