"""Figures of a run as metrics for monitoring: values, Prometheus text, OpenTelemetry JSON."""
