"""What vendors' data sheets say of accelerators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        mark: what its name holds.
        peak_tflops: dense 16-bit matrix products, 1e12 operations/s.
        memory_gbps: of its memory, 1e9 bytes/s.
    """

    mark: str
    peak_tflops: float
    memory_gbps: float


# Vendors' data sheets, SXM or OAM modules, without sparsity.
DEVICES = (
    Device(mark="B200", peak_tflops=2250, memory_gbps=8000),
    Device(mark="GH200", peak_tflops=989.4, memory_gbps=4000),
    Device(mark="H200", peak_tflops=989.4, memory_gbps=4800),
    Device(mark="H100", peak_tflops=989.4, memory_gbps=3350),
    Device(mark="H800", peak_tflops=989.4, memory_gbps=3350),
    Device(mark="A100", peak_tflops=312, memory_gbps=2039),
    Device(mark="A800", peak_tflops=312, memory_gbps=2039),
    Device(mark="V100", peak_tflops=125, memory_gbps=900),
    Device(mark="MI300", peak_tflops=1307, memory_gbps=5300),
)


def device_named(name: str) -> Device | None:
    """Return the device that a name means, None where none is known."""
    return next((device for device in DEVICES if device.mark in name.upper()), None)
