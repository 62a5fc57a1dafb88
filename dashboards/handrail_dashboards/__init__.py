"""Grafana dashboards: as code in ``boards``, as JSON in ``generated``.

Exporting needs only the standard library.
"""
