"""Metrics of our own processes: registry, histograms, catalogue, OTLP push."""
