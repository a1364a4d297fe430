"""Links among ranks: their latency and bandwidth, and how they are told apart."""
