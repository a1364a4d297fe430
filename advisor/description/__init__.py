"""A run in people's own words: model, cluster, parallel sizes and speed, instead of a trace."""
