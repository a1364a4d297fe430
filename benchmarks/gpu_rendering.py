"""Renders recorded host rows as the trace that the same steps leave on GPUs with NCCL.

Operators and annotations are the recorded ones. What the CPU build does inside an operator that is
one kernel on a GPU is dropped; launches, kernels, copies, synchronisations and the collectives'
metadata are added; every time is drawn from the seed.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_layout import DEVICE, PID, WINDOW_NS, flow, host_args, mark, span

if TYPE_CHECKING:
    from recording import HostNode

MAIN_THREAD = PID
BACKWARD_THREAD = PID + 611
COMPUTE_STREAM, COPY_IN_STREAM, GATHER_STREAM, SCATTER_STREAM, REDUCE_STREAM = 7, 20, 24, 28, 32
STREAMS = [COMPUTE_STREAM, COPY_IN_STREAM, GATHER_STREAM, SCATTER_STREAM, REDUCE_STREAM]
# The recorded model is tiny: its collectives count for a model this many times wider.
_SHARD_SCALE = 64
_BYTES_PER_NS = 180.0
_LAUNCHES_OF_A_LIST = 4
_EVALUATE = "autograd::engine::evaluate_function"


def _elementwise(functor: str, count: int = 3) -> str:
    inner = f"at::native::{functor}, std::array<char*, {count}ul>"
    return f"void at::native::vectorized_elementwise_kernel<4, {inner} >(int, {inner})"


def _foreach(functor: str, depth: int) -> str:
    space = "at::native::(anonymous namespace)"
    lists = f"{space}::TensorListMetadata<{depth}>"
    return (
        f"void {space}::multi_tensor_apply_kernel<{lists}, {space}::{functor}<float, {depth}, 1, 0>, "
        f"std::multiplies<float>, float>({lists}, {space}::{functor}<float, {depth}, 1, 0>, "
        "std::multiplies<float>, float)"
    )


_GEMM = "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_{}"
_FLASH = (
    "void pytorch_flash::{0}<Flash_{1}_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t, "
    "Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, false, false, true, true, "
    "false>(pytorch_flash::Flash_{1}_params)"
)
_NORM = "void at::native::(anonymous namespace)::{}<c10::BFloat16, float>(int, float, c10::BFloat16 const*)"
_SPACE = "at::native::(anonymous namespace)"
_SUM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<{0}, at::native::func_wrapper_t<{0}, "
    "at::native::sum_functor<{0}, float, {0}>::operator()(at::TensorIterator&)::{{lambda(float, float)#1}}>, "
    "unsigned int, {0}, 4, 4> >(at::native::ReduceOp<{0}, float>)"
)
# Operators that are kernels on a GPU: the kernels and their usual duration (us). What the CPU build
# runs inside is dropped.
_KERNELS: dict[str, tuple[tuple[str, ...], float]] = {
    "aten::mm": ((_GEMM.format("NTN"),), 55.0),
    "aten::addmm": ((_GEMM.format("bias_TNN"),), 60.0),
    "aten::native_layer_norm": ((_NORM.format("vectorized_layer_norm_kernel"),), 9.0),
    "aten::native_layer_norm_backward": (
        tuple(map(_NORM.format, ("layer_norm_grad_input_kernel_vectorized", "GammaBetaBackwardCUDAKernel"))),
        12.0,
    ),
    "aten::_scaled_dot_product_flash_attention": ((_FLASH.format("flash_fwd_kernel", "fwd"),), 80.0),
    "aten::_scaled_dot_product_flash_attention_backward": (
        tuple(_FLASH.format(f"flash_bwd_{part}", "bwd") for part in ("dot_do_o", "dq_dk_dv", "convert_dq")),
        70.0,
    ),
    "aten::sum": ((_SUM.format("c10::BFloat16"),), 8.0),
    "aten::linalg_vector_norm": ((_SUM.format("float"),), 7.0),
    "aten::_foreach_norm": ((_foreach("LpNormFunctor", 1), _foreach("LpNormCleanup", 1)), 15.0),
    "aten::index_select": ((f"void {_SPACE}::indexSelectLargeIndex<c10::BFloat16, long>()",), 11.0),
    "aten::split_with_sizes_copy": (
        ("void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char*)",),
        14.0,
    ),
    "aten::_chunk_cat": (
        ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**)",),
        16.0,
    ),
    "aten::_foreach_copy_": ((_foreach("Copy", 2),), 10.0),
}
_HOST_ONLY = {
    "aten::_unsafe_view",
    "aten::alias",
    "aten::as_strided",
    "aten::detach_",
    "aten::empty",
    "aten::empty_strided",
    "aten::lift_fresh",
    "aten::resize_",
    "aten::resolve_conj",
    "aten::result_type",
    "aten::to",
    "aten::view",
}
_COLLECTIVES = {
    "c10d::_allgather_base_": ("_allgather_base", "_all_gather_base", "AllGather", GATHER_STREAM),
    "c10d::_reduce_scatter_base_": (
        "_reduce_scatter_base", "_reduce_scatter_base", "ReduceScatter_Sum_bf16", SCATTER_STREAM,
    ),
    "c10d::allreduce_": ("allreduce", "all_reduce", "AllReduce_Sum_f32", REDUCE_STREAM),
}  # fmt: skip


@dataclass(slots=True)
class Rendered:
    """The rows of the recorded steps, and how far one copy of them moves each kind of number.

    ``steps`` are the positions of rows that name a profiler step.
    """

    rows: list[str]
    steps: set[int]
    shift: dict[str, int]


@dataclass(slots=True)
class _Open:
    """An annotation that runs: the device span of what was launched inside it, per stream."""

    streams: dict[int, tuple[int, int]] = field(default_factory=dict)


class GpuTimeline:
    """Plays host rows in order and collects the rows of a GPU trace."""

    def __init__(self, seed: int, world: int) -> None:
        self._random = random.Random(seed)
        self._world = world
        self._now = WINDOW_NS + 300_000
        self._host: list[tuple[str, bool]] = []
        self._device: list[tuple[str, bool]] = []
        self._free = dict.fromkeys(STREAMS, 0)
        self._open: list[_Open] = []
        self._external = self._index = self._flow = self._collective = 0
        self._correlation = 1000
        self._forward: dict[int, int] = {}
        self._top_sequence = 0
        self._steps = 0
        self._updating = False

    def render(self, forest: list[HostNode]) -> Rendered:
        """Return the rows of all recorded steps."""
        for node in forest:
            self._play(node, MAIN_THREAD)
        end = max(self._now, *self._free.values())
        pairs = self._host + self._device
        shift = {
            "T": -(-(end - WINDOW_NS + 50_000) // 1000) * 1000,
            "C": self._correlation - 1000 + 1,
            "E": self._external + 1,
            "F": self._flow + 1,
            "N": self._index + 1,
            "Q": self._top_sequence + 1,
            "S": self._collective + 1,
            "H": 0x9E3779B97F4A7C15,
            "P": self._steps,
        }
        steps = {place for place, (_, is_step) in enumerate(pairs) if is_step}
        return Rendered([row for row, _ in pairs], steps, shift)

    def _spend(self, median_us: float, until_ns: int = 0) -> int:
        """Let host time pass, at least up to ``until_ns``; return the nanoseconds."""
        length = max(100, int(median_us * 1000 * math.exp(self._random.gauss(0, 0.35))), until_ns - self._now)
        self._now += length
        return length

    def _play(self, node: HostNode, thread: int) -> None:
        name = node.name.replace("_for_cpu", "").replace("ForCpu", "")
        if name.startswith(_EVALUATE):
            thread = BACKWARD_THREAD
        is_annotation = node.category == "user_annotation"
        is_step = name.startswith("ProfilerStep#")
        place = len(self._host)
        self._host.append(("", is_step))
        external, index = self._numbers()
        numbers = {"External id": external, "Ev Idx": index}
        if is_annotation:
            self._open.append(_Open())
        start = self._now
        self._link_passes(name, node, thread, start)
        self._spend(0.9)
        outside = self._updating
        self._updating = outside or name.startswith("Optimizer.step")
        self._inside(name, node, thread, external)
        self._updating = outside
        self._spend(0.6)
        if is_step:
            number = int(name.partition("#")[2])
            self._steps += 1
            name = f"ProfilerStep#{mark('P', number)}"
        args = {"External id": 0, **node.args}
        row = span(node.category, name, (PID, thread), start, self._now - start, host_args(args, numbers))
        self._host[place] = (row, is_step)
        if is_annotation:
            self._close(name, external, is_step=is_step)

    def _link_passes(self, name: str, node: HostNode, thread: int, start: int) -> None:
        """Draw the arrow from a forward operator to its autograd node."""
        sequence = node.args.get("Sequence number")
        if not isinstance(sequence, int):
            return
        self._top_sequence = max(self._top_sequence, sequence)
        if not name.startswith(_EVALUATE):
            if thread == MAIN_THREAD:
                self._forward.setdefault(sequence, start)
            return
        forward = self._forward.pop(sequence, None)
        if forward is not None:
            self._flow += 1
            number = mark("F", self._flow)
            self._host.append((flow("fwdbwd", number, (PID, MAIN_THREAD), forward, is_end=False), False))
            self._host.append((flow("fwdbwd", number, (PID, thread), start, is_end=True), False))

    def _inside(self, name: str, node: HostNode, thread: int, external: int) -> None:
        if name in _COLLECTIVES:
            self._collect(name, node, thread)
            return
        if name in _KERNELS:
            kernels, median_us = _KERNELS[name]
            if name == "aten::split_with_sizes_copy":
                self._wait(GATHER_STREAM, COMPUTE_STREAM, thread, external)
            stream = COPY_IN_STREAM if name == "aten::_foreach_copy_" else COMPUTE_STREAM
            for kernel in kernels:
                self._launch(kernel, stream, thread, external, median_us)
            return
        if name.startswith("aten::_foreach_") and name != "aten::_foreach_add_":
            functor = name.removeprefix("aten::_foreach_").strip("_").title() + "Functor"
            for _ in range(_LAUNCHES_OF_A_LIST):
                self._launch(_foreach(f"Binary{functor}", 3), COMPUTE_STREAM, thread, external, 30.0)
            return
        for child in node.children:
            self._play(child, thread)
        if node.children or not name.startswith("aten::") or name in _HOST_ONLY:
            return
        if node.args.get("Input Dims", [[]])[:1] == [[]] and name != "aten::_local_scalar_dense":
            return  # scalars stay on the host
        if name == "aten::_local_scalar_dense":
            if not self._updating:  # the optimizer's step counters live on the host
                self._read_scalar(thread, external)
        else:
            functor = name.removeprefix("aten::").strip("_")
            self._launch(_elementwise(f"CUDAFunctor_{functor}<float>"), COMPUTE_STREAM, thread, external, 6.0)

    def _runtime(self, name: str, cbid: int, thread: int, external: int, median_us: float, until_ns: int = 0) -> int:
        """Add a runtime call; return its correlation."""
        self._correlation += 1
        start = self._now
        length = self._spend(median_us, until_ns)
        number = mark("C", self._correlation)
        args = f'"External id": {mark("E", external)},"cbid": {cbid}, "correlation": {number}'
        self._device.append((span("cuda_runtime", name, (PID, thread), start, length, args), False))
        return self._correlation

    def _launch(
        self, kernel: str, stream: int, thread: int, external: int, median_us: float, extra: str = ""
    ) -> tuple[int, int]:
        """Add a launch, its arrow and its kernel; return the kernel's start and end."""
        if kernel.startswith(("nvjet", "void pytorch_flash", "void at::native::(anonymous namespace)::vec")):
            name = "cudaOccupancyMaxActiveBlocksPerMultiprocessor"
            self._runtime(name, 298, thread, external, 0.5)
        launched = self._now
        correlation = self._runtime("cudaLaunchKernel", 211, thread, external, 3.2)
        blocks = self._random.choice((33, 66, 132, 264, 528, 1056))
        threads = 544 if extra else self._random.choice((128, 256, 512))
        length = max(900, int(median_us * 1000 * math.exp(self._random.gauss(0, 0.25))))
        args = (
            f'"External id": {mark("E", external)},"queued": 0, "device": {DEVICE}, "context": 1, '
            f'"stream": {stream}, "correlation": {mark("C", correlation)}, "registers per thread": '
            f'{96 if extra else 64}, "shared memory": {82240 if extra else 0}, '
            f'"blocks per SM": {blocks / 132:.6f}, "warps per SM": {blocks * threads / 32 / 132:.6f}, "grid": [{blocks}, 1, 1], '
            f'"block": [{threads}, 1, 1], "est. achieved occupancy %": {0 if extra else 50}{extra}'
        )
        return self._on_device("kernel", kernel, stream, thread, launched, length, correlation, args)

    def _on_device(
        self,
        category: str,
        name: str,
        stream: int,
        thread: int,
        launched: int,
        length: int,
        correlation: int,
        args: str,
    ) -> tuple[int, int]:
        start = max(launched + 4_500, self._free[stream] + 700)
        end = start + length
        self._free[stream] = end
        number = mark("C", correlation)
        self._device += [
            (flow("ac2g", number, (PID, thread), launched, is_end=False), False),
            (flow("ac2g", number, (DEVICE, stream), start, is_end=True), False),
            (span(category, name, (DEVICE, stream), start, length, args), False),
        ]
        for item in self._open:
            first, last = item.streams.get(stream, (start, end))
            item.streams[stream] = (min(first, start), max(last, end))
        return start, end

    def _wait(self, awaited: int, waiting: int, thread: int, external: int) -> None:
        """Make one stream wait for what another was given so far."""
        recorded = self._runtime("cudaEventRecord", 135, thread, external, 0.9)
        self._runtime("cudaStreamWaitEvent", 147, thread, external, 0.9)
        args = (
            f'"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": {awaited}, '
            f'"wait_on_cuda_event_record_corr_id": {mark("C", recorded)}, "wait_on_cuda_event_id": 17, '
            f'"stream": {waiting}, "correlation": {mark("C", self._correlation)}, '
            f'"device": {DEVICE}, "context": 1'
        )
        place = (DEVICE, waiting)
        self._device.append((span("cuda_sync", "Stream Wait Event", place, self._now, 500, args), False))
        self._free[waiting] = max(self._free[waiting], self._free[awaited])

    def _read_scalar(self, thread: int, external: int) -> None:
        """Copy one number to the host and wait for it."""
        launched, stream = self._now, COMPUTE_STREAM
        correlation = self._runtime("cudaMemcpyAsync", 41, thread, external, 4.0)
        args = (
            f'"External id": {mark("E", external)},"device": {DEVICE}, "context": 1, "stream": {stream}, '
            f'"correlation": {mark("C", correlation)}, "bytes": 4, "memory bandwidth (GB/s)": 0.0016'
        )
        name = "Memcpy DtoH (Device -> Pageable)"
        _, end = self._on_device("gpu_memcpy", name, stream, thread, launched, 1_800, correlation, args)
        start = self._now
        correlation = self._runtime("cudaStreamSynchronize", 131, thread, external, 2.0, end + 1_500)
        args = (
            f'"cuda_sync_kind": "Stream Sync", "stream": {stream}, "correlation": {mark("C", correlation)}, '
            f'"device": {DEVICE}, "context": 1'
        )
        row = span("cuda_sync", "Stream Sync", (DEVICE, stream), start, self._now - start, args)
        self._device.append((row, False))

    def _collect(self, name: str, node: HostNode, thread: int) -> None:
        """Add what NCCL's process group leaves of one collective."""
        collective, annotation, algorithm, stream = _COLLECTIVES[name]
        inputs, outputs = self._elements(collective, node)
        place, start = len(self._host), self._now
        self._host.append(("", False))
        external, index = self._numbers()
        self._collective += 1
        self._spend(4.0)
        self._wait(COMPUTE_STREAM, stream, thread, external)
        args = self._collective_args(collective, inputs, outputs)
        begun = self._now
        inner, inner_index = self._numbers()
        self._open.append(_Open())
        dtype_bytes = 4 if collective == "allreduce" else 2
        length_us = 14.0 + max(inputs, outputs) * dtype_bytes / _BYTES_PER_NS / 1000
        kernel = f"ncclDevKernel_{algorithm}_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._launch(kernel, stream, thread, external, length_us, f", {args}")
        self._runtime("cudaEventRecord", 135, thread, external, 0.9)
        self._add_host("user_annotation", f"nccl:{annotation}", thread, begun, inner, inner_index)
        self._close(f"nccl:{annotation}", inner, is_step=False)
        self._spend(1.0)
        more = '"Global rank start": 0, "Global rank stride": 1, "Rank": 0, "Is asynchronized op": false'
        self._add_host("cpu_op", "record_param_comms", thread, start, external, index, f"{args}, {more}, ", place)
        if collective == "allreduce":
            self._wait(stream, COMPUTE_STREAM, thread, external)

    def _numbers(self) -> tuple[int, int]:
        """Return the External id and the index of the next host row."""
        self._external += 1
        self._index += 1
        return self._external, self._index - 1

    def _elements(self, collective: str, node: HostNode) -> tuple[int, int]:
        """Return the elements that go in and out on one rank of the job."""
        dims = node.args.get("Input Dims", [[], []])
        sizes = [math.prod(dim) if dim and isinstance(dim[0], int) else 1 for dim in dims[:2]]
        # Recorded with two ranks: the shard stays, the full buffer grows with the world.
        shard = max(1, min(sizes)) * _SHARD_SCALE
        full = shard * self._world
        return {"_allgather_base": (shard, full), "_reduce_scatter_base": (full, shard)}.get(collective, (1, 1))

    def _add_host(
        self,
        category: str,
        name: str,
        thread: int,
        start: int,
        external: int,
        index: int,
        args: str = "",
        place: int | None = None,
    ) -> None:
        """Add a host row that the recording lacks, or put it where a place was kept for it."""
        text = f'"External id": {mark("E", external)},"Record function id": 0, {args}"Ev Idx": {mark("N", index)}'
        row = span(category, name, (PID, thread), start, self._now - start, text)
        if place is None:
            self._host.append((row, False))
        else:
            self._host[place] = (row, False)

    def _collective_args(self, collective: str, inputs: int, outputs: int) -> str:
        shown = ", ".join(map(str, range(min(self._world, 30)))) + (", ..." if self._world > 30 else "")
        dtype = "Float" if collective == "allreduce" else "BFloat16"
        address = 139_887_722_364_928 + self._collective * 4_194_304
        return (
            f'"Collective name": "{collective}", "In msg nelems": {inputs}, "Out msg nelems": {outputs}, '
            f'"Group size": {self._world}, "dtype": "{dtype}", "In split size": "[]", '
            '"Out split size": "[]", "Process Group Name": "0", "Process Group Description": "default_pg", '
            f'"Process Group Ranks": "[{shown}]", "Input Tensors start": "[{address}]", '
            f'"Output Tensors start": "[{address + 2_097_152}]", "Seq": {mark("S", self._collective)}, '
            f'"Comms Id": {mark("H", self._random.getrandbits(64))}'
        )

    def _close(self, name: str, external: int, *, is_step: bool) -> None:
        """End an annotation and show it on every stream it launched work on."""
        for stream, (first, last) in self._open.pop().streams.items():
            args = f'"External id": {mark("E", external)}'
            row = span("gpu_user_annotation", name, (DEVICE, stream), first - 1, last - first + 2, args)
            self._device.append((row, is_step))
