"""What a device row is: compute, communication, memory or synchronisation.

Broader than HTA's rule (names starting ``nccl``), which counts RCCL generic kernels, oneCCL,
MSCCL++, NVSHMEM/DeepEP, user buffers, custom all-reduce and symmetric-memory kernels as compute.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op

if TYPE_CHECKING:
    from collections.abc import Iterable


class KernelKind(IntEnum):
    """Kind of a device row; the value is what the ``kind`` column holds."""

    COMPUTE = 0
    COMMUNICATION = 1
    MEMORY = 2
    SYNC = 3


_COMMUNICATION = re.compile(
    r"nccl|rccl|oneccl|hccl|mscclpp|msccl_|nvshmem|deep_?ep::|cross_device_reduce|quickreduce"
    r"|multimem_|symm_mem|one_?shot_?all|two_?shot_?all|lamport|userbuffers"
    r"|(?<![a-z])all_?reduce|(?<![a-z])all_?gather|reduce_?scatter|(?<![a-z])all_?to_?all"
    r"|(?-i:All(?:Reduce|Gather|ToAll))"  # in the middle of a name, where "smallReduce" is none
    r"|(?:intra|inter)node::(?:dispatch|combine|notify)|^gloo:",
    re.IGNORECASE,
)
# A kernel that torch.compile has made is named after the operators it fuses, a wait for a collective among them.
_FUSED = re.compile(r"^triton_[a-z_]+?_fused_")
_SYNC = re.compile(r"^(?:Stream|Event|Context|Device) (?:Sync|Wait)", re.IGNORECASE)
# MTIA's are called dma_request, its matrix products fc-dtype_Float and alike.
_MEMORY = re.compile(r"^(?:hip)?Mem(?:cpy|set)|^Copy(?:Host|Device)|^FillBuffer|^dma_", re.IGNORECASE)

# Autograd functions in which tensor parallelism sends activations (Megatron-LM, core/tensor_parallel).
TENSOR_PARALLEL_FUNCTIONS = (
    "_CopyToModelParallel", "_ReduceFromModelParallel", "_ScatterToModelParallel", "_GatherFromModelParallel",
    "_ScatterToSequenceParallel", "_GatherFromSequenceParallel", "_ReduceScatterToSequenceParallel",
    "LinearWithGradAccumulation", "LinearWithFrozenWeight", "_VocabParallelCrossEntropy",
)  # fmt: skip
# An operator that takes a norm; a collective inside it is of the norm of gradients.
NORM_OPERATOR = "aten::linalg_vector_norm"
_PEER_COPY = re.compile(r"PtoP|Peer")

_OPS: tuple[tuple[str, Op], ...] = (
    ("reducescatter", Op.REDUCE_SCATTER),
    ("allgather", Op.ALL_GATHER),
    ("allreduce", Op.ALL_REDUCE),
    ("alltoall", Op.ALL_TO_ALL),
    ("crossdevicereduce", Op.ALL_REDUCE),
    ("broadcast", Op.BROADCAST),
    ("sendrecv", Op.SEND_RECV),
    ("gather", Op.GATHER),
    ("scatter", Op.SCATTER),
    ("barrier", Op.BARRIER),
    ("dispatch", Op.ALL_TO_ALL),
    ("combine", Op.ALL_TO_ALL),
    ("send", Op.SEND),
    ("recv", Op.RECV),
    ("reduce", Op.REDUCE),
)


_MATRIX = re.compile(r"gemm|cutlass|matmul|_mm_|Cijk_|nvjet|xmma|^fc-dtype", re.IGNORECASE)
# Operand types of matrix products as cuBLAS, CUTLASS, Tensile and nvjet name them.
_HALF = re.compile(r"bf16|bfloat16|f16|fp16|half|_h\d|hmma|s1688|s16816|HHS|BBS|HSH|BSB|^nvjet_[ht]", re.IGNORECASE)


def computes_16_bit(names: Iterable[str]) -> bool | None:
    """Tell whether matrix products take 16-bit operands, None where no kernel is one."""
    products = [name for name in names if _MATRIX.search(name)]
    return any(_HALF.search(name) for name in products) if products else None


def kind_of_kernel(name: str) -> KernelKind:
    """Classify a device row by its name.

    Args:
        name: kernel or copy name as recorded.
    """
    if _MEMORY.search(name):
        return KernelKind.MEMORY
    if _SYNC.search(name):
        return KernelKind.SYNC
    if _COMMUNICATION.search(name) and not _only_mentions_one(name.lower()):
        return KernelKind.COMMUNICATION
    return KernelKind.COMPUTE


def _only_mentions_one(name: str) -> bool:
    """Tell whether a name (lower case) is that of a computing kernel of PyTorch's that only mentions a collective."""
    return bool(_FUSED.match(name)) or "multi_tensor" in name or "elementwise" in name.partition("at::native::")[2]


def is_peer_copy(name: str) -> bool:
    """Tell whether a device row is a copy between devices, of which collectives by the copy engine consist."""
    return bool(_PEER_COPY.search(name))


def op_of_name(name: str) -> Op:
    """Return the collective that a kernel, span, operator or log name stands for."""
    plain = name.lower().replace("_", "").replace(" ", "")
    for needle, op in _OPS:
        if needle in plain:
            return op
    return Op.UNKNOWN
