"""From a stitched request to phases, outcomes and findings: pure functions."""
