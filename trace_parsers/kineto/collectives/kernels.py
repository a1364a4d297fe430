"""Collectives as NCCL-like kernels ran them, explained by the host calls that launched them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.trace_parsers.constants import MAX_GROUP_SIZE
from paro_advise.trace_parsers.kernel_kinds import is_peer_copy, op_of_name
from paro_advise.trace_parsers.kineto.collectives.group_ranks import GroupTexts
from paro_advise.trace_parsers.kineto.collectives.host_calls import COMMS_ROWS, calls_by_external, enclosing_calls
from paro_advise.trace_parsers.kineto.collectives.rows import CollectiveRows
from paro_advise.trace_parsers.kineto.collectives.sizes import buffer_bytes, ranks_of_shapes, recorded_dtype
from paro_advise.trace_parsers.kineto.events import CommArgs, as_int
from paro_advise.trace_parsers.kineto.host_rows import NOWHERE, owners_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.trace_parsers.kineto.collectives.host_calls import HostCall
    from paro_advise.trace_parsers.kineto.host_rows import HostRows
    from paro_advise.trace_parsers.kineto.phases import PhaseClock
    from paro_advise.trace_parsers.tables import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class CommKernel:
    """A device row that communicates.

    Attributes:
        launch: (time_us, tid) of its launch on the host, (NaN, -1) when unknown.
    """

    start_us: float | None  # None where only its call is known
    end_us: float | None
    stream: int
    name: str
    external: int
    launch: tuple[float, int]
    args: CommArgs | None


def kernel_collectives(
    kernels: Sequence[CommKernel],
    calls: Sequence[HostCall],
    rows: HostRows,
    clock: PhaseClock,
    groups: Mapping[str, ProcessGroup],
) -> CollectiveRows:
    """Build rows from NCCL-like kernels and the host calls that launched them.

    Args:
        kernels: by start.
        calls: host rows of collectives, by which kernels are explained.
        rows: all host rows.
        clock: the phase of training at any time.
        groups: process groups by name.
    """
    by_external = calls_by_external(calls)
    kernels = _joined_copies(kernels, by_external)
    around = enclosing_calls(calls, [kernel.launch for kernel in kernels])
    issuers = [by_external.get(kernel.external) or near for kernel, near in zip(kernels, around, strict=True)]
    owners = owners_at(rows, [(call.start_us, call.tid) if call else NOWHERE for call in issuers])
    out = CollectiveRows()
    texts = GroupTexts(groups)
    described: set[int] = set()
    for kernel, call, owner in zip(kernels, issuers, owners, strict=True):
        args = kernel.args or (call.args if call else CommArgs())
        # Several kernels of one call share its bytes: only the first one counts them.
        repeats = kernel.external >= 0 and kernel.external in described
        if args.collective is not None and kernel.external >= 0:
            described.add(kernel.external)
        _add_kernel(out, kernel, call, args, owner, clock, texts.ranks(args), repeats=repeats)
    return out


def _joined_copies(kernels: Sequence[CommKernel], calls: Mapping[int, HostCall]) -> list[CommKernel]:
    """Make one row of the copies of a recorded collective that copy engines run, by peer, in turn or at once."""
    place_of: dict[int, int] = {}
    out: list[CommKernel] = []
    for kernel in kernels:
        place = place_of.get(kernel.external)
        if not is_peer_copy(kernel.name) or kernel.external not in calls or kernel.end_us is None:
            out.append(kernel)
        elif place is None:
            place_of[kernel.external] = len(out)
            out.append(kernel)
        else:
            out[place] = replace(out[place], end_us=max(kernel.end_us, out[place].end_us or kernel.end_us))
    return out


def issued_collectives(
    calls: Sequence[HostCall], rows: HostRows, clock: PhaseClock, groups: Mapping[str, ProcessGroup]
) -> CollectiveRows:
    """Build rows without times from the host calls alone, for recordings without device activity.

    Args:
        calls: host rows of collectives; of rows within each other only the one that says most counts.
        rows: all host rows.
        clock: the phase of training at any time.
        groups: process groups by name.
    """
    telling = [call for call in calls if call.tells]
    recorded = [call for call in telling if call.name in COMMS_ROWS] or telling
    owners = owners_at(rows, [(call.start_us, call.tid) for call in recorded])
    out = CollectiveRows()
    texts = GroupTexts(groups)
    for call, owner in zip(recorded, owners, strict=True):
        kernel = CommKernel(
            start_us=None, end_us=None, stream=call.tid, name=call.name, external=call.external,
            launch=NOWHERE, args=None,
        )  # fmt: skip
        _add_kernel(out, kernel, call, call.args, owner, clock, texts.ranks(call.args), repeats=False)
    return out


def _add_kernel(
    out: CollectiveRows,
    kernel: CommKernel,
    call: HostCall | None,
    args: CommArgs,
    owner: str,
    clock: PhaseClock,
    ranks: str,
    *,
    repeats: bool,
) -> None:
    op = _op_of_kernel(kernel, call, args)
    size = as_int(args.group_size) or ranks_of_shapes(op, args)
    out.add(
        start_us=kernel.start_us,
        end_us=kernel.end_us,
        issue_us=call.start_us if call else None,
        issue_tid=call.tid if call else None,
        op=op.value,
        bytes=None if repeats else buffer_bytes(op, args),
        dtype=str(args.dtype or recorded_dtype(args)),
        group_size=size if size and 0 < size <= MAX_GROUP_SIZE else None,
        group_name=str(args.group_name or ""),
        group_desc=str(args.group_desc or ""),
        group_ranks=ranks,
        seq=as_int(args.seq),
        peer=as_int({Op.SEND: args.destination, Op.RECV: args.source}.get(op)),
        stream=kernel.stream,
        name=kernel.name,
        host_op=_host_op(owner, call.name if call else ""),
        owner=owner,
        phase=clock.phase(call.start_us, op) if call else "",
        micro_batch=clock.micro_batch(call.start_us, op) if call else None,
    )


def _op_of_kernel(kernel: CommKernel, call: HostCall | None, args: CommArgs) -> Op:
    """Return the collective by the arguments, the call or the kernel, whichever first names one."""
    # A gather's size stands in the c10d row; its kernel may be one that sends and receives.
    span = call.name if call and call.name.startswith(("nccl:", "c10d::_allgather_base")) else ""
    ops = (op_of_name(name) for name in (str(args.collective or ""), span, kernel.name))
    return next((op for op in ops if op != Op.UNKNOWN), Op.UNKNOWN)


def _host_op(owner: str, fallback: str) -> str:
    operators = [part for part in owner.split(" > ") if part.startswith("c10d::")]
    return operators[-1] if operators else (fallback if fallback.startswith("c10d::") else "")
