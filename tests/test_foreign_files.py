"""Files in the style of public code bases: what a plan takes out, leaves, tells of, or refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from test_apply import plan  # noqa: F401 - a fixture

from paro_advise.advisor.cli import run

FSDP_SCRIPT = """#!/bin/bash
# Megatron
ARGS=(
    --use-megatron-fsdp
    --data-parallel-sharding-strategy optim_grads_params
    --init-model-with-meta-device
    --fsdp-double-buffer
    --fsdp-manual-registration
    --ckpt-format fsdp_dtensor
    --bf16
)
torchrun pretrain_gpt.py "${ARGS[@]}"
"""
ZERO_YAML = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 2
  offload_optimizer_device: none
  zero_stage: 3   # of DeepSpeed
distributed_type: DEEPSPEED
num_processes: 8
"""
FSDP1_YAML = """distributed_type: FSDP
fsdp_config:
    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP   # ours
    fsdp_backward_prefetch: BACKWARD_PRE
    fsdp_sharding_strategy: FULL_SHARD
    fsdp_sync_module_states: true
    fsdp_use_orig_params: true
    fsdp_offload_params: false
num_processes: 8
"""


def applied(path, text, chosen):
    """Return the exit code of `apply --write --force`, and what the file holds then."""
    path.write_text(text)
    return run(["apply", chosen, str(path), "--write", "--force"]), path.read_text()


# ---- launch scripts of Megatron-LM ---------------------------------------------------------------------------


def test_a_comment_behind_a_command_is_no_place_for_flags(plan, tmp_path):  # noqa: F811
    text = """#!/bin/bash
# Megatron
NAME="run #1"  # next time: --overlap-param-gather
TRAIN_ARGS="--use-distributed-optimizer --bf16"
torchrun pretrain_gpt.py $TRAIN_ARGS
"""
    code, found = applied(tmp_path / "m.sh", text, plan("NNG"))
    flags = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    assert (code, found) == (0, text.replace("--use-distributed-optimizer", flags))


def test_plain_data_parallelism_reduces_beside_backward(plan, tmp_path):  # noqa: F811
    """As the prediction does. Without the flag Megatron's DDP has one bucket, reduced after backward."""
    text = "# Megatron\ntorchrun pretrain_gpt.py --use-distributed-optimizer --overlap-grad-reduce --bf16\n"
    code, found = applied(tmp_path / "m.sh", text, plan("NNN"))
    assert (code, found) == (0, "# Megatron\ntorchrun pretrain_gpt.py --overlap-grad-reduce --bf16\n")


def test_nothing_of_megatron_fsdp_is_left_where_it_does_not_run(plan, tmp_path):  # noqa: F811
    """arguments.py refuses its format of checkpoints, and registering its buffers, with anything else."""
    code, found = applied(tmp_path / "m.sh", FSDP_SCRIPT, plan("NNG"))
    assert code == 0
    assert found.split("ARGS=(")[1].split(")")[0].split() == [
        "--use-distributed-optimizer",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--bf16",
    ]


def test_what_megatron_fsdp_has_beside_stays_with_it(plan, tmp_path):  # noqa: F811
    code, found = applied(tmp_path / "m.sh", FSDP_SCRIPT, plan("NGG"))
    assert code == 0
    assert "--fsdp-double-buffer" in found
    assert "--fsdp-manual-registration" in found
    assert "--data-parallel-sharding-strategy optim_grads\n" in found.replace(" --fsdp", "\n --fsdp")


def test_torchs_fsdp2_makes_way(plan, tmp_path):  # noqa: F811
    text = "# Megatron\ntorchrun pretrain_gpt.py --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --bf16\n"
    code, found = applied(tmp_path / "m.sh", text, plan("NNG"))
    assert code == 0
    assert "fsdp2" not in found


def test_flags_under_a_condition_are_refused(plan, tmp_path, capsys):  # noqa: F811
    text = FSDP_SCRIPT.replace("ARGS=(\n", 'ARGS=()\nif [ "${FSDP}" = 1 ]; then\nARGS=(\n').replace(")\n", ")\nfi\n", 2)
    text = text.replace("ARGS=()\nfi\n", "ARGS=()\n")
    code, found = applied(tmp_path / "m.sh", text, plan("NNG"))
    assert (code, found) == (2, text)
    assert "stands under a condition" in capsys.readouterr().err


# ---- DeepSpeed -----------------------------------------------------------------------------------------------


def test_stage_0_has_no_optimizer_to_offload(plan, tmp_path, capsys):  # noqa: F811
    text = json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    code, found = applied(tmp_path / "ds.json", text, plan("NNN"))
    assert (code, found) == (2, text)
    assert "remove zero_optimization.offload_optimizer first" in capsys.readouterr().err


def test_quantised_traffic_is_told(plan, tmp_path, capsys):  # noqa: F811
    text = json.dumps({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}})
    assert applied(tmp_path / "ds.json", text, plan("NGG"))[0] == 0
    assert "zero_quantized_weights stay and round what is sent" in capsys.readouterr().err


def test_micro_batches_follow_from_batch_sizes(plan, tmp_path, capsys):  # noqa: F811
    """64 samples on 8 ranks are 8 micro-batches of one; the plan is for 2."""
    text = json.dumps({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    code, found = applied(tmp_path / "ds.json", text, plan("NGG"))
    assert (code, found) == (4, text)
    assert "gradient_accumulation_steps 2, the file says 8" in capsys.readouterr().err


def test_a_file_for_tensor_parallel_ranks_is_no_file_for_a_plan_without(plan, tmp_path):  # noqa: F811
    text = json.dumps({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4}})
    assert applied(tmp_path / "ds.json", text, plan("NGG")) == (4, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trainer_state.json", '{"best_metric": null, "log_history": [], "max_steps": 9, "train_batch_size": 2}'),
        ("hydra.yaml", "trainer:\n  distributed_type: FSDP\n  lr: 1\n"),
    ],
)
def test_other_files_are_not_taken_for_configurations(name, text, plan, tmp_path):  # noqa: F811
    assert applied(tmp_path / name, text, plan("NGG")) == (2, text)


# ---- accelerate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("triple", "stage"), [("NGG", 2), ("NNG", 1), ("NNN", 0)])
def test_a_file_by_which_accelerate_starts_deepspeed_stays_one(triple, stage, plan, tmp_path):  # noqa: F811
    pytest.importorskip("ruamel.yaml")
    code, found = applied(tmp_path / "a.yaml", ZERO_YAML, plan(triple))
    assert (code, found) == (0, ZERO_YAML.replace("zero_stage: 3", f"zero_stage: {stage}"))


@pytest.mark.parametrize(
    ("change", "triple", "code", "said"),
    [
        (("steps: 2", "steps: 8"), "NGG", 4, "the file says 8"),
        (("device: none", "device: cpu"), "NNN", 2, "remove deepspeed_config.offload_optimizer_device first"),
        (("  zero_stage: 3   # of DeepSpeed", "  deepspeed_config_file: ds.json"), "NGG", 2, "stands in another file"),
        (("", ""), "III", 2, "must read mics_shard_size from a DeepSpeed JSON"),
    ],
)
def test_what_such_a_file_cannot_say_is_refused(change, triple, code, said, plan, tmp_path, capsys):  # noqa: F811
    pytest.importorskip("ruamel.yaml")
    text = ZERO_YAML.replace(*change) if change[0] else ZERO_YAML
    assert applied(tmp_path / "a.yaml", text, plan(triple)) == (code, text)
    assert said in capsys.readouterr().err


def test_a_file_for_fsdp1_becomes_one_for_fsdp2_and_says_so(plan, tmp_path, capsys):  # noqa: F811
    """Without what FSDP2 does not have, as by accelerate's own conversion; indented as before."""
    pytest.importorskip("ruamel.yaml")
    code, found = applied(tmp_path / "a.yaml", FSDP1_YAML, plan("NGG"))
    assert code == 0
    gone = ("fsdp_sharding_strategy", "fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
    said = capsys.readouterr().err
    for key in gone:
        assert key not in found
        assert key in said
    assert "\n    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP   # ours\n" in found
    assert "\n    fsdp_version: 2\n" in found


# ---- scripts -------------------------------------------------------------------------------------------------

IMPORTS_FIRST = """
import torch.distributed.checkpoint.state_dict as helpers
from torch.nn.parallel import DistributedDataParallel
from paro_advise.runtime.redirect import use_plan
use_plan({plan!r})
import torch
print(helpers.DDP is DistributedDataParallel is torch.nn.parallel.DistributedDataParallel)
print(helpers.FSDP is torch.distributed.fsdp.FullyShardedDataParallel)
"""


def test_torchs_checkpoint_helpers_know_a_planned_model_whenever_they_are_imported(plan, tmp_path):  # noqa: F811
    """Else keys of a checkpoint have `module.` before them: get_state_dict() asks whether DDP wraps the model."""
    program = IMPORTS_FIRST.format(plan=plan("III"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr
