"""All ranks of a run together: which there are, their nodes, one clock, links, stragglers."""
