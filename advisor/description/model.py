"""The description of a run, as its TOML file has it (docs/descriptions.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

Positive = Annotated[float, Meta(ge=1e-3, le=1e15)]
Rate = Annotated[float, Meta(ge=1e-3, le=1e6)]  # 1e9 bytes/s
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Blocks = Annotated[int, Meta(ge=1, le=2_000)]
Percent = Annotated[float, Meta(ge=0.01, le=100)]
Name = Annotated[str, Meta(max_length=200)]
ElementType = Literal["fp32", "bf16", "fp16"]
ELEMENT_BYTES: dict[ElementType, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class BytesPerParameter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes per parameter of each model state."""

    parameter: Positive = 2.0
    gradient: Positive = 2.0
    optimizer: Positive = 12.0


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained.

    Attributes:
        parameters: of the whole model.
        trained_parameters: those that have gradients; None for all.
        layers: blocks that are sent at once; None where they are not known.
        sequence_length: tokens of a sample.
        parameter_type, gradient_type: in which parameters are gathered and gradients reduced.
        bytes_per_parameter: of each model state, None for mixed-precision Adam.
    """

    parameters: Positive
    trained_parameters: Positive | None = None
    layers: Blocks | None = None
    sequence_length: Count | None = None
    parameter_type: ElementType = "bf16"
    gradient_type: ElementType = "bf16"
    bytes_per_parameter: BytesPerParameter | None = None


class RatesByNodes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bus bandwidths (1e9 bytes/s, as nccl-tests print them) by number of nodes, whose ranks all take part.

    Attributes:
        all_gather, reduce_scatter, all_reduce: rates by number of nodes.
        message: size of the whole buffer, such as "256MB".
    """

    all_gather: dict[Count, Rate] = field(default_factory=dict)
    reduce_scatter: dict[Count, Rate] = field(default_factory=dict)
    all_reduce: dict[Count, Rate] = field(default_factory=dict)
    message: str = "256MB"


class Cluster(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where it runs.

    Attributes:
        nodes, gpus_per_node: of the job.
        device: name of the accelerator, such as "H100".
        device_memory: of one, such as "80GiB".
        peak_tflops: dense 16-bit matrix products of one, 1e12 operations/s; None for the data sheet's.
        inter_gbps: what a node's network cards move together in one direction, 1e9 bytes/s.
        intra_gbps: what a collective inside a node reaches, bus bandwidth in 1e9 bytes/s.
        links: what benchmarks measured.
        nodes_per_pod: nodes of a faster interconnect domain.
    """

    nodes: Count
    gpus_per_node: Annotated[int, Meta(ge=1, le=1024)]
    device: Name = ""
    device_memory: str | None = None
    peak_tflops: Positive | None = None
    inter_gbps: Rate | None = None
    intra_gbps: Rate | None = None
    links: RatesByNodes | None = None
    nodes_per_pod: Count | None = None


class Parallel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks that share a model beside data parallelism; tensor parallelism is laid inside nodes first."""

    tensor: Count = 1
    pipeline: Count = 1


class DescribedRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How it runs, and how fast.

    Attributes:
        framework: that trains.
        strategy: "GGG", "III/8".
        micro_batches: of a step.
        micro_batch_size: samples of one on a rank.
        step_time_ms, tokens_per_s, mfu_pct: the measured step, one of the three: milliseconds; of the whole job;
            share of the peak, counting 6 operations a parameter and token.
        compute_mfu_pct: where nothing was measured, what arithmetic alone should reach, from and to.
        measured_peak: memory of a rank, such as "61GiB".
        reductions_beside_backward: strategies whose reductions the framework runs beside backward; None for all.
    """

    framework: Literal["fsdp2", "fsdp1", "ddp", "deepspeed", "megatron", "torchtitan", "other"] = "other"
    strategy: str
    micro_batches: Count = 1
    micro_batch_size: Count = 1
    step_time_ms: Positive | None = None
    tokens_per_s: Positive | None = None
    mfu_pct: Percent | None = None
    compute_mfu_pct: tuple[Percent, Percent] | None = None
    measured_peak: str | None = None
    reductions_beside_backward: tuple[str, ...] | None = None


class Description(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run in people's words."""

    model: Model
    cluster: Cluster
    run: DescribedRun
    parallel: Parallel = field(default_factory=Parallel)
