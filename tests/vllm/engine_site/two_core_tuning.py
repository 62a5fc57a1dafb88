"""Keep two busy loops of the engine from starving each other on two cores.

This plugin of vLLM's is only for the test bed. pair.py puts this folder on the engine's PYTHONPATH; vLLM loads it in each of
its processes. Nothing else of the engine changes.

1. The processes of one engine wait for each other in a loop of ``sched_yield``. On Linux 6.18 a yielding thread forfeits so
   much that, beside another busy process, it did not run again for up to 31 s (measured: 4 of 24 requests took 26-31 s). vLLM's
   own other branch, ``time.sleep(0)``, gives up the processor without that.
2. NIXL's progress thread polls without pause: an idle engine takes one whole core (measured for a pair: both cores, 1.5 % of
   them with this). With a delay its poll blocks until UCX has an event, at most 10 ms.

Together: 40 requests at concurrency 4 through vllm-router took 13-75 s without, 1.4-1.9 s with them.
"""

from __future__ import annotations

import sys
from typing import Any

NIXL_POLL_US = 10_000


def _sleep_in_nixl(module: Any) -> None:
    """Set the delay of the progress thread in every NIXL agent from now on.

    ``module`` is nixl's Python API.
    """
    bindings = module.nixlBind
    make_agent = bindings.nixlAgent
    if getattr(make_agent, "two_core_tuning", False):
        return

    def make_patient_agent(name: str, config: Any) -> Any:
        config.pthrDelay = NIXL_POLL_US
        return make_agent(name, config)

    make_patient_agent.two_core_tuning = True  # type: ignore[attr-defined]
    bindings.nixlAgent = make_patient_agent


def register() -> None:
    """Patch the process; vLLM calls this in each process, in some more than once."""
    from vllm.distributed import nixl_utils, utils

    utils.USE_SCHED_YIELD = False

    load = nixl_utils._load_nixl_attr
    if getattr(load, "two_core_tuning", False):
        return

    # Leave the import of NIXL to vLLM, which sets a variable of UCX just before it.
    def load_and_tune(name: str) -> Any:
        attribute = load(name)
        if name == "NixlWrapper" and attribute is not None:
            _sleep_in_nixl(sys.modules[attribute.__module__])
        return attribute

    load_and_tune.two_core_tuning = True  # type: ignore[attr-defined]
    nixl_utils._load_nixl_attr = load_and_tune
