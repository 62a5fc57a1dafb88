"""Who samples what, and when it was last heard: sources of requests are the stitcher's to remember, these are not."""

from __future__ import annotations

from dataclasses import dataclass, field

from handrail.records import EngineSample, Role
from handrail.records.devices import DeviceRun


@dataclass(slots=True)
class SourceLiveness:
    """Bounded: roles and sources are closed enums."""

    last_unix_ns: dict[tuple[Role, str], int] = field(default_factory=dict)

    def sample(self, sample: DeviceRun | EngineSample, received_unix_ns: int) -> None:
        """Take note of who sent it."""
        self.last_unix_ns[sample.process.role, sample.source.value] = received_unix_ns

    def since(self, oldest_unix_ns: int) -> set[tuple[Role, str]]:
        """Those heard since then, as (role, source)."""
        return {who for who, at in self.last_unix_ns.items() if at >= oldest_unix_ns}
