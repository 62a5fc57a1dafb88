"""Metrics of Handrail's own processes: registry, histograms, catalogue, OTLP push."""
