"""Command line of the emulator: engine, router, load, truth, simulate.

Run it as ``python -m handrail_sim.emulator``.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from handrail_sim.emulator import faults, load, process, router, scenario, truth_log, virtual_run, workload
from handrail_sim.emulator.plugin_events import socket_path
from handrail_sim.emulator.profile import ProfileError, bundled
from handrail_sim.emulator.profile import load as load_profile

_OURS = (
    ProfileError,
    scenario.ScenarioError,
    faults.FaultError,
    virtual_run.SimulationError,
    truth_log.WitnessError,
    workload.TraceError,
)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text} is not between 0 and 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise ValueError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not 1 or more")
    return value


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every process of a fleet shares."""
    parser.add_argument("--scenario", default="split", help=f"a file or one of: {', '.join(scenario.bundled())}")
    _add_fault(parser, "of the fleet, given to every process")
    parser.add_argument("--began-unix-ns", type=int, metavar="NS", help="when the fleet began; default: now")
    parser.add_argument("--truth", type=Path, metavar="FILE", help="append what truly happened to it, a line of JSON a request")


def _add_fault(parser: argparse.ArgumentParser, more: str) -> None:
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME:PLACE:SIZE[@FROM-TO]",
        help=f"{more}; seconds of the run after @; any of: {', '.join(faults.FAULTS)}",
    )


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="handrail_sim.emulator", description="An emulated vLLM prefill/decode fleet over real sockets."
    )
    commands = top.add_subparsers(dest="command", required=True)

    engine = commands.add_parser("engine", help="one vLLM engine")
    engine.add_argument("--role", choices=("prefill", "decode", "both"), default="both")
    engine.add_argument("--listen", type=process.address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    _add_run(engine)
    engine.add_argument("--host", help="which of the scenario's hosts it is; default: the first of its role")
    engine.add_argument("--profile", help=f"llm-d latencies instead of the scenario's: a file or one of: {', '.join(bundled())}")
    engine.add_argument("--seed", type=int, default=0)
    engine.add_argument("--speed", type=_positive, default=1.0, help="2: everything takes half as long")
    engine.add_argument("--model", help="served name; default: the profile's, or the scenario's")
    engine.add_argument("--otlp-endpoint", metavar="URL", help="where to export spans; with /v1/traces for http")
    engine.add_argument("--otlp-protocol", choices=("grpc", "http"), default="grpc")
    engine.add_argument("--ready-file", type=Path)
    engine.add_argument("--request-id-headers", action="store_true", help="echo X-Request-Id (vLLM: --enable-request-id-headers)")
    engine.add_argument("--num-gpu-blocks", type=_count, help="KV blocks of 16 tokens; default: the scenario's")
    engine.add_argument(
        "--kv-load-failure-policy", choices=("fail", "recompute"), default="fail", help="for failures that no fault ordered"
    )
    engine.add_argument("--max-model-len", type=_count, default=32_768)
    engine.add_argument("--kv-lease-duration", type=_positive, default=30.0, metavar="SECONDS")

    relay = commands.add_parser("router", help="a two-step prefill/decode router")
    relay.add_argument("--listen", type=process.address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    relay.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    relay.add_argument("--decode", nargs="+", required=True, metavar="URL")
    relay.add_argument("--policy", choices=router.POLICIES, default="round_robin")
    relay.add_argument("--drop-traceparent", choices=router.DROPS)
    relay.add_argument("--replace-ids", action="store_true", help="send both workers an id of our own, as vllm-router does")
    _add_run(relay)
    relay.add_argument("--retries", type=int, help="other hosts to try when a prefill fails; default: the scenario's")
    relay.add_argument("--otlp-endpoint", metavar="URL", help="where to export spans as vllm-router does; default: none")
    relay.add_argument("--otlp-protocol", choices=("grpc", "http"), default="grpc")
    relay.add_argument("--think-ms", type=float, default=0.0, help="time spent before forwarding")
    relay.add_argument("--ready-file", type=Path)

    sender = commands.add_parser("load", help="send requests; one JSON line each with the client's times")
    sender.add_argument("--url", required=True)
    sender.add_argument("--requests", type=_count, required=True)
    pace = sender.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=_count, default=8)
    pace.add_argument("--rate", type=_positive, help="requests per second, Poisson; of a trace: 2 is twice as fast")
    query = sender.add_argument_group("what simulate would ask, at its times, instead of a pace, kinds and lengths of its own")
    query.add_argument("--scenario", help=f"a file or one of: {', '.join(scenario.bundled())}")
    query.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths: Azure's .csv or Mooncake's .jsonl")
    _add_fault(sender, "of the fleet; a client's own is client_slow")
    sender.add_argument("--streaming-share", type=_share, default=0.8)
    sender.add_argument("--chat-share", type=_share, default=0.5)
    sender.add_argument("--seed", type=int, default=0)
    sender.add_argument("--model")
    sender.add_argument("--id-prefix", default="load")
    sender.add_argument("--no-traceparent", action="store_true")
    sender.add_argument("--prompt-words", type=_count, nargs=2, default=(50, 400), metavar=("MIN", "MAX"))
    sender.add_argument("--answer-tokens", type=_count, nargs=2, default=(8, 40), metavar=("MIN", "MAX"))
    sender.add_argument("--timeout", type=_positive, default=120.0, metavar="SECONDS", help="of a whole request")

    argument_parser = commands.add_parser(
        "truth", help="what the processes' --truth files and the load's lines make together, a line a request"
    )
    argument_parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="as written by --truth")
    argument_parser.add_argument("--load", type=Path, required=True, metavar="FILE", help="what load printed")
    argument_parser.add_argument("--began-unix-ns", type=int, required=True, metavar="NS", help="as the processes were told")

    virtually = commands.add_parser(
        "simulate", help="a fleet in virtual time: the truth of each request, and what hosts say of it"
    )
    virtually.add_argument("--scenario", default="split", help=f"a file or one of: {', '.join(scenario.bundled())}")
    virtually.add_argument("--requests", type=_count, default=1000)
    virtually.add_argument("--seed", type=int, default=0)
    _add_fault(virtually, "of the run")
    virtually.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths: Azure's .csv or Mooncake's .jsonl")
    virtually.add_argument("--rate", type=_positive, default=1.0, help="2: the trace twice as fast")
    virtually.add_argument("--json", action="store_true", help="one object a request; without it, the run's figures")
    return top


def _host(args: argparse.Namespace, chosen: scenario.Scenario) -> str:
    hosts = chosen.hosts()
    valid = {"prefill": hosts.prefill, "decode": hosts.decode}.get(args.role, (*hosts.decode, *hosts.prefill))
    if args.host is not None and args.host not in valid:
        raise scenario.ScenarioError(
            f"--host {args.host!r}: scenario {chosen.name} has no such {args.role} host; valid: {', '.join(valid)}"
        )
    host: str = args.host or valid[0]
    return host


def _engine(args: argparse.Namespace) -> None:
    from handrail_sim.emulator import engine, http_api  # SDK and Prometheus client, which routers and clients do not need

    chosen = scenario.load(args.scenario)
    profile = load_profile(args.profile) if args.profile is not None else None
    if args.num_gpu_blocks is not None:
        chosen = dataclasses.replace(chosen, kv_blocks=args.num_gpu_blocks)
    settings = engine.EngineSettings(
        role=args.role,
        listen=args.listen,
        scenario=chosen,
        host=_host(args, chosen),
        profile=profile,
        model=args.model or (profile.model if profile is not None else chosen.model),
        faults=_faults(args, chosen),
        began_unix_ns=args.began_unix_ns,
        truth=args.truth,
        seed=args.seed,
        speed=args.speed,
        otlp_endpoint=args.otlp_endpoint,
        otlp_protocol=args.otlp_protocol,
        ready_file=args.ready_file,
        echo_request_id=args.request_id_headers,
        max_model_len=args.max_model_len,
        lease_s=args.kv_lease_duration,
        recompute=args.kv_load_failure_policy == "recompute",
        plugin_socket=socket_path(),
    )
    asyncio.run(http_api.run(settings))


def _faults(args: argparse.Namespace, chosen: scenario.Scenario) -> tuple[faults.Fault, ...]:
    return tuple(faults.parse(text, chosen.hosts()) for text in args.fault)


def _router(args: argparse.Namespace) -> None:
    chosen = scenario.load(args.scenario)
    settings = router.RouterSettings(
        listen=args.listen,
        prefill=tuple(url.rstrip("/") for url in args.prefill),
        decode=tuple(url.rstrip("/") for url in args.decode),
        policy=args.policy,
        drop_traceparent=args.drop_traceparent,
        replace_ids=args.replace_ids,
        think_s=args.think_ms / 1e3,
        retries=chosen.prefill_retries if args.retries is None else args.retries,
        faults=_faults(args, chosen),
        began_unix_ns=args.began_unix_ns,
        truth=args.truth,
        otlp_endpoint=args.otlp_endpoint,
        otlp_protocol=args.otlp_protocol,
        ready_file=args.ready_file,
    )
    asyncio.run(router.run(settings))


def _load(args: argparse.Namespace) -> None:
    arrivals: list[workload.Arrival] = []
    if args.trace is not None:
        arrivals = workload.repeat(virtual_run.read_trace(args.trace), args.requests, args.rate or 1.0)
    elif args.scenario is not None:
        arrivals = workload.generate(scenario.load(args.scenario), args.requests, args.seed)
    hosts = scenario.load(args.scenario or "split").hosts()
    slow = [faults.parse(text, hosts) for text in args.fault if text.startswith("client_slow:")]
    settings = load.LoadSettings(
        url=args.url.rstrip("/"),
        requests=args.requests,
        concurrency=args.concurrency,
        rate=args.rate,
        streaming_share=args.streaming_share,
        chat_share=args.chat_share,
        seed=args.seed,
        model=args.model,
        id_prefix=args.id_prefix,
        traceparent=not args.no_traceparent,
        prompt_words=tuple(args.prompt_words),
        answer_tokens=tuple(args.answer_tokens),
        timeout_s=args.timeout,
        arrivals=tuple(arrivals),
        slow_clients_s=max((fault.size for fault in slow), default=0.0),
    )
    asyncio.run(load.run(settings, load.print_line))


def _truth(args: argparse.Namespace) -> None:
    lines = [line for path in args.files for line in truth_log.read(path)]
    for truth in truth_log.truths(lines, truth_log.read_load(args.load), args.began_unix_ns):
        print(json.dumps(dataclasses.asdict(truth)))


def _simulate(args: argparse.Namespace) -> None:
    chosen = scenario.load(args.scenario)
    settings = virtual_run.VirtualRunSettings(
        scenario=chosen,
        requests=args.requests,
        seed=args.seed,
        faults=_faults(args, chosen),
        trace=args.trace,
        rate=args.rate,
    )
    virtual_requests = virtual_run.simulate(settings)
    if args.json:
        for line in virtual_run.lines(settings, virtual_requests):
            print(line)
    else:
        print(json.dumps(virtual_run.summary(virtual_requests), indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        commands = {"engine": _engine, "router": _router, "load": _load, "truth": _truth, "simulate": _simulate}
        commands[args.command](args)
    except (*_OURS, OSError) as error:
        print(f"handrail_sim.emulator {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
