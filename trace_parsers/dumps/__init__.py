"""Flight-recorder dumps: as tables, and rank by rank."""
