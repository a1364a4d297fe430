"""What NCCL's own tools write: Inspector and profiler-plugin dumps, topology files."""
