"""Names for what torch's own signatures leave open: their values are of any type, and torch gives them no name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

StateDict: TypeAlias = dict[str, Any]  # tensors, numbers and nested state dicts, by name
ParamGroup: TypeAlias = dict[str, Any]  # "params", a list of tensors, and the optimizer's settings
Arguments: TypeAlias = tuple[Any, ...]  # positional arguments of a function that is passed on
Keywords: TypeAlias = dict[str, Any]  # its keyword arguments
AnyFunction: TypeAlias = Callable[..., Any]  # an operator or hook of torch
Result: TypeAlias = Any  # what a function of torch takes or returns: tensors, numbers, arrays, lists of them
