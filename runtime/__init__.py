"""Makes a strategy happen in a training process."""
