"""What gloo's spans were for: sizes come from the operators that issued them."""

from __future__ import annotations

from paro_advise.trace_parsers.kineto.gloo import GlooCall, GlooSpan, pair_gloo


def pair(name, dims, span_name, span_dims):
    call = GlooCall(start_us=10.0, tid=1, name=name, dims=dims)
    span = GlooSpan(start_us=20.0, end_us=30.0, thread=2, name=span_name, dims=span_dims, dtype="float")
    (found,) = pair_gloo([call], [span])
    return found


def test_a_gather_into_one_tensor_tells_its_size():
    found = pair("c10d::_allgather_base_", [[800], [100], []], "gloo:all_gather", [[100]])
    assert (found.call is not None, found.nelems, found.group_size) == (True, 800, 8)


def test_a_gather_into_a_list_leaves_its_size_to_the_group():
    """As FSDP1 gathers on a CPU: no profiler records the shapes of a list of lists."""
    found = pair("c10d::allgather_", [[], [[100]], [], []], "gloo:all_gather", [[100]])
    assert (found.call is not None, found.nelems, found.group_size) == (True, None, None)


def test_a_reduce_scatter_from_lists_takes_its_size_from_the_worker():
    found = pair("c10d::reduce_scatter_", [[[100]], [], [], []], "gloo:all_reduce", [[800]])
    assert (found.call is not None, found.nelems, found.group_size) == (True, 800, None)


def test_a_reduce_scatter_is_an_all_reduce_of_the_whole_input():
    found = pair("c10d::_reduce_scatter_base_", [[100], [800], []], "gloo:all_reduce", [[800]])
    assert (found.op, found.nelems, found.group_size) == ("reduce_scatter", 800, 8)
