"""Traces and metrics of Handrail's own processes.

They use the OpenTelemetry SDK.
"""
