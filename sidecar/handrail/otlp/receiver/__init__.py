"""OTLP receiver: gRPC and HTTP."""
