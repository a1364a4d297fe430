"""The page of an analysis, and that of inputs which time no step."""
