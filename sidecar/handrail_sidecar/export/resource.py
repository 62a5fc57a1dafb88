"""Describe the observed process and its host as OTLP resources.

The environment adds attributes.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from handrail import conventions as names
from handrail.records import Process, Role
from handrail.telemetry.resource import environment_attributes
from handrail.wire.exchange import resource_of

_BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
_MACHINE_IDS: Final = ("/etc/machine-id", "/var/lib/dbus/machine-id")


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Identity of a host.

    ``id``: equal for two processes exactly when they share a kernel, and so a wall clock. ``name``: for people.
    """

    id: str
    name: str


def host_identity(boot_id: str = _BOOT_ID, machine_ids: tuple[str, ...] = _MACHINE_IDS) -> HostIdentity:
    """Identify this host from the given files.

    The id is the hash of the kernel's boot id: containers of one host see the same one, and no two kernels share one.
    ``/etc/machine-id`` does neither: an image carries none, or the same one everywhere. It serves only without a boot id (not
    Linux); without both, the host's name serves. A sandbox with a kernel of its own (gVisor, Kata) has an id of its own: its
    clock is then compared as another host's, which is coarser, never wrong. Ids are hashed, since both files identify a machine
    beyond this use.
    """
    name = socket.gethostname()
    for kind, paths in (("boot", (boot_id,)), ("machine", machine_ids)):
        for path in paths:
            if found := _first_line(path):
                return HostIdentity(_digest(kind, found), name)
    return HostIdentity(_digest("name", name), name)


def new_sender_id() -> str:
    """Draw a new id of 32 hex digits, once a process start."""
    return os.urandom(16).hex()


def own_process(role: Role, instance: str, *, sender: str, service_name: str = "", host: HostIdentity | None = None) -> Process:
    """The process that this sidecar observes.

    ``service_name`` takes precedence over the environment's, that one over ``handrail-<role>``.
    """
    given = environment_attributes()
    here = host or host_identity()
    return Process(
        role=role,
        instance=instance,
        host=str(given.get(names.HOST_ID) or here.id),
        service=service_name or str(given.get(names.SERVICE_NAME) or f"handrail-{role.value}"),
        sender=sender,
        host_name=str(given.get(names.HOST_NAME) or here.name),
    )


def own_resource(process: Process, *, cluster: str = "") -> Resource:
    """The resource of the sidecar's own records (wire.md).

    It includes the environment's attributes.
    """
    return resource_of(process, cluster=cluster, extra=environment_attributes())


def tap_attributes(process: Process) -> Mapping[str, str]:
    """Attributes that a tapped resource gains if it lacks them.

    See wire.md, "Spans that pass through a tap".
    """
    gained = {
        names.ROLE: process.role.value,
        names.INSTANCE: process.instance,
        names.SENDER_ID: process.sender,
        names.HOST_ID: process.host,
        names.HOST_NAME: process.host_name,
    }
    return {name: text for name, text in gained.items() if text}


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.readline(200).strip()
    except OSError:
        return ""


def _digest(kind: str, text: str) -> str:
    return hashlib.blake2b(f"{kind}:{text}".encode(), digest_size=16, person=b"handrail-host").hexdigest()
