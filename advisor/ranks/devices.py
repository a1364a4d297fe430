"""What vendors' data sheets say of accelerators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        mark: what its name holds.
        peak_tflops: dense 16-bit matrix products, 1e12 operations/s; None where the name does not tell.
        memory_gbps: of its memory, 1e9 bytes/s; None where the name does not tell.
        links_gbps: what it sends to the others of its node, one direction, 1e9 bytes/s; None without such links.
    """

    mark: str
    peak_tflops: float | None
    memory_gbps: float | None
    links_gbps: float | None


# Vendors' data sheets, without sparsity; the first whose mark a name holds. Cards without links of their own first;
# bridges that join pairs count as none.
DEVICES = tuple(
    Device(mark=mark, peak_tflops=peak, memory_gbps=memory, links_gbps=links)
    for mark, peak, memory, links in (
        ("Laptop GPU", None, None, None), ("RTX A", None, None, None),
        ("H100 PCIe", 756.0, 2000.0, None), ("H100 NVL", 835.0, 3938.0, None),
        ("GB200", 2500.0, 8000.0, 900.0), ("B200", 2250.0, 8000.0, 900.0), ("B300", 2250.0, 8000.0, 900.0),
        ("GH200", 989.0, 4000.0, 450.0), ("H200", 989.0, 4800.0, 450.0), ("H20", 148.0, 4000.0, 450.0),
        ("H100", 989.0, 3350.0, 450.0),
        ("H800", 989.0, 3350.0, 200.0), ("A800", 312.0, 2039.0, 200.0), ("A100", 312.0, 2039.0, 300.0),
        ("V100", 125.0, 900.0, 150.0), ("L40S", 362.0, 864.0, None), ("MI300X", 1307.0, 5300.0, 448.0),
        ("MI300", None, None, 448.0), ("MI325", 1307.0, 6000.0, 448.0), ("MI355", 2500.0, 8000.0, 537.0),
        ("MI250X", 383.0, 3277.0, 175.0), ("MI250", 362.0, 3277.0, 175.0), ("L40", 181.0, 864.0, None),
        ("L4", 121.0, 300.0, None), ("A40", 150.0, 696.0, None), ("A10", None, 600.0, None), ("T4", 65.0, 320.0, None),
        ("L20", 119.5, 864.0, None), ("A30", 165.0, 933.0, None), ("A16", None, 200.0, None),
        ("RTX 6000 Ada", 364.0, 960.0, None), ("RTX 4090", 165.2, 1008.0, None), ("RTX 5090", 209.5, 1792.0, None),
        ("RTX", None, None, None), ("Quadro", None, None, None),
    )
)  # fmt: skip


def device_named(name: str | None) -> Device | None:
    """Return the device that a name means, None where none is known."""
    return next((device for device in DEVICES if device.mark.lower() in (name or "").lower()), None)


def has_links(name: str | None) -> bool:
    """Tell whether devices of a node may have links of their own: not where these send through the host's PCIe."""
    device = device_named(name)
    return device_links_gbps(name) is not None or ("pcie" not in (name or "").lower() and device is None)


def device_links_gbps(name: str | None) -> float | None:
    """Return what one device sends to its node's others at best (1e9 bytes/s), None when not known."""
    if "pcie" in (name or "").lower() or "NVL" in (name or ""):
        return None
    device = device_named(name)
    return device.links_gbps if device else None
