"""Receive spans over OTLP, join them into requests, explain and store them.

The spans come from sidecars and engines. The collector also serves the HTTP API
that the other commands query.

examples:
  handrail collector
  handrail collector --otlp-grpc 0.0.0.0:4317 --data /var/lib/handrail \\
    --tls-cert-file tls.crt --tls-key-file tls.key
  handrail collector --config collector.yaml
"""

from __future__ import annotations

import argparse

from handrail.config.schema import ConfigError
from handrail_cli.config_file import add_config_flags, configuration, print_problems
from handrail_cli.errors import EXIT_USAGE
from handrail_cli.logs import start_logging
from handrail_collector.config import CollectorConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail collector``."""
    add_config_flags(parser, CollectorConfig)


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGTERM or Ctrl-C."""
    try:
        config = configuration(arguments, CollectorConfig)
    except ConfigError as error:
        print_problems(error, as_json=arguments.json)
        return EXIT_USAGE
    start_logging(as_json=arguments.json)
    from handrail_collector.app import run as run_collector

    return run_collector(config)
