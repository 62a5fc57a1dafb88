"""From records to OTLP batches, spooled until the collector has them."""
