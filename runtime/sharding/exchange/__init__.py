"""What moves gradients and updated parameters between the levels of a strategy."""
