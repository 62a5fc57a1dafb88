"""Benchmarks with budgets.

``make bench`` runs every ``bench_*.py`` of this folder, each in a process of its own.
"""
