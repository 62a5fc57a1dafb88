"""Run vllm-router 0.1.17 with its built-in OTLP tracing.

Its own command line does not offer the tracing. Runs in the router's environment.
One argument, a JSON object: ``port``, ``metrics_port``, ``prefill`` and ``decode`` (lists of URLs), ``otlp_endpoint``
(host:port of a gRPC receiver).
"""

import json
import sys

from vllm_router_rs import PolicyType, Router


def main() -> None:
    options = json.loads(sys.argv[1])
    router = Router(
        worker_urls=[],
        policy=PolicyType.RoundRobin,
        host="127.0.0.1",
        port=options["port"],
        vllm_pd_disaggregation=True,
        prefill_urls=[(url, None) for url in options["prefill"]],
        decode_urls=options["decode"],
        kv_connector="nixl",
        prometheus_host="127.0.0.1",
        prometheus_port=options["metrics_port"],
        worker_startup_check_interval=1,
        log_level="INFO",
        enable_trace=True,
        otlp_traces_endpoint=options["otlp_endpoint"],
    )
    router.start()


if __name__ == "__main__":
    main()
