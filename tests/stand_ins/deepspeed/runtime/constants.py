"""Defaults of DeepSpeed 0.19.8."""

GRADIENT_CLIPPING_DEFAULT = 1.0
