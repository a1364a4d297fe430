"""Sizes of element types under the names that traces and logs use."""

from __future__ import annotations

_SIZES = {
    "float": 4, "float32": 4, "fp32": 4, "int": 4, "int32": 4, "uint32": 4,
    "double": 8, "float64": 8, "fp64": 8, "long": 8, "long int": 8, "int64": 8, "uint64": 8,
    "bfloat16": 2, "bf16": 2, "half": 2, "float16": 2, "fp16": 2, "short": 2, "int16": 2,
    "byte": 1, "char": 1, "int8": 1, "uint8": 1, "unsigned char": 1, "signed char": 1, "bool": 1,
    "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip


def plain_dtype(name: str) -> str:
    """Return a type's name in lower case and without its home: "bfloat16" for "c10::BFloat16"."""
    return name.strip().lower().removeprefix("c10::").removeprefix("torch.")


def is_of_bytes(name: str) -> bool:
    """Tell whether a type is that of bytes, as which FSDP2 gathers parameters of several types, or of 8 bits."""
    return plain_dtype(name) in ("byte", "uint8", "unsigned char")


def is_of_counts(name: str) -> bool:
    """Tell whether a type is an integer of more than 8 bits: what is added up of it are counts and marks."""
    return plain_dtype(name) in ("int", "int32", "uint32", "long", "long int", "int64", "uint64", "short", "int16")


def dtype_bytes(name: str) -> int | None:
    """Return the bytes of one element, None for an unknown type.

    Args:
        name: "Float", "c10::BFloat16", "long int", "Float8_e4m3fn", "fp16", ...
    """
    plain = plain_dtype(name)
    if plain.startswith(("float8", "fp8", "e4m3", "e5m2")):
        return 1
    return _SIZES.get(plain)
