"""Benchmarks with budgets: ``make bench`` runs every ``bench_*.py`` here, each in a process of its own."""
