"""The records that sidecars would make of a virtual fleet."""
