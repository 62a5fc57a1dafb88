"""The collector: receive, journal, stitch, explain, store, forward."""
