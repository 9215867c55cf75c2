#!/usr/bin/env bash
# Our Houlsby and Pfeiffer adapters against AdapterHub's `adapters` 1.3.0, given the same weights: logits and gradients
# to 1e-5 on tiny BERT, GPT-2 and Llama. Theirs is installed into an environment of its own (about 1 GB, kept and used
# again where ADAPTERHUB_VENV names a folder). Run it from the environment in which the workbench is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
venv=${ADAPTERHUB_VENV:-$results/venv}

if [ ! -x "$venv/bin/python" ]; then
    python -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet adapters==1.3.0 torch==2.13.0
fi
"$venv/bin/python" scripts/adapterhub_equality.py theirs "$results"
python scripts/adapterhub_equality.py ours "$results"
