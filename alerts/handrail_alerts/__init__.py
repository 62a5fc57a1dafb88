"""Objectives and limits in one file, and the Prometheus rules, inhibitions and runbook links that are made of it."""
