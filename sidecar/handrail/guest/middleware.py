"""Former place of ``handrail.plugin.middleware``.

Engines are started with ``--middleware handrail.guest.middleware.Handrail``.
"""

from __future__ import annotations

import logging

from handrail.plugin.middleware import Handrail as Handrail

logging.getLogger("handrail").warning(
    "handrail.guest.middleware.Handrail is deprecated, and version 0.2 removes it: use --middleware "
    "handrail.plugin.middleware.Handrail"
)
