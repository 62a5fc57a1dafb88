"""Check a prefill/decode pair before traffic, and predict the hand-off's cost.

The checks cover the GPUs, the network, the engines and the sidecars. A check
passes, warns, fails or cannot be judged; it shows its evidence, why it matters
and what to do.

Give it running engines, the files that start them, or both. On the host of an
engine it also checks GPUs and adapters. It changes nothing and sends no
request.

examples:
  handrail doctor --prefill http://10.0.0.7:8100 --decode http://10.0.0.8:8200
  handrail doctor --config pair.yaml --config sidecar.yaml --on decode
  handrail doctor --model config.json --link-gbps 400 --tokens 10000 --ttft 1s
  handrail doctor --same-env --on prefill --config pair.yaml --strict
    (in an init container)
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from handrail.config.schema import ConfigError, load, not_yaml, read_text
from handrail.security.tokens import OPEN
from handrail_cli.access import access, add_access_flags
from handrail_cli.commands.kv_size import add_serving_flags, config_failure, serving
from handrail_cli.config_file import invalid_file
from handrail_cli.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, CliError
from handrail_cli.time_flags import duration_ns
from handrail_doctor.checks.all_checks import counts, findings, nothing_was_judged
from handrail_doctor.checks.result import CheckStatus
from handrail_doctor.facts import DoctorOptions, PairSide, Placement, SidecarSetup
from handrail_doctor.gather.deployment import Started, engines_in
from handrail_doctor.gather.gather import Wanted, gather
from handrail_doctor.gather.gpus import NvmlReader, P2pReader
from handrail_doctor.kv_size.keys import ModelConfigError, UnknownModelError
from handrail_doctor.kv_size.read import read_model
from handrail_doctor.prediction import predicted
from handrail_doctor.split_worth import judged
from handrail_sidecar.settings import SidecarConfig

EXIT_NOTHING: Final = 3
"""Exit code where nothing could be judged or predicted.

An init container that checks nothing must not look like one whose checks pass.
"""

DEFAULT_TOKENS: Final = 8000
_MOST_TOKENS: Final = 10**9
_API_VARIABLE: Final = "HANDRAIL_API"
_ON: Final = {
    "prefill": {PairSide.PREFILL},
    "decode": {PairSide.DECODE},
    "both": {PairSide.PREFILL, PairSide.DECODE},
    "neither": set(),
}
_READS: Final = "Kubernetes or Compose YAML with 'vllm serve' in a command, or a sidecar's configuration with its role"
_PLACEMENTS: Final = (Placement.SAME_HOST.value, Placement.ACROSS_HOSTS.value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail doctor``."""
    what = parser.add_argument_group("what to check")
    what.add_argument("--prefill", metavar="URL", help="HTTP address of the prefill engine")
    what.add_argument("--decode", metavar="URL", help="HTTP address of the decode engine")
    what.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="Kubernetes or Compose YAML that starts the engines, or a sidecar's configuration; may be repeated",
    )
    what.add_argument(
        "--model", metavar="MODEL_CONFIG", type=Path, help="config.json of the model, or its folder, for the prediction"
    )
    what.add_argument(
        "--api", metavar="URL", help=f"collector that knows clocks, traffic and measured rates (default: ${_API_VARIABLE})"
    )
    what.add_argument(
        "--otlp",
        metavar="ENDPOINT",
        action="append",
        default=[],
        help="OTLP endpoint that must accept an export; may be repeated",
    )
    what.add_argument(
        "--header",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="header for the engines, such as a token; may be repeated",
    )
    add_access_flags(parser)
    where = parser.add_argument_group("where the engines run")
    where.add_argument("--on", choices=tuple(_ON), help="engines that run on this host (default: by their addresses)")
    where.add_argument(
        "--placement", choices=_PLACEMENTS, help="whether both engines run on one host (default: by their addresses)"
    )
    where.add_argument(
        "--same-env", action="store_true", help="doctor runs in the pod of the engine, with its environment; needs --on"
    )
    for side in PairSide:
        where.add_argument(f"--{side.value}-gpus", metavar="N,N", help=f"GPUs of {side.value} by their NVML numbers")
        where.add_argument(
            f"--{side.value}-side-channel",
            metavar="HOST:PORT",
            help=f"side channel of {side.value} (NIXL; port 5600)",
        )
    where.add_argument(
        "--root", metavar="DIR", type=Path, default=Path("/"), help="folder where sys and proc of the host are mounted"
    )
    expected = parser.add_argument_group("expected traffic")
    expected.add_argument(
        "--tokens",
        metavar="N",
        type=int,
        default=DEFAULT_TOKENS,
        help=f"length of a typical prompt in tokens (default {DEFAULT_TOKENS})",
    )
    expected.add_argument(
        "--link-gbps", metavar="GBIT", type=float, help="rate of the link in 10^9 bits a second (default: by its hardware)"
    )
    expected.add_argument("--ttft", metavar="DURATION", help="objective for the TTFT, such as 1s")
    expected.add_argument("--itl", metavar="DURATION", help="objective for the gaps of a stream, such as 50ms")
    expected.add_argument("--rate", metavar="N", type=float, help="requests per second")
    add_serving_flags(parser.add_argument_group("how the model is served (default: as the engines report)"))
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=5.0, help="longest wait for each answer (default 5)")
    parser.add_argument("--strict", action="store_true", help="treat a warning as a failure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0: nothing failed; 1: a check failed; 3: nothing could be judged.

    With ``--strict``, a warning also gives 1. Handrail's own remarks do not count. Raises ``CliError`` (2) for flags and files.
    """
    return check(arguments, NvmlReader())


def check(arguments: argparse.Namespace, reader: P2pReader) -> int:
    """Run as ``run`` does, with any reader of the GPUs."""
    from handrail_cli.console import waiting
    from handrail_cli.render import doctor

    wanted = wanted_of(arguments)
    with waiting("checking engines, host and network"):
        facts = asyncio.run(gather(wanted, reader, dict(os.environ)))
    found = findings(facts)
    rate = predicted(facts)
    answer = judged(facts, rate)
    if arguments.json:
        doctor.print_json(facts, found, rate, answer)
    else:
        doctor.print_page(facts, found, rate, answer)
    if nothing_was_judged(facts, found):
        return EXIT_NOTHING
    number = counts(found)
    return EXIT_FAILED if number[CheckStatus.FAIL] or (arguments.strict and number[CheckStatus.WARN]) else EXIT_OK


# --- what the flags mean ----------------------------------------------------------------------------------------------------


def wanted_of(arguments: argparse.Namespace) -> Wanted:
    """Return everything that the flags and files hold.

    Raises ``CliError``.
    """
    started, sidecars = _files(arguments.config)
    if arguments.model is not None:
        try:
            read_model(arguments.model)
        except UnknownModelError:
            pass  # the pair can be checked all the same; the prediction gives the reason
        except ModelConfigError as error:
            raise config_failure(error) from None
    if arguments.same_env and arguments.on not in ("prefill", "decode"):
        raise CliError(
            what="--same-env needs the engine of this environment", valid="--on prefill or --on decode", exit_code=EXIT_USAGE
        )
    _positive("--timeout", arguments.timeout, 600)
    api = _api(arguments.api)
    return Wanted(
        options=_options(arguments),
        urls={side: url for side in PairSide if (url := _url(side, getattr(arguments, side.value))) is not None},
        started=started,
        sidecars=sidecars,
        model=arguments.model,
        serving=serving(arguments),
        placement=Placement(arguments.placement) if arguments.placement else Placement.UNKNOWN,
        on=frozenset(_ON[arguments.on]) if arguments.on else None,
        own_environment=arguments.same_env,
        side_channels={side: each for side in PairSide if (each := _side_channel(arguments, side)) is not None},
        otlp=tuple(("--otlp", endpoint) for endpoint in arguments.otlp),
        headers=_headers(arguments.header),
        api=api,
        access=access(arguments, api) if api is not None else OPEN,
        root=arguments.root,
        timeout_s=arguments.timeout,
    )


def _options(arguments: argparse.Namespace) -> DoctorOptions:
    _positive("--tokens", arguments.tokens, _MOST_TOKENS)
    for flag, value in (("--link-gbps", arguments.link_gbps), ("--rate", arguments.rate)):
        if value is not None:
            _positive(flag, value, 10**6)
    return DoctorOptions(
        tokens=arguments.tokens,
        link_bits_per_s=arguments.link_gbps * 1e9 if arguments.link_gbps is not None else None,
        ttft_ns=_duration("--ttft", arguments.ttft),
        itl_ns=_duration("--itl", arguments.itl),
        requests_per_s=arguments.rate,
        gpus={side: each for side in PairSide if (each := _gpus(arguments, side)) is not None},
    )


def _files(paths: list[Path]) -> tuple[tuple[Started, ...], tuple[SidecarSetup, ...]]:
    """Read engines of deployments, and sidecars, from the files.

    A file must hold one kind or the other. Raises ``CliError``.
    """
    started: list[Started] = []
    sidecars: list[SidecarSetup] = []
    for path in paths:
        documents = _documents(path)
        if len(documents) == 1 and isinstance(documents[0], dict) and "role" in documents[0]:
            sidecars.append(_sidecar(path))
            continue
        found = engines_in(documents, str(path))
        if not found:
            raise CliError(
                what="this file holds neither an engine nor a sidecar",
                where=str(path),
                valid=_READS,
                exit_code=EXIT_USAGE,
            )
        started += found
    nameless = [each for each in started if each.side is None]
    if nameless:
        raise CliError(
            what=f"cannot tell whether {', '.join(each.name or 'an engine' for each in nameless)} is prefill or decode",
            where=nameless[0].setup.by,
            valid="kv_role of kv_producer or kv_consumer in --kv-transfer-config, or prefill or decode in its name",
            exit_code=EXIT_USAGE,
        )
    return tuple(started), tuple(sidecars)


def _documents(path: Path) -> list[Any]:
    """Return the documents of one file that are not empty.

    Raises ``CliError``.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]

    if path.is_dir():
        what = f"--config needs a file, and this is a folder: {_READS}"
        raise CliError(what=what, where=str(path), valid=_rendered(path), exit_code=EXIT_USAGE)
    try:
        return [each for each in yaml.safe_load_all(read_text(path)) if each is not None]
    except ConfigError as error:
        what, where = error.problems[0].rule, str(path)
    except yaml.YAMLError as error:
        problem = not_yaml(error, str(path))
        what, where = problem.rule, problem.where or str(path)
    except RecursionError:
        what, where = "is nested too deeply to be read", str(path)
    raise CliError(what=what, where=where, valid=_READS, exit_code=EXIT_USAGE)


def _rendered(folder: Path) -> str:
    """Return the command that turns a folder into one file."""
    kustomize, helm = f"kubectl kustomize {folder}", f"helm template NAME {folder}"
    if (folder / "Chart.yaml").exists():
        makers = [helm]
    elif any((folder / name).exists() for name in ("kustomization.yaml", "kustomization.yml", "Kustomization")):
        makers = [kustomize]
    else:
        makers = [kustomize, helm]
    return f"{' or '.join(makers)} > pair.yaml, then --config pair.yaml"


def _sidecar(path: Path) -> SidecarSetup:
    try:
        config = load(SidecarConfig, path)
    except ConfigError as error:
        raise invalid_file(error, f"correct the file; 'handrail config check {path}' lists the same problems") from None
    return SidecarSetup(
        by=str(path),
        role=config.role.value,
        collector=str(config.collector.endpoint),
        sends=config.collector.client,
        plugin_socket=str(config.plugin_socket) if config.plugin_socket else None,
        metrics_url=str(config.metrics.url) if config.metrics.url else None,
    )


def _url(side: PairSide, text: str | None) -> str | None:
    if text is None:
        return None
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise CliError(what=f"--{side.value} is {text!r}", valid="http://10.0.0.7:8100", exit_code=EXIT_USAGE)
    return f"{parts.scheme}://{parts.netloc}"


def _side_channel(arguments: argparse.Namespace, side: PairSide) -> tuple[str, int] | None:
    text = getattr(arguments, f"{side.value}_side_channel")
    if text is None:
        return None
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise CliError(
            what=f"--{side.value}-side-channel is {text!r}", valid="HOST:PORT, such as 10.0.0.7:5600", exit_code=EXIT_USAGE
        )
    return host, port


def _gpus(arguments: argparse.Namespace, side: PairSide) -> tuple[int, ...] | None:
    text = getattr(arguments, f"{side.value}_gpus")
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise CliError(what=f"--{side.value}-gpus is {text!r}", valid="numbers with commas, such as 0,1", exit_code=EXIT_USAGE)
    return tuple(map(int, words))


def _headers(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if any(not name or not equals for name, equals, _ in pairs):
        raise CliError(what="--header has no value", valid="NAME=VALUE, such as Authorization='Bearer ...'", exit_code=EXIT_USAGE)
    return {name: value for name, _, value in pairs}


def _api(given: str | None) -> str | None:
    url = given or os.environ.get(_API_VARIABLE)
    return None if not url else url if url.startswith(("http://", "https://")) else f"http://{url}"


def _duration(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    found = duration_ns(flag, text)
    _positive(flag, found, 10**15)
    return found


def _positive(flag: str, value: float, most: Any) -> None:
    if not 0 < value <= most:
        raise CliError(what=f"{flag} is {value:,}", valid=f"above 0, at most {most:,}", exit_code=EXIT_USAGE)
