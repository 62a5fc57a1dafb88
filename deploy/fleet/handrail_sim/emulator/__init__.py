"""The emulated fleet that the demo, tests and benchmarks run."""
