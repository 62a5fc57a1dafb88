"""Gather the facts: ask engines, collector, host and ports at once.

Each has its own time limit. It also reads the files that start the engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from handrail.security.tokens import OPEN, Access
from handrail_doctor.facts import (
    SIDES,
    ClockPair,
    DoctorOptions,
    EngineView,
    Facts,
    ObservedTraffic,
    OtlpTarget,
    PairSide,
    Placement,
    Setup,
    SidecarSetup,
    SideChannel,
)
from handrail_doctor.gather.collector import ask_collector
from handrail_doctor.gather.deployment import Started, names_of_plugins
from handrail_doctor.gather.engines import ask_engine
from handrail_doctor.gather.gpus import P2pReader
from handrail_doctor.gather.host import read_host
from handrail_doctor.gather.reachability import connect, export_nothing, is_local, is_loopback
from handrail_doctor.kv_size.keys import ModelConfigError
from handrail_doctor.kv_size.read import CONFIG_FILE, read_model
from handrail_doctor.kv_size.shape import AUTO
from handrail_doctor.kv_size.size import BLOCK_SIZE, Serving, Sizes, sizes

SIDE_CHANNEL_PORT: Final = 5600
"""vLLM's default side-channel port; each data-parallel rank adds its number."""
_GUESS: Final = "vLLM's default port"
_OWN_PREFIXES: Final = ("UCX_", "VLLM_", "HANDRAIL_", "NIXL_", "CUDA_VISIBLE_DEVICES", "NVIDIA_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to gather.

    ``model``: its config, or None. ``on``: the engines that run on this host; None: their addresses decide.
    """

    options: DoctorOptions
    urls: Mapping[PairSide, str] = field(default_factory=dict)
    started: tuple[Started, ...] = ()
    sidecars: tuple[SidecarSetup, ...] = ()
    model: Path | None = None
    serving: Serving = field(default_factory=Serving)  # the options of the command line; the engines give the rest
    placement: Placement = Placement.UNKNOWN
    on: frozenset[PairSide] | None = None
    own_environment: bool = False  # that of the engine that runs here
    side_channels: Mapping[PairSide, tuple[str, int]] = field(default_factory=dict)
    otlp: tuple[tuple[str, str], ...] = ()  # name, endpoint
    headers: Mapping[str, str] = field(default_factory=dict)  # for the engines
    api: str | None = None
    access: Access = OPEN  # to the collector
    root: Path = Path("/")
    timeout_s: float = 5.0


async def gather(wanted: Wanted, reader: P2pReader, environment: Mapping[str, str]) -> Facts:
    """Gather all facts. ``environment``: this process's.

    Takes a few times ``timeout_s`` at most. Raises nothing for what cannot be reached.
    """
    views, observed = await asyncio.gather(_engines(wanted), _collector(wanted))
    here = wanted.on if wanted.on is not None else await asyncio.to_thread(_here, views)
    if wanted.own_environment and len(here) == 1:
        (side,) = here
        views[side] = replace(views[side], setups=(*views[side].setups, _own_setup(environment)))
    placement, placement_by = _placement(wanted, views, here)
    clocks, traffic, no_clocks = observed
    found = None
    no_sizes = ""
    try:
        found = await asyncio.to_thread(_sizes, wanted, views)
    except ModelConfigError as error:
        no_sizes = f"{error.what} ({error.where})"
    host, channels, otlp = await asyncio.gather(
        asyncio.to_thread(
            read_host, here, reader, wanted.root, timeout_s=wanted.timeout_s, elsewhere=_elsewhere(wanted, views, here)
        ),
        _side_channels(wanted, views, here),
        _otlp(wanted, views, here),
    )
    return Facts(
        options=wanted.options,
        placement=placement,
        placement_by=placement_by,
        engines=views,
        host=host,
        side_channels=channels,
        otlp=otlp,
        clocks=clocks or _clocks_by_date(views, here),
        no_clocks=no_clocks,
        traffic=traffic,
        sidecars=wanted.sidecars,
        sizes=found,
        no_sizes=no_sizes or ("" if found else "no model config (--model)"),
    )


# --- the parts ------------------------------------------------------------------------------------------------------------


async def _engines(wanted: Wanted) -> dict[PairSide, EngineView]:
    async def one(side: PairSide) -> EngineView:
        files = tuple(each.setup for each in wanted.started if each.side is side)
        url = wanted.urls.get(side)
        if url is None:
            return EngineView(side=side, setups=files)
        live = await ask_engine(side, url, timeout_s=wanted.timeout_s, headers=wanted.headers)
        return replace(live, setups=(*live.setups, *files))

    return dict(zip(SIDES, await asyncio.gather(*map(one, SIDES)), strict=True))


async def _collector(wanted: Wanted) -> tuple[tuple[ClockPair, ...], ObservedTraffic | None, str]:
    if wanted.api is None:
        return (), None, ""
    return await ask_collector(wanted.api, wanted.timeout_s, wanted.access)


def _here(views: Mapping[PairSide, EngineView]) -> frozenset[PairSide]:
    """Return the engines whose address is one of this host's."""
    return frozenset(side for side, view in views.items() if view.host and is_local(view.host))


def _elsewhere(wanted: Wanted, views: Mapping[PairSide, EngineView], here: frozenset[PairSide]) -> str:
    """Return how we know that neither engine runs on this host.

    '' where one does, or where nothing shows it.
    """
    if here:
        return ""
    if wanted.on is not None:
        return "--on neither"
    return "by their addresses" if all(view.host for view in views.values()) else ""


def _own_setup(environment: Mapping[str, str]) -> Setup:
    env = {name: value for name, value in environment.items() if name.startswith(_OWN_PREFIXES)}
    port = env.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "")
    return Setup(
        by="this environment",
        side_host=env.get("VLLM_NIXL_SIDE_CHANNEL_HOST"),
        side_port=int(port) if port.isdigit() else None,
        kv_layout=env.get("VLLM_KV_CACHE_LAYOUT"),
        plugins=names_of_plugins(env),
        env=env,
        whole_env=True,
    )


def _placement(wanted: Wanted, views: Mapping[PairSide, EngineView], here: frozenset[PairSide]) -> tuple[Placement, str]:
    if wanted.placement is not Placement.UNKNOWN:
        return wanted.placement, "--placement"
    hosts = [views[side].host for side in SIDES]
    if None in hosts:
        return Placement.UNKNOWN, "the addresses of both engines are not known (--placement)"
    if here == frozenset(SIDES) or hosts[0] == hosts[1] or all(is_loopback(host) for host in hosts if host):
        return Placement.SAME_HOST, "by their addresses"
    # Two pods of one host have two addresses as well.
    return Placement.ACROSS_HOSTS, f"by their addresses, {hosts[0]} and {hosts[1]} (--placement same-host if that is one machine)"


def _sizes(wanted: Wanted, views: Mapping[PairSide, EngineView]) -> Sizes | None:
    """Compute the sizes of the model of the options, or of an engine's folder.

    The folder is the one with which the engine was started, where it exists on this host.
    """
    path = wanted.model
    if path is None:
        models = [Path(view.value("model")) for view in views.values() if view.value("model")]
        path = next((folder for folder in models if folder.is_absolute() and (folder / CONFIG_FILE).is_file()), None)
    if path is None:
        return None
    serving, decode, prefill = wanted.serving, views[PairSide.DECODE], views[PairSide.PREFILL]

    def report(name: str) -> object:
        found = decode.value(name)
        return prefill.value(name) if found is None else found

    tp, block, hybrid = report("tp"), report("block_size") or report("group_block_size"), report("hybrid")
    return sizes(
        read_model(path),
        Serving(
            kv_dtype=str(report("kv_cache_dtype") or AUTO) if serving.kv_dtype == AUTO else serving.kv_dtype,
            dtype=serving.dtype or (str(report("dtype")) if report("dtype") else None),
            tp=serving.tp if serving.tp != 1 or not isinstance(tp, int) else tp,
            block_size=serving.block_size if serving.block_size != BLOCK_SIZE or not isinstance(block, int) else block,
            windowed=serving.windowed and hybrid is not False,
        ),
    )


async def _side_channels(
    wanted: Wanted, views: Mapping[PairSide, EngineView], here: frozenset[PairSide]
) -> tuple[SideChannel, ...]:
    async def one(side: PairSide) -> SideChannel | None:
        address = _side_channel_address(wanted, views[side])
        if address is None:
            return None
        host, port, by = address
        if is_loopback(host) and side not in here:
            return SideChannel(
                side=side, host=host, port=port, by=by, why_not=f"{host}:{port} ({by}) is an address of its own host"
            )
        reach, detail = await connect(host, port, wanted.timeout_s)
        return SideChannel(side=side, host=host, port=port, by=by, reach=reach, detail=detail)

    return tuple(each for each in await asyncio.gather(*map(one, SIDES)) if each is not None)


def _side_channel_address(wanted: Wanted, view: EngineView) -> tuple[str, int, str] | None:
    """Return (host, port, source) of an engine's side channel.

    None where nothing is known of this engine, or where its connector has no such port.
    """
    if view.side in wanted.side_channels:
        return (*wanted.side_channels[view.side], f"--{view.side.value}-side-channel")
    connector = view.connector
    if connector is not None and connector.nixl is None:
        return None
    host, port = view.setting("side_host"), view.setting("side_port")
    named = str(host.value) if host is not None and host.value not in ("0.0.0.0", "::", "*") else view.host
    if named is None:
        return None
    if port is not None:
        return named, int(port.value), port.by
    return named, SIDE_CHANNEL_PORT, _GUESS


async def _otlp(wanted: Wanted, views: Mapping[PairSide, EngineView], here: frozenset[PairSide]) -> tuple[OtlpTarget, ...]:
    targets: dict[str, str] = {endpoint: name for name, endpoint in wanted.otlp}
    for sidecar in wanted.sidecars:
        targets.setdefault(sidecar.collector, f"the {sidecar.role} sidecar's collector ({sidecar.by})")
    sends = {sidecar.collector: sidecar.sends for sidecar in wanted.sidecars}
    unreachable: dict[str, str] = {}
    for side, view in views.items():
        sourced_value = view.setting("otlp_endpoint")
        if sourced_value is None:
            continue
        endpoint = str(sourced_value.value)
        targets.setdefault(endpoint, f"the {side.value} engine's exporter ({sourced_value.by})")
        if side not in here and is_loopback(urlsplit(endpoint if "://" in endpoint else f"//{endpoint}").hostname or ""):
            unreachable[endpoint] = f"it is an address of {side.value}'s own host"
    coroutines = [
        export_nothing(name, endpoint, {}, sends.get(endpoint))
        for endpoint, name in targets.items()
        if endpoint and endpoint not in unreachable
    ]
    skipped = [OtlpTarget(name=targets[endpoint], endpoint=endpoint, why_not=why) for endpoint, why in unreachable.items()]
    return (*await asyncio.gather(*coroutines), *skipped)


def _clocks_by_date(views: Mapping[PairSide, EngineView], here: frozenset[PairSide]) -> tuple[ClockPair, ...]:
    """Return each engine's clock against this host's, seconds wide.

    An engine that runs here has no offset to report.
    """
    found: Sequence[tuple[PairSide, EngineView]] = [(side, view) for side, view in views.items() if side not in here]
    return tuple(
        ClockPair(
            source="this host",
            target=f"{side.value}'s host",
            low_ns=view.live.clock[0],
            high_ns=view.live.clock[1],
            by="its HTTP Date",
        )
        for side, view in found
        if view.live is not None and view.live.clock is not None
    )
