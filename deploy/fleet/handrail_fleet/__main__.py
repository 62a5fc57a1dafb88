"""``python -m handrail_fleet engine | router | load | simulate``."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from handrail_fleet import faults, load, ready, router, scenario, virtual
from handrail_fleet.profile import ProfileError, bundled
from handrail_fleet.profile import load as load_profile


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


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="handrail_fleet", description="An emulated vLLM prefill/decode fleet over real sockets.")
    commands = top.add_subparsers(dest="command", required=True)

    engine = commands.add_parser("engine", help="one vLLM engine")
    engine.add_argument("--role", choices=("prefill", "decode", "both"), default="both")
    engine.add_argument("--listen", type=ready.address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    engine.add_argument("--profile", default="8b-h100-balanced-per-token", help=f"a file or one of: {', '.join(bundled())}")
    engine.add_argument("--seed", type=int, default=0)
    engine.add_argument("--speed", type=_positive, default=1.0, help="2: everything takes half as long")
    engine.add_argument("--model", help="served name; default: the profile's")
    engine.add_argument("--otlp-endpoint", metavar="URL", help="where to export spans; with /v1/traces for http")
    engine.add_argument("--otlp-protocol", choices=("grpc", "http"), default="grpc")
    engine.add_argument("--ready-file", type=Path)
    engine.add_argument("--request-id-headers", action="store_true", help="echo X-Request-Id (vLLM: --enable-request-id-headers)")
    engine.add_argument("--num-gpu-blocks", type=_count, default=16_384, help="KV blocks of 16 tokens")
    engine.add_argument("--max-model-len", type=_count, default=32_768)
    engine.add_argument("--kv-lease-duration", type=_positive, default=30.0, metavar="SECONDS")

    relay = commands.add_parser("router", help="a two-step prefill/decode router")
    relay.add_argument("--listen", type=ready.address, default=("127.0.0.1", 0), metavar="HOST:PORT")
    relay.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    relay.add_argument("--decode", nargs="+", required=True, metavar="URL")
    relay.add_argument("--policy", choices=router.POLICIES, default="round_robin")
    relay.add_argument("--drop-traceparent", choices=router.DROPS)
    relay.add_argument("--replace-ids", action="store_true", help="send both workers an id of our own, as vllm-router does")
    relay.add_argument("--think-ms", type=float, default=0.0, help="time spent before forwarding")
    relay.add_argument("--ready-file", type=Path)

    sender = commands.add_parser("load", help="send requests; one JSON line each with the client's times")
    sender.add_argument("--url", required=True)
    sender.add_argument("--requests", type=_count, required=True)
    pace = sender.add_mutually_exclusive_group()
    pace.add_argument("--concurrency", type=_count, default=8)
    pace.add_argument("--rate", type=_positive, help="requests per second, Poisson")
    sender.add_argument("--streaming-share", type=_share, default=0.8)
    sender.add_argument("--chat-share", type=_share, default=0.5)
    sender.add_argument("--seed", type=int, default=0)
    sender.add_argument("--model")
    sender.add_argument("--id-prefix", default="load")
    sender.add_argument("--no-traceparent", action="store_true")
    sender.add_argument("--prompt-words", type=_count, nargs=2, default=(50, 400), metavar=("MIN", "MAX"))
    sender.add_argument("--answer-tokens", type=_count, nargs=2, default=(8, 40), metavar=("MIN", "MAX"))

    virtually = commands.add_parser(
        "simulate", help="a fleet in virtual time: the truth of each request, and what hosts say of it"
    )
    virtually.add_argument("--scenario", default="split", help=f"a file or one of: {', '.join(scenario.bundled())}")
    virtually.add_argument("--requests", type=_count, default=1000)
    virtually.add_argument("--seed", type=int, default=0)
    virtually.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="NAME:PLACE:SIZE[@FROM-TO]",
        help=f"seconds of the run after @; any of: {', '.join(faults.FAULTS)}",
    )
    virtually.add_argument("--trace", type=Path, metavar="FILE", help="arrivals and lengths: Azure's .csv or Mooncake's .jsonl")
    virtually.add_argument("--rate", type=_positive, default=1.0, help="2: the trace twice as fast")
    virtually.add_argument("--json", action="store_true", help="one object a request; without it, the run's figures")
    return top


def _engine(args: argparse.Namespace) -> None:
    from handrail_fleet import engine, http_api  # the SDK and the Prometheus client: a router or a client need neither

    profile = load_profile(args.profile)
    settings = engine.Settings(
        role=args.role,
        listen=args.listen,
        profile=profile,
        model=args.model or profile.model,
        seed=args.seed,
        speed=args.speed,
        otlp_endpoint=args.otlp_endpoint,
        otlp_protocol=args.otlp_protocol,
        ready_file=args.ready_file,
        echo_request_id=args.request_id_headers,
        blocks=args.num_gpu_blocks,
        max_model_len=args.max_model_len,
        lease_s=args.kv_lease_duration,
    )
    asyncio.run(http_api.run(settings))


def _router(args: argparse.Namespace) -> None:
    settings = router.Settings(
        listen=args.listen,
        prefill=tuple(url.rstrip("/") for url in args.prefill),
        decode=tuple(url.rstrip("/") for url in args.decode),
        policy=args.policy,
        drop_traceparent=args.drop_traceparent,
        replace_ids=args.replace_ids,
        think_s=args.think_ms / 1e3,
        ready_file=args.ready_file,
    )
    asyncio.run(router.run(settings))


def _load(args: argparse.Namespace) -> None:
    settings = load.Settings(
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
    )
    asyncio.run(load.run(settings, load.print_line))


def _simulate(args: argparse.Namespace) -> None:
    chosen = scenario.load(args.scenario)
    settings = virtual.Settings(
        scenario=chosen,
        requests=args.requests,
        seed=args.seed,
        faults=tuple(faults.parse(text, chosen.hosts()) for text in args.fault),
        trace=args.trace,
        rate=args.rate,
    )
    told = virtual.simulate(settings)
    if args.json:
        for line in virtual.lines(settings, told):
            print(line)
    else:
        print(json.dumps(virtual.summary(told), indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        {"engine": _engine, "router": _router, "load": _load, "simulate": _simulate}[args.command](args)
    except (ProfileError, scenario.ScenarioError, faults.FaultError, virtual.SimulationError, OSError) as error:
        print(f"handrail_fleet {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
