"""The user's optimizers at work on the parts of a model that this rank holds."""
