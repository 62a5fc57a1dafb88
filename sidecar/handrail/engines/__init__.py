"""Engine adapters: each reads what one engine emits into records."""
