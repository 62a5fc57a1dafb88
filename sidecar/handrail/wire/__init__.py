"""Records to OTLP and back: one codec for sidecar and collector."""
