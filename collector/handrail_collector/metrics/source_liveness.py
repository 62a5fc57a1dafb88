"""Remember when each source last sent samples.

The stitcher remembers the sources of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from handrail.records import EngineSample, Role
from handrail.records.devices import DeviceRun


@dataclass(slots=True)
class SourceLiveness:
    """Receive times by role and source. Bounded, because both are closed enums."""

    last_unix_ns: dict[tuple[Role, str], int] = field(default_factory=dict)

    def sample(self, sample: DeviceRun | EngineSample, received_unix_ns: int) -> None:
        """Note the sender of a sample."""
        self.last_unix_ns[sample.process.role, sample.source.value] = received_unix_ns

    def since(self, oldest_unix_ns: int) -> set[tuple[Role, str]]:
        """List the (role, source) pairs that sent samples since then."""
        return {who for who, at in self.last_unix_ns.items() if at >= oldest_unix_ns}
