#!/usr/bin/env bash
# A Slurm job of one or more nodes.
#
#   sbatch --nodes 2 scripts/launch/slurm.sh @ configs/sft.toml --output-dir /mnt/runs/a
#
# Each node runs one torchrun, which starts one process for each of its GPUs. When the job is requeued, after a
# preemption or a lost node, the same line resumes the run from its newest checkpoint. Set ckpt.interval to what you are
# willing to lose. Change the lines below to what your cluster wants (partition, account, time).
#SBATCH --job-name=exact-trainer
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail

# Slurm runs a copy of this file, so the project is found from where sbatch was called.
cd "${SLURM_SUBMIT_DIR:-$PWD}"
export PATH="$PWD/.venv/bin:$PATH"

NODES=$SLURM_JOB_NUM_NODES
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 20000))
JOB=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
export NODES HEAD JOB

srun --kill-on-bad-exit=1 scripts/launch/torchrun_multinode.sh "$@"
