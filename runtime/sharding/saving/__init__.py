"""Checkpoints of a sharded model, and what streams one."""
