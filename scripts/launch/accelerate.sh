#!/usr/bin/env bash
# The same recipe under accelerate's launcher, without a configuration of its own: the recipe says everything. On a CPU
# accelerate starts several processes through MPI only; torchrun.sh needs none.
#   scripts/launch/accelerate.sh sft/quickstart distributed.zero=2 --out runs/shared
set -euo pipefail
processes=${PROCESSES:-$(python -c 'import torch; print(torch.accelerator.device_count())')}
exec accelerate launch --multi_gpu --num_machines=1 --mixed_precision=no --num_processes="$processes" \
    --module workbench.cli.verbs run "$@"
