"""What computes, copies and communicates on a rank: device rows of a GPU run, operators of a CPU run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kernel_kinds import KernelKind, is_peer_copy, kind_of_kernel
from paro_advise.trace_parsers.kineto.collectives.kernels import CommKernel
from paro_advise.trace_parsers.kineto.columns import HostKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import numpy as np
    import polars as pl
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.collectives.runtime_annotations import OwnCalls
    from paro_advise.trace_parsers.kineto.columns import DeviceColumns
    from paro_advise.trace_parsers.kineto.host_rows import HostRows

# What stands before "::" in the names of operators that hold others or only wait.
_CONTAINERS = ("c10d", "_c10d_functional", "autograd", "torch", "record_param_comms", "paro_advise")
_WAITING = ("c10d::", "_c10d_functional::")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Device rows of a GPU run, in order of the file.

    Attributes:
        start_us, end_us: from the start of the trace.
        kind: KernelKind values.
        name: codes into ``names``.
        launch_us, launch_tid: launch on the host, NaN and -1 when unknown.
        launch_end_us: when the host was done with it.
        flops: of the matrix product that a row is part of, shared by its rows; 0 for others.
        names_operators: the external ids are those of operators. Traces of before 2022 write the launch in place of
            the operator, whose number would be another one's.
    """

    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    stream: NDArray[np.int64]
    kind: NDArray[np.uint8]
    name: NDArray[np.uint32]
    external: NDArray[np.int64]
    launch_us: NDArray[np.float64]
    launch_tid: NDArray[np.int32]
    launch_end_us: NDArray[np.float64]
    flops: NDArray[np.float64]
    names_operators: bool
    names: tuple[str, ...]

    def table(self, passes: NDArray[np.uint8]) -> pl.DataFrame:
        """Return the rows as EventTables.device, by start.

        Args:
            passes: the PassKind of each row.
        """
        import polars as pl

        return pl.DataFrame(
            {
                "start_us": self.start_us,
                "end_us": self.end_us,
                "stream": self.stream,
                "kind": self.kind,
                "name": self.name,
                "launch_us": self.launch_us,
                "launch_end_us": self.launch_end_us,
                "flops": self.flops,
                "pass": passes,
            }
        ).sort("start_us", maintain_order=True)

    def comm_kernels(self, raw: DeviceColumns) -> list[CommKernel]:
        """Return the rows that communicate, by start."""
        import numpy as np

        args = dict(raw.comm)
        kernels = [
            CommKernel(
                start_us=float(self.start_us[row]),
                end_us=float(self.end_us[row]),
                stream=int(self.stream[row]),
                name=self.names[self.name[row]],
                external=int(self.external[row]),
                launch=(float(self.launch_us[row]), int(self.launch_tid[row])),
                args=args.get(row),
            )
            for row in np.flatnonzero(self.kind == KernelKind.COMMUNICATION).tolist()
        ]
        return sorted(kernels, key=lambda kernel: kernel.start_us or 0.0)


def device_rows(
    raw: DeviceColumns,
    start_us: NDArray[np.float64],
    duration_us: NDArray[np.float64],
    host: HostRows,
    comm_ids: Iterable[int],
    flops: Mapping[int, float],
) -> DeviceRows:
    """Return the device rows of a GPU run.

    Args:
        raw: as collected.
        start_us: from the start of the trace.
        duration_us: not negative.
        host: host rows, for launches.
        comm_ids: external ids of the host's collectives.
        flops: of matrix products, by the external id of their operator.
    """
    import numpy as np

    kind = _device_kinds(raw, comm_ids)
    external, correlation = (np.frombuffer(ids, dtype=np.int64) for ids in (raw.external, raw.correlation))
    launch_us, launch_end_us, launch_tid = _launches(correlation, host)
    names_operators = not np.array_equal(external, correlation)
    return DeviceRows(
        start_us=start_us,
        end_us=start_us + duration_us,
        stream=np.frombuffer(raw.stream, dtype=np.int64),
        kind=kind,
        name=np.frombuffer(raw.name, dtype=np.uint32),
        external=external,
        launch_us=launch_us,
        launch_tid=launch_tid,
        launch_end_us=launch_end_us,
        flops=_shared_flops(external, kind == KernelKind.COMPUTE, flops if names_operators else {}),
        names_operators=names_operators,
        names=tuple(raw.names),
    )


def _shared_flops(
    external: NDArray[np.int64], computes: NDArray[np.bool_], flops: Mapping[int, float]
) -> NDArray[np.float64]:
    """Return each row's share of the operations of the product that launched it."""
    import numpy as np

    out = np.zeros(len(external))
    if not flops:
        return out
    ids = np.array(sorted(flops), dtype=np.int64)
    whole = np.array([flops[number] for number in ids.tolist()])
    place = np.minimum(np.searchsorted(ids, external), len(ids) - 1)
    mine = (ids[place] == external) & computes
    rows_of = np.bincount(place[mine], minlength=len(ids))
    out[mine] = whole[place[mine]] / rows_of[place[mine]]
    return out


def _device_kinds(raw: DeviceColumns, comm_ids: Iterable[int]) -> NDArray[np.uint8]:
    """Return each device row's KernelKind."""
    import numpy as np

    code = np.frombuffer(raw.name, dtype=np.uint32)
    kind = np.array([kind_of_kernel(name) for name in raw.names], dtype=np.uint8)[code]
    if raw.comm:
        rows = [row for row, _ in raw.comm]
        kind[np.array(rows, dtype=np.int64)] = KernelKind.COMMUNICATION
    comms = np.array([number for number in comm_ids if number >= 0], dtype=np.int64)
    # Copy-engine collectives run as peer copies inside a recorded collective.
    is_copy = np.array([is_peer_copy(name) for name in raw.names], dtype=bool)
    if is_copy.any() and len(comms):
        external = np.frombuffer(raw.external, dtype=np.int64)
        kind[is_copy[code] & np.isin(external, comms)] = KernelKind.COMMUNICATION
    return kind


def _launches(
    correlation: NDArray[np.int64], host: HostRows
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int32]]:
    """Return start, end and thread of each device row's launch on the host, NaN and -1 without runtime rows."""
    import numpy as np

    times, ends = np.full(len(correlation), np.nan), np.full(len(correlation), np.nan)
    tids = np.full(len(correlation), -1, dtype=np.int32)
    runtime = np.flatnonzero((host.kind == HostKind.RUNTIME) & (host.correlation >= 0))
    if not len(runtime):
        return times, ends, tids
    ids = host.correlation[runtime]
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids[order], correlation), len(ids) - 1)
    found = (ids[order][place] == correlation) & (correlation >= 0)
    times[found] = host.start_us[runtime][order][place][found]
    ends[found] = host.end_us[runtime][order][place][found]
    tids[found] = host.tid[runtime][order][place][found]
    return times, ends, tids


def operator_table(
    host: HostRows, workers: set[int], own: OwnCalls, kinds: Callable[[NDArray[np.float64]], NDArray[np.uint8]]
) -> pl.DataFrame:
    """Return the operators that compute on a CPU run, one row each, as device rows.

    gloo's worker threads compute for the collective, not for the model, and so do operators inside a
    collective of our runtime. Containers (autograd nodes, c10d calls) hold waiting; only operators
    outside them count.

    Args:
        host: host rows.
        workers: threads of gloo.
        own: calls of our runtime.
        kinds: the PassKind of what begins at some times (us).
    """
    import numpy as np
    import polars as pl

    on_worker = np.isin(host.tid, list(workers)) if workers else np.zeros(len(host.tid), dtype=bool)
    operator = (host.kind == HostKind.OPERATOR) & ~on_worker & ~own.mask(host)
    busy = operator & host.mask_of_names(_computes(name) for name in host.names)
    waiting = operator & host.mask_of_names(name.startswith(_WAITING) for name in host.names)
    rows = np.flatnonzero(busy | waiting)
    return pl.DataFrame(
        {
            "start_us": host.start_us[rows],
            "end_us": host.end_us[rows],
            "stream": host.tid[rows].astype(np.int64),
            "kind": np.where(waiting[rows], KernelKind.SYNC, KernelKind.COMPUTE).astype(np.uint8),
            "name": host.name[rows],
            "launch_us": np.full(len(rows), np.nan),
            "pass": kinds(host.start_us[rows]),
        }
    )


def _computes(operator: str) -> bool:
    head = operator.partition("::")[0]
    return "::" in operator and head not in _CONTAINERS
