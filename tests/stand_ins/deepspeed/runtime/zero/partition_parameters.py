"""What DeepSpeed says of such a parameter."""

from enum import Enum


class ZeroParamStatus(Enum):
    AVAILABLE = 1
    NOT_AVAILABLE = 2
