"""Collectives of a Kineto trace: NCCL kernels, gloo spans and the ranges of our own runtime."""
