#!/usr/bin/env bash
# What rendering needs, only where it is missing: Chromium and Prometheus from Debian (as root), Grafana's components from npm.
set -euo pipefail
cd "$(dirname "$0")"
missing=()
command -v chromium >/dev/null || missing+=(chromium fonts-dejavu-core)
command -v prometheus >/dev/null || missing+=(prometheus)
command -v npm >/dev/null || missing+=(nodejs npm)
if [ "${#missing[@]}" -gt 0 ]; then
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        apt-get update -q
        DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -q -y --no-install-recommends "${missing[@]}"
    else
        echo "needs ${missing[*]}: install them, the tests that need them are skipped until then" >&2
    fi
fi
if [ ! -e node_modules/.package-lock.json ] || [ package-lock.json -nt node_modules/.package-lock.json ]; then
    npm ci --no-audit --no-fund
fi
