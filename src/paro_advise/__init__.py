"""Finds what limits a ZeRO, FSDP or DeepSpeed training run, recommends a sharding strategy and applies it.

The rooms of the package lie at the top of the repository; the links beside this file give them their import names.
"""
