"""What runs inside the engine's processes: the standard library alone, nothing that the engine could feel (DESIGN section 9)."""
