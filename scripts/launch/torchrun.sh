#!/usr/bin/env bash
# The same recipe under torch's own launcher; as many processes as this machine has accelerators.
#   scripts/launch/torchrun.sh sft/quickstart distributed.zero=2 --out runs/shared
set -euo pipefail
processes=${PROCESSES:-$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')}
exec torchrun --standalone --nproc-per-node="$processes" -m workbench.cli.verbs run "$@"
