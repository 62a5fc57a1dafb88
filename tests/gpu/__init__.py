"""Checks that only a machine with a GPU can run.

Run ``run.sh`` there, once for each GPU product; its recording becomes a golden file.
"""
