"""An example configuration of Alertmanager.

Pages and tickets go to one receiver each. It includes the inhibitions.
"""

from __future__ import annotations

from typing import Any

from handrail_alerts.inhibition import INHIBITIONS
from handrail_alerts.render import to_yaml

_HEAD = (
    "# Made by 'handrail alerts alertmanager'. Set the receivers' addresses; the inhibitions belong to the rules.\n"
    "# A silenced alert still inhibits others: silence with as many labels as you know (instance, reason).\n"
)


def example() -> str:
    """Return the text of the example file."""
    rules: list[dict[str, Any]] = [
        {
            "source_matchers": list(each.source),
            "target_matchers": list(each.target),
            **({"equal": list(each.equal)} if each.equal else {}),
        }
        for each in INHIBITIONS
    ]
    config = {
        "route": {
            "receiver": "tickets",
            "group_by": ["alertname", "cluster"],
            "group_wait": "10s",
            "group_interval": "1m",
            "repeat_interval": "4h",
            "routes": [{"matchers": ['severity="page"'], "receiver": "pager", "group_wait": "0s"}],
        },
        "inhibit_rules": rules,
        "receivers": [
            {"name": "pager", "webhook_configs": [{"url": "http://127.0.0.1:9095/page", "send_resolved": True}]},
            {"name": "tickets", "webhook_configs": [{"url": "http://127.0.0.1:9095/ticket", "send_resolved": True}]},
        ],
    }
    return _HEAD + to_yaml(config)
