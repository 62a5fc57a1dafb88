#!/usr/bin/env bash
# Programs that tests run and pip cannot give. Names as arguments; by default those of the README's test command. Installs what is
# missing on Debian and Ubuntu as root; elsewhere says how, and the tests that need them are skipped with the reason (in CI they fail).
set -euo pipefail
declare -A package=(
    [gcc]="gcc libc6-dev" [promtool]=prometheus [prometheus]=prometheus [amtool]=prometheus-alertmanager
    [systemd-analyze]=systemd [setpriv]=util-linux [findmnt]=util-linux [mount]=mount
    [faketime]=faketime [ip]=iproute2
    [node]=nodejs [npm]=npm [chromium]="chromium fonts-dejavu-core"
)
if [ "$#" = 0 ]; then
    set -- gcc promtool amtool node npm
    [ "$(uname)" != Linux ] || set -- "$@" systemd-analyze setpriv findmnt mount
fi
packages=()
missing=()
for program in "$@"; do
    command -v "$program" >/dev/null && continue
    missing+=("$program")
    read -ra needed <<<"${package[$program]}"
    packages+=("${needed[@]}")
done
[ "${#missing[@]}" -gt 0 ] || exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
    echo "for tests: apt-get install ${packages[*]}"
    apt-get update -qq
    # RUNLEVEL: the packages' own services stay off
    DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null
    exit 0
fi
{
    echo "not on this machine: ${missing[*]}. The tests that need them are skipped. To have them:"
    echo "  Debian, Ubuntu: sudo apt-get install --no-install-recommends ${packages[*]}"
    echo "  Fedora:         sudo dnf install gcc golang-github-prometheus golang-github-prometheus-alertmanager libfaketime iproute nodejs npm chromium systemd util-linux"
    echo "  macOS:          xcode-select --install; brew install prometheus alertmanager node chromium"
} >&2
