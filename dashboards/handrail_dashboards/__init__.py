"""Grafana dashboards: as code in ``boards``, as JSON in ``generated``. Exporting needs the standard library alone."""
