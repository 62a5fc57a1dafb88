"""Resource of what a process of Handrail's reports about itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

import handrail
from handrail import conventions as names


def environment_attributes() -> dict[str, Any]:
    """Attributes from OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.

    The SDK's own detector reads them.
    """
    return dict(OTELResourceDetector().detect().attributes)


def process_resource(service: str, instance_id: str, more: Mapping[str, str]) -> Resource:
    """Describe this process by the semantic conventions.

    ``service`` is a name of Handrail's, and OTEL_SERVICE_NAME does not change it: that one names the observed service.
    ``more``: further attributes; empty ones are left out.
    """
    host = {names.HOST_NAME: socket.gethostname()}
    own = {
        names.SERVICE_NAME: service,
        names.SERVICE_VERSION: handrail.__version__,
        names.SERVICE_INSTANCE_ID: instance_id,
        **{name: text for name, text in more.items() if text},
    }
    return Resource.create({**host, **environment_attributes(), **own, names.PROCESS_PID: os.getpid()})
