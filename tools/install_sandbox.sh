#!/usr/bin/env bash
# Bubblewrap from Debian, for `reward.name: code` and its tests. Needs root; without it the tests skip (or fail, under
# PACS_CI=1) with that reason.
set -euo pipefail
if command -v bwrap >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "install-sandbox: missing bwrap; install bubblewrap (needs root on Debian or Ubuntu)" >&2
    exit 0
fi
echo "install-sandbox: bubblewrap from apt" >&2
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null; }; then
    echo "install-sandbox: apt-get failed; tests of the sandbox skip" >&2
fi
