"""Encode records as OTLP and decode them: one codec for sidecar and collector."""
