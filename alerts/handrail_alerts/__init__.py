"""Objectives and limits in one file, and the Prometheus rules made from it.

Inhibitions and runbook links are made from it too.
"""
