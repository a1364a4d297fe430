"""What traces show of how a run trains: its strategy, its parameters, its micro-batches."""
