"""Plans in users' own files: idempotent, undoable, comments and formatting kept, the rest refused."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import pytest
from helpers import write_run
from test_recommend import calibration
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.advisor.edits.json_text import remove_key, set_value, without_comments
from paro_advise.advisor.prediction.advice.wanted import Wanted
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.core.documents import to_json
from paro_advise.errors import UsageError
from paro_advise.policies.plan import Quantiles, Verdict, read_plan, with_id
from paro_advise.runtime.adapters.redirection import redirect

DEEPSPEED = """{
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "betas": [0.9, 0.95],
    "zero_optimization": {
        "stage": 3,
        "zero_hpz_partition_size": 8,
        "contiguous_gradients": true
    },
    "bf16": {"enabled": true}
}
"""
ACCELERATE = """# our cluster
compute_environment: LOCAL_MACHINE
distributed_type: FSDP   # keep
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP  # ours
  fsdp_reshard_after_forward: true
machine_rank: 0
"""
TORCHTITAN = """# job
[parallelism]
data_parallel_shard_degree = -1   # all
tensor_parallel_degree = 1

[training]
steps = 10
"""
MEGATRON = """#!/bin/bash
# Megatron
torchrun pretrain_gpt.py \\
    --use-distributed-optimizer \\
    --num-layers 12 \\
    --overlap-grad-reduce
echo done
"""
SCRIPT = '''"""Trains."""

from __future__ import annotations

# ours
import torch
from torch.distributed.fsdp import fully_shard


def main():
    fully_shard(torch.nn.Linear(2, 2))  # one unit
'''
FILES = {
    "ds.json": DEEPSPEED,
    "accelerate.yaml": ACCELERATE,
    "titan.toml": TORCHTITAN,
    "megatron.sh": MEGATRON,
    "train.py": SCRIPT,
}


@pytest.fixture
def plan(tmp_path):
    """Return a function that writes a plan which chooses a strategy."""

    def write(triple, group_size=2, variant="", **changes):
        made = recommend(calibration(), Limits())
        ways = [c for c in made.candidates if (c.triple, c.variant) == (triple, variant)]
        chosen = next(c for c in ways if c.group_size in (None, group_size))
        path = tmp_path / f"{triple}.json"
        path.write_bytes(to_json(with_id(replace(made, chosen=chosen, verdict=Verdict.CHANGE, **changes))))
        return str(path)

    return write


@pytest.mark.parametrize("variant", ["kept_for_backward", "second_copy"])
def test_a_way_that_only_a_framework_has_is_not_run_without_it(variant, plan, tmp_path, capsys):
    """The runtime would train with the triple alone: what ran before, in place of what was planned."""
    (tmp_path / "train.py").write_text(SCRIPT)
    chosen = plan("GGG", variant=variant)
    for words in (["apply", chosen, str(tmp_path / "train.py")], ["run", "--plan", chosen, "--", "true"]):
        assert run(words) == 2
        assert "must be one of the runtime's own strategies to run" in capsys.readouterr().err
    with pytest.raises(UsageError, match="must be one of the runtime's own strategies"):
        redirect(chosen, None)
    assert recommend(calibration(), Limits(), wanted=Wanted.parse("GGG")).chosen.variant == ""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("triple", ["NGG", "III"])
def test_round_trips(name, triple, plan, tmp_path, capsys):
    if name.endswith((".yaml", ".toml", ".py")):
        pytest.importorskip({"yaml": "ruamel.yaml", "toml": "tomlkit", "py": "libcst"}[name.rpartition(".")[2]])
    target = tmp_path / name
    target.write_text(FILES[name])
    chosen = plan(triple)
    assert run(["apply", chosen, str(target)]) == 0
    assert target.read_text() == FILES[name]  # a diff writes nothing
    assert "+++ b/" in capsys.readouterr().out
    assert run(["apply", chosen, str(target), "--write"]) == 0
    changed = target.read_text()
    assert changed != FILES[name]
    assert run(["apply", chosen, str(target), "--write"]) == 0
    assert target.read_text() == changed
    assert "nothing to change" in capsys.readouterr().err
    kept = [line for line in FILES[name].splitlines() if "#" in line and "degree" not in line]
    assert all(line in changed.splitlines() for line in kept)
    assert run(["apply", chosen, str(target), "--undo"]) == 0
    assert target.read_text() == FILES[name]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(name)) == [name]


def test_the_words_of_each_framework(plan, tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        run(["apply", plan("III"), str(tmp_path / name), "--write", "-q"])
    zero = json.loads((tmp_path / "ds.json").read_text())["zero_optimization"]
    assert (zero["stage"], zero["mics_shard_size"]) == (3, 2)
    assert "zero_hpz_partition_size" not in zero
    assert "parallelism_config_dp_replicate_size: 4" in (tmp_path / "accelerate.yaml").read_text()
    assert "data_parallel_shard_degree = 2   # all" in (tmp_path / "titan.toml").read_text()
    megatron = (tmp_path / "megatron.sh").read_text()
    assert "--outer-dp-sharding-strategy no_shard --num-distributed-optimizer-instances 4" in megatron
    assert "--use-distributed-optimizer" not in megatron
    assert megatron.endswith("--num-layers 12\necho done\n")  # no continuation into the next command
    script = (tmp_path / "train.py").read_text()
    assert script.index("use_plan('III.json', beside=__file__)") < script.index("import torch\n")
    ast.parse(script)


@pytest.mark.parametrize("name", FILES)
def test_a_change_that_gains_nothing_is_not_written(name, plan, tmp_path, capsys):
    """A plan whose own prediction is 0.85x, or that says to measure first: exit 4, --force writes it."""
    made = read_plan(plan("III"))

    def slower(choice):
        return replace(choice, predicted=replace(choice.predicted, speedup=Quantiles(p10=0.8, p50=0.85, p90=0.9)))

    slow = replace(made, chosen=slower(made.chosen), candidates=tuple(map(slower, made.candidates)))
    for doubtful in (slow, replace(made, verdict=Verdict.MEASURE_FIRST)):
        (tmp_path / name).write_text(FILES[name])
        (tmp_path / "doubtful.json").write_bytes(to_json(with_id(doubtful)))
        arguments = ["apply", str(tmp_path / "doubtful.json"), str(tmp_path / name), "--write"]
        assert run(arguments) == 4
        assert "E523" in capsys.readouterr().err
        assert (tmp_path / name).read_text() == FILES[name]
        assert run([*arguments, "--force"]) == 0
        assert (tmp_path / name).read_text() != FILES[name]
        assert run([*arguments[:-1], "--undo"]) == 0
        assert (tmp_path / name).read_text() == FILES[name]


def test_what_cannot_be_expressed_is_refused(plan, tmp_path, capsys):
    target = tmp_path / "ds.json"
    target.write_text(DEEPSPEED)
    assert run(["apply", plan("NIG"), str(target)]) == 2
    assert "deepspeed has no settings for NIG" in capsys.readouterr().err
    assert run(["apply", plan("NIG"), str(tmp_path / "train.py")]) == 3
    (tmp_path / "train.py").write_text("import numpy\n")
    assert run(["apply", plan("NIG"), str(tmp_path / "train.py")]) == 2
    (tmp_path / "x.ini").write_text("a=1\n")
    assert run(["apply", plan("NIG"), str(tmp_path / "x.ini")]) == 2


def test_a_stale_plan_names_the_fact(plan, tmp_path, capsys):
    target = tmp_path / "accelerate.yaml"
    pytest.importorskip("ruamel.yaml")
    target.write_text(ACCELERATE.replace("num_processes: 8", "num_processes: 16"))
    assert run(["apply", plan("III"), str(target)]) == 4
    assert "made for num_processes 8, the file says 16" in capsys.readouterr().err


def test_an_undo_does_not_lose_later_work(plan, tmp_path, capsys):
    target = tmp_path / "ds.json"
    target.write_text(DEEPSPEED)
    chosen = plan("NGG")
    assert run(["apply", chosen, str(target), "--undo"]) == 3
    assert run(["apply", chosen, str(target), "--write", "-q"]) == 0
    target.write_text(target.read_text().replace("0.95", "0.99"))
    assert run(["apply", chosen, str(target), "--undo"]) == 2
    assert "0.99" in target.read_text()
    assert run(["apply", chosen, str(target), "--undo", "--force"]) == 0
    assert target.read_text() == DEEPSPEED


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", '{\n  "a": {\n    "b": 1\n  }\n}'),
        ('{"x": 1}', '{"x": 1, "a": {"b": 1}}'),
        ('{\n\t"a": {\n\t\t"b": 2\n\t}\n}', '{\n\t"a": {\n\t\t"b": 1\n\t}\n}'),
        ('{"a": {"b": 1 }}', '{"a": {"b": 1 }}'),
    ],
)
def test_json_is_changed_in_place(text, expected):
    assert set_value(text, ("a", "b"), 1) == expected


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2}', '{"b": 2, "a": 1}', '{\n "a": 1\n}', '{"c": {"a": 3}}'])
def test_json_keys_are_taken_out(text):
    wanted = json.loads(text)
    wanted.pop("a", None)
    assert json.loads(remove_key(text, ("a",))) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "torchrun megatron.py --num-distributed-optimizer-instances $((WORLD/8)) --use-distributed-optimizer\n",
        "torchrun megatron.py --num-distributed-optimizer-instances 2>log --use-distributed-optimizer\n",
        "if a; then megatron.py --use-distributed-optimizer; else megatron.py --use-distributed-optimizer; fi\n",
        "# megatron --use-distributed-optimizer\ntorchrun pretrain.py\n",
    ],
)
def test_launch_scripts_that_are_too_clever_are_refused(text, plan, tmp_path):
    target = tmp_path / "megatron.sh"
    target.write_text(text)
    assert run(["apply", plan("NGG"), str(target), "--write"]) == 2
    assert target.read_text() == text


def test_a_comment_is_no_flag_and_quotes_stay_whole(plan, tmp_path):
    target = tmp_path / "megatron.sh"
    target.write_text(
        '# --use-distributed-optimizer is ZeRO-1\nARGS="--use-distributed-optimizer --seed 1"\n'
        "torchrun megatron.py $ARGS --ckpt-format torch_dist\n"
    )
    assert run(["apply", plan("NGG"), str(target), "--write", "-q"]) == 0
    text = target.read_text()
    assert text.startswith('# --use-distributed-optimizer is ZeRO-1\nARGS="--use-megatron-fsdp')
    assert "torch_dist" not in text
    assert text.count('"') == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 3},, }'),
        ("ds.json", '{"zero_optimization": {"stage": 3'),
        ("ds.json", '{"zero_optimization": ' + "[" * 5000),
        ("ds.json", '{"zero_optimization": [1]}'),
        ("acc.yaml", "distributed_type: FSDP\nfsdp_config: [1]\n"),
        ("acc.yaml", "distributed_type: FSDP\nx: !!int foo\n"),
        ("t.toml", "[[parallelism]]\n"),
        ("run.sh", "cat > t.toml <<EOF\n[parallelism]\ntensor_parallel_degree = 1\nEOF\n"),
        ("t.toml", 'x = """\n[parallelism]\n"""\n'),
        ("t.py", "import torch\nDDP = " + "[" * 3000 + "]" * 3000 + "\n"),
        ("t.py", "import torch\nDDP = (\n"),
    ],
)
def test_broken_files_are_refused_without_a_defect(name, text, plan, tmp_path, capsys):
    pytest.importorskip("libcst")
    target = tmp_path / name
    target.write_text(text)
    assert run(["apply", plan("NGG"), str(target), "--write"]) == 2
    assert target.read_text() == text
    assert "defect" not in capsys.readouterr().err


def test_line_ends_permissions_and_links_stay(plan, tmp_path):
    real = tmp_path / "real.json"
    real.write_bytes(b"\xef\xbb\xbf" + DEEPSPEED.replace("\n", "\r\n").encode())
    real.chmod(0o640)
    link = tmp_path / "ds.json"
    link.symlink_to(real)
    chosen = plan("NGG")
    assert run(["apply", chosen, str(link), "--write", "-q"]) == 0
    data = real.read_bytes()
    assert data.startswith(b"\xef\xbb\xbf")
    assert data.count(b"\r\n") == data.count(b"\n")
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert run(["apply", chosen, str(link), "--undo"]) == 0
    assert real.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()


OTHER_WAYS = {
    "acc.yaml": (
        "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_tp_size: 2\n",
        "made for model-parallel ranks 1, the file says 2",
    ),
    "acc2.yaml": ("distributed_type: MEGATRON_LM\nnum_processes: 8\n", "this one names Megatron-LM"),
    "titan.toml": ("[parallelism]\nexpert_parallel_degree = 4\n", "made for parallelism.expert_parallel_degree 1"),
    "megatron.sh": (
        """# --tensor-model-parallel-size 1
torchrun megatron.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-distributed-optimizer
""",
        "made for model-parallel ranks 1, the file says 4",
    ),
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_files_that_cut_the_model_in_other_ways_are_refused(name, plan, tmp_path, capsys):
    """Only some of their ranks share the data, and the plan was made for a job where all do."""
    pytest.importorskip({"yaml": "ruamel.yaml", "toml": "tomlkit", "sh": "paro_advise"}[name.rpartition(".")[2]])
    text, told = OTHER_WAYS[name]
    (tmp_path / name).write_text(text)
    assert run(["apply", plan("III"), str(tmp_path / name), "--write"]) != 0
    assert told in capsys.readouterr().err
    assert (tmp_path / name).read_text() == text


SHARED = {
    "titan.toml": ("[parallelism]\ntensor_parallel_degree = {}\n", "data_parallel_replicate_degree = 2"),
    "acc.yaml": (
        "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_tp_size: {}\n",
        "parallelism_config_dp_replicate_size: 2",
    ),
    "run.sh": (
        "torchrun pretrain_gpt.py --tensor-model-parallel-size {} --use-distributed-optimizer\n",
        "--num-distributed-optimizer-instances 2",
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_groups_are_of_the_ranks_that_share_the_data(name, plan, tmp_path, capsys):
    """Eight ranks, of which two hold a model together: groups of two of the four that share the data are two groups."""
    pytest.importorskip({"yaml": "ruamel.yaml", "toml": "tomlkit", "sh": "paro_advise"}[name.rpartition(".")[2]])
    made = recommend(calibration(), Limits())
    origin = replace(made.origin, data_parallel_ranks=4, model_parallel_ranks=2)
    text, written = SHARED[name]
    target = tmp_path / name
    for degree in (1, 2):
        target.write_text(text.format(degree))
        code = run(["apply", plan("III", origin=origin), str(target), "--write", "--force"])
        assert (code == 0) is (degree == 2), capsys.readouterr().err
    assert written in target.read_text()
    assert "2 ranks hold a model together and 4 share the data" in capsys.readouterr().err


def test_a_script_that_leaves_one_connection_is_told_that_megatrons_fsdp_does_not_start(plan, tmp_path, capsys):
    target = tmp_path / "run.sh"
    for setting, is_told in (
        ("export CUDA_DEVICE_MAX_CONNECTIONS=1", True),
        ("# CUDA_DEVICE_MAX_CONNECTIONS=1", False),
    ):
        target.write_text(f"{setting}\ntorchrun pretrain_gpt.py --use-distributed-optimizer\n")
        assert run(["apply", plan("III"), str(target), "--force"]) == 0
        assert ("take CUDA_DEVICE_MAX_CONNECTIONS=1 out of the script" in capsys.readouterr().err) is is_told


MEGATRON_LAUNCH = "torchrun megatron.py {} --use-distributed-optimizer --use-megatron-fsdp\n"


@pytest.mark.parametrize(
    ("before", "sizes", "found"),
    [
        ("", '"--tensor-model-parallel-size 8"', 8),
        ("TP=4\nexport PP=2\n", "--tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP}", 8),
        ("TP='2'\n", "--tensor-model-parallel-size=${TP} --context-parallel-size $CP", 2),
        ("", "--tensor-model-parallel-size 0 --context-parallel-size $CP", 0),
    ],
)
def test_sizes_of_model_parallelism_are_found_in_quotes_and_variables(before, sizes, found, plan, tmp_path, capsys):
    (tmp_path / "megatron.sh").write_text(before + MEGATRON_LAUNCH.format(sizes))
    assert run(["apply", plan("III"), str(tmp_path / "megatron.sh"), "--write", "--force"]) != 0
    assert f"made for model-parallel ranks 1, the file says {found}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "sizes"),
    [
        ("", "--tensor-model-parallel-size ${TP:-8}"),
        ("TP=1\nTP=2\n", "--tensor-model-parallel-size $TP"),
        ('[ "$BIG" ] && A="--tensor-model-parallel-size 1" || A="--tensor-model-parallel-size 2"\n', "$A"),
    ],
)
def test_sizes_that_only_the_start_decides_are_said_to_be_open(before, sizes, plan, tmp_path, capsys):
    (tmp_path / "megatron.sh").write_text(before + MEGATRON_LAUNCH.format(sizes))
    run(["apply", plan("GGG"), str(tmp_path / "megatron.sh"), "--force"])
    told = capsys.readouterr().err
    assert "the script leaves --tensor-model-parallel-size open: the plan is for 1 model-parallel rank" in told
    assert "must fit the file" not in told


def test_a_plan_that_keeps_the_run_says_so_and_takes_no_file_for_one_that_runs_it(tmp_path, capsys):
    kept = tmp_path / "keep.json"
    made = recommend(calibration(), Limits())
    kept.write_bytes(to_json(with_id(replace(made, chosen=made.baseline, verdict=Verdict.KEEP))))
    for name, text in {"ds.json": DEEPSPEED, "notes.txt": "no configuration\n"}.items():
        (tmp_path / name).write_text(text)
    assert run(["apply", str(kept), str(tmp_path / "ds.json")]) == 0
    assert "the plan keeps the run as it is; nothing to change" in capsys.readouterr().err
    lacking = replace(made.baseline, feasible=False)
    told = replace(made, chosen=lacking, verdict=Verdict.KEEP, text="Nothing fits, not even GGG: 5 GiB of 4 GiB.")
    kept.write_bytes(to_json(with_id(told)))
    assert run(["apply", str(kept), str(tmp_path / "ds.json")]) == 0
    assert "Nothing fits, not even GGG: 5 GiB of 4 GiB; nothing to change" in capsys.readouterr().err
    assert run(["apply", str(kept), str(tmp_path / "notes.txt")]) != 0
    assert "got none of them" in capsys.readouterr().err


def test_a_script_with_a_byte_order_mark_keeps_it(plan, tmp_path):
    pytest.importorskip("libcst")
    (tmp_path / "train.py").write_text("\ufeff" + SCRIPT)
    assert run(["apply", plan("III"), str(tmp_path / "train.py"), "--write", "-q"]) == 0
    text = (tmp_path / "train.py").read_text()
    assert text.startswith("\ufeff")
    assert "use_plan" in text


COMMENTED = """{
  // "stage": 9 is no setting
  "zero_optimization": { /* ZeRO */
    "stage": 1, # of three
    "url": "http://x/#y" // the last
  }
}
"""


def test_comments_in_json_stay(tmp_path):
    """DeepSpeed reads Hjson; what a comment says is no setting, and what a string holds no comment."""
    found = set_value(COMMENTED, ("zero_optimization", "stage"), 3)
    assert found == COMMENTED.replace('"stage": 1', '"stage": 3')
    found = set_value(found, ("zero_optimization", "overlap_comm"), True)
    assert '"url": "http://x/#y", // the last\n    "overlap_comm": true\n' in found
    assert json.loads(without_comments(found))["zero_optimization"] == {
        "stage": 3, "url": "http://x/#y", "overlap_comm": True
    }  # fmt: skip
    found = remove_key(found, ("zero_optimization", "overlap_comm"))
    assert json.loads(without_comments(found))["zero_optimization"] == {"stage": 3, "url": "http://x/#y"}
    assert all(
        comment in found for comment in ('// "stage": 9 is no setting', "/* ZeRO */", "# of three", "// the last")
    )


def test_a_comment_before_a_key_that_is_taken_out_does_not_swallow_what_follows():
    left = remove_key('{"a": 1, // one\n  // two\n  "b": 2}', ("b",))
    assert json.loads(without_comments(left)) == {"a": 1}
    assert "// two" in left


def test_a_deepspeed_file_with_comments_is_edited(plan, tmp_path):
    target = tmp_path / "ds.json"
    target.write_text("{\n  // ours\n" + DEEPSPEED.lstrip().removeprefix("{"))
    assert run(["apply", plan("NGG"), str(target), "--write", "-q"]) == 0
    assert "// ours" in target.read_text()
    assert json.loads(without_comments(target.read_text()))["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize("zero", ["3", "[3]", '{"stage": 3, "offload_param": "cpu"}'])
def test_a_deepspeed_file_of_another_shape_is_refused_by_its_rule(zero, plan, tmp_path, capsys):
    target = tmp_path / "ds.json"
    target.write_text(f'{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {zero}}}')
    assert run(["apply", plan("NGG"), str(target), "--write", "-q"]) != 0
    assert "must be an object, got" in capsys.readouterr().err
    assert "NGG" not in target.read_text()


def test_an_export_to_the_standard_output_stands_there_alone(tmp_path, capsys):
    traces = write_run(tmp_path / "traces", [fsdp_rank(0), fsdp_rank(1)])
    words = ["recommend", str(traces), "--strategy", "GGG", "--export", "fsdp2=-", "--force", "-q"]
    code, told = run(words), capsys.readouterr()
    assert code == 0, told.err
    assert "def apply(" in told.out
    ast.parse(told.out)
