"""Collects what a training log says about itself: step times, sizes, framework, faults."""

from __future__ import annotations

import re
from array import array
from statistics import median

from paro_advise.core.framework import Framework
from paro_advise.trace_parsers.logs.constants import MAX_FAULTS, MAX_HINTS, MAX_LIST_TEXT, MAX_VALUES
from paro_advise.trace_parsers.values import parse_float

_STEP = re.compile(r"\biteration\s{1,20}(\d{1,9})\s{0,20}/\s{0,20}(\d{1,9})\b")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\):\s{0,20}([\d.eE+-]{1,20})")
_BATCH = re.compile(r"global batch size:\s*(\d{1,9})")
_RUNTIME = re.compile(r"'train_runtime': '?([\d.eE+-]{1,20})")
_TOTAL_STEPS = re.compile(r"Total optimization steps = ([\d,]{1,12})")
_RESUMED = re.compile(r"Continuing training from global step (\d{1,9})")
_PROGRESS = re.compile(r"(\d{1,9})/(\d{1,9}) \[[\d:]{4,12}<[\d:?]{1,12}, +([\d.]{1,12})(s/it|it/s)")
_SAMPLES = re.compile(r"\b(?:Curr)?SamplesPerSec=([\d.eE+-]{1,24})")
# DeepSpeed's wall_clock_breakdown; without the loading of data.
_PASSES = re.compile(r"time \(ms\) \| fwd: ([\d.]{1,20}) \| bwd: ([\d.]{1,20}) \|.{0,200}\| step: ([\d.]{1,20})")
_TOKENS = re.compile(r"\btps:\s{0,20}([\d,]{1,12})")
_WORLD = (
    re.compile(r"using world size:\s*(\d{1,7})"),
    re.compile(r"\bdist_world_size=(\d{1,7})"),
    re.compile(r"\bworld_size \.{3,80} (\d{1,7})\s*$"),
)
_SIZES = re.compile(r"(data|tensor-model|pipeline-model|model|sequence)-parallel[- ]size:\s*(\d{1,7})")
_ZERO = re.compile(r"\bzero(?:_optimization)?_stage \.{3,80} (\d)\b|--zero-stage[ =](\d)\b")
_LAUNCH = re.compile(r"--(nproc[_-]per[_-]node|nnodes)[ =](\d{1,6})\b")
_FAULT_RANKS = re.compile(r"\bFault ranks: \[([\d, ]{0,4000})\]")
_FAULT_TYPE = re.compile(r"\bRank (\d{1,7}), fault_type: (\w{1,40})")
_HINTS = (
    ("torchtitan", "torchtitan"),
    ("Megatron", "megatron"),
    ("megatron", "megatron"),
    ("DeepSpeed", "deepspeed"),
    ("deepspeed", "deepspeed"),
    ("RunningAvgSamplesPerSec=", "deepspeed"),
    ("| bwd_allreduce", "deepspeed"),
    ("'train_runtime'", "hf_trainer"),
    ("[INFO|trainer.py", "hf_trainer"),
)


class TrainingFacts:
    """Facts found so far; ``metadata`` names them with their units.

    Attributes:
        world_size, gpus_per_node, num_nodes: as the log says, None when it is silent.
    """

    def __init__(self) -> None:
        self.gpus_per_node: int | None = None
        self.num_nodes: int | None = None
        self._world: list[int | None] = [None] * len(_WORLD)
        self._step_ms = array("d")
        self._last_step = -1
        self._passes_ms = array("d")
        self._samples = array("d")
        self._tokens = array("d")
        self._facts: dict[str, str] = {}
        self._runtime_s: float | None = None
        self._steps_done = self._steps_before = 0
        self._hints: set[str] = set()
        self._faults: dict[int, str] = {}

    @property
    def world_size(self) -> int | None:
        """Return the number of ranks by the most reliable line that says it."""
        return next((size for size in self._world if size), None)

    @property
    def is_empty(self) -> bool:
        """Return whether no step, throughput or fault was found."""
        return not (
            self._step_ms
            or self._passes_ms
            or self._samples
            or self._tokens
            or self._runtime_s
            or self._faults
            or self._facts.get("fault_ranks")
        )

    def feed(self, line: str) -> None:
        """Take a line as it stands in the log."""
        if len(self._hints) < MAX_HINTS:
            self._hints.update(name for word, name in _HINTS if word in line)
        if "elapsed time per iteration" in line:
            self._read_step(line)
        elif "SamplesPerSec=" in line:
            self._append(self._samples, _SAMPLES.findall(line)[-1:])
        elif "| fwd: " in line and (passes := _PASSES.search(line)):
            parts = [part for text in passes.groups() if (part := parse_float(text)) is not None]
            if len(parts) == len(passes.groups()) and len(self._passes_ms) < MAX_VALUES:
                self._passes_ms.append(sum(parts))
        elif "'train_runtime'" in line and (found := _RUNTIME.search(line)):
            self._runtime_s = self._runtime_s or parse_float(found[1])
        elif "/it" in line or "it/s" in line:
            self._read_progress(line)
        elif "tps:" in line and "loss:" in line and (found := _TOKENS.search(line)):
            self._hints.add("torchtitan")
            self._append(self._tokens, [found[1].replace(",", "")])
        elif "world" in line or "Fault" in line or "fault_type" in line:
            self._read_sizes_and_faults(line)
        if "from global step" in line and (found := _RESUMED.search(line)):
            self._steps_before = int(found[1])
        if "optimization steps" in line and (found := _TOTAL_STEPS.search(line)):
            self._facts.setdefault("total_steps", found[1].replace(",", ""))
        if "zero" in line and (found := _ZERO.search(line)):
            self._facts.setdefault("zero_stage", found[1] or found[2])
        if "--n" in line:
            self._read_launch(line)

    def _append(self, column: array[float], texts: list[str]) -> None:
        values = [parse_float(text) for text in texts]
        column.extend(value for value in values if value and len(column) < MAX_VALUES)

    def _read_step(self, line: str) -> None:
        found, elapsed = _STEP.search(line), _ELAPSED.search(line)
        # Ranks that print the same line twice must not count twice.
        if found is None or elapsed is None or int(found[1]) == self._last_step:
            return
        self._last_step = int(found[1])
        value = parse_float(elapsed[2])
        if value and len(self._step_ms) < MAX_VALUES:
            self._step_ms.append(value * (1e3 if elapsed[1] == "s" else 1.0))
        self._facts.setdefault("total_steps", found[2])
        if batch := _BATCH.search(line):
            self._facts.setdefault("global_batch_size", batch[1])

    def _read_progress(self, line: str) -> None:
        total = self._facts.get("total_steps")
        for done, of, _, _ in _PROGRESS.findall(line)[-1:]:
            if of == total:
                self._steps_done = max(self._steps_done, int(done))

    def _read_sizes_and_faults(self, line: str) -> None:
        for index, pattern in enumerate(_WORLD):
            if self._world[index] is None and (found := pattern.search(line)):
                self._world[index] = int(found[1]) or None
                for name, size in _SIZES.findall(line):
                    self._facts.setdefault(f"{name.replace('-', '_')}_parallel_size", size)
        if found := _FAULT_RANKS.search(line):
            self._facts.setdefault("fault_ranks", found[1].replace(" ", "")[:1000])
        if (found := _FAULT_TYPE.search(line)) and len(self._faults) < MAX_FAULTS:
            self._faults[int(found[1])] = found[2]

    def _read_launch(self, line: str) -> None:
        for name, value in _LAUNCH.findall(line):
            if name == "nnodes":
                self.num_nodes = self.num_nodes or int(value) or None
            else:
                self.gpus_per_node = self.gpus_per_node or int(value) or None

    @property
    def median_iteration_us(self) -> float | None:
        """Return the median time of an iteration, None where the log gives none."""
        return 1e3 * median(self._step_ms) if self._step_ms else None

    @property
    def mean_iteration_us(self) -> float | None:
        """Return the mean time of an iteration where the log gives only the whole time, else None."""
        num_steps = self._steps_since_start
        return self._runtime_s * 1e6 / num_steps if not self._step_ms and self._runtime_s and num_steps else None

    @property
    def _steps_since_start(self) -> int:
        """Return the steps that the time of the whole run is of: those before a resumed one are not."""
        return max(0, self._steps_done - self._steps_before)

    @property
    def framework(self) -> Framework:
        """Return what shards the model: DeepSpeed under whatever wraps it, Megatron-LM alone, torchtitan's FSDP2."""
        named = {"deepspeed": Framework.DEEPSPEED, "torchtitan": Framework.FSDP2, "megatron": Framework.MEGATRON}
        return next((framework for hint, framework in named.items() if hint in self._hints), Framework.UNKNOWN)

    @property
    def zero_stage(self) -> int | None:
        """Return DeepSpeed's stage of ZeRO, None where the log does not say."""
        stage = self._facts.get("zero_stage")
        return int(stage) if stage else None

    def metadata(self) -> dict[str, str]:
        """Return the facts; times in ms, throughputs per second."""
        out = dict(self._facts)
        if self._step_ms:
            out["iteration_count"] = str(len(self._step_ms))
            out["median_iteration_ms"] = f"{median(self._step_ms):.3f}"
        elif self.mean_iteration_us:
            out["iteration_count"] = str(self._steps_since_start)
            out["mean_iteration_ms"] = f"{self.mean_iteration_us / 1e3:.3f}"
        if self._passes_ms:
            out["median_passes_and_update_ms"] = f"{median(self._passes_ms):.3f}"
        if self._samples:
            out["median_samples_per_second"] = f"{median(self._samples):.6g}"
        if self._tokens:
            out["median_tokens_per_second"] = f"{median(self._tokens):.6g}"
        if self._faults:
            out["fault_types"] = ",".join(f"{rank}:{kind}" for rank, kind in sorted(self._faults.items()))[
                :MAX_LIST_TEXT
            ]
        if self._hints:
            out["framework"] = "+".join(sorted(self._hints))
        return dict(sorted(out.items()))
