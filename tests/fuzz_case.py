"""One damaged input through the command line, and what must hold whatever the damage is.

No traceback and no defect of ours, at most 10 s of CPU time and 1 GB of memory, no control character in any output,
and no other verdict without a word when more than 1 % of the file was damaged. Damage that leaves a sound document
(a number that became another number) cannot be seen by any reader and is counted apart.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import signal
import sqlite3
import tarfile
import time
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from input_samples import Sample, samples, sealed
from mutation import Mutation, mutate

from paro_advise.advisor.cli import run

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CPU_S = 10.0
MAX_PEAK_MB = 1024
SILENT_SHARE = 0.01  # of a file; damage above it must be said where the verdict changes
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_DEFECTS = ("Traceback", "E100", "E101", "defect of paro-advise", "Warning:")
_DAMAGE_CODES = ("Q10", "Q2", "Q30")  # of notices that speak of what was lost or left out
_CONTAINER_SHARE = 0.5  # of packed inputs whose container is damaged instead of its content
_VALUES_SHARE = 0.8  # of strict documents in which only values are changed
_WITHOUT_PAGE = 2  # of three analyses, those that write no page


class LateError(BaseException):
    """A case ran longer than it may; no handler for ordinary errors may swallow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A damaged input.

    Attributes:
        number: by which it can be made again.
        sample: what was damaged.
        mutation: of its content, or of what it is packed in.
        content: of the file to write.
        is_container_damaged: the mutation is that of the packed file.
    """

    number: int
    sample: Sample
    mutation: Mutation
    content: bytes
    is_container_damaged: bool

    @property
    def share(self) -> float:
        """Return how much of the file was damaged."""
        whole = self.sample.packed(self.sample.data) if self.is_container_damaged else self.sample.data
        return self.mutation.damaged_bytes / len(whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an analysis says.

    Attributes:
        what: regime, limiting state and case.
        notices: (code, message) of what it says of its data.
    """

    what: tuple[str, ...]
    notices: frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case.

    Attributes:
        result: "read", "refused", or "verdict said" and "verdict unseen" where the verdict changed: with a word on
            the damage, or because the damage left a sound document.
        failures: what must not happen but did.
        peak_mb: the most memory held, 1 MiB.
    """

    number: int
    kind: str
    result: str
    failures: tuple[str, ...]
    cpu_s: float
    peak_mb: float


def make_case(seed: int, number: int) -> Case:
    """Return a case; the same seed and number give the same one, as long as the samples stay the same."""
    rng = random.Random(f"{seed} {number}")
    known = samples()
    sample = known[number % len(known)]
    if sample.container and rng.random() < _CONTAINER_SHARE:
        damaged = mutate(sample.packed(sample.data), rng)
        return Case(number=number, sample=sample, mutation=damaged, content=damaged.data, is_container_damaged=True)
    damaged = mutate(sample.data, rng, only_values=sample.is_strict and rng.random() < _VALUES_SHARE)
    packed = sealed(damaged.data) if sample.kind == "plan" else sample.packed(damaged.data)
    return Case(number=number, sample=sample, mutation=damaged, content=packed, is_container_damaged=False)


def run_case(case: Case, folder: Path) -> Outcome:
    """Write a case into an empty folder, read it and judge what came out."""
    sample = case.sample
    begin = time.process_time()
    _reset_peak()
    with_page = case.number // len(samples()) % 3 >= _WITHOUT_PAGE
    code, texts = _read(sample, case.content, folder, with_page=with_page)
    cpu_s, peak_mb = time.process_time() - begin, _peak_mb()
    failures = _failures(code, texts, cpu_s, peak_mb)
    result = "read" if code in (0, 5) else "refused"
    if sample.verb == "analyze" and code == 0 and not failures:
        before, now = _sound_verdict(sample), _verdict(texts["r.json"])
        if before.what != now.what:
            is_said = any(note[0].startswith(_DAMAGE_CODES) for note in now.notices - before.notices)
            result = "verdict said" if is_said or case.share <= SILENT_SHARE else "verdict unseen"
            if result == "verdict unseen" and not _is_sound(case):
                failures = (f"silent: {before.what} became {now.what}, {case.share:.0%} damaged",)
    return Outcome(number=case.number, kind=sample.kind, result=result, failures=failures, cpu_s=cpu_s, peak_mb=peak_mb)


def _read(sample: Sample, content: bytes, folder: Path, *, with_page: bool) -> tuple[int, dict[str, str]]:
    """Run the command; return its exit code and the text of everything it wrote."""
    source, written = folder / "in", folder / "out"
    source.mkdir()
    written.mkdir()
    path = source / sample.file_name
    path.write_bytes(content)
    for name, data in sample.beside:
        (source / name).write_bytes(data)
    words = [sample.verb, *(word.format(file=path, dir=source) for word in sample.words)]
    match sample.verb:
        case "analyze":
            words += ["--json", str(written / "r.json"), "--jobs", "1"]
            words += ["-o", str(written / "r.html")] if with_page else []
        case "recommend":
            words += ["-o", str(written / "plan.json"), "--html", str(written / "plan.html")]
        case "compare":
            words += ["--json", str(written / "c.json"), "-o", str(written / "c.html")]
    os.environ["PARO_ADVISE_CACHE"] = str(folder / "cache")
    out, err = io.BytesIO(), io.BytesIO()
    with _streams(out, err), warnings.catch_warnings(), cpu_deadline(MAX_CPU_S):
        warnings.simplefilter("error")
        try:
            code = run(words)
        except LateError:
            code = -1
    found = {"stdout": out.getvalue(), "stderr": err.getvalue()}
    found |= {item.name: item.read_bytes() for item in written.iterdir()}
    return code, {name: data.decode("utf-8", "surrogateescape") for name, data in found.items()}


@contextlib.contextmanager
def _streams(out: io.BytesIO, err: io.BytesIO) -> Iterator[None]:
    """Catch both streams with the error handlers that Python gives them."""
    stdout = io.TextIOWrapper(out, "utf-8", "strict", write_through=True)
    stderr = io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield
    stdout.detach()
    stderr.detach()


@contextlib.contextmanager
def cpu_deadline(seconds: float) -> Iterator[None]:
    """Raise LateError after so much CPU time of this process, however busy the machine is."""

    def stop(_signal: int, _frame: object) -> None:
        raise LateError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _failures(code: int, texts: dict[str, str], cpu_s: float, peak_mb: float) -> tuple[str, ...]:
    found = []
    if code == -1 or cpu_s > MAX_CPU_S:
        found.append(f"took {cpu_s:.1f} s of CPU time")
    if peak_mb > MAX_PEAK_MB:
        found.append(f"held {peak_mb:.0f} MiB")
    said = texts["stderr"]
    if defect := next((word for word in _DEFECTS if word in said), ""):
        found.append(f"{defect}: {said[max(0, said.index(defect) - 80) :][:300]!r}")
    elif code not in (0, 2, 3, 4, 5) and "error[E" not in said:
        found.append(f"exit code {code}: {said[-300:]!r}")
    for name, text in texts.items():
        if hit := CONTROL.search(text):
            found.append(f"control character in {name}: {text[max(0, hit.start() - 60) : hit.end() + 20]!r}")
        if "<script>alert" in text and name.endswith(".html"):
            found.append(f"script in {name}")
        if any("\ud800" <= char <= "\udfff" for char in text if not text.isascii()):
            found.append(f"{name} is not UTF-8")
        if name.endswith(".json") and (problem := _json_problem(text)):
            found.append(f"{name} is no JSON: {problem}")
    return tuple(found)


def _json_problem(text: str) -> str:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return str(error)[:200]
    return ""


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _verdict(text: str) -> Verdict:
    analysis = json.loads(text)
    found = analysis["verdict"]
    notices = frozenset((note["code"], note["message"]) for note in analysis["data_quality"])
    return Verdict(what=(found["regime"], str(found["limiting_state"]), found["case"]), notices=notices)


@cache
def _sound_verdict(sample: Sample) -> Verdict:
    """Return the verdict on an undamaged sample."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        code, texts = _read(sample, sample.packed(sample.data), Path(name), with_page=False)
    if code:
        raise RuntimeError(f"a sound {sample.kind} was refused: {texts['stderr'][-300:]}")
    return _verdict(texts["r.json"])


def _is_sound(case: Case) -> bool:
    """Tell whether damage left a document in which nothing is broken, so that no reader could notice."""
    content = case.content
    if case.is_container_damaged:
        try:
            return all(map(_is_json, _unpacked(content, case.sample.container)))
        except Exception:  # noqa: BLE001 - whatever a strict reader of any container raises
            return False
    if content.startswith(b"SQLite format 3\0"):
        return _is_sound_database(content)
    texts = case.mutation.data.splitlines() if case.sample.name.endswith("l") else [case.mutation.data]
    return all(map(_is_json, texts))


def _unpacked(content: bytes, container: str) -> list[bytes]:
    import bz2
    import gzip
    import lzma

    import zstandard

    match container.rpartition(".")[2]:
        case "gz":
            raw = gzip.decompress(content)
        case "bz2":
            raw = bz2.decompress(content)
        case "xz":
            raw = lzma.decompress(content)
        case "zst":
            raw = zstandard.ZstdDecompressor().stream_reader(content).read()
        case _:
            raw = content
    if not container.startswith("tar"):
        return [raw]
    with tarfile.open(fileobj=io.BytesIO(raw), errorlevel=2) as archive:
        members = [file.read() for info in archive if (file := archive.extractfile(info))]
    if len(members) != 2:
        raise ValueError("a member is lost")
    return members


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text.decode("utf-8", "replace"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _is_sound_database(content: bytes) -> bool:
    connection = sqlite3.connect(":memory:")
    try:
        connection.deserialize(content)
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    except sqlite3.Error:
        return False
    finally:
        connection.close()


def _reset_peak() -> None:
    """Make the kernel forget the most memory that this process held, where it can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
