"""``--with-hta``: figures by HolisticTraceAnalysis' rules, computed here and by the package itself."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.hta.rules import HtaNumbers, HtaOwn, HtaRow, hta_rules
from paro_advise.errors import InputError
from paro_advise.trace_parsers.bytes.blocks import BlockReader, SourceRef
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HTA_VERSION = "0.5.0"  # the release whose rules hta_rules follows
_ROUNDING_SWITCH = "HTA_DISABLE_NS_ROUNDING"
_BREAKDOWN = {
    "idle_time_us": "idle_time(us)",
    "compute_time_us": "compute_time(us)",
    "non_compute_time_us": "non_compute_time(us)",
    "kernel_time_us": "kernel_time(us)",
    "idle_time_pctg": "idle_time_pctg",
    "compute_time_pctg": "compute_time_pctg",
    "non_compute_time_pctg": "non_compute_time_pctg",
}
NUMBERS = tuple(field.name for field in fields(HtaNumbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class HtaFigures:
    """All traces by HTA's rules, in order of input, and what HTA itself could not do."""

    rows: tuple[HtaRow, ...]
    notices: tuple[Notice, ...]


def hta_figures(refs: Sequence[SourceRef]) -> HtaFigures:
    """Compute HTA's figures for every Kineto trace, and let HTA compute them where it is installed.

    Args:
        refs: inputs of any kind; what is not a Kineto trace, or cannot be read, is passed over.
    """
    rows: list[HtaRow] = []
    remarks = _Remarks()
    analysis: Any = None
    for ref in refs:
        row = _ours(ref)
        if row is None:
            continue
        if not rows:
            analysis = _library(remarks)
        if row.kernel_time_us is None:
            remarks.add("Q335", ref.file_name, "HTA knows device rows only, there are none")
        elif analysis is not None:
            row = replace(row, own=_theirs(analysis, ref, row, remarks))
        rows.append(row)
    return HtaFigures(rows=tuple(rows), notices=tuple(remarks.notices()))


def _ours(ref: SourceRef) -> HtaRow | None:
    from paro_advise.trace_parsers.nccl import profiler_plugin
    from paro_advise.trace_parsers.read import looks_like_kineto, read_head

    try:
        head = read_head(ref)
        if looks_like_kineto(head) and not profiler_plugin.looks_like(head):
            return hta_rules(ref)
    except InputError:  # the analysis itself says so
        pass
    return None


class _Remarks:
    """Collects what to tell, one notice for all traces that share a reason."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], list[str]] = {}

    def add(self, code: str, file_name: str, reason: str) -> None:
        """Note a reason; an empty file name stands for the installation."""
        self._files.setdefault((code, reason), []).append(file_name)

    def notices(self) -> Iterator[Notice]:
        """Yield the notices in order of first mention."""
        for (code, reason), names in self._files.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            where = f"{names[0]}{more}: " if names[0] else ""
            severity = Severity.WARNING if code in ("Q330", "Q333") else Severity.INFO
            yield Notice(code=code, severity=severity, message=where + reason, help=_help(code))


def _help(code: str) -> str:
    if code == "Q330":
        return "pip install 'paro-advise[hta]'"
    if code in ("Q331", "Q332"):
        from importlib.metadata import PackageNotFoundError, version

        with contextlib.suppress(PackageNotFoundError):
            if int(version("pandas").partition(".")[0]) >= 3:
                return "pip install 'pandas<3': HTA 0.5.0 does not work with later ones"
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep HTA from printing, logging and warning, and from a rounding switch in the environment."""
    disabled = logging.root.manager.disable
    switch = os.environ.pop(_ROUNDING_SWITCH, None)
    logging.disable(logging.CRITICAL)
    sink = io.StringIO()
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if switch is not None:
            os.environ[_ROUNDING_SWITCH] = switch


def _library(remarks: _Remarks) -> Any:
    """Return HTA's ``TraceAnalysis``, None when it cannot be imported."""
    try:
        with _quiet():
            import hta
            from hta.trace_analysis import TraceAnalysis
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "hta"
        why = "is not installed" if missing else f"cannot be imported ({_reason(error)})"
        remarks.add("Q330", "", f"HolisticTraceAnalysis {why}: only our figures by its rules are shown")
        return None
    if hta.__version__ != HTA_VERSION:
        remarks.add("Q334", "", f"HTA {hta.__version__} is installed, our figures follow the rules of {HTA_VERSION}")
    return TraceAnalysis


class _Impossible(Exception):  # noqa: N818 - a reason, not a failure
    """Why HTA has no answer, in our words."""


def _reason(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0][:120]
    kind = "" if isinstance(error, _Impossible) else type(error).__name__
    return ": ".join(part for part in (kind, text) if part)


def _theirs(analysis: Any, ref: SourceRef, row: HtaRow, remarks: _Remarks) -> HtaOwn | None:
    """Let HTA compute its figures for one trace; None when it cannot read it."""
    with tempfile.TemporaryDirectory(prefix="paro-advise-hta-") as folder:

        def attempt(what: str, call: Callable[[], Any], code: str = "Q332") -> Any:
            try:
                with _quiet():
                    return call()
            except Exception as error:  # noqa: BLE001 - whatever HTA raises, the analysis goes on
                reason = _reason(error).replace(folder + os.sep, "")
                remarks.add(code, ref.file_name, f"HTA cannot {what} ({reason})")
                return None

        rank = row.rank or 0
        loaded = attempt(
            "read the trace",
            lambda: analysis(trace_files={rank: str(_acceptable(ref, Path(folder)))}),
            code="Q331",
        )
        if loaded is None:
            return None
        known: dict[str, float | None] = {
            **(attempt("compute its temporal breakdown", lambda: _breakdown(loaded)) or {}),
            **(attempt("compute its overlap", lambda: _overlap(loaded)) or {}),
        }
        idle = attempt("compute its idle time breakdown", lambda: _idle(loaded, rank))
        critical = attempt("compute its critical path", lambda: _critical_path(loaded, rank, row.num_steps))
    differing = [name for name in known if not same_figure(known[name], getattr(row, name))]
    for name in differing[:1]:
        ours = figure_text(getattr(row, name))
        reason = f"{name} is {ours} by our reading of HTA's rules, {figure_text(known[name])} by HTA itself"
        remarks.add("Q333", ref.file_name, reason)
    return HtaOwn(**{**dict.fromkeys(NUMBERS), **known}, idle_us=idle or {}, critical_path_pctg=critical or {})


def _acceptable(ref: SourceRef, folder: Path) -> Path:
    """Return a path to the trace that HTA accepts: it goes by the suffix, and reads gzip and plain JSON."""
    head = b""
    if ref.member is None:
        with ref.path.open("rb") as file:
            head = file.read(4)
    is_gzip = head.startswith(b"\x1f\x8b")
    target = folder / ("trace.json.gz" if is_gzip else "trace.json")
    if ref.member is not None or head.startswith(b"\x28\xb5\x2f\xfd"):
        with target.open("wb") as out:
            out.writelines(BlockReader(ref))
        return target
    try:
        target.symlink_to(ref.path.resolve())
    except OSError:
        shutil.copyfile(ref.path, target)
    return target


def _known(value: Any) -> float | None:
    figure = float(value)
    return figure if math.isfinite(figure) else None


def same_figure(theirs: float | None, ours: float | None) -> bool:
    """Tell whether two figures agree, unknown ones included."""
    if theirs is None or ours is None:
        return theirs is ours
    return math.isclose(theirs, ours, rel_tol=1e-9, abs_tol=1e-6)


def _breakdown(loaded: Any) -> dict[str, float | None]:
    frame = loaded.get_temporal_breakdown(visualize=False)
    return {name: _known(frame[column].iloc[0]) for name, column in _BREAKDOWN.items()}


def _overlap(loaded: Any) -> dict[str, float | None]:
    frame = loaded.get_comm_comp_overlap(visualize=False)
    return {"comp_comm_overlap_pctg": _known(frame["comp_comm_overlap_pctg"].iloc[0])}


def _idle(loaded: Any, rank: int) -> dict[str, float]:
    frame, _ = loaded.get_idle_time_breakdown(ranks=[rank], visualize=False)
    sums = frame.groupby("idle_category")["idle_time"].sum()
    return {str(cause): float(value) for cause, value in sums.items()}


def _critical_path(loaded: Any, rank: int, num_steps: int) -> dict[str, float]:
    """Return what bounds the critical path of the second step (HTA: the first lacks events)."""
    if not num_steps:
        raise _Impossible("the trace has no ProfilerStep marks")
    graph, found = loaded.critical_path_analysis(rank, "ProfilerStep", 1 if num_steps > 2 else 0)
    if not found:
        raise _Impossible("it reports failure")
    shares = {str(cause): _known(share) for cause, share in graph.summary().items() if cause}
    return {cause: round(share, 2) for cause, share in shares.items() if share is not None}


def figure_text(value: float | None) -> str:
    """Return a figure as precisely as the two sides are compared."""
    return "unknown" if value is None else f"{value:.10g}"
