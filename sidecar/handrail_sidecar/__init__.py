"""The sidecar process: proxy, taps and samplers beside one engine or router."""
