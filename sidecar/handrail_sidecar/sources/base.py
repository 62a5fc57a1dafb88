"""What every source passes its records to.

The life of a source is that of each component: ``handrail.runtime.process.Component``.
"""

from __future__ import annotations

from collections.abc import Callable

from handrail.records import Observation

Sink = Callable[[Observation], None]
"""Takes one finished record.

It never blocks and never raises; it counts drops itself. Records are frozen and may be kept.
"""
