"""HolisticTraceAnalysis' figures by its own rules, and as the package itself computes them."""
