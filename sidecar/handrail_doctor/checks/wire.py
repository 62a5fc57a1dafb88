"""Checks of the hardware and software that carry KV between hosts.

They cover RDMA adapters and their ports, UCX's choice of devices, NIXL and network interfaces.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final

from handrail_doctor.checks.result import CheckResult, failed, passed, skipped, warned
from handrail_doctor.facts import SIDES, Facts, PairSide, Placement, RdmaPort, SourcedValue
from handrail_doctor.transports import RDMA, SRD, devices, efa_ports, has_rdma, nixl_backends, transports, uses_ucx

_ROCE_MTU: Final = 4200  # an Ethernet MTU from which RoCE can use its own 4096
_SLOW_NIC: Final = 25e9
_NIXL: Final = ("nixl", "nixl-cu12", "nixl-cu13")
_COLD: Final = "the first hand-off of a pair waits while UCX tries them: 38 s measured, and 300 s if one leads nowhere"


def check_rdma(facts: Facts) -> CheckResult:
    """Check that an RDMA port is up, where the engines are on different hosts."""
    check, title = "wire.rdma", "RDMA"
    if not facts.host.here:
        return skipped(
            check,
            title,
            "no engine runs here, as far as the doctor knows",
            "doctor on the engines' hosts (--on says which runs here)",
        )
    ports = facts.host.rdma
    if ports is None:
        return skipped(
            check,
            title,
            "; ".join(facts.host.unread) or "sysfs was not read",
            "--root with the path where the host's / is mounted",
        )
    active = [port for port in ports if port.active]
    needed = facts.placement is Placement.ACROSS_HOSTS
    if active:
        down = [port for port in ports if not port.active]
        also = "; not up: " + ", ".join(map(_state, down)) if down else ""
        return passed(check, title, f"{_described(active)}{also}")
    if ports:
        shown = ", ".join(map(_state, ports))
        why = "the hand-off falls back to TCP through host memory"
        do = "check ibstat (cable, switch, and a subnet manager for InfiniBand) or ip link for RoCE"
        make = failed if needed else warned
        return make(check, title, f"no port is up: {shown}", why=why, do=do)
    if not needed:
        return skipped(check, title, "no adapter here", "--placement across-hosts makes this a failure")
    return failed(
        check,
        title,
        "no RDMA adapter here, and the engines are on different hosts",
        why="KV goes over TCP through host memory; UCX without RDMA took 1800 ms to begin a transfer that takes 0.16 ms with it "
        "(ai-dynamo/dynamo#1314)",
        do="use hosts with RDMA (in a container also its devices: rdma/hca or /dev/infiniband), or put "
        "prefill and decode on one host",
    )


def check_rate(facts: Facts) -> CheckResult | None:
    """Check the rates of the ports: equal on one host, and more than one lane up."""
    active = [port for port in facts.host.rdma or () if port.active and port.bits_per_s]
    if not active:
        return None
    check, title = "wire.rate", "rate of the RDMA ports"
    single = [port for port in active if port.lanes == 1 and port.link_layer == "InfiniBand"]
    rates = sorted({port.bits_per_s for port in active if port.bits_per_s})
    if single:
        return warned(
            check,
            title,
            f"{', '.join(f'{port.key} has one lane ({_gbps(port)})' for port in single)}",
            why="a port that lost lanes has a quarter of its rate or less",
            do="check ibstat and the cable, then ibportstate",
        )
    if len(rates) > 1:
        return warned(
            check,
            title,
            ", ".join(f"{port.key} {_gbps(port)}" for port in active),
            why="a transfer on the slower port takes longer",
            do="set UCX_NET_DEVICES to the fast ports only, on both engines",
        )
    return passed(check, title, f"{len(active)} × {_gbps(active[0])}")


def check_mtu(facts: Facts) -> CheckResult | None:
    """Check that the Ethernet MTU does not cut RoCE's own MTU."""
    found = [(port, nic) for port in _ethernet(facts) for nic in facts.host.nics if nic.name == port.netdev and nic.mtu]
    if not found:
        return None
    check, title = "wire.mtu", "MTU of the RoCE ports"
    small = [(port, nic) for port, nic in found if nic.mtu and nic.mtu < _ROCE_MTU]
    if small:
        return warned(
            check,
            title,
            ", ".join(f"{port.key} on {nic.name}: {nic.mtu}" for port, nic in small),
            why="RoCE then sends packets of 1024 bytes or less, and does not reach the line rate",
            do=f"set an MTU of 9000 (at least {_ROCE_MTU}) on both hosts and on every switch between them",
        )
    return passed(check, title, ", ".join(f"{nic.name} {nic.mtu}" for _, nic in found))


def check_gid(facts: Facts) -> CheckResult | None:
    """Check that a RoCE port has a RoCE v2 GID with an address.

    UCX_IB_GID_INDEX must point at one.
    """
    ports = list(_ethernet(facts))
    if not ports:
        return None
    check, title = "wire.gid", "GIDs of the RoCE ports"
    chosen = _variable(facts, "UCX_IB_GID_INDEX")
    bad = []
    for port in ports:
        usable = [gid for gid in port.gids if gid.kind == "RoCE v2" and not _link_local(gid.address)]
        if chosen is not None and chosen.value.isdigit():
            index = int(chosen.value)
            if index not in [gid.index for gid in usable]:
                kinds = [gid.kind for gid in port.gids if gid.index == index]
                bad.append(f"{port.key}: index {index} is {kinds[0] if kinds else 'empty'}")
        elif not usable:
            bad.append(f"{port.key}: no RoCE v2 GID with an address")
    if bad:
        return failed(
            check,
            title,
            "; ".join(bad),
            why="without a routable GID UCX cannot connect, or only within one network segment",
            do="give the port's interface an address (ip addr); unset UCX_IB_GID_INDEX, or set it to a RoCE v2 GID (show_gids)",
        )
    return passed(check, title, f"RoCE v2 on {', '.join(port.key for port in ports)}")


def check_ucx_devices(facts: Facts) -> CheckResult:
    """Check which devices UCX may use (case B08).

    A device that does not exist, or is down, hangs. A choice of many devices is a gamble.
    """
    check, title = "wire.ucx_devices", "UCX_NET_DEVICES"
    if not _ucx(facts):
        return skipped(check, title, f"{_carrier(facts)} hands over, which does not read it")
    if not _environments(facts):
        return skipped(
            check,
            title,
            "the engines' environment is not known",
            "--config with the file that starts them, or --same-env in their pod",
        )
    sourced_value = _variable(facts, "UCX_NET_DEVICES")
    if sourced_value is None and any(facts.engine(side).set_elsewhere("UCX_NET_DEVICES") for side in SIDES):
        return skipped(check, title, "it may be set only where the engines run", "--same-env in their pod")
    named = devices(sourced_value.value if sourced_value else None)
    ports, nics = facts.host.rdma or (), {nic.name for nic in facts.host.nics}
    active = [port for port in ports if port.active]
    text = f"{sourced_value.value} ({sourced_value.by})" if sourced_value else "not set"
    if named is None:
        kinds = {(port.link_layer, port.bits_per_s) for port in active}
        if len(active) > 1 and (len(kinds) > 1 or len(active) < len(ports)):
            return warned(
                check,
                title,
                f"{text}: UCX chooses among {_described(active)}",
                why=f"the ports are not alike. {_COLD} (sgl-project/sglang#28737)",
                do="set UCX_NET_DEVICES to the ports of the KV network, such as "
                + ",".join(port.key for port in _fastest(active)),
            )
        return passed(check, title, f"{text}: any, and all are alike")
    if facts.host.rdma is None:
        return skipped(check, title, f"{text}; the adapters of this host cannot be read")
    if not facts.host.here:
        return skipped(check, title, f"{text}; neither engine runs here", "doctor on the engines' hosts")
    by_key = {port.key: port for port in ports} | {port.adapter: port for port in ports if port.port == 1}
    missing = [name for name in named if name not in by_key and name not in nics]
    down = [name for name in named if name in by_key and not by_key[name].active]
    if missing or down:
        shown = [f"{name} is not there" for name in missing] + [
            f"{name} is {by_key[name].state or 'unreadable'}" for name in down
        ]
        there = ", ".join([port.key for port in active] or sorted(nics)) or "none"
        return failed(
            check,
            title,
            f"{text}: {'; '.join(shown)}",
            why="UCX finds no path, and each hand-off hangs until its timeout (300 s in sgl-project/sglang#28737)",
            do=f"name devices that are up here: {there}",
        )
    return passed(check, title, text)


def check_ucx_tls(facts: Facts) -> CheckResult | None:
    """Check that UCX_TLS leaves the transports that the KV path needs.

    RDMA across hosts, cuda_ipc within one, and cuda_copy for GPU memory at all.
    """
    sourced_value = _variable(facts, "UCX_TLS")
    if sourced_value is None or not _environments(facts) or not _ucx(facts):
        return None
    check, title = "wire.ucx_tls", "UCX_TLS"
    left = transports(sourced_value.value)
    text = f"{sourced_value.value} ({sourced_value.by})"
    lost = []
    if facts.host.gpus.devices and "cuda_copy" not in left:
        lost.append(("cuda_copy", "without it UCX cannot access GPU memory, and a transfer fails"))
    if facts.placement is Placement.ACROSS_HOSTS and efa_ports(facts) and SRD not in left:
        lost.append((SRD, "the adapters are EFA, which carries only SRD, and KV goes over TCP"))
    elif facts.placement is Placement.ACROSS_HOSTS and has_rdma(facts) and not left & RDMA:
        lost.append(("an RDMA transport (rc, dc, ib)", "adapters are up, but KV goes over TCP"))
    if facts.placement is Placement.SAME_HOST and len(facts.host.gpus.devices) > 1 and not left & (RDMA | {"cuda_ipc"}):
        lost.append(("cuda_ipc", "GPUs of one host then copy through host memory"))
    if lost:
        return failed(
            check,
            title,
            f"{text} leaves out {', '.join(name for name, _ in lost)}",
            why="; ".join(why for _, why in lost),
            do="unset UCX_TLS, so that UCX chooses, or list them",
        )
    return passed(check, title, text)


def check_nixl(facts: Facts) -> CheckResult | None:
    """Check NIXL and its backend."""
    check, title = "wire.nixl", "NIXL"
    connectors = [facts.engine(side).connector for side in SIDES]
    known = [each for each in connectors if each is not None]
    if known and all(each.nixl is None for each in known):
        return None
    versions = {name: facts.host.packages[name] for name in _NIXL if name in facts.host.packages}
    found = [each for side in (PairSide.DECODE, PairSide.PREFILL) if (each := nixl_backends(facts.engine(side))) is not None]
    backend = f"backend {', '.join(found[0])}" if found else "backend UCX (the default)"
    if not versions:
        return skipped(check, title, f"not installed in this Python, {backend}", "doctor in the engine's environment")
    numbers = set(versions.values())
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    if len(numbers) > 1:
        return warned(
            check,
            title,
            f"{shown}, {backend}",
            why="two builds of NIXL are installed, and the order of imports decides which one loads",
            do="keep one of them, in the same version on P and D",
        )
    return passed(check, title, f"{shown}, {backend}")


def check_nic(facts: Facts) -> CheckResult | None:
    """Check the interfaces that carry KV where there is no RDMA."""
    if facts.placement is not Placement.ACROSS_HOSTS or has_rdma(facts):
        return None
    up = [nic for nic in facts.host.nics if nic.up and nic.physical and nic.bits_per_s]
    check, title = "wire.nic", "network interfaces"
    if not up:
        return skipped(check, title, "no interface shows its speed (in a container none does)", "--link-gbps")
    best = max(up, key=lambda nic: nic.bits_per_s or 0)
    shown = ", ".join(f"{nic.name} {(nic.bits_per_s or 0) / 1e9:g} Gb/s" for nic in up)
    if (best.bits_per_s or 0) < _SLOW_NIC:
        return warned(
            check,
            title,
            shown,
            why="the whole KV of every prompt crosses this interface before its first token",
            do="use RDMA, or put prefill and decode on one host; handrail kv-size shows how long a transfer takes",
        )
    return passed(check, title, shown)


def checks(facts: Facts) -> Iterator[CheckResult | None]:
    """Yield all checks, in the order in which they are shown."""
    yield check_rdma(facts)
    if facts.host.here:  # otherwise this host's hardware is not on the KV path
        yield check_rate(facts)
        yield check_mtu(facts)
        yield check_gid(facts)
        yield check_nic(facts)
    yield check_ucx_devices(facts)
    yield check_ucx_tls(facts)
    yield check_nixl(facts)


# --- helpers ----------------------------------------------------------------------------------------------------------------


def _ethernet(facts: Facts) -> Iterator[RdmaPort]:
    yield from (port for port in facts.host.rdma or () if port.active and port.link_layer == "Ethernet")


def _described(ports: list[RdmaPort]) -> str:
    """Describe ports, with equal ones together.

    Example: ``mlx5_0:1, mlx5_1:1 at 400 Gb/s InfiniBand``.
    """
    alike: dict[str, list[str]] = {}
    for port in ports:
        alike.setdefault(f"{_gbps(port)} {port.link_layer or 'of unknown link layer'}", []).append(port.key)
    return "; ".join(f"{', '.join(keys)} at {kind}" for kind, keys in alike.items())


def _state(port: RdmaPort) -> str:
    return f"{port.key} {port.state or 'unreadable'} ({port.physical or 'no physical state'})"


def _gbps(port: RdmaPort) -> str:
    return f"{port.bits_per_s / 1e9:g} Gb/s" if port.bits_per_s else "rate unknown"


def _fastest(ports: list[RdmaPort]) -> list[RdmaPort]:
    most = max(port.bits_per_s or 0 for port in ports)
    return [port for port in ports if (port.bits_per_s or 0) == most]


def _link_local(address: str) -> bool:
    try:
        return ipaddress.IPv6Address(address).is_link_local
    except ValueError:
        return True


def _environments(facts: Facts) -> bool:
    return any(facts.engine(side).environment_known for side in SIDES)


def _variable(facts: Facts, name: str) -> SourcedValue | None:
    """Return a variable of the engine that runs here, else of either engine.

    D comes first, since D reads.
    """
    order = sorted((PairSide.DECODE, PairSide.PREFILL), key=lambda side: side not in facts.host.here)
    return next((sourced_value for side in order if (sourced_value := facts.engine(side).variable(name)) is not None), None)


def _ucx(facts: Facts) -> bool:
    """Test whether UCX carries the KV of either engine."""
    return any(uses_ucx(facts.engine(side)) for side in SIDES)


def _carrier(facts: Facts) -> str:
    """Return what carries the KV instead of UCX."""
    connectors = [facts.engine(side).connector for side in SIDES]
    backends = [name for side in SIDES for name in nixl_backends(facts.engine(side)) or ()]
    names = (
        [f"NIXL's backend {', '.join(dict.fromkeys(backends))}"] if backends else [each.described for each in connectors if each]
    )
    return " and ".join(dict.fromkeys(names))
