"""Every configuration that must join.

It is each router with each way to lose the trace context, observed both ways.
"""

from __future__ import annotations

from dataclasses import replace

from vllm.proxy import Context
from vllm.stack import Attach, Configuration, Front

_FRONTS = (
    Configuration(name="two-step"),
    Configuration(name="two-step-no-client-context", client_context=False),  # the edge makes one, and the proxy forwards it
    Configuration(name="two-step-no-context", client_context=False, context=Context.NONE),  # and the engines get none
    Configuration(name="two-step-drop-on-decode", context=Context.DROP_DECODE),
    Configuration(name="two-step-drop-on-prefill", context=Context.DROP_PREFILL),
    Configuration(name="vllm-router", front=Front.ROUTER),
    Configuration(name="vllm-router-traced", front=Front.ROUTER_TRACED),
)
CONFIGURATIONS = tuple(replace(each, attach=attach) for attach in Attach for each in _FRONTS)
PLAIN = {attach: Configuration(name="two-step", attach=attach) for attach in Attach}
