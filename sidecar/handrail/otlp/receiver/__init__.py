"""The OTLP receiver: gRPC and HTTP."""
