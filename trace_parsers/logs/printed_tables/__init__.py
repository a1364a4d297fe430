"""Tables of measurements that benchmarks and communication loggers print."""
