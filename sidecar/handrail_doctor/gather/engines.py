"""Ask a running engine over HTTP for its state and its settings.

The endpoints are /health, /version, /v1/models, /metrics, and /server_info where it is switched on.
Each answer is bounded in time and size and may be missing: a coarser view, never an error. ``/server_info`` exists only with
``VLLM_SERVER_DEV_MODE=1``, which vLLM advises against in production. Source: vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from handrail_doctor.facts import ALL_PLUGINS, EngineView, HttpAnswer, LiveEngine, PairSide, Setup
from handrail_doctor.gather.deployment import backend_of, canonical, names_of, transfer_fields, whole
from handrail_sidecar.engine_metrics.exposition import families_of, split_sample

_MOST_BYTES: Final = 16 << 20
_DATE_LATE_NS: Final = 3 * 10**9
"""How late a Date header may be, in ns.

It has whole seconds, and servers renew it about once a second.
"""
_FAMILY: Final = b"vllm:"
_CACHE_INFO: Final = b"vllm:cache_config_info{"


@dataclass(frozen=True, slots=True)
class _Reply:
    answer: HttpAnswer
    body: bytes = b""
    clock: tuple[int, int] | None = None


async def ask_engine(
    side: PairSide, url: str, *, timeout_s: float, headers: Mapping[str, str], now_unix_ns: Callable[[], int] = time.time_ns
) -> EngineView:
    """Ask ``url`` (scheme, host, port) for everything that it answers.

    Takes about ``timeout_s``; never raises for what the peer does.
    """
    base = url.rstrip("/")
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(timeout=timeout, headers=dict(headers), trust_env=False) as session:

        def get(path: str) -> Any:
            return _get(session, base + path, timeout_s, now_unix_ns)

        health, version, models, page, info = await asyncio.gather(
            get("/health"), get("/version"), get("/v1/models"), get("/metrics"), get("/server_info?config_format=json")
        )
    served = _models(models.body)
    live = LiveEngine(
        health=health.answer,
        models=tuple(name for name, _, _ in served),
        metrics=page.answer,
        families=frozenset(families_of(page.body)),
        clock=_narrowest([each.clock for each in (health, version, models, page)]),
    )
    is_engine = bool(served) or _FAMILY in page.body  # other programs have a /version too
    fields = _object(version.body) if is_engine else {}
    setups = (_server_info(_object(info.body), base), _metrics(page.body, base), _api(served, fields, base))
    return EngineView(
        side=side, url=base, host=urlsplit(base).hostname, live=live, setups=tuple(each for each in setups if each is not None)
    )


# --- what the answers say ---------------------------------------------------------------------------------------------------


def _api(served: list[tuple[str, str | None, int | None]], version: Mapping[str, Any], base: str) -> Setup | None:
    number = version.get("version")
    if not served and not isinstance(number, str):
        return None
    _, root, longest = served[0] if served else ("", None, None)
    return Setup(by=f"{base}/v1/models", model=root, max_model_len=longest, version=number if isinstance(number, str) else None)


def _models(body: bytes) -> list[tuple[str, str | None, int | None]]:
    """Return (served name, path or name of its source, longest context) of each model.

    Adapters, which have a parent, are left out.
    """
    found = []
    data = _object(body).get("data")
    for each in data if isinstance(data, list) else ():
        if isinstance(each, Mapping) and isinstance(each.get("id"), str) and not each.get("parent"):
            root = each.get("root")
            found.append((each["id"], root if isinstance(root, str) else None, whole(each.get("max_model_len"))))
    return found


def _metrics(page: bytes, base: str) -> Setup | None:
    """Read the labels of ``vllm:cache_config_info``."""
    line = next((line for line in page.split(b"\n") if line.startswith(_CACHE_INFO)), None)
    sample = split_sample(line) if line is not None else None
    if sample is None:
        return None
    labels = sample[1]
    return Setup(
        by=f"{base}/metrics",
        kv_cache_dtype=_error_text(labels.get("cache_dtype")),
        group_block_size=whole(labels.get("block_size")),
        kv_layout=_error_text(labels.get("kv_cache_layout")),
    )


def _server_info(info: Mapping[str, Any], base: str) -> Setup | None:
    config = _part(info, "vllm_config")
    if not config:
        return None
    model, cache, parallel = _part(config, "model_config"), _part(config, "cache_config"), _part(config, "parallel_config")
    transfer, observed = _part(config, "kv_transfer_config"), _part(config, "observability_config")
    scheduler, env = _part(config, "scheduler_config"), _part(info, "vllm_env")
    off = scheduler.get("disable_hybrid_kv_cache_manager")
    return Setup(
        by=f"{base}/server_info",
        model=_error_text(model.get("model")),
        revision=_error_text(model.get("revision")),
        dtype=_error_text(model.get("dtype")),
        kv_cache_dtype=_error_text(cache.get("cache_dtype")),
        group_block_size=whole(cache.get("block_size")),
        kv_layout=_error_text(env.get("VLLM_KV_CACHE_LAYOUT")),
        tp=whole(parallel.get("tensor_parallel_size")),
        dcp=whole(parallel.get("decode_context_parallel_size")),
        attention_backend=backend_of(_part(config, "attention_config").get("backend")),
        speculation=_part(config, "speculative_config") if "speculative_config" in config else None,
        hf_overrides=canonical(_part(model, "hf_overrides")) or ("" if "hf_overrides" in model else None),
        max_model_len=whole(model.get("max_model_len")),
        hybrid=not off if isinstance(off, bool) else None,
        **transfer_fields(transfer),
        side_host=_error_text(env.get("VLLM_NIXL_SIDE_CHANNEL_HOST")),
        side_port=whole(env.get("VLLM_NIXL_SIDE_CHANNEL_PORT")),
        otlp_endpoint=_error_text(observed.get("otlp_traces_endpoint")),
        # It has all VLLM_* variables that are set, and no other: UCX_* and HANDRAIL_SOCKET stay unknown.
        plugins=(names_of(env.get("VLLM_PLUGINS")) or ALL_PLUGINS) if env else None,
    )


def _error_text(value: Any) -> str | None:
    """Return a text from JSON or a label; None where it has no content.

    ``torch.bfloat16`` becomes ``bfloat16``.
    """
    if not isinstance(value, str) or value in ("", "None", "null"):
        return None
    return value.removeprefix("torch.")


def _part(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


# --- asking ---------------------------------------------------------------------------------------------------------------


async def _get(session: aiohttp.ClientSession, url: str, timeout_s: float, now_unix_ns: Callable[[], int]) -> _Reply:
    sent = now_unix_ns()
    try:
        async with session.get(url, allow_redirects=False) as response:
            clock = _clock(response.headers.get("Date"), sent, now_unix_ns())
            parts, size = [], 0
            async for part in response.content.iter_any():
                size += len(part)
                if size > _MOST_BYTES:
                    return _Reply(HttpAnswer(status=response.status, error=f"the answer is larger than {_MOST_BYTES >> 20} MiB"))
                parts.append(part)
            body = b"".join(parts)
            return _Reply(HttpAnswer(status=response.status), body if response.status == 200 else b"", clock)
    except asyncio.TimeoutError:
        return _Reply(HttpAnswer(error=f"no answer within {timeout_s:g} s"))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return _Reply(HttpAnswer(error=reason(error)))


def reason(error: Exception) -> str:
    """Return why a request got no answer, in one short line."""
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        return f"cannot connect: {os.strerror(number) if number and number > 0 else error.os_error}"[:200]
    return f"{type(error).__name__}: {error}"[:200] if str(error) else type(error).__name__


def _clock(date: str | None, sent_ns: int, received_ns: int) -> tuple[int, int] | None:
    """Return the interval of the peer's clock minus ours.

    The peer wrote its Date between our sending and receiving, and the Date is up to some seconds late.
    """
    try:
        reported_ns = int(parsedate_to_datetime(date).timestamp()) * 10**9 if date else None
    except (TypeError, ValueError, OverflowError):
        return None
    return None if reported_ns is None else (reported_ns - received_ns, reported_ns + _DATE_LATE_NS - sent_ns)


def _narrowest(clocks: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the interval that all of them allow."""
    known = [clock for clock in clocks if clock is not None]
    if not known:
        return None
    low, high = max(low for low, _ in known), min(high for _, high in known)
    return (low, high) if low <= high else None
