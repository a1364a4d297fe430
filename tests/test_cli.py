"""The command line as scripts rely on it: commands, options, exit codes, streams, files."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest
from conftest import ROOT
from helpers import write_run
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import VERBS, cli, run
from paro_advise.advisor.commands.options import ByteSize

OPTIONS = {
    "analyze": {"-o", "--output", "--json", "--force", "--gpus-per-node", "--skip-steps", "--tokens-per-step", "--peak-tflops",
                "--with-hta", "--sample", "--engine", "--max-array", "--jobs", "--cache", "-q", "--quiet"},
    "apply": {"--diff", "--write", "--undo", "--force", "-q", "--quiet"},
    "attach": {"-o", "--output", "--seconds", "--at", "--pid", "--job-id", "--force", "-q", "--quiet"},
    "capture": {"-o", "--output", "--steps", "--ranks", "--max-trace-mb", "--force", "-q", "--quiet"},
    "compare": {"--plan", "-o", "--output", "--json", "--markdown", "--junit", "--notebook", "--force", "--acceptance", "--min-gain", "--device-memory",
                "--price-per-gpu-hour", "--watts-per-gpu", "--gpus-per-node", "--allow-unlike", "--engine", "--max-array", "-q", "--quiet"},
    "demo": {"-o", "--output", "--script", "--force"},
    "doctor": {"--json"},
    "export": {"--prometheus", "--otel", "--grafana", "--inductor", "--plan", "--label", "--force", "--gpus-per-node", "--engine", "--max-array", "-q", "--quiet"},
    "index": {"-o", "--output", "--force"},
    "hang": {"-o", "--output", "--json", "--force", "-q", "--quiet"},
    "explain": set(),
    "recommend": {"-o", "--output", "--html", "--force", "--device-memory", "--measured-peak", "--redundancy-budget", "--host-gbps", "--export", "--learn-from", "--allow-untested", "--strategy", "--what-if", "--gpus-per-node", "--nodes-per-pod",
                  "--skip-steps", "--engine", "--max-array", "-q", "--quiet"},
    "run": {"--plan", "--capture", "--steps", "--job", "--allow-drift", "--force"},
    "schema": set(),
    "show": {"--json", "--force"},
    "switch": {"--timeout", "--canary", "--canary-steps"},
    "watch": {"--once", "--json", "--interval", "--record", "--apply", "--prometheus", "--label", "--force"},
    "slice": {"-o", "--output", "--rank", "--step", "--max-mb", "--force"},
}  # fmt: skip


@pytest.fixture
def traces(tmp_path):
    return write_run(tmp_path / "traces", [fsdp_rank(0), fsdp_rank(1, late_us=30)])


def test_verbs_and_options_are_frozen():
    assert set(VERBS) == set(OPTIONS)
    for verb, expected in OPTIONS.items():
        command = cli.get_command(click.Context(cli), verb)
        got = {text for parameter in command.params for text in parameter.opts if text.startswith("-")}
        assert got == expected, verb


def test_every_verb_explains_itself_with_an_example(capsys):
    for verb in VERBS:
        assert run([verb, "--help"]) == 0
        assert "Example" in capsys.readouterr().out, verb


def test_analyze_prints_results_on_stdout_and_commentary_on_stderr(traces, capsys):
    assert run(["analyze", str(traces)]) == 0
    out, err = capsys.readouterr()
    assert "parameter" in out.splitlines()[0]
    assert "strategy GGG" in out
    assert "found 2 files" in err
    assert "ranks 0-1 of 2" in err
    report, plan = err.strip().splitlines()[-2:]
    assert report.startswith(". next: paro-advise analyze")
    assert plan.startswith(". next: paro-advise recommend")
    assert "\x1b" not in out


def test_a_path_in_place_of_a_verb_means_analyze(traces, capsys):
    assert run([str(traces)]) == 0
    assert "strategy GGG" in capsys.readouterr().out


def test_json_has_the_keys_that_scripts_rely_on(traces, tmp_path, capsys):
    target = tmp_path / "a.json"
    assert run(["analyze", str(traces), "--json", str(target), "-q"]) == 0
    data = json.loads(target.read_text())
    assert list(data)[0:1] == sorted(data)[0:1]
    assert (data["format"], data["format_version"]) == ("paro-advise/analysis", "1.2")
    run_keys = {"world_size", "ranks", "ranks_missing", "gpus_per_node", "gpus_per_node_source", "backend", "framework", "strategy",
                "num_steps", "micro_batches", "parameter_count", "inputs"}  # fmt: skip
    assert run_keys <= set(data["run"])
    assert {"triple", "group_size", "source"} <= set(data["run"]["strategy"])
    assert {"path", "bytes", "sha256", "kind"} <= set(data["run"]["inputs"][0])
    assert set(data["step_time_us"]) == {"median", "p5", "p95", "values", "computing", "left_out"}
    assert set(data["breakdown_us"]) == {"compute", "exposed_communication", "other", "idle"}
    assert set(data["states"]) == {"parameter", "gradient", "optimizer", "other", "unknown"}
    state_keys = {
        "count",
        "bytes",
        "total_us",
        "exposed_us",
        "hidden_us",
        "transfer_us",
        "wait_us",
        "regime",
        "evidence",
    }
    assert state_keys <= set(data["states"]["parameter"])
    assert {"op", "span", "group_size", "num_samples", "alpha_us", "busbw_gbps", "source"} <= set(data["links"][0])
    assert {"regime", "limiting_state", "text"} <= set(data["verdict"])
    assert {"clock_offsets_us", "clock_error_us", "stragglers", "data_quality"} <= set(data)


def test_json_on_stdout_is_nothing_but_json(traces, capsys):
    assert run(["analyze", str(traces), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["world_size"] == 2


def test_the_same_input_gives_the_same_bytes(traces, tmp_path):
    for name, options in (("a", []), ("b", []), ("c", ["--no-cache"]), ("d", ["--jobs", "2"])):
        assert run(["analyze", str(traces), "--json", str(tmp_path / name), "-q", *options]) == 0
    first = (tmp_path / "a").read_bytes()
    assert all((tmp_path / name).read_bytes() == first for name in "bcd")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["analyze", "no/such/path"], 3, "E301"),
        (["analyze"], 2, "E200"),
        (["analyze", "--bogus"], 2, "E200"),
        (["anlyze"], 2, "Did you mean 'analyze'"),
        (["explain", "PARO02"], 2, "did you mean PARO02"),
        (["schema", "nothing"], 2, "analysis"),
        (["recommend", "no/such/path"], 3, "E301"),
        (["run", "--plan", "p.json", "--steps", "4:6", "--", "true"], 2, "need --capture"),
        (["run", "--plan", "p.json", "--force", "--", "true"], 2, "need --capture"),
        (["recommend", ".", "--device-memory", "much"], 2, "80GiB"),
        (["show", "no/such/file"], 3, "E300"),
        (["slice", "no/such/file", "-o", "x.json"], 3, "E300"),
    ],
)
def test_exit_codes_and_messages(arguments, code, text, capsys):
    assert run(arguments) == code
    err = capsys.readouterr().err
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "size"), [("80G", 80e9), ("80GB", 80e9), ("80GiB", 80 * 2**30), ("80 Gi", 80 * 2**30), ("1.5t", 1.5e12)]
)
def test_sizes_as_people_write_them(text, size):
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["80", "1e9", "0.5GiB", "80 Gib/s", "-1GiB"])
def test_sizes_that_are_mistakes_are_refused_with_an_example(text, traces, capsys):
    assert run(["recommend", str(traces), "--device-memory", text]) == 2
    assert "write for example 80GiB" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--color=always", "doctor"], ["doctor", "--color", "always"]])
def test_colour_is_chosen_before_or_after_the_verb(words, capfd):
    assert run(words) == 0
    assert "\x1b[32m" in capfd.readouterr().out


def test_doctor_says_what_each_optional_package_is_for(capsys):
    assert run(["doctor"]) == 0
    for line in capsys.readouterr().out.splitlines():
        if line.split("]")[1].split()[0] in ("torch", "libcst", "isal"):
            assert len(line.split()) > 3, line


@pytest.mark.parametrize(
    ("verb", "code"), [("explain", 0), ("explain PARO011", 0), ("schema analysis", 0), ("explain nothing 2>&1", 2)]
)
def test_a_reader_that_has_seen_enough_changes_no_exit_code(verb, code):
    """The reader has gone before the first byte comes."""
    command = f"{sys.executable} -m paro_advise {verb} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_full_disk_is_one_line_and_exit_1():
    command = f"{sys.executable} -m paro_advise explain PARO011 > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("error[E400]")


def test_output_that_is_no_file_is_written_to(traces):
    program = "import io, sys\nfrom paro_advise.advisor.cli import main\nsys.stdout = io.StringIO()\n"
    program += "try:\n    main(['explain', 'PARO011'])\nfinally:\n    sys.__stdout__.write(sys.stdout.getvalue()[:7])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "PARO011"), done.stderr


def test_an_edit_whose_diff_nobody_reads_to_its_end_is_still_made(traces, tmp_path):
    """``apply --write | true``"""
    run(["recommend", str(traces), "--strategy", "NNN", "-o", str(tmp_path / "plan.json")])
    script = tmp_path / "train.py"
    script.write_text("from torch.distributed.fsdp import fully_shard\nfully_shard(model)\n")
    command = f"{sys.executable} -m paro_advise apply plan.json train.py --write --force | true; "
    command += "exit ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "use_plan" in script.read_text()) == (0, True), done.stderr


def test_ctrl_c_is_exit_130_without_a_traceback(traces):
    program = "import sys, signal; from paro_advise.advisor import cli; from paro_advise.advisor.facts.reading import all_inputs\n"
    program += "def stop(*_, **__): signal.raise_signal(signal.SIGINT)\nall_inputs.read_all = stop\n"
    program += f"cli.main(['analyze', {str(traces)!r}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr


def test_each_verb_says_what_comes_next(traces, tmp_path, capsys):
    """What it prints can be typed as it is."""
    report, plan = tmp_path / "run.html", tmp_path / "plan.json"
    assert run(["analyze", str(traces), "-o", str(report)]) == 0
    assert f"next: paro-advise recommend {traces} -o plan.json" in capsys.readouterr().err
    assert run(["recommend", str(report), "-o", str(plan)]) == 0  # a report holds its analysis
    found = json.loads(plan.read_text())
    err = capsys.readouterr().err
    assert ("next: paro-advise apply" in err) == (found["verdict"] == "change")
    assert run(["compare", str(report), str(report)]) == 0
    assert f"next: paro-advise compare {report} {report} -o comparison.html" in capsys.readouterr().err


@pytest.mark.parametrize("characters", [1 << 18, 10])
def test_a_report_of_any_length_stands_for_its_run(characters, traces, tmp_path, monkeypatch, capsys):
    """Its data stand at its end, behind pictures and tables, or packed."""
    monkeypatch.setattr("paro_advise.core.documents.PLAIN_CHARACTERS", characters)
    report = tmp_path / "run.html"
    assert run(["analyze", str(traces), "-o", str(report)]) == 0
    report.write_text(report.read_text().replace("<style>", f"<style>/*{'x' * (1 << 17)}*/", 1))
    assert run(["recommend", str(report)]) == 0
    assert run(["compare", str(report), str(report)]) == 0
    assert run(["export", str(report), "--prometheus", str(tmp_path / "run.prom")]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("links", 0, "busbw_gbps"), -5.0),
        (("links", 0, "alpha_us"), -1.0),
        (("states", "parameter", "count"), -3.0),
        (("states", "parameter", "count"), 1e23),
        (("run", "device_memory_bytes"), -5),
        (("run", "strategy", "triple"), "XYZ"),
        (("step_time_us", "computing"), [1.0]),
    ],
)
def test_an_analysis_with_numbers_that_none_has_is_refused(path, value, traces, tmp_path, capsys):
    source = tmp_path / "run.json"
    assert run(["analyze", str(traces), "--json", str(source)]) == 0
    assert run(["recommend", str(source)]) == 0
    document = json.loads(source.read_text())
    home = document
    for step in path[:-1]:
        home = home[step]
    home[path[-1]] = value
    source.write_text(json.dumps(document))
    capsys.readouterr()
    for verb in (["recommend", str(source)], ["compare", str(source), str(source)]):
        assert run(verb) == 3
        told = capsys.readouterr().err
        assert "an analysis must hold what `analyze` writes" in told
        assert str(path[-1]) in told


@pytest.mark.parametrize("option", ["--min-gain", "--price-per-gpu-hour", "--watts-per-gpu"])
def test_options_take_no_number_that_is_none(option, traces, capsys):
    assert run(["compare", str(traces), str(traces), option, "nan"]) == 2
    assert "'nan' is not a finite number" in capsys.readouterr().err


def test_unusable_inputs_are_exit_3_with_a_reason(tmp_path, capsys):
    for name, content in {
        "empty.json": b"",
        "noise.bin": bytes(range(256)) * 40,
        "other.json": b'{"hello": 1}',
        "cut.json": b'{"schemaVersion": 1, "traceEv',
    }.items():
        (tmp_path / name).write_bytes(content)
        assert run(["analyze", str(tmp_path / name)]) == 3, name
        err = capsys.readouterr().err
        assert "error[E3" in err
        assert "help:" in err


def test_errors_as_json(tmp_path, capsys):
    (tmp_path / "x.json").write_bytes(b"")
    assert run(["analyze", str(tmp_path / "x.json"), "--json", "-"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert set(error) == {"code", "message", "where", "hint"}


def test_a_broken_file_among_good_ones_is_reported_not_fatal(traces, capsys):
    (traces / "rank2.json").write_text('{"schemaVersion": 1, "traceEvents": [')
    (traces / "notes.csv").write_text("1,2,3\n")
    assert run(["analyze", str(traces)]) == 0
    err = capsys.readouterr().err
    assert "error[Q301]: rank2.json" in err
    assert "notes.csv" in err


def test_standard_input(traces, capsys, monkeypatch):
    import io

    class Stdin:
        buffer = io.BytesIO((traces / "rank0.json").read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert run(["analyze", "-"]) == 0
    assert "1 of 2 seen" in capsys.readouterr().out


def test_show_reads_a_report_back(traces, tmp_path, capsys):
    report, data = tmp_path / "r.html", tmp_path / "r.json"
    assert run(["analyze", str(traces), "-o", str(report), "--json", str(data), "-q"]) == 0
    capsys.readouterr()
    assert run(["show", str(report), "--json", "-"]) == 0
    assert capsys.readouterr().out.encode() == data.read_bytes()
    data.write_text(data.read_text().replace('"1.2"', '"2.0"'))
    assert run(["show", str(data)]) == 3


def test_one_rank_of_a_folder_is_sliced_when_asked_for(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [fsdp_rank(rank, world=4) for rank in range(4)])
    target = tmp_path / "worst.json"
    assert run(["slice", str(folder), "--rank", "3", "-o", str(target)]) == 0
    alone = target.read_bytes()
    assert run(["slice", str(folder / "rank3.json"), "-o", str(target), "--force"]) == 0
    assert target.read_bytes() == alone
    capsys.readouterr()
    assert run(["slice", str(folder), "--rank", "7", "-o", str(target), "--force"]) == 3
    assert "it has 0, 1, 2, 3" in capsys.readouterr().err
    assert run(["slice", str(folder / "rank0.json"), "--rank", "1", "-o", str(target), "--force"]) == 2
    (tmp_path / "empty").mkdir()
    assert run(["slice", str(tmp_path / "empty"), "-o", str(target), "--force"]) == 3


def test_slice_is_a_small_trace_with_our_tracks(traces, tmp_path, capsys):
    target = tmp_path / "worst.json"
    assert run(["slice", str(traces / "rank0.json"), "-o", str(target), "--step", "1"]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    ours = [event for event in events if event.get("cat") == "paro_advise"]
    assert sorted({event["name"] for event in ours}) == [
        "gradient reduce",
        "parameter backward",
        "parameter forward",
    ]
    kernels = {event["ts"] for event in events if event.get("cat") == "kernel"}
    assert {event["ts"] for event in ours} <= kernels
    (mark,) = [event for event in events if event["name"].startswith("ProfilerStep")]
    assert mark["name"] == "ProfilerStep#6"


def test_shells_complete_verbs_and_codes(monkeypatch, capsys):
    """As click asks: the words so far in the environment, a line of type and value for each proposal."""
    for words, place, proposed in (
        ("paro-advise com", 1, ["compare"]),
        ("paro-advise explain PARO03", 2, ["PARO030", "PARO031", "PARO032", "PARO033"]),
        ("paro-advise explain q301", 2, ["Q301"]),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(place))
        monkeypatch.setenv("_PARO_ADVISE_COMPLETE", "bash_complete")
        with pytest.raises(SystemExit):
            cli.main(prog_name="paro-advise")
        assert capsys.readouterr().out.split() == [f"plain,{text}" for text in proposed]


def test_man_pages_say_what_help_says(tmp_path):
    script = ROOT / "benchmarks" / "man_pages.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=120)
    assert {path.stem for path in tmp_path.iterdir()} == {"paro-advise", *(f"paro-advise-{verb}" for verb in VERBS)}
    text = (tmp_path / "paro-advise-recommend.1").read_text()
    assert "Predict every strategy, group size and collective algorithm" in text


def test_doctor_and_explain(capsys):
    assert run(["doctor"]) == 0
    assert "[OK]   python" in capsys.readouterr().out
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checks"]
    assert run(["explain", "paro020"]) == 0
    assert "set_requires_all_reduce" in capsys.readouterr().out


def test_schema_accepts_a_real_analysis(traces, tmp_path, capsys):
    assert run(["schema", "analysis"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "Analysis" in schema["$defs"]
    assert set(schema["$defs"]["StateEntry"]["required"]) >= {"exposed_us", "regime"}


@pytest.mark.parametrize(("variable", "expected"), [("NO_COLOR", False), ("FORCE_COLOR", True)])
def test_colour_follows_the_environment(traces, variable, expected, monkeypatch, capsys):
    monkeypatch.setenv(variable, "1")
    assert run(["analyze", str(traces), "-q"]) == 0
    assert ("\x1b[" in capsys.readouterr().out) is expected


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from paro_advise.advisor.cli import run; run(['analyze', '--help']); "
        "heavy = {'torch', 'polars', 'numpy', 'pandas', 'hta', 'jinja2', 'msgspec'} & set(sys.modules); "
        "sys.exit(','.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_hostile_names_cannot_steer_the_terminal(tmp_path, capsys):
    trace = fsdp_rank(0)
    trace.groups = [("0", "\x1b]0;owned\x07<script>alert(1)</script>", [0, 1])]
    assert run(["analyze", str(trace.write(tmp_path / "rank0.json"))]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err


def test_an_output_is_never_an_input(traces, tmp_path, capsys):
    trace = traces / "rank0.json"
    before = trace.read_bytes()
    assert run(["analyze", str(trace), "-o", str(trace), "--force"]) == 1
    assert run(["slice", str(trace), "-o", str(trace), "--force"]) == 1
    assert trace.read_bytes() == before
    assert run(["analyze", str(trace), "-o", str(tmp_path / "x"), "--json", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_work(traces, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(["analyze", str(traces), "-o", str(tmp_path / "file" / "r.html")]) == 1
    err = capsys.readouterr().err
    assert "E400" in err
    assert "found" not in err


def test_the_suggested_command_can_be_pasted(tmp_path, capsys):
    path = fsdp_rank(0).write(tmp_path / "my trace rank0.json")
    assert run(["analyze", str(path), "--gpus-per-node", "1"]) == 0
    report, plan = capsys.readouterr().err.strip().splitlines()[-2:]
    assert f"analyze '{path}' --gpus-per-node 1 -o report.html" in report
    assert f"recommend '{path}' --gpus-per-node 1 -o plan.json" in plan


@pytest.mark.parametrize("folder", ["/dev/null", "relative"])
def test_a_cache_that_cannot_be_used_is_no_error(traces, folder, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("PARO_ADVISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert run(["analyze", str(traces)]) == 0
    assert not (tmp_path / "relative").exists()


def test_file_names_of_any_bytes(tmp_path, capsys):
    import os

    name = os.fsdecode(os.fsencode(str(tmp_path)) + b"/r\xff\xfe0.json")
    with open(name, "w") as file:  # noqa: PTH123 - bytes that pathlib would show the same way
        file.write(fsdp_rank(0).text())
    assert run(["analyze", name, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["run"]["ranks"] == [0]


def test_pipes_are_read_once(tmp_path, capsys):
    import os
    import threading

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = fsdp_rank(0).text().encode()
    writer = threading.Thread(target=lambda: pipe.write_bytes(data))
    writer.start()
    assert run(["analyze", str(pipe)]) == 0
    writer.join()
    assert "strategy GGG" in capsys.readouterr().out


def test_findings_stand_in_the_json(traces, capsys):
    assert run(["analyze", str(traces), "--json", "-"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"PARO010", "PARO030"} <= {item["code"] for item in findings}
    assert {"applies", "does not apply"} >= {item["status"] for item in findings if item["code"] != "PARO030"}
    (late,) = [item for item in findings if item["code"] == "PARO030"]
    assert (late["status"], "record 3 or more" in late["text"]) == ("could not be judged", True)
