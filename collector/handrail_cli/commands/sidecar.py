"""Observe one router or engine process.

The sidecar is an inline proxy (--listen, --upstream), a tap for the process's
OTLP spans (--otlp-grpc, --otlp-http), or both.

examples:
  handrail sidecar --role edge --listen 127.0.0.1:8000 \\
    --upstream http://127.0.0.1:8001 --collector https://collector:4318
  handrail sidecar --role edge --listen 0.0.0.0:8000 --plaintext proxy \\
    --upstream http://127.0.0.1:8001
  handrail sidecar --role decode --instance 10.0.0.7:8200 \\
    --otlp-grpc 127.0.0.1:4327
  handrail sidecar --config decode.yaml
"""

from __future__ import annotations

import argparse

from handrail.config.schema import ConfigError
from handrail_cli.config_file import add_config_flags, configuration, print_problems
from handrail_cli.errors import EXIT_USAGE
from handrail_cli.logs import start_logging
from handrail_sidecar.settings import SidecarConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``handrail sidecar``."""
    add_config_flags(parser, SidecarConfig)


def run(arguments: argparse.Namespace) -> int:
    """Run until SIGTERM or Ctrl-C."""
    try:
        config = configuration(arguments, SidecarConfig)
    except ConfigError as error:
        print_problems(error, as_json=arguments.json)
        return EXIT_USAGE
    start_logging(as_json=arguments.json)
    from handrail_sidecar.app import run as run_sidecar

    return run_sidecar(config)
