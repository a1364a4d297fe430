"""One file per training framework: how it is recognised, what its settings express, how they read."""
