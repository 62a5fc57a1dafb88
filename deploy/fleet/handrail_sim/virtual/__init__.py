"""What sidecars would record of a virtual fleet."""
