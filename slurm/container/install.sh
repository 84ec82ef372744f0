#!/usr/bin/env bash
# In an Ubuntu image: `install.sh CHECKOUT`, called by Dockerfile and pacs-megatron.def.
set -euo pipefail
cd "$1"
export DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
apt-get update -qq
# libnuma: SGLang's kernels. ibverbs and rdmacm: NCCL over InfiniBand. bubblewrap: reward.name=code.
apt-get install -y -qq --no-install-recommends python3.12-dev python3.12-venv g++ ca-certificates libnuma1 ibverbs-providers librdmacm1 bubblewrap
rm -rf /var/lib/apt/lists/*
tools/install.sh gpu
tools/install.sh sglang-gpu
