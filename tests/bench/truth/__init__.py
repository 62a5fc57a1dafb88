"""Is what Handrail says of a slow request true? Every fault of the emulated fleet, judged against what truly happened."""
