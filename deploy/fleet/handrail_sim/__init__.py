"""A fleet without GPUs: the emulator, virtual observers and the demo."""
