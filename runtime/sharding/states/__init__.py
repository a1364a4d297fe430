"""States of a sharded model and its optimizer: as shards, and whole."""
