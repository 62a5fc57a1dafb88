"""Run a real prefill/decode pair: two ``vllm serve`` processes and vllm-router.

The engines hand KV blocks over with NIXL on this machine.
Requirements found (vLLM 0.32 on CPU): the KV block size must be a multiple of 32 with NIXL; every address must be named, or UCX
and the side channel bind other interfaces; a pair takes about 5.4 GB and 30-60 s to start on two cores.
``python tests/vllm/serve_pair.py`` runs one from the command line. Standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vllm.child import HOST, Child, free_port

VERSION = "0.32.0"
MODEL_NAME = "tiny"
START_S = 600.0
_TEST_BED = Path(__file__).parent

ENGINE_ENV: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": HOST,
    "UCX_TLS": "tcp,self,sm",
    "UCX_NET_DEVICES": "lo",
    "PYTHONPATH": str(_TEST_BED / "engine_site"),  # two_core_tuning.py
    "OTEL_BSP_SCHEDULE_DELAY": "200",  # ms; 5 s by default, which only makes tests wait
}


class NotInstalledError(RuntimeError):
    """The engine is not installed; the message says what to run."""


@dataclass(frozen=True, slots=True)
class Installation:
    """What install.sh made."""

    root: Path

    @property
    def vllm(self) -> Path:
        return self.root / "venv/bin/vllm"

    @property
    def python(self) -> Path:
        return self.root / "venv/bin/python"

    @property
    def router(self) -> Path:
        return self.root / "venv_router/bin/vllm-router"

    @property
    def router_python(self) -> Path:
        return self.root / "venv_router/bin/python"

    @property
    def model(self) -> Path:
        """Return the model with random weights: its output depends on the KV cache."""
        return self.root / "tiny-qwen3-rand"

    @property
    def model_without_weights(self) -> Path:
        return self.root / "tiny-qwen3"


def find_installation(cache: Path | None = None) -> Installation:
    """Find the installation under ``cache``.

    The default is HANDRAIL_CACHE, else ~/.cache/handrail. Raises ``NotInstalledError``.
    """
    base = cache or Path(os.environ.get("HANDRAIL_CACHE") or Path.home() / ".cache/handrail")
    found = Installation(base / f"vllm-{VERSION}")
    stamps = (".venv-*", ".venv_router-*", ".models-*")
    if not all(any(found.root.glob(stamp)) for stamp in stamps):
        raise NotInstalledError(f"no vLLM {VERSION} in {found.root}: run `bash tests/vllm/install.sh` (2 to 3 minutes)")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How one engine of the pair is started."""

    port: int = 0  # 0: a free one
    otlp_endpoint: str = ""  # grpc://host:port or http://host:port/v1/traces; without one nothing is exported
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    connector: Mapping[str, object] = field(default_factory=dict)  # added to (or replacing parts of) --kv-transfer-config


class Engine:
    """One ``vllm serve`` process. Built by ``start_engine``."""

    def __init__(self, child: Child, role: str, port: int, side_channel_port: int) -> None:
        self.child = child
        self.role = role
        self.port = port
        self.side_channel_port = side_channel_port

    @property
    def instance(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.instance}"

    def wait_healthy(self, deadline_s: float) -> None:
        """Return when /health answers 200.

        Raises ``ChildError`` when the process ends first or at the timeout.
        """
        self.child.wait_http(f"{self.url}/health", deadline_s=deadline_s)


def _otlp(settings: EngineSettings, role: str) -> tuple[list[str], dict[str, str]]:
    if not settings.otlp_endpoint:
        return [], {}
    protocol = "http/protobuf" if settings.otlp_endpoint.startswith("http") else "grpc"
    env = {"OTEL_SERVICE_NAME": f"vllm-{role}", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol}
    return ["--otlp-traces-endpoint", settings.otlp_endpoint], env


def start_engine(
    installation: Installation, role: str, settings: EngineSettings, *, logs: Path, model: Path | None = None
) -> Engine:
    """Start ``role`` (``prefill`` or ``decode``) and return at once.

    The log is ``logs/<role>-<port>.log``.
    """
    port, side_channel = settings.port or free_port(), free_port()
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        **settings.connector,
    }
    otlp_flags, otlp_env = _otlp(settings, role)
    model = model or installation.model
    load = ["--load-format", "dummy"] if model == installation.model_without_weights else []
    command = [
        *(str(installation.vllm), "serve", str(model), "--served-model-name", MODEL_NAME, *load),
        *("--host", HOST, "--port", str(port), "--seed", "0"),
        *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16", "--block-size", "32"),
        *("--kv-transfer-config", json.dumps(transfer), *otlp_flags, *settings.flags),
    ]
    env = {
        **ENGINE_ENV,
        "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        **otlp_env,
        **settings.env,
    }
    child = Child(f"vllm {role}", command, log=logs / f"{role}-{port}.log", env=env)
    return Engine(child, role, port, side_channel)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode engine."""

    prefill: Engine
    decode: Engine

    def wait_healthy(self, timeout_s: float = START_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        for engine in (self.prefill, self.decode):
            engine.wait_healthy(deadline_s)

    def stop(self) -> None:
        for engine in (self.decode, self.prefill):
            engine.child.stop()


@contextlib.contextmanager
def running_pair(
    installation: Installation,
    *,
    logs: Path,
    prefill: EngineSettings | None = None,
    decode: EngineSettings | None = None,
    model: Path | None = None,
    timeout_s: float = START_S,
) -> Iterator[Pair]:
    """Run a pair that answers; stop it at the end. Both engines start at once.

    Raises ``ChildError`` with the end of the log.
    """
    with contextlib.ExitStack() as stack:
        engines = []
        for role, settings in (("prefill", prefill), ("decode", decode)):
            engine = start_engine(installation, role, settings or EngineSettings(), logs=logs, model=model)
            stack.callback(engine.child.stop)
            engines.append(engine)
        pair = Pair(*engines)
        pair.wait_healthy(timeout_s)
        yield pair


@contextlib.contextmanager
def running_router(
    installation: Installation,
    *,
    prefill_urls: Sequence[str],
    decode_urls: Sequence[str],
    logs: Path,
    otlp_endpoint: str = "",
    timeout_s: float = 240.0,
) -> Iterator[str]:
    """Run vllm-router in front of the engines or of their sidecars; yield its URL.

    ``otlp_endpoint`` (``host:port``, gRPC) turns on its built-in tracing, which its own command line does not offer.
    """
    port = free_port()
    if otlp_endpoint:
        options = {"port": port, "prefill": list(prefill_urls), "decode": list(decode_urls), "otlp_endpoint": otlp_endpoint}
        options["metrics_port"] = free_port()
        command = [str(installation.router_python), str(_TEST_BED / "router_traced.py"), json.dumps(options)]
    else:
        command = [str(installation.router), "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
        for flag, urls in (("--prefill", prefill_urls), ("--decode", decode_urls)):
            command += [part for url in urls for part in (flag, url)]
        command += ["--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(free_port())]
        command += ["--worker-startup-check-interval", "1"]
    with Child("vllm-router", command, log=logs / f"router-{port}.log") as child:
        url = f"http://{HOST}:{port}"
        child.wait_http(f"{url}/health", deadline_s=time.monotonic() + timeout_s)
        yield url


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Unwind at SIGTERM like at Ctrl-C, so that everything started is stopped."""
    raise SystemExit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a pair until SIGTERM or Ctrl-C; print one JSON line when both answer."""
    parser = argparse.ArgumentParser(prog="serve_pair.py", description=main.__doc__)
    parser.add_argument("--logs", type=Path, help="folder of the logs (default: a new temporary one)")
    parser.add_argument("--prefill-port", type=int, default=0)
    parser.add_argument("--decode-port", type=int, default=0)
    parser.add_argument("--prefill-otlp", default="", help="grpc://host:port or http://host:port/v1/traces")
    parser.add_argument("--decode-otlp", default="")
    parser.add_argument("--router", action="store_true", help="also vllm-router in front")
    parser.add_argument("--prefill-url", help="where the router reaches P (default: P itself; a sidecar in front of it)")
    parser.add_argument("--decode-url", help="where the router reaches D")
    options = parser.parse_args(argv)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="handrail-pair-"))
    try:
        installation = find_installation()
    except NotInstalledError as error:
        print(error, file=sys.stderr)
        return 3
    prefill = EngineSettings(port=options.prefill_port, otlp_endpoint=options.prefill_otlp)
    decode = EngineSettings(port=options.decode_port, otlp_endpoint=options.decode_otlp)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGINT, _end)
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(running_pair(installation, logs=logs, prefill=prefill, decode=decode))
        ready = {"prefill": pair.prefill.url, "decode": pair.decode.url, "model": MODEL_NAME, "logs": str(logs)}
        if options.router:
            prefill_url, decode_url = options.prefill_url or pair.prefill.url, options.decode_url or pair.decode.url
            router = running_router(installation, prefill_urls=[prefill_url], decode_urls=[decode_url], logs=logs)
            ready["router"] = stack.enter_context(router)
        print(json.dumps(ready), flush=True)
        signal.pause()
    return 0
