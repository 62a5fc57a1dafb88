#!/usr/bin/env bash
# What rendering needs, only where it is missing: Chromium and Prometheus (as tests/tools.sh does it), Grafana's components from npm.
set -euo pipefail
cd "$(dirname "$0")"
bash ../../tools.sh chromium prometheus promtool node npm
if command -v npm >/dev/null && { [ ! -e node_modules/.package-lock.json ] || [ package-lock.json -nt node_modules/.package-lock.json ]; }; then
    npm ci --no-audit --no-fund
fi
