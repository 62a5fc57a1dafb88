"""What Handrail's own processes report about themselves: traces and metrics, by the OpenTelemetry SDK."""
