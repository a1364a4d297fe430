"""Reports of Nsight Systems as scripts and launchers make them: 4 steps of 100 ms, 40 % computing, 10 % communicating."""

from __future__ import annotations

import sqlite3

import pytest
from helpers import analyze

from paro_advise.advisor.cli import run

MS = 1_000_000  # ns, the unit of the export
STEP_MS, COMPUTE_MS, COMM_MS, STEPS = 100, 40, 10, 4
RANK, THREAD, LOADER = 1000, 1, 2  # process of the rank, and two of its threads
KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"


def global_pid(process):
    return process << 24


class Report:
    """An export, written row by row."""

    def __init__(self):
        self.kernels, self.copies, self.ranges = [], [], []

    def kernel(self, name, begin_ms, length_ms, process=RANK, device=0):
        self.kernels.append((begin_ms * MS, (begin_ms + length_ms) * MS, device, 7, global_pid(process), name))

    def mark(self, name, begin_ms, length_ms, thread=THREAD):
        begin, end = int(begin_ms * MS), int((begin_ms + length_ms) * MS)
        self.ranges.append((begin, end, 59, name, global_pid(RANK) + thread))

    def write(self, path, *, kernels=True):
        names = {"gemm": 1, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)": 2}
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
            db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(code, name) for name, code in names.items()])
            columns = "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, globalPid INTEGER"
            if kernels:
                db.execute(f"CREATE TABLE {KERNEL} ({columns}, demangledName INTEGER, correlationId INTEGER)")
                rows = [
                    (*row[:5], 2 if "AllReduce" in row[5] else 1, place) for place, row in enumerate(self.kernels, 1)
                ]
                db.executemany(f"INSERT INTO {KERNEL} VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                runtime = "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER"
                db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME ({runtime})")
                calls = [(row[0] - MS, row[0], row[4] + THREAD, row[6]) for row in rows]
                db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?)", calls)
            db.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({columns}, copyKind INTEGER)")
            db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, ?, ?, ?, 1)", self.copies)
            db.execute(
                "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER)"
            )
            db.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?)", self.ranges)
        db.close()
        return path


def usual(*, marks=True):
    report = Report()
    for step in range(STEPS):
        at = step * STEP_MS
        if marks:
            report.mark(f"step {step}", at, STEP_MS)
        report.kernel("gemm", at + 5, COMPUTE_MS)
        report.kernel("ncclDevKernel_AllReduce", at + 60, COMM_MS)
    return report


def micro_batches(report):
    for step in range(2 * STEPS):
        report.mark(f"iter {step}", step * STEP_MS / 2, STEP_MS / 2)


def a_loader(report):
    for step in range(STEPS):
        report.mark(f"step {step}", step * STEP_MS + 10, 30, thread=LOADER)


def a_busy_loader(report):
    """Its ranges cover more of the time than those of the thread that launches the kernels."""
    report.ranges = [(begin, end - 5 * MS, *rest) for begin, end, *rest in report.ranges]
    for step in range(2 * STEPS):
        report.mark(f"step {step}", step * STEP_MS / 2, STEP_MS / 2, thread=LOADER)


def test_the_thread_that_launches_kernels_is_the_training_one(tmp_path):
    report = usual()
    a_busy_loader(report)
    analysis = analyze(report.write(tmp_path / "rank0.sqlite"))
    assert len(analysis.step_time_us.values) == STEPS


def marked_twice(report):
    for step in range(STEPS):
        report.mark(f"step {step}", step * STEP_MS, STEP_MS)


def a_launcher(report):
    report.copies.append((1000, 1995, 0, 7, global_pid(900)))


def another_device(report):
    report.copies.append((1000, 1995, 0, 7, global_pid(RANK)))
    report.kernels = [(*row[:2], 1, *row[3:]) for row in report.kernels]


@pytest.mark.parametrize("habit", [None, micro_batches, a_loader, marked_twice, a_launcher, another_device])
def test_the_steps_are_those_of_training_and_the_device_is_the_ranks(habit, tmp_path):
    report = usual()
    if habit:
        habit(report)
    analysis = analyze(report.write(tmp_path / "rank0.sqlite"))
    assert analysis.step_time_us.values == pytest.approx([STEP_MS * 1e3] * STEPS)
    parts = analysis.breakdown_us
    assert parts.compute == pytest.approx(COMPUTE_MS * 1e3)
    assert parts.exposed_communication == pytest.approx(COMM_MS * 1e3)
    assert sum(state.count for state in analysis.states.values()) == 1  # a step
    codes = {notice.code for notice in analysis.data_quality}
    assert ("Q274" in codes) is (habit in (micro_batches, a_loader, marked_twice))
    assert ("Q270" in codes) is (habit in (a_launcher, another_device))


def test_without_kernels_nothing_is_said_of_the_device(tmp_path):
    analysis = analyze(usual().write(tmp_path / "rank0.sqlite", kernels=False))
    assert analysis.verdict.regime == "unknown"
    assert not any(item.code == "PARO031" and item.status == "applies" for item in analysis.findings)
    assert {"Q122", "Q271"} <= {notice.code for notice in analysis.data_quality}


def test_reports_without_marks_are_one_step_and_not_compared(tmp_path, capsys):
    paths = [tmp_path / name for name in ("marked.sqlite", "bare.sqlite")]
    usual().write(paths[0])
    usual(marks=False).write(paths[1])
    assert "Q120" in {notice.code for notice in analyze(paths[1]).data_quality}
    assert run(["compare", *map(str, paths)]) == 4
    assert "steps marked before and not marked after" in capsys.readouterr().err
    assert run(["compare", *map(str, paths), "--allow-unlike", "steps"]) == 0


def test_a_report_is_told_what_it_can_do_and_not_what_the_profiler_of_torch_can(tmp_path, capsys):
    bare = usual(marks=False).write(tmp_path / "bare.sqlite")
    assert run(["recommend", str(bare), "-o", str(tmp_path / "plan.json")]) == 3
    assert "help: mark each step: torch.cuda.nvtx.range_push" in capsys.readouterr().err
    (unattributed,) = [item for item in analyze(bare).findings if item.code == "PARO040"]
    assert "with_stack" not in unattributed.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("report.nsys-rep", b"NVIDIA Tegra Profiler Report 8\x00\x01"),
        (
            "report.json",
            b'{"Type": 80, "NvtxEvent": {"Type": 59, "Text": "step 1"}}\n{"CudaEvent": {"startNs": "1"}}\n',
        ),
        ("report.json", b'{"CudaEvent": {"startNs": "1000", "endNs": "9000"}, "Type": 79}\n'),
    ],
)
def test_other_forms_of_a_report_are_refused_with_the_command_that_helps(name, content, tmp_path, capsys):
    path = tmp_path / name
    path.write_bytes(content)
    assert run(["analyze", str(path)]) == 3
    assert "nsys export --type sqlite" in capsys.readouterr().err


def test_runs_of_unknown_size_have_no_device_hours(tmp_path, capsys):
    """One report of a job, then two of the same: nothing became dearer."""
    (tmp_path / "two").mkdir()
    for path in ("one.sqlite", "two/rank0.sqlite", "two/rank1.sqlite"):
        usual().write(tmp_path / path)
    assert run(["compare", str(tmp_path / "one.sqlite"), str(tmp_path / "two")]) == 0
    printed = capsys.readouterr().out
    assert "step 100 ms -> 100 ms" in printed
    assert not any("worse" in line for line in printed.splitlines() if line.startswith("device hours"))


def test_without_names_of_kernels_nothing_is_said_of_the_device(tmp_path):
    """Whether a kernel computes or communicates its name tells."""
    path = usual().write(tmp_path / "rank0.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE StringIds")
    db.close()
    analysis = analyze(path)
    assert analysis.verdict.regime == "unknown"
    assert any("lacks" in notice.message and "StringIds" in notice.message for notice in analysis.data_quality)


def test_rows_in_a_write_ahead_log_are_said_to_be_left_out(tmp_path):
    """A program that still has the database open writes its newest rows beside it."""
    path = usual().write(tmp_path / "r.sqlite")
    assert "Q275" not in {item.code for item in analyze(path).data_quality}
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("INSERT INTO StringIds VALUES (9, 'later')")
        db.commit()
        assert path.with_name("r.sqlite-wal").stat().st_size > 0
        assert "Q275" in {item.code for item in analyze(path).data_quality}
    db.close()
