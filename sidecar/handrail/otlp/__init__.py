"""OTLP on the wire: decoding, receiving, sending."""
