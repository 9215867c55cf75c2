#!/usr/bin/env bash
# The same recipe under DeepSpeed's launcher.
#   scripts/launch/deepspeed.sh sft/quickstart distributed.zero=2 --out runs/shared
set -euo pipefail
processes=${PROCESSES:-$(python -c 'import torch; print(max(1, torch.accelerator.device_count()))')}
exec deepspeed --num_gpus="$processes" --no_local_rank --module workbench.cli.verbs run "$@"
