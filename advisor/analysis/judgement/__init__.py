"""What the figures of a run mean: the verdict on its step, and findings."""
