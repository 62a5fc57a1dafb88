"""The emulated fleet for the demo, the tests and the benchmarks."""
