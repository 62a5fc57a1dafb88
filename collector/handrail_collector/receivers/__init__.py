"""What accepts OTLP from outside."""
