#!/usr/bin/env bash
# Slurm and munge from Debian, for the tests that submit to a real Slurm on this host. Needs root; without it the tests
# skip (or fail, under PACS_CI=1) with that reason.
set -euo pipefail
missing=()
for tool in sbatch slurmctld slurmd munged; do
    if ! PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null; then missing+=("$tool"); fi
done
if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "install-slurm: missing ${missing[*]}; install slurm-wlm and munge (needs root on Debian or Ubuntu)" >&2
    exit 0
fi
echo "install-slurm: slurm-wlm and munge from apt" >&2
export DEBIAN_FRONTEND=noninteractive
# Packages must not start system daemons: the tests start their own, as a user process, and end them.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    trap 'rm -f $policy' EXIT
fi
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; }; then
    echo "install-slurm: apt-get failed; tests of Slurm skip" >&2
fi
