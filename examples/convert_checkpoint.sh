#!/usr/bin/env bash
# Hugging Face -> Megatron -> Hugging Face, each step verified, and a certificate with logits.
#
#     examples/convert_checkpoint.sh MODEL_FOLDER WORK_FOLDER [TP [PP]]
#
# Any model of a supported family (docs/families.md); WORK_FOLDER needs twice its size. No GPU is needed. TP and PP are the
# layout at which the policy computes the logits that are compared with transformers.
set -euo pipefail

model=$1 work=$2 tp=${3:-1} pp=${4:-1}
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}

"$python" "$here/conversion/hf_to_megatron.py" --hf "$model" --out "$work/megatron" --verify
"$python" "$here/conversion/megatron_to_hf.py" --checkpoint "$work/megatron" --out "$work/hf" --verify
"$python" "$here/conversion/verify.py" --hf "$work/hf" --checkpoint "$work/megatron" \
    --certificate "$work/certificate.json" --logits --tp "$tp" --pp "$pp"
