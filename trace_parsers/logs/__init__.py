"""Text that training jobs, NCCL and benchmarks print, read line by line."""
