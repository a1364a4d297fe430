"""DeepSpeed's engine, configuration and checkpoints, under a plan."""
