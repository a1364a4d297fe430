"""Two runs side by side: what changed, how sure that is, whether a prediction held."""
