"""Logs as containers, launchers and terminals hand them on, and logs that are given twice."""

from __future__ import annotations

import gzip
import json

import pytest
from helpers import analyze

from paro_advise.trace_parsers.logs.log_lines import strip_prefix, whole_lines
from paro_advise.trace_parsers.logs.text_scan import TextScan

TIME = "2026-01-01T00:00:00.000000123Z"
COUNTS = (1000, 2000, 3000)  # elements of fp32


class Text:
    def __init__(self, written):
        self.written = written

    def lines(self):
        return iter(self.written)


def log_of(rank):
    """What NCCL 2.28 writes on one of two ranks: its communicator, and three all-reduces."""
    process, comm = f"vm:{705 + rank}:{705 + rank} [0] NCCL INFO", f"0x45b6202{rank}"
    init = f"ncclCommInitRankConfig comm {comm} rank {rank} nranks 2 cudaDev 0 nvmlDev 0 busId 60 commId 0x5de79d3179725a44"
    lines = [f"{process} {init} - Init START", f"{process} {init} - Init COMPLETE"]
    lines += [
        f"{process} AllReduce: opCount {number} sendbuff 0x7f4feb recvbuff 0x7f4feb count {count} datatype 7 op 0 root 0 "
        f"comm {comm} [nranks=2] stream 0x46d11fe0"
        for number, count in enumerate(COUNTS)
    ]
    return lines


def in_parts(line):
    """CRI cuts long lines; P says that more follows."""
    return [f"{TIME} stdout P {line[:40]}", f"{TIME} stdout P {line[40:80]}", f"{TIME} stdout F {line[80:]}"]


WRITTEN = {
    "plain": lambda line: [line],
    "CRI": lambda line: [f"{TIME} stdout F {line}"],
    "CRI in a zone": lambda line: [f"2026-01-01T00:00:00.5+02:00 stderr F {line}"],
    "CRI in parts": in_parts,
    "Docker": lambda line: [json.dumps({"log": f"{line}\n", "stream": "stdout", "time": TIME})],
    "Docker without line breaks": lambda line: [json.dumps({"log": line, "stream": "stdout", "time": TIME})],
    "kubectl --prefix": lambda line: [f"[pod/train-worker-0/pytorch] {line}"],
    "docker compose": lambda line: [f"trainer-0  | {line}"],
    "names of workers in colour": lambda line: [f"\x1b[36m[worker-0]\x1b[0m {line}"],
    "colour": lambda line: [f"\x1b[32m{line}\x1b[0m"],
}


@pytest.mark.parametrize("how", WRITTEN)
def test_a_log_says_the_same_however_it_was_handed_on(how, tmp_path):
    lines = [written for line in log_of(0) for written in WRITTEN[how](line)]
    (tmp_path / "nccl.log").write_text("\n".join(lines) + "\n")
    analysis = analyze(tmp_path / "nccl.log")
    assert "Q210" not in {item.code for item in analysis.data_quality}  # no line was torn
    assert sum(entry.count for entry in analysis.collectives) == len(COUNTS)
    assert sum(entry.bytes * entry.count for entry in analysis.collectives) == 4 * sum(COUNTS)


@pytest.mark.parametrize("how", WRITTEN)
def test_a_training_log_says_the_same_however_it_was_handed_on(how):
    told = [
        f"iteration {step}/ 100 | elapsed time per iteration (ms): {200.0 + step} | global batch size: 64 | loss: 2.5"
        for step in range(1, 6)
    ]
    told.append("  world_size ............................................... 16")
    written = [part for line in told for part in WRITTEN[how](line)]
    scan = TextScan(Text(written))  # type: ignore[arg-type]
    assert scan.training.world_size == 16
    assert scan.training.median_iteration_us == pytest.approx(203_000)
    assert scan.training.metadata()["global_batch_size"] == "64"


def test_a_line_that_a_rank_flushed_in_parts_is_one():
    """nccl-tests prints a row in three parts, each of which mpirun --tag-output tags."""
    row = "  4294967296    1073741824     float     sum      -1    17244  249.07  467.01      0    17250  248.99  466.86   0"
    parts = row[:62], row[62:92], row[92:]
    assert strip_prefix("".join(f"[1,0]<stdout>:{part}" for part in parts)).split() == row.split()


def test_what_is_no_such_prefix_stays():
    for line in ("step 3 | loss 2.5", '{"log": 3}', "stdout is closed", "a P b"):
        assert strip_prefix(line) == line
        assert list(whole_lines([line])) == [line]


def test_parts_into_which_docker_cuts_a_long_line_are_joined():
    """It cuts behind 16 KiB, and only the last part ends with a line break."""
    line = "x" * 40_000
    parts = [line[:16_384], line[16_384:32_768], f"{line[32_768:]}\n"]
    written = [json.dumps({"log": part, "stream": "stderr", "time": TIME}) for part in parts]
    other = json.dumps({"log": "between\n", "stream": "stdout", "time": TIME})
    assert list(whole_lines([written[0], other, *written[1:], other])) == ["between", line, "between"]
    assert list(whole_lines(written[:2])) == [line[:32_768]]


def test_a_line_whose_end_is_missing_is_kept():
    assert list(whole_lines(in_parts("x" * 100)[:2])) == [f"{TIME} stdout P {'x' * 80}"]


def test_calls_that_stand_in_several_logs_count_once(tmp_path):
    """A joint log beside the ranks' own, and a compressed copy beside the plain file."""
    ranks = [log_of(0), log_of(1)]
    for folder in ("ranks", "joint", "copies"):
        (tmp_path / folder).mkdir()
        for rank, lines in enumerate(ranks):
            (tmp_path / folder / f"r{rank}.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "joint/all.log").write_text("\n".join(ranks[0] + ranks[1]) + "\n")
    (tmp_path / "copies/r0.log.gz").write_bytes(gzip.compress(("\n".join(ranks[0]) + "\n").encode()))
    for folder, codes in (("ranks", set()), ("joint", {"Q305"}), ("copies", {"Q305"})):
        analysis = analyze(tmp_path / folder)
        assert f"{2 * len(COUNTS)} collectives of" in analysis.verdict.text, folder
        assert {item.code for item in analysis.data_quality} & {"Q305"} == codes
