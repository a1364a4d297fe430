"""Steps cut out of traces for a viewer: of one rank, or of all ranks on one clock."""
