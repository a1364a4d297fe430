"""Compares the analysis of big traces with HTA's and with merely parsing the JSON.

    python benchmarks/bench_analyze.py [--quick] [--repeats N]

Every measurement is a fresh process; the kinds take turns (A B C A B C ...), so that drift of the
machine hits all alike. Single-file kinds are pinned to one core. CPU seconds and wall time count
from the moment all imports are done; what the process spent in all is shown beside them. The last
line of the output is JSON.

What runs: ``ours`` reads one trace and builds the analysis; ``hta`` loads it with HTA's defaults
and computes its overlap and its temporal breakdown; ``simdjson`` decompresses and parses the JSON
and does nothing else, in chunks or as a whole, which is the least a reader can cost; ``cache_*``
analyse the same trace twice with a cache; ranks are files analysed together by two processes. Ours
keeps the rows it needs, HTA keeps all: reading less is part of the design.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent
INPUTS = ROOT.parent / ".bench"
SIZES_MB = (60, 600)
SCALE_RANKS = (8, 16, 32, 64, 256)
GENERATOR = ("recording.py", "gpu_layout.py", "gpu_rendering.py", "make_traces.py")
_BOUNDARY = b"\n  },\n  {"
_CHUNK_BYTES = 512 * 1024
_OUTPUT_BYTES = 1 << 20  # unbounded buffers cost isal twice the time
_SAMPLE_S = 0.05
_WIDTHS = ("<16", ">9", ">9", ">9", ">9", ">9", ">9", ">12")
TARGETS: dict[str, tuple[str, float]] = {
    "hta_cpu_ratio_60": (">=", 40.0),
    "hta_cpu_ratio_600": (">=", 40.0),
    "simdjson_ratio_60": ("<=", 2.0),
    "simdjson_ratio_600": ("<=", 1.5),
    "rss_ratio_600": (">=", 8.0),
    "cache_speedup_600": (">=", 10.0),
    "scale_64_time_per_mb_ratio": ("<=", 1.3),
    "scale_256_peak_rss_mb": ("<=", 300.0),
}


# ---- measured in child processes ----------------------------------------------------------------


def _used() -> tuple[float, float]:
    """Return the CPU seconds of this process and its ended children, and the wall clock."""
    import resource

    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in spent), time.perf_counter()


def _measure(work: Callable[[], int]) -> dict[str, Any]:
    """Run work once and say what it used; ``rows`` is what it returned."""
    import gc
    import resource

    # What imports left behind is no part of the work: the collector need not walk it.
    gc.collect()
    gc.freeze()
    cpu, wall = _used()
    rows = work()
    cpu_end, wall_end = _used()
    peaks = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "rows": rows,
        "cpu_s": cpu_end - cpu,
        "cpu_total_s": cpu_end,
        "wall_s": wall_end - wall,
        "rss_mb": peaks[0],
        "worker_rss_mb": peaks[1],
    }


def _import_ours() -> None:
    """Import what the analysis imports when it first needs it."""
    modules = (
        "advisor.analysis.build",
        "advisor.facts.reading.all_inputs",
        "advisor.facts.rank_facts",
        "trace_parsers.read",
    )
    for name in ("isal.isal_zlib", "numpy.ma", "polars", *(f"paro_advise.{module}" for module in modules)):
        importlib.import_module(name)


def _child_ours(paths: list[Path], _: Path) -> dict[str, Any]:
    _import_ours()
    from paro_advise.advisor.analysis.build import build_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.facts.rank_facts import rank_facts
    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.read import read_source

    def work() -> int:
        facts = rank_facts(read_source(SourceRef(path=paths[0])))
        build_analysis([facts], facts.notices, Options())
        return facts.num_events

    return _measure(work)


def _child_gather(paths: list[Path], cache: Path, jobs: int = 1) -> dict[str, Any]:
    _import_ours()
    from paro_advise.advisor.analysis.build import build_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.facts.reading.all_inputs import read_all
    from paro_advise.advisor.facts.reading.choice import EngineChoice
    from paro_advise.trace_parsers.bytes.blocks import SourceRef

    refs = [SourceRef(path=path) for path in paths]

    def work() -> int:
        found = read_all(
            refs, is_collection=True, cache=None if jobs > 1 else str(cache), choice=EngineChoice(jobs=jobs)
        )
        build_analysis(found.facts, found.notices, Options())
        return sum(facts.num_events for facts in found.facts)

    return _measure(work)


def _child_scale(paths: list[Path], cache: Path) -> dict[str, Any]:
    return _child_gather(paths, cache, jobs=2)


def _child_hta(paths: list[Path], _: Path) -> dict[str, Any]:
    import logging
    import warnings

    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")

    def work() -> int:
        analysis = TraceAnalysis(trace_files={0: str(paths[0])}, trace_dir=str(paths[0].parent))
        analysis.get_comm_comp_overlap(visualize=False)
        analysis.get_temporal_breakdown(visualize=False)
        return len(analysis.t.traces[0])

    return _measure(work)


def _child_simdjson(paths: list[Path], _: Path) -> dict[str, Any]:
    """Decompress and parse chunks of whole events, nothing else."""
    import simdjson
    from isal import isal_zlib

    def blocks() -> Any:
        stream = isal_zlib.decompressobj(31)
        with paths[0].open("rb") as file:
            while data := file.read(128 * 1024):
                while data:
                    yield stream.decompress(data, _OUTPUT_BYTES)
                    data = stream.unconsumed_tail or stream.unused_data
                    if stream.eof:
                        stream = isal_zlib.decompressobj(31)

    def work() -> int:
        parser: Any = simdjson.Parser()
        events, parts, size, started = 0, [], 0, False
        for block in blocks():
            parts.append(block)
            size += len(block)
            if size < _CHUNK_BYTES:
                continue
            text = b"".join(parts)
            if not started:
                text = text[text.index(b'"traceEvents": [') :]
                text = text[text.index(b"{") + 1 :]
                started = True
            cut = text.rfind(_BOUNDARY)
            events += len(parser.parse(b"[{" + text[:cut] + b"}]"))
            parts = [text[cut + len(_BOUNDARY) :]]
            size = len(parts[0])
        text = b"".join(parts)
        return events + len(parser.parse(b"[{" + text[: text.rindex(b"]")] + b"]"))

    return _measure(work)


def _child_simdjson_whole(paths: list[Path], _: Path) -> dict[str, Any]:
    """Decompress and parse the document in one piece."""
    import simdjson
    from isal import igzip

    def work() -> int:
        with igzip.open(paths[0], "rb") as file:
            document: Any = simdjson.Parser().parse(file.read())
            return len(document["traceEvents"])

    return _measure(work)


CHILDREN: dict[str, Callable[[list[Path], Path], dict[str, Any]]] = {
    "ours": _child_ours,
    "hta": _child_hta,
    "simdjson": _child_simdjson,
    "simdjson_whole": _child_simdjson_whole,
    "cache_first": _child_gather,
    "cache_second": _child_gather,
    "scale": _child_scale,
}


# ---- the run ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Series:
    """The measurements of one kind on one size."""

    kind: str
    megabytes: float
    samples: list[dict[str, Any]] = field(default_factory=list)

    def median(self, key: str) -> float:
        """Return the median over the repetitions."""
        return statistics.median(sample[key] for sample in self.samples)


def launch(kind: str, paths: list[Path], cache: Path, *, is_pinned: bool = True) -> dict[str, Any]:
    """Measure one kind in a fresh process; samples the memory of its process tree as well."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", kind, "--cache", str(cache)]
    if is_pinned:
        command += ["--core", str(max(os.sched_getaffinity(0)))]
    threads = {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    child = subprocess.Popen(
        [*command, *map(str, paths)],
        env={**os.environ, **threads},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak = [0.0]
    watcher = threading.Thread(target=_watch, args=(child.pid, peak), daemon=True)
    watcher.start()
    out, errors = child.communicate()
    if child.returncode:
        raise RuntimeError(f"measuring {kind} failed:\n{errors[-2000:]}")
    watcher.join()
    return {**json.loads(out.splitlines()[-1]), "tree_rss_mb": peak[0]}


def _watch(pid: int, peak: list[float]) -> None:
    """Keep the highest sum of resident memory over a process and its descendants (MB)."""
    while (total := _tree_rss_mb(pid)) > 0:
        peak[0] = max(peak[0], total)
        time.sleep(_SAMPLE_S)


def _tree_rss_mb(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20 + sum(_tree_rss_mb(int(child)) for child in children)


def inputs(megabytes: int, ranks: int) -> list[Path]:
    """Return the traces of one size, made on first use."""
    version = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in GENERATOR)).hexdigest()[:8]
    folder = INPUTS / f"{version}-{megabytes}mb-{ranks}"
    if not folder.exists():
        print(f"making {ranks} x {megabytes} MB in {folder.name} ...", flush=True)
        partial = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(exist_ok=True)
        command = [sys.executable, str(ROOT / "make_traces.py"), str(partial), "--mb", str(megabytes)]
        subprocess.run([*command, "--ranks", str(ranks)], check=True, capture_output=True)
        partial.rename(folder)
    return sorted(folder.glob("rank*.json.gz"), key=lambda path: int(path.name.split("_")[0][4:]))


def json_megabytes(path: Path) -> float:
    """Return the size of the decompressed text in 10^6 bytes."""
    import gzip

    total = 0
    with gzip.open(path, "rb") as file:
        while block := file.read(1 << 22):
            total += len(block)
    return total / 1e6


def single_file(sizes: tuple[int, ...], repeats: int, hta_repeats_600: int) -> dict[tuple[str, int], Series]:
    """Measure all single-file kinds on all sizes, in turns."""
    kinds = ("ours", "hta", "simdjson", "simdjson_whole", "cache_first", "cache_second")
    paths = {size: inputs(size, 64 if size == 60 else 1)[:1] for size in sizes}
    series: dict[tuple[str, int], Series] = {}
    for size in sizes:
        megabytes = json_megabytes(paths[size][0])
        series |= {(kind, size): Series(kind, megabytes) for kind in kinds}
    for turn in range(repeats):
        for size in sizes:
            with tempfile.TemporaryDirectory() as folder:
                for kind in kinds:
                    if size == 600 and (kind == "simdjson_whole" or (kind == "hta" and turn >= hta_repeats_600)):
                        continue
                    series[kind, size].samples.append(launch(kind, paths[size], Path(folder)))
                    print(f"turn {turn + 1}/{repeats}: {size} MB {kind}", file=sys.stderr, flush=True)
    return {key: item for key, item in series.items() if item.samples}


def many_ranks(counts: tuple[int, ...]) -> dict[int, Series]:
    """Measure the analysis of many files with two processes."""
    paths = inputs(60, 64)
    megabytes = json_megabytes(paths[0])
    # Beyond 64 files the same ones stand again under other names: each is read, then left out as a rank's second trace.
    again = INPUTS / "again"
    again.mkdir(exist_ok=True)
    for number in range(len(paths), max(counts, default=0)):
        link = again / f"again{number}_{paths[number % len(paths)].name}"
        link.unlink(missing_ok=True)
        os.link(paths[number % len(paths)], link)
        paths.append(link)
    out = {}
    for count in counts:
        out[count] = Series("scale", megabytes * count)
        out[count].samples.append(launch("scale", paths[:count], INPUTS, is_pinned=False))
    return out


# ---- what it says -------------------------------------------------------------------------------


def figures_of(single: dict[tuple[str, int], Series], scale: dict[int, Series]) -> dict[str, float]:
    """Return all figures by name."""
    out: dict[str, float] = {}
    for size in sorted({size for _, size in single}):
        ours = single["ours", size]
        cpu = ours.median("cpu_s")
        floors = [
            single[kind, size].median("cpu_s") for kind in ("simdjson", "simdjson_whole") if (kind, size) in single
        ]
        first, second = single["cache_first", size], single["cache_second", size]
        out |= {
            f"ours_cpu_s_{size}": cpu,
            f"ours_mb_per_s_{size}": ours.megabytes / cpu,
            f"ours_rss_mb_{size}": ours.median("rss_mb"),
            f"hta_cpu_s_{size}": single["hta", size].median("cpu_s"),
            f"hta_cpu_ratio_{size}": single["hta", size].median("cpu_s") / cpu,
            f"hta_cpu_ratio_with_imports_{size}": single["hta", size].median("cpu_total_s")
            / ours.median("cpu_total_s"),
            f"simdjson_cpu_s_{size}": min(floors),
            f"simdjson_ratio_{size}": cpu / min(floors),
            f"rss_ratio_{size}": single["hta", size].median("rss_mb") / ours.median("rss_mb"),
            f"cache_speedup_{size}": first.median("wall_s") / second.median("wall_s"),
            f"cache_cpu_speedup_{size}": first.median("cpu_s") / second.median("cpu_s"),
        }
    per_mb = {}
    for count, item in scale.items():
        per_mb[count] = item.median("wall_s") / item.megabytes * 1000
        out |= {
            f"scale_{count}_wall_s": item.median("wall_s"),
            f"scale_{count}_ms_per_mb": per_mb[count],
            f"scale_{count}_peak_rss_mb": max(item.median("rss_mb"), item.median("worker_rss_mb")),
            f"scale_{count}_sum_rss_mb": item.median("tree_rss_mb"),
            f"scale_{count}_cpu_utilisation": item.median("cpu_s") / item.median("wall_s"),
        }
    if len(per_mb) > 1:
        most, least = max(per_mb), min(per_mb)
        out[f"scale_{most}_time_per_mb_ratio"] = per_mb[most] / per_mb[least]
    return {name: round(value, 4) for name, value in out.items()}


def print_tables(single: dict[tuple[str, int], Series], scale: dict[int, Series]) -> None:
    """Print medians and ratios."""
    heads = ("kind", "JSON MB", "runs", "CPU s", "+imports", "wall s", "RSS MB", "CPU / ours")
    print("\n" + "".join(f"{head:{width}}" for head, width in zip(heads, _WIDTHS, strict=True)))
    for (kind, size), item in sorted(single.items(), key=lambda pair: pair[0][1]):
        ratio = item.median("cpu_s") / single["ours", size].median("cpu_s")
        print(
            f"{kind:<16}{item.megabytes:>9.1f}{len(item.samples):>9}{item.median('cpu_s'):>9.3f}"
            f"{item.median('cpu_total_s'):>9.3f}{item.median('wall_s'):>9.3f}{item.median('rss_mb'):>9.0f}{ratio:>12.2f}"
        )
    heads = ("ranks", "JSON MB", "wall s", "ms / MB", "CPU s", "CPU use", "RSS max", "RSS sum")
    print("\n" + "".join(f"{head:{width}}" for head, width in zip(heads, _WIDTHS, strict=True)))
    for count, item in scale.items():
        wall, cpu = item.median("wall_s"), item.median("cpu_s")
        biggest = max(item.median("rss_mb"), item.median("worker_rss_mb"))
        print(
            f"{count:<16}{item.megabytes:>9.0f}{wall:>9.2f}{wall / item.megabytes * 1000:>9.2f}{cpu:>9.2f}"
            f"{cpu / wall:>9.2f}{biggest:>9.0f}{item.median('tree_rss_mb'):>12.0f}"
        )


def verdict(figures: dict[str, float]) -> dict[str, Any]:
    """Compare the figures that were measured with their targets."""
    targets = {}
    for name, (sign, bound) in TARGETS.items():
        if name in figures:
            met = figures[name] >= bound if sign == ">=" else figures[name] <= bound
            targets[name] = {"target": f"{sign} {bound:g}", "value": figures[name], "met": met}
    return {
        "name": "bench-analyze",
        "figures": figures,
        "targets": targets,
        "met": all(item["met"] for item in targets.values()),
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="60 MB only, one repetition, few ranks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hta-repeats", type=int, default=2, help="of HTA at 600 MB, where a run takes a minute")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(SCALE_RANKS), help="counts of files, 64 at most")
    parser.add_argument("--child", choices=sorted(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, default=INPUTS, help=argparse.SUPPRESS)
    parser.add_argument("paths", type=Path, nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        if args.core is not None:
            os.sched_setaffinity(0, {args.core})
        print(json.dumps(CHILDREN[args.child](args.paths, args.cache)))
        return 0
    repeats = 1 if args.quick else args.repeats
    counts = tuple(args.ranks)[:2] if args.quick else tuple(args.ranks)
    hta_repeats = min(repeats, args.hta_repeats)
    single = single_file(SIZES_MB[:1] if args.quick else SIZES_MB, repeats, hta_repeats)
    scale = many_ranks(counts)
    print_tables(single, scale)
    if not args.quick and hta_repeats < repeats:
        print(f"\nmedians; HTA at 600 MB ran {hta_repeats} times, everything else {repeats} times, ranks once")
    print(json.dumps(verdict(figures_of(single, scale))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
