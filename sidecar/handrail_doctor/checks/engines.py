"""Checks of each engine alone.

The engine is alive, its peer can find it, and telemetry can see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from handrail_doctor.checks.handshake import MORE, shown
from handrail_doctor.checks.result import CheckResult, failed, passed, skipped, warned
from handrail_doctor.connectors import Connector
from handrail_doctor.facts import ALL_PLUGINS, SIDES, Facts, PairSide, Placement, SourcedValue
from handrail_doctor.gather.reachability import is_loopback

_TELEMETRY_FAMILIES: Final = ("vllm:num_requests_running", "vllm:time_to_first_token_seconds")


def check_live(facts: Facts, side: PairSide) -> CheckResult | None:
    """Check that the engine answers.

    200 on /health does not prove that it works: a stopped engine answers it too.
    """
    engine = facts.engine(side)
    if engine.live is None:
        return None
    check, title, live = f"engine.{side.value}", f"{side.value} engine", engine.live
    if not live.health.ok:
        return failed(
            check,
            title,
            f"{engine.url}/health: {live.health.error or f'HTTP {live.health.status}'}",
            why="the engine cannot serve traffic",
            do="read the engine's log; check the address: scheme, host and port only",
        )
    version = engine.value("version")
    return passed(
        check,
        title,
        f"{engine.url} answers, serves {', '.join(live.models) or 'no model'}{f', vLLM {version}' if version else ''}",
    )


def check_side_channel_host(facts: Facts, side: PairSide) -> CheckResult | None:
    """Check the host that P gives D as its address.

    The default is localhost, which is right only where both are on one host.
    """
    engine = facts.engine(side)
    connector = engine.connector
    if not engine.environment_known and engine.setting("side_host") is None:
        return None
    check, title = f"engine.{side.value}.side_channel_host", f"side channel host of {side.value}"
    if connector is not None and connector.nixl is None:
        unknown = connector.unknown()
        if not unknown:
            return None
        return skipped(check, title, f"{connector.described}: whether it runs NIXL is not known here", "its documentation")
    if engine.setting("side_host") is None and engine.set_elsewhere("VLLM_NIXL_SIDE_CHANNEL_HOST"):
        return skipped(check, title, "VLLM_NIXL_SIDE_CHANNEL_HOST is set only where the engine runs", "--same-env in its pod")
    sourced_value = engine.setting("side_host") or SourcedValue(
        "localhost", "vLLM's default, VLLM_NIXL_SIDE_CHANNEL_HOST is not set"
    )
    seen, loopback = f"{sourced_value.value} ({sourced_value.by})", is_loopback(sourced_value.value)
    if loopback and facts.placement is Placement.UNKNOWN:
        return skipped(check, title, f"{seen}: right only where P and D share a host, which is not known", "--placement")
    if sourced_value.value in ("0.0.0.0", "::", "*") or (loopback and facts.placement is Placement.ACROSS_HOSTS):
        return failed(
            check,
            title,
            seen,
            why="the peer gets this address and looks for the blocks there, on its own host: the handshake fails",
            do="set VLLM_NIXL_SIDE_CHANNEL_HOST to an address at which the peer reaches this engine (the pod's, status.podIP)",
        )
    return passed(check, title, seen)


def check_plugin(facts: Facts, side: PairSide) -> CheckResult | None:
    """Check that our plugin is loaded.

    VLLM_PLUGINS lists the plugins that are allowed; HANDRAIL_SOCKET switches ours on.
    """
    engine = facts.engine(side)
    if not engine.setups:
        return None
    check, title = f"engine.{side.value}.plugin", f"Handrail's plugin in {side.value}"
    plugins, socket = engine.setting("plugins"), engine.variable("HANDRAIL_SOCKET")
    if plugins is not None and plugins.value != ALL_PLUGINS and "handrail" not in plugins.value:
        return failed(
            check,
            title,
            f"VLLM_PLUGINS is {','.join(plugins.value)!r} ({plugins.by})",
            why="the list excludes the plugin: Handrail gets no KV fetch, peer, bytes or failure, and no message says why",
            do="add handrail to VLLM_PLUGINS, or unset VLLM_PLUGINS",
        )
    if socket is None and engine.environment_known and not engine.set_elsewhere("HANDRAIL_SOCKET"):
        return warned(
            check,
            title,
            "HANDRAIL_SOCKET is not set",
            why="the plugin does nothing: the hand-off shows as a remainder between proxies, without its cause",
            do="set HANDRAIL_SOCKET=/run/handrail/engine.sock, and the sidecar's --plugin-socket to the same path",
        )
    if socket is not None:
        others = [
            each
            for each in facts.sidecars
            if each.role == side.value and each.plugin_socket and each.plugin_socket != socket.value
        ]
        if others:
            return failed(
                check,
                title,
                f"the engine writes to {socket.value} ({socket.by}), "
                f"the sidecar listens at {others[0].plugin_socket} ({others[0].by})",
                why="nothing arrives, and neither side notices",
                do="set one path in both",
            )
        return passed(check, title, f"on, to {socket.value}")
    missing = (
        "HANDRAIL_SOCKET is set only where the engine runs"
        if engine.environment_known
        else "the engine's environment is not known"
    )
    return skipped(check, title, missing, MORE)


def check_telemetry(facts: Facts, side: PairSide) -> CheckResult | None:
    """Check the flags without which the engine exports less telemetry."""
    engine = facts.engine(side)
    if not engine.setups and (engine.live is None or not engine.live.health.ok):
        return None
    check, title = f"engine.{side.value}.telemetry", f"telemetry of {side.value}"
    live = engine.live
    if engine.value("log_stats") is False:
        return failed(
            check,
            title,
            "--disable-log-stats",
            why="/metrics shows no figure of the engine, so Handrail cannot notice a hang",
            do="remove the flag",
        )
    if live is not None and live.health.ok and not live.metrics.ok:
        reason = live.metrics.error or f"HTTP {live.metrics.status}"
        return failed(
            check,
            title,
            f"/metrics: {reason}",
            why="Handrail cannot read queues, KV usage and failures",
            do="use the engine's own port",
        )
    if live is not None and live.metrics.ok and not any(name in live.families for name in _TELEMETRY_FAMILIES):
        return warned(
            check,
            title,
            f"/metrics has {len(live.families)} families, none of vLLM's",
            why="this is not vLLM, or its statistics are off (--disable-log-stats)",
            do="see what the page contains: handrail metrics",
        )
    middleware = engine.setting("middleware")
    if middleware is not None and not any("handrail" in name for name in middleware.value):
        return warned(
            check,
            title,
            f"no --middleware handrail.plugin.middleware.Handrail ({middleware.by})",
            why="without it or an inline proxy, Handrail does not see this engine's HTTP exchange: admission and "
            "response times are missing",
            do="add the flag, or put the sidecar's proxy in front of the engine",
        )
    return passed(check, title, "metrics page read" if live is not None and live.metrics.ok else "no flag prevents it")


def check_drift(facts: Facts, side: PairSide) -> CheckResult | None:
    """Check that the running engine is set up as its file says."""
    engine = facts.engine(side)
    differ = []
    for name in ("model", "dtype", "kv_cache_dtype", "block_size", "tp", "connector", "revision"):
        values = [SourcedValue(value, each.by) for each in engine.setups if (value := getattr(each, name)) is not None]
        other = next((each for each in values if not _same(name, each.value, values[0].value)), None)
        if other is not None:
            differ.append(_drifted(name, values[0], other))
    flag, group = engine.setting("block_size"), engine.setting("group_block_size")
    resized = flag is not None and group is not None and flag.value != group.value
    if resized and flag is not None and group is not None and _one_kind_of_layers(facts):
        differ.append(_drifted("block_size", group, flag))
    elif resized and flag is not None and group is not None and facts.sizes is None and not differ:
        return skipped(
            f"engine.{side.value}.drift",
            f"sources of {side.value} agree",
            f"{_drifted('block_size', group, flag)}: the engine shows the smallest block of the model's groups of layers",
            "--model, which tells whether it has several",
        )
    if not differ:
        return None
    return warned(
        f"engine.{side.value}.drift",
        f"sources of {side.value} agree",
        "; ".join(differ),
        why="the running engine differs from the file, so a restart may change it; or two engines of one side differ. The "
        "doctor uses the first value",
        do="restart with the file, update the file, or use one file for each engine",
    )


def checks(facts: Facts) -> Iterator[CheckResult | None]:
    """Yield all checks, in the order in which they are shown."""
    for side in SIDES:
        yield check_live(facts, side)
    for side in SIDES:
        yield check_side_channel_host(facts, side)
        yield check_drift(facts, side)


def own_checks(facts: Facts) -> Iterator[CheckResult | None]:
    """Yield the checks of what Handrail itself needs: the pair works without it."""
    for side in SIDES:
        yield check_plugin(facts, side)
        yield check_telemetry(facts, side)


# --- helpers ----------------------------------------------------------------------------------------------------------------


def _drifted(name: str, one: SourcedValue, other: SourcedValue) -> str:
    values = [each.value.described if isinstance(each.value, Connector) else shown(each.value) for each in (one, other)]
    return f"{name} is {values[0]} by {one.by} and {values[1]} by {other.by}"


def _one_kind_of_layers(facts: Facts) -> bool:
    """Test whether the model is known to have one group of layers, whose block is the flag's."""
    return facts.sizes is not None and len({layer for layer, _ in facts.sizes.shape.layers}) == 1


def _same(name: str, one: Any, other: Any) -> bool:
    """Test whether two values agree.

    One that is ``auto`` was resolved by the engine to the other. A connector's settings are checked elsewhere.
    """
    if isinstance(one, Connector) and isinstance(other, Connector):
        return one.described == other.described
    return one == other or (name in ("dtype", "kv_cache_dtype") and "auto" in (one, other))
