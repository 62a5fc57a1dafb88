"""The sidecar process: start the components of the list, and stop them.

The list is ``components.COMPONENTS``; the settings decide which of it are made.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from handrail.config.listeners import write_ready
from handrail.runtime.descriptors import raise_limit
from handrail.runtime.process import Stop, freeze_gc, start
from handrail.runtime.process import run as run_process
from handrail_sidecar.components import Sidecar, make_sidecar
from handrail_sidecar.settings import SidecarConfig

log = logging.getLogger(__name__)


def run(config: SidecarConfig) -> int:
    """Run until SIGTERM or Ctrl-C; return the exit code."""
    return run_process(_main(config.resolved()))


async def start_components(stack: AsyncExitStack, sidecar: Sidecar) -> dict[str, str]:
    """Start every component; ``stack`` shuts them down.

    Returns the addresses that they bind, by name.
    """
    addresses: dict[str, str] = {}
    for entry, component in sidecar.components:
        await start(stack, entry.name, component, min(sidecar.config.drain.seconds, entry.most_drain_s), sidecar.tracer)
        addresses.update(entry.addresses(component))
    return addresses


async def _main(config: SidecarConfig) -> int:
    stop = Stop()
    limit = raise_limit()
    sidecar = make_sidecar(config)
    sidecar.protection.warn_of_open(config.listeners)
    async with AsyncExitStack() as stack:
        addresses = await start_components(stack, sidecar)
        seen = {**addresses, **({"metrics": str(config.metrics.url)} if config.metrics.url is not None else {})}
        seen |= {"log": " ".join(config.log.files)} if config.log.files else {}
        what = sidecar.protection.describe(seen, config.listeners)
        log.info("observing %s %s: %s; %s", config.role.value, config.instance, what, limit)
        freeze_gc(young=5_000)
        sidecar.not_ready = ""
        if config.ready_file is not None:
            write_ready(config.ready_file, addresses)
        await stop.wait()
        sidecar.not_ready = "stopping: draining running requests"
    return 0
