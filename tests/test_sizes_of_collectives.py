"""Bytes of states where some sizes were not recorded: a missing size is no size of zero."""

from __future__ import annotations

import pytest
from helpers import analyze, write_run
from trace_builder import fsdp_rank

SIZES = ("In msg nelems", "Out msg nelems", "Input Dims")


def without_sizes(trace, *, keep=lambda _: False):
    """Take the sizes of collectives out of a trace, but of those that ``keep`` picks by their place."""
    place = 0
    for event in trace.events:
        if SIZES[0] in event["args"]:
            place += event["cat"] == "kernel"
            if not keep(place):
                event["args"] = {key: value for key, value in event["args"].items() if key not in SIZES}
    return trace


def states_of(folder, *traces):
    return analyze(write_run(folder, list(traces))).states


def test_ranks_that_recorded_no_sizes_make_those_of_the_others_no_smaller(tmp_path):
    whole = states_of(tmp_path / "whole", *(fsdp_rank(rank) for rank in range(2)))
    mixed = states_of(tmp_path / "mixed", fsdp_rank(0), without_sizes(fsdp_rank(1)))
    for state in ("parameter", "gradient"):
        assert mixed[state].bytes == pytest.approx(whole[state].bytes)
        assert mixed[state].count == whole[state].count


def test_ranks_that_recorded_no_sizes_are_joined_with_the_others(tmp_path):
    traces = [fsdp_rank(0), without_sizes(fsdp_rank(1))]
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert not {"Q311", "Q338"} & {item.code for item in analysis.data_quality}
    assert analysis.states["gradient"].wait_us is not None


def test_bytes_are_unknown_where_most_sizes_are(tmp_path):
    traces = [without_sizes(fsdp_rank(rank), keep=lambda place: place == 1) for rank in range(2)]
    states = states_of(tmp_path / "run", *traces)
    assert states["parameter"].bytes is None
    assert states["gradient"].bytes is None


def gather_of_older_torch(trace):
    """A gather as torch 2.0 wrote it: the c10d row holds both sides, the nccl row inside it the input only.

    Kernels are known by their launch alone.
    """
    launch_us, thread = 0.0, 1
    for event in list(trace.events):
        args = event["args"]
        if event["name"] == "record_param_comms":
            launch_us, thread = event["ts"] - trace.offset + 3, event["tid"]
        elif event["cat"] == "kernel" and SIZES[0] in args:
            del args["External id"]
            event["name"] = event["name"].replace("AllGather", "SendRecv")
            trace.row("cuda_runtime", "cudaLaunchKernelExC", launch_us, 1, thread, correlation=args["correlation"])
        if event["name"] == "c10d::_allgather_base_":
            args |= {"Input Dims": [[4096], [2048], []], "Input type": ["c10::BFloat16", "c10::BFloat16", ""]}
        elif event["name"] == "record_param_comms":
            gathers = args.get("Collective name") == "_allgather_base"
            event["name"] = "nccl:_all_gather_base" if gathers else "nccl:_reduce_scatter_base"
            args |= {"Input Dims": [[2048] if gathers else [4096]], "Input type": ["c10::BFloat16"]}
        for name in ("Collective name", "Group size", "dtype", "Seq", *SIZES[:2]):
            args.pop(name, None)
    return trace


def test_a_gather_of_older_torch_has_the_size_that_the_row_around_it_tells(tmp_path):
    states = states_of(tmp_path / "run", *(gather_of_older_torch(fsdp_rank(rank)) for rank in range(2)))
    each = states["parameter"].bytes / states["parameter"].count
    assert each == 4096 * 2  # bytes of the whole, in bf16
