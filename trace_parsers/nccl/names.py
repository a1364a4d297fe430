"""NCCL's numbers and names of element types, algorithms and protocols."""

from __future__ import annotations

# ncclDataType_t in order, under PyTorch's names as Kineto and the flight recorder write them.
_DTYPES = (
    "Char", "Byte", "Int", "UInt32", "Long", "UInt64", "Half", "Float", "Double", "BFloat16",
    "Float8_e4m3fn", "Float8_e5m2",
)  # fmt: skip
# Bytes of one element, in the same order (NCCL documentation, ncclDataType_t).
_SIZES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
_SIZE_OF = dict(zip(_DTYPES, _SIZES, strict=True))
_PLAIN_NAMES = {
    "int8": "Char", "char": "Char", "uint8": "Byte", "int32": "Int", "int": "Int", "uint32": "UInt32",
    "int64": "Long", "uint64": "UInt64", "float16": "Half", "half": "Half", "float32": "Float",
    "float": "Float", "float64": "Double", "double": "Double", "bfloat16": "BFloat16",
    "f16": "Half", "f32": "Float", "f64": "Double", "bf16": "BFloat16", "i8": "Char", "u8": "Byte",
    "i32": "Int", "u32": "UInt32", "i64": "Long", "u64": "UInt64",
    "float8e4m3": "Float8_e4m3fn", "float8e5m2": "Float8_e5m2", "f8e4m3": "Float8_e4m3fn",
    "f8e5m2": "Float8_e5m2",
}  # fmt: skip
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")


def dtype_of_number(number: int) -> str:
    """Return PyTorch's name of an ncclDataType_t, "" for an unknown one."""
    return _DTYPES[number] if 0 <= number < len(_DTYPES) else ""


def dtype_of_name(name: str) -> str:
    """Return PyTorch's name of "ncclFloat32", "bfloat16", "f32", ..., "" for an unknown one."""
    return _PLAIN_NAMES.get(name.lower().removeprefix("nccl"), "")


def element_bytes(dtype: str) -> int | None:
    """Return the size of one element of a type named by the functions above."""
    return _SIZE_OF.get(dtype)


def algorithm_name(text: str) -> str:
    """Return the algorithm of a TUNING line; releases before 2.24 print its number."""
    return _ALGORITHMS[int(text)] if text.isdecimal() and int(text) < len(_ALGORITHMS) else text


def protocol_name(text: str) -> str:
    """Return the protocol of a TUNING line; releases before 2.24 print its number."""
    return _PROTOCOLS[int(text)] if text.isdecimal() and int(text) < len(_PROTOCOLS) else text
