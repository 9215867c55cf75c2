#!/usr/bin/env bash
#SBATCH --job-name=workbench
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --requeue
# The same recipe on several machines under Slurm. Files must be on a disk that all of them see. A job that is requeued
# goes on where it was.
#   sbatch scripts/launch/slurm.sh sft/quickstart distributed.zero=3 --out /shared/runs/mine
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
resume=()
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then resume=(--resume); fi
exec srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}" --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" -m workbench.cli.verbs run "$@" "${resume[@]}"
