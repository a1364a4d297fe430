"""Who holds a job up, from the NCCL watchdog's lines in its log and from Python stacks."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from test_hang import causes, dump, entry, written
from test_hang_ras import GUIDE as RAS

from paro_advise.advisor.cli import run
from paro_advise.advisor.hangs.model import Cause
from paro_advise.advisor.hangs.reading import read_hang
from paro_advise.trace_parsers.discover import find_inputs

WORLD, PAIR = "PG ID 0 PG GUID 0(default_pg)", "PG ID 3 PG GUID 7(pair)"
# On gloo: rank 2 does something else before the fourth of four all-reduces; each rank then prints its stacks.
JOB = """
import faulthandler, os, sys, threading, time
import torch, torch.distributed as dist
def load_batch(): time.sleep(120)
def train(rank):
    dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store", 4), rank=rank, world_size=4)
    value = torch.ones(4)
    for _ in range(3): dist.all_reduce(value)
    def dump():
        time.sleep(float(sys.argv[2]))
        with open(f"{sys.argv[1]}/stack_rank_{rank}.txt", "w") as file: faulthandler.dump_traceback(file)
        os._exit(0)
    threading.Thread(target=dump, daemon=True).start()
    if rank == 2: load_batch()
    dist.all_reduce(value)
    time.sleep(120)
children = [pid for pid in (os.fork() or train(rank) for rank in range(4))]
for child in children: os.waitpid(child, 0)
"""


def prefix(rank):
    return f"[rank{rank}]:[E1125 07:00:0{rank}.123456789 ProcessGroupNCCL.cpp:616] "


def timeout(rank, seq, op="ALLREDUCE", elements=1024):
    return (
        f"{prefix(rank)}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, "
        f"NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000) ran for 600034 milliseconds before timing out."
    )


def counters(rank, enqueued, completed, group=WORLD, group_rank=None):
    place = rank if group_rank is None else group_rank
    return (
        f"{prefix(rank)}[{group} Rank {place}] Exception (either an error or timeout) detected by watchdog at work: "
        f"{completed + 1}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
    )


def waits(rank, seq, **about):
    return [timeout(rank, seq, **about), counters(rank, seq + 1, seq - 1)]


def signalled(rank, seq):
    """Return what a rank writes that waits in nothing, when it is told that another one's collective timed out."""
    line = (
        f"{prefix(rank)}[{WORLD} Rank {rank}] Received a dump signal due to a collective timeout from rank 0 and we will "
        f"try our best to dump the debug info. Last enqueued NCCL work: {seq}, last completed NCCL work: {seq}.This is "
        "most likely caused by incorrect usages of collectives"
    )
    return [line]


def told(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, lines in files.items():
        (folder / f"{name}.log").write_text("\n".join(["starting", *lines, "done"]) + "\n")
    refs, is_collection = find_inputs([str(folder)])
    return read_hang(refs, is_collection=is_collection)[0]


def test_a_rank_that_came_less_far_by_its_own_line_is_at_fault(tmp_path):
    hang = told(tmp_path / "d", job=[*waits(0, 7), *waits(1, 7), *signalled(2, 6), *waits(3, 7)])
    assert causes(hang) == {2: Cause.HOST}
    assert hang.text == (
        "Rank 2 holds the others up. Rank 2 never issued all_reduce 7, 1,024 elements of group 0 (default_pg), in "
        "which ranks 0-1, 3 wait."
    )


def test_a_rank_without_a_line_is_named_and_what_that_can_mean(tmp_path):
    hang = told(tmp_path / "d", node0=[*waits(0, 7), *waits(1, 7)], node1=waits(3, 7))
    assert causes(hang) == {2: Cause.GONE}
    assert "wrote no line of its watchdog here" in hang.text


def test_another_number_of_elements_is_a_mismatch(tmp_path):
    hang = told(tmp_path / "d", job=[*waits(0, 7), *waits(1, 7, elements=4096), *waits(2, 7), *waits(3, 7)])
    assert causes(hang) == {1: Cause.MISMATCH}


@pytest.mark.parametrize("op", ["ALLGATHER", "ALLTOALL_BASE"])
def test_lists_and_splits_that_differ_in_size_are_none(op, tmp_path):
    about = {"op": op}
    hang = told(
        tmp_path / "d", job=[line for rank in range(4) for line in waits(rank, 7, elements=100 + rank, **about)]
    )
    assert hang.culprits == ()
    assert hang.mismatches == ()


def test_one_that_waits_alone_may_have_issued_one_too_many(tmp_path):
    """Three ranks would have to stand at once, or one issued what no other one wants."""
    hang = told(tmp_path / "d", job=[*waits(0, 11), *[line for rank in (1, 2, 3) for line in signalled(rank, 10)]])
    assert hang.culprits == ()
    assert "rank 0 waits in all_reduce 11, 1,024 elements" in hang.text
    assert "or that collective should not have been issued" in hang.text


def test_ranks_of_a_group_are_those_of_the_job(tmp_path):
    """Ranks 2 and 3 are ranks 0 and 1 of the pair."""
    pair = [timeout(2, 40, elements=8), counters(2, 40, 39, PAIR, 0)]
    behind = [counters(3, 39, 39, PAIR, 1)]
    hang = told(tmp_path / "d", job=[*waits(0, 7), *waits(1, 7), *pair, *signalled(2, 6), *signalled(3, 6), *behind])
    assert causes(hang) == {3: Cause.HOST}


def test_counters_that_were_never_set_tell_nothing(tmp_path):
    lines = [line for rank in (0, 1, 3) for line in waits(rank, 7)]
    unset = counters(2, 1, 76280750235782912)
    assert causes(told(tmp_path / "d", job=[*lines, unset])) == {2: Cause.GONE}


@pytest.mark.parametrize("elsewhere", ["", ", last started NCCL work: 1"])
def test_the_first_collective_is_number_1(tmp_path, elsewhere):
    """Nothing is completed, which torch writes as -1."""
    started = [
        line.replace(", last completed", f"{elsewhere}, last completed")
        for rank in (0, 1, 3)
        for line in [timeout(rank, 1), counters(rank, 1, -1)]
    ]
    hang = told(tmp_path / "d", job=started)
    assert causes(hang) == {2: Cause.GONE}
    assert "all_reduce 1, 1,024 elements" in hang.text


def test_a_wait_whose_operation_no_line_tells_is_a_wait(tmp_path):
    hang = told(tmp_path / "d", job=[counters(0, 7, 6), counters(1, 7, 6), *signalled(2, 6), counters(3, 7, 6)])
    assert causes(hang) == {2: Cause.HOST}
    assert "never issued collective 7 of group 0" in hang.text


def test_a_log_of_several_runs_is_refused(tmp_path, capsys):
    first = [line for rank in (0, 1, 2) for line in waits(rank, 10)]
    second = [line for rank in (0, 1, 3) for line in waits(rank, 500)]
    (tmp_path / "job.log").write_text("\n".join([*first, "restarting", *second]))
    assert run(["hang", str(tmp_path / "job.log")]) == 3
    assert "a log must be of one run" in capsys.readouterr().err


def test_logs_of_some_nodes_blame_nobody_on_the_others(tmp_path):
    hang = told(tmp_path / "d", node1=[line for rank in range(8, 16) for line in waits(rank, 7)])
    assert hang.culprits == ()
    assert hang.text == (
        "Cannot tell who is at fault: others wait for ranks 0-7, of which nothing is here. Give what they left too."
    )


def test_two_groups_of_one_name_in_a_log_are_left_out(tmp_path):
    """Ranks 0 and 2 are both rank 0 of their pair."""
    pairs = [counters(0, 40, 39, PAIR, 0), counters(1, 40, 39, PAIR, 1), counters(2, 12, 11, PAIR, 0)]
    hang = told(tmp_path / "d", job=[*waits(0, 7), *waits(1, 7), *waits(2, 7), *pairs, *signalled(3, 6)])
    assert causes(hang) == {3: Cause.HOST}
    assert {wait.group for wait in hang.waits} == {"0"}


def test_bytes_of_dumps_and_elements_of_logs_are_not_compared(tmp_path):
    """Rank 3 has a log only, and waits as the others do for rank 4."""
    group = (("0", "default_pg"), (0, 1, 2, 3, 4))
    written(tmp_path / "d", {rank: dump(entry(7, size=8), groups=(group,)) for rank in range(3)})
    hang = told(tmp_path / "d", job=waits(3, 7, elements=8))
    assert causes(hang) == {4: Cause.GONE}
    assert hang.mismatches == ()


def test_a_log_that_holds_stacks_too_is_a_log(tmp_path):
    printed = [
        "Process 0: initialised",
        "Current thread 0x00007f0a (most recent call first):",
        '  File "a.py", line 1 in f',
    ]
    hang = told(tmp_path / "d", job=[*printed, *waits(0, 7), *waits(1, 7), *signalled(2, 6), *waits(3, 7)])
    assert causes(hang) == {2: Cause.HOST}


@pytest.mark.parametrize("name", ["stack_rank_1.txt", "job.log"])
def test_what_was_read_is_not_replaced(tmp_path, capsys, name):
    folder = spied(tmp_path / "d", IN_REDUCE, IN_LOADER, IN_REDUCE)
    (folder / "job.log").write_text("\n".join(waits(0, 7)))
    before = (folder / name).read_bytes()
    assert run(["hang", str(folder), "--json", str(folder / name), "--force"]) == 1
    assert "E401" in capsys.readouterr().err
    assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("rank", [999_999_999, 5_000_000])
def test_a_rank_that_no_job_has_is_not_believed(tmp_path, rank):
    hang = told(tmp_path / "d", job=[*waits(0, 7), *waits(1, 7), *waits(rank, 7)])
    assert hang.ranks == (0, 1)


def test_dumps_and_lines_complete_each_other(tmp_path):
    """Rank 1 left a dump; the watchdog's lines tell of the others."""
    written(tmp_path / "d", {1: dump(entry(6, done=True), groups=((("0", "default_pg"), (0, 1, 2, 3)),))})
    hang = told(tmp_path / "d", job=[*waits(0, 7), *waits(2, 7), *waits(3, 7)])
    assert causes(hang) == {1: Cause.HOST}


SPY = """Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
{frames}
Thread 99 (idle): "Thread-1"
    wait (threading.py:324)
    _bootstrap (threading.py:973)
"""
IN_REDUCE = (
    "    all_reduce (torch/distributed/distributed_c10d.py:2709)\n    step (train.py:88)\n    <module> (train.py:120)"
)
IN_LOADER = (
    "    _try_get_data (torch/utils/data/dataloader.py:1133)\n    step (train.py:80)\n    <module> (train.py:120)"
)
IN_ITEM = "    step (train.py:92)\n    <module> (train.py:120)"


def spied(folder, *frames):
    folder.mkdir(exist_ok=True)
    for rank, text in enumerate(frames):
        (folder / f"stack_rank_{rank}.txt").write_text(SPY.format(pid=100 + rank, frames=text))
    return folder


def test_who_does_something_else_while_most_wait_is_at_fault(tmp_path):
    hang = told(spied(tmp_path / "d", IN_REDUCE, IN_LOADER, IN_REDUCE, IN_REDUCE))
    assert causes(hang) == {1: Cause.HOST}
    assert hang.text == (
        "Rank 1 holds the others up. Rank 1 is in _try_get_data (data/dataloader.py:1133) < step (train.py:80) < "
        "<module> (train.py:120), while ranks 0, 2-3 wait in collectives."
    )


NATIVE = "".join(f"    c10d::call_{number} (libtorch_cuda.so)\n" for number in range(6))
LOCALS = "        Arguments:\n            tensor: <Tensor at 0x7f>\n        Locals:\n            x: (1, 2:0)\n"
LAUNCHER = """Process 1: torchrun train.py
Python v3.12.3

Thread 1 (idle): "MainThread"
    _invoke_run (torch/distributed/elastic/agent/server/api.py:880)
    <module> (torchrun:8)
"""


@pytest.mark.parametrize(
    "within",
    [
        lambda text: text.replace('"MainThread"\n', f'"MainThread"\n{NATIVE}'),
        lambda text: re.sub(r"(?m)^(    .*:\d+\))$", rf"\1\n{LOCALS}".rstrip("\n"), text),
        lambda text: f"{LAUNCHER}\n{text}",
    ],
    ids=["--native", "--locals", "--subprocesses"],
)
def test_py_spys_other_forms_tell_the_same(within, tmp_path):
    """Calls of libraries, variables of each call, and the launcher before the rank that it has started."""
    folder = spied(tmp_path / "d", IN_REDUCE, IN_LOADER, IN_REDUCE, IN_REDUCE)
    plain = told(folder).text
    for path in folder.iterdir():
        path.write_text(within(path.read_text()))
    assert told(folder).text == plain


@pytest.mark.parametrize(
    "frames",
    [
        (IN_ITEM, IN_ITEM, IN_LOADER),
        (IN_REDUCE, IN_LOADER),
        (IN_REDUCE,) * 3,
        (*(IN_REDUCE,) * 4, IN_ITEM, IN_LOADER),
    ],
)
def test_stacks_that_do_not_tell_are_shown(tmp_path, frames):
    """``loss.item()`` waits for the device, which no Python stack shows."""
    hang = told(spied(tmp_path / "d", *frames))
    assert hang.culprits == ()
    assert hang.text.startswith("Cannot tell who is at fault from stacks alone: rank")
    assert sum(map(len, hang.places.values())) == len(frames)


def test_stacks_say_where_the_rank_stands_that_dumps_name(tmp_path, capsys):
    folder = spied(tmp_path / "d", IN_ITEM, IN_ITEM, IN_LOADER, IN_ITEM)
    before = entry(4, done=True)
    written(folder, {rank: dump(before, *([entry(5)] if rank != 2 else [])) for rank in range(4)})
    page, data = tmp_path / "hang.html", tmp_path / "hang.json"
    assert run(["hang", str(folder), "-o", str(page), "--json", str(data)]) == 0
    said = capsys.readouterr().out
    assert "Rank 2 never issued all_reduce 5" in said
    assert "rank 2      is in: _try_get_data (data/dataloader.py:1133)" in said
    assert "Main threads" in page.read_text()
    assert '"stack": "_try_get_data' in data.read_text().replace('":"', '": "')


def test_files_of_stacks_must_name_their_rank(tmp_path, capsys):
    folder = spied(tmp_path / "d", IN_REDUCE, IN_REDUCE, IN_LOADER)
    (folder / "stack_rank_2.txt").rename(folder / "stack.txt")
    assert run(["hang", str(folder)]) == 0
    assert "stacks must be named after their rank" in capsys.readouterr().err


def test_a_log_without_a_word_of_the_watchdog_is_refused(tmp_path, capsys):
    (tmp_path / "train.log").write_text("step 1 loss 2.0\n" * 10)
    assert run(["hang", str(tmp_path / "train.log")]) == 3
    assert "lines of the NCCL watchdog, there are none" in capsys.readouterr().err


def test_stacks_of_a_job_on_gloo_by_faulthandler(tmp_path):
    pytest.importorskip("torch")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    for wait_s in (8, 30):  # the first is enough on a machine with nothing else to do
        folder = tmp_path / str(wait_s)
        folder.mkdir()
        subprocess.run([sys.executable, "-c", JOB, str(folder), str(wait_s)], check=True, env=environment, timeout=240)
        hang = told(folder)
        if causes(hang):
            break
    assert causes(hang) == {2: Cause.HOST}
    assert "is in load_batch" in hang.text


STUCK = 'Thread 0x00007f (most recent call first):\n  File "train.py", line 7 in main\n'


@pytest.mark.parametrize(
    "text",
    ["\n".join(waits(0, 17)), STUCK, RAS],
    ids=["a watchdog's lines", "stacks", "a report of RAS"],
)
def test_analyze_says_who_reads_what_a_hang_leaves(text, tmp_path, capsys):
    """Seen: "record a few steps with the profiler", of a job that hangs."""
    (tmp_path / "left.txt").write_text(text)
    assert run(["analyze", str(tmp_path / "left.txt")]) == 3
    said = capsys.readouterr().err
    assert "tells where ranks wait" in said
    assert "`paro-advise hang` reads it" in said


def test_a_log_with_steps_is_analysed_though_it_ends_in_a_hang(tmp_path, capsys):
    steps = [
        f"iteration {i:8d}/     100 | elapsed time per iteration (ms): {time} | global batch size: 8"
        for i, time in enumerate([900.0, 200.0, 210.0], 1)
    ]
    (tmp_path / "job.log").write_text("\n".join([*steps, *waits(0, 17)]))
    assert run(["analyze", str(tmp_path / "job.log")]) == 0
    assert "tells where" not in capsys.readouterr().err
