"""Each framework's own training loop goes through capture, plan and comparison, with losses as without us.

The frameworks are installed by ``make integrations``; elsewhere these tests are left out, and say so.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from loop import plan_for, torchrun
from ranks import run_ranks

LOOPS = Path(__file__).parent / "workers" / "integrations"
# Framework, package, its script, a strategy that differs from the script's own.
FRAMEWORKS = {
    "huggingface": ("transformers", "GGG"),
    "accelerate": ("accelerate", "NGG"),
    "lightning": ("lightning", "NNG"),
    "deepspeed": ("deepspeed", "GGG"),
    "ray": ("ray.train", "NGG"),
}
# Of a loss: ranks add in another order, in float32.
ROUNDING = 2e-6


def is_installed(package):
    home, _, member = package.partition(".")
    return find_spec(home) is not None and (not member or find_spec("pyarrow") is not None)


def framework(name):
    package, strategy = FRAMEWORKS[name]
    missing = pytest.mark.skipif(not is_installed(package), reason=f"{package} is not installed (make integrations)")
    return pytest.param(name, strategy, id=name, marks=[missing, pytest.mark.distributed])


def trained(name, folder, *words):
    """Run a framework's loop on two ranks; return its losses and what it said."""
    script = LOOPS / f"{name}_loop.py"
    start = [sys.executable, str(script)] if name == "ray" else torchrun(script, ranks=2)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PARO_")}
    environment |= {
        "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": f"file:{folder}/mlruns", "RAY_TRAIN_V2_ENABLED": "1",
        "MLFLOW_ALLOW_FILE_STORE": "true", "PYTHONPATH": str(LOOPS), "ACCELERATE_USE_CPU": "1",
    }  # fmt: skip
    done = subprocess.run(
        [*start, "--trackers", str(folder / "trackers"), *words],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    losses = [float(value) for value in re.findall(r"^LOSS \d+ (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 10, done.stdout
    return losses, done.stderr


def paro(*words):
    done = subprocess.run(
        [sys.executable, "-m", "paro_advise", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "strategy"), [framework(name) for name in FRAMEWORKS])
def test_capture_plan_compare(tmp_path, name, strategy):
    before, after, plan = tmp_path / "before", tmp_path / "after", tmp_path / "plan.json"
    plain, _ = trained(name, tmp_path)
    captured, _ = trained(name, tmp_path, "--folder", str(before))
    assert captured == plain
    analysis = json.loads((before / "analyze.json").read_text())
    assert analysis["run"]["world_size"] == 2
    assert len(analysis["ranks"]) == 2
    assert (before / "analyze.html").exists()
    paro("recommend", before, "--strategy", strategy, "--allow-untested", "-o", plan, "-q")
    words = ["--folder", str(after), "--plan", str(plan), "--before", str(before)]
    planned, _ = trained(name, tmp_path, *words)
    assert planned == pytest.approx(plain, rel=ROUNDING)
    comparison = json.loads((after / "compare.json").read_text())
    assert comparison["after"]["run"]["strategy"]["triple_at_rest"] == strategy
    assert comparison["parity"]["loss_max_pct"] < 100 * ROUNDING
    assert kept_by(name, tmp_path) >= {"paro/step_time_ms", "paro/speedup"}


def kept_by(name, folder):
    """Return the names of the figures that the framework's tracker has."""
    if name == "huggingface":
        assert list((folder / "mlruns").rglob("artifacts/paro-advise/compare.html"))
        assert list((folder / "mlruns").rglob("artifacts/paro-advise/plan.json"))
        return {f"paro/{path.name}" for path in (folder / "mlruns").rglob("metrics/paro/*")}
    if name == "lightning":
        (file,) = (folder / "trackers").rglob("version_1/metrics.csv")
        with file.open() as rows:
            return set(next(csv.reader(rows)))
    if name == "deepspeed":
        return {f"paro/{path.stem.removeprefix('paro_')}" for path in (folder / "trackers" / "csv").rglob("paro_*.csv")}
    return {"paro/step_time_ms", "paro/speedup"}


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed (make integrations)")
@pytest.mark.distributed
def test_lightning_may_spawn_its_ranks_while_it_is_recorded(tmp_path):
    environment = {
        **os.environ,
        "PARO_CAPTURE": str(tmp_path / "run"),
        "PARO_CAPTURE_STEPS": "4:6",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(LOOPS / "lightning_spawn.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert "fitted" in done.stdout, done.stderr[-8000:]
    assert len(list((tmp_path / "run").glob("rank*.json.gz"))) == 2
    assert json.loads((tmp_path / "run" / "analyze.json").read_text())["run"]["world_size"] == 2


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed (make integrations)")
@pytest.mark.distributed
def test_what_unfreezes_layers_in_a_later_epoch_is_refused_before_the_first(a_plan, tmp_path):
    plan = plan_for(a_plan, tmp_path / "plan.json", "NNG")
    done = run_ranks(LOOPS / "lightning_unfreezes.py", ranks=2, plan=plan, drift="parameter_count")
    assert done.returncode == 1
    assert "Unfreezing, which adds layers to it in a later epoch" in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed (make integrations)")
@pytest.mark.distributed
def test_lightning_validates_the_mean_of_weights_that_it_trained(a_plan, tmp_path):
    """Its callback copies the model at each start, also of a validation, which uses no copy."""
    script = LOOPS / "lightning_averages.py"
    plain = told_by(run_ranks(script))
    assert len(plain) == 3 + 1
    for strategy in ("NNN", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        found = told_by(run_ranks(script, plan=plan, drift="parameter_count"))
        assert found == pytest.approx(plain, rel=ROUNDING)


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed (make integrations)")
@pytest.mark.parametrize("strategy", ["GGG", "III", "NGG"])
def test_torchtitan_takes_the_exported_configuration(strategy):
    """As far as a CPU goes: torchtitan 0.3 starts on GPUs only."""
    from types import SimpleNamespace

    from test_exports import target
    from torchtitan.config.configs import ParallelismConfig

    from paro_advise.policies.frameworks.registry import export

    made: dict = {}
    exec(export("torchtitan", target(strategy)).text, made)
    config = made[strategy.lower()](lambda: SimpleNamespace(parallelism=ParallelismConfig()))
    degrees = config.parallelism.data_parallel_replicate_degree, config.parallelism.data_parallel_shard_degree
    ranks, group = target(strategy).world_size, target(strategy).group_size
    assert degrees == ((ranks // group, group) if strategy == "III" else (1, ranks))
    fields = set(ParallelismConfig.__dataclass_fields__)
    assert {
        name for name in dir(config.parallelism) if not name.startswith("_")
    } == fields  # nothing that torchtitan does not know


FIGURES = {"paro/step_time_ms": 12.5, "paro/speedup": 1.75}


@pytest.mark.skipif(find_spec("wandb") is None, reason="Weights & Biases is not installed (make integrations)")
def test_a_run_of_weights_and_biases_holds_report_and_figures(tmp_path):
    """Offline: its log holds what it would send."""
    (tmp_path / "compare.html").write_text("<p>a report of this test</p>")
    code = f"""
from pathlib import Path
import wandb
from paro_advise.runtime.integrations.trackers import keep
run = wandb.init(mode="offline", dir=".", project="p")
print("KEPT", keep([Path("compare.html")], {FIGURES}))
run.finish()
"""
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment |= {f"WANDB_{name}_DIR": str(tmp_path / name.lower()) for name in ("CACHE", "DATA", "CONFIG")}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert "KEPT ['Weights & Biases']" in done.stdout, done.stderr[-4000:]
    (log,) = (tmp_path / "wandb").rglob("*.wandb")
    assert all(name.encode() in log.read_bytes() for name in (*FIGURES, "compare.html"))
    (staged,) = (tmp_path / "data" / "artifacts" / "staging").iterdir()
    assert staged.read_text() == "<p>a report of this test</p>"


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="TensorBoard is not installed (make integrations)")
def test_tensorboard_shows_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from paro_advise.runtime.integrations.trackers import keep, to_tensorboard

    with SummaryWriter(str(tmp_path)) as writer:
        assert "TensorBoard" in keep([], FIGURES, [to_tensorboard(writer, step=40)])
    events = EventAccumulator(str(tmp_path)).Reload()
    shown = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert shown == {name: [(40, value)] for name, value in FIGURES.items()}


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed (make integrations)")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "ranks", "mesh"),
    [("GGG", 2, "((2,), '(Shard(dim=0),)')"), ("III", 4, "((2, 2), '(Replicate(), Shard(dim=0))')")],
)
def test_transformers_shards_by_the_exported_configuration(tmp_path, strategy, ranks, mesh):
    """By its own from_pretrained, on gloo: every weight lies on the mesh that the strategy asks for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from paro_advise.policies.frameworks.model import Target
    from paro_advise.policies.frameworks.registry import export

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=64, **sizes)).save_pretrained(tmp_path / "model")
    target = Target(triple=strategy, group_size=2, world_size=ranks, micro_batches=1)
    (tmp_path / "planned.py").write_text(export("transformers", target).text)
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    worker = [LOOPS / "transformers_shards.py", tmp_path / "model", tmp_path / "planned.py"]
    done = subprocess.run([sys.executable, *words, *map(str, worker)], capture_output=True, text=True, check=False)
    assert f"SHARDED True 6 [{mesh}]" in done.stdout, done.stderr[-4000:]


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed (make integrations)")
@pytest.mark.distributed
@pytest.mark.parametrize(("way", "strategy"), [("whole", "NNG"), ("whole", "GGG"), ("parts", "NNG")])
def test_fabric_saves_and_loads_what_its_fsdp2_strategy_trains(way, strategy, a_plan, tmp_path):
    """Without sharded parameters Fabric found no model to save, after the training."""
    script = LOOPS / "fabric_fsdp2.py"
    plain = told_by(run_ranks(script, way))
    assert len(plain) >= 6
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy)
    found = told_by(run_ranks(script, way, plan=plan, drift="parameter_count"))
    assert found == pytest.approx(plain, rel=ROUNDING)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (make integrations)")
@pytest.mark.distributed
def test_scripts_of_zero_3_see_whole_parameters_under_any_plan(a_plan, tmp_path):
    """They make models in ``zero.Init``, and change, read, run and save inside ``GatheredParameters``."""
    script = LOOPS / "deepspeed_gathers.py"
    plain = told_by(run_ranks(script))
    assert len(plain) == 2 * 4 + 2
    for strategy in ("NNG", "IIG", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        assert told_by(run_ranks(script, plan=plan, drift="parameter_count")) == pytest.approx(plain, rel=ROUNDING)
    # DeepSpeed forgets at the next step what is changed in training; a plan would keep it.
    done = run_ranks(script, "--changes", plan=plan, drift="parameter_count")
    assert done.returncode != 0
    assert "must stay as they are" in done.stderr
    done = run_ranks(script, "--reads", plan=plan, drift="parameter_count")
    assert done.returncode != 0
    assert "safe_get_full_fp32_param must be given parameters of its own optimizer" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (make integrations)")
@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "strategy"), [(1, "NNG"), (2, "IIG"), (3, "GGG")])
def test_scripts_of_deepspeed_train_alike_under_a_plan(stage, strategy, a_plan, tmp_path):
    """Gradients are scaled once however they come, dropped where DeepSpeed has not taken them, and skipped if infinite."""
    script = LOOPS / "deepspeed_habits.py"
    plain = told_by(run_ranks(script, str(stage)))
    assert len(plain) == 9 * 8 + 1
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy)
    found = told_by(run_ranks(script, str(stage), plan=plan, drift="parameter_count"))
    assert found == pytest.approx(plain, rel=ROUNDING)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (make integrations)")
@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "kind"), [(2, "float32"), (2, "bfloat16"), (3, "Init")])
def test_deepspeeds_optimizers_keep_float32_whatever_the_model_is_in(stage, kind, a_plan, tmp_path):
    """Values start from what bfloat16 holds of them, and steps that are lost in it add up.

    Once a gradient is rounded the other way, by a unit of bfloat16, steps part by as much at the most.
    """
    script = LOOPS / "deepspeed_low_precision.py"
    plain = told_by(run_ranks(script, str(stage), kind, ranks=2))
    assert len(plain) == 2 * 40
    plan = plan_for(a_plan, tmp_path / "plan.json", "IIG")
    found = told_by(
        run_ranks(script, str(stage), kind, ranks=2, plan=plan, drift="parameter_count,world_size,gpus_per_node")
    )
    assert found[: 2 * 30] == pytest.approx(plain[: 2 * 30], rel=1e-6)
    assert found == pytest.approx(plain, rel=2.0**-8)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (make integrations)")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("stage", "way", "is_refused"),
    [(2, "pairs", True), (2, "direct", True), (1, "boundaries", False), (3, "late", False)],
)
def test_several_passes_before_a_step_of_deepspeed_add_up_or_are_refused(stage, way, is_refused, a_plan, tmp_path):
    """ZeRO-1 and 2 drop what is there when another pass follows one at the boundary: losses differed, unsaid."""
    script = LOOPS / "deepspeed_passes.py"
    plain = told_by(run_ranks(script, str(stage), way))
    plan = plan_for(a_plan, tmp_path / "plan.json", "NNG")
    done = run_ranks(script, str(stage), way, plan=plan, drift="parameter_count")
    if is_refused:
        assert done.returncode == 1
        assert "of several, ZeRO-1 and 2 take the gradients of the last one alone" in done.stderr
    else:
        assert told_by(done) == pytest.approx(plain, rel=ROUNDING)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (make integrations)")
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "strategy"), [("cleared", "NNG"), ("gathered", "GGG"), ("accelerate", "IIG"), ("accelerate-3", "IIG")]
)
def test_gradients_are_kept_and_weights_saved_as_deepspeed_does(way, strategy, a_plan, tmp_path):
    """Each was wrong without a word: gradients gone, half of each weight saved, all of them under other names."""
    script = LOOPS / "deepspeed_saved.py"
    plain = told_by(run_ranks(script, way))
    assert len(plain) > 2 * 6
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy)
    found = told_by(run_ranks(script, way, plan=plan, drift="parameter_count"))
    assert found == pytest.approx(plain, rel=ROUNDING)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (make integrations)")
@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "strategy"), [(3, "NIG"), (3, "GGG"), (2, "NNG")])
def test_deepspeeds_settings_and_whole_weights_are_those_of_deepspeed(stage, strategy, a_plan, tmp_path):
    """What accelerate and transformers ask for at ZeRO-3 was missing; checkpoints without frozen weights were refused."""
    script = LOOPS / "deepspeed_exported.py"
    plain = told_by(run_ranks(script, str(stage)))
    assert len(plain) > 8
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy)
    found = told_by(run_ranks(script, str(stage), plan=plan, drift="parameter_count"))
    assert found == pytest.approx(plain, rel=ROUNDING)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed (make integrations)")
@pytest.mark.distributed
@pytest.mark.parametrize(("stage", "strategy"), [(0, "NNG"), (1, "GGG")])
def test_what_a_stage_shows_is_there_under_plans_of_other_stages(stage, strategy, a_plan, tmp_path):
    """Gradients that a script halves at stage 0; norms of weights and whole state dicts below stage 3."""
    script = LOOPS / "deepspeed_shown.py"
    plain = told_by(run_ranks(script, str(stage)))
    assert len(plain) == 1 + 4 * 4
    assert plain[0] > 0
    plan = plan_for(a_plan, tmp_path / "plan.json", strategy, collectives="native")
    found = told_by(run_ranks(script, str(stage), plan=plan, drift="parameter_count"))
    assert found == pytest.approx(plain, rel=ROUNDING)


def told_by(done):
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [float(value) for value in re.findall(r"^LOSS \d+ (\S+)$", done.stdout, re.MULTILINE)]
