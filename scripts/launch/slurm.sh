#!/usr/bin/env bash
# A Slurm job of one or more nodes.
#
#   sbatch --nodes 2 scripts/launch/slurm.sh @ configs/sft.toml --output-dir /mnt/runs/a
#
# Each node runs one torchrun, which starts one process for each of its GPUs. When the job is requeued, the same line
# resumes the run from its newest checkpoint:
#
#   time limit    five minutes before it, Slurm wakes this script; the run saves, ends, and the job is requeued
#   preemption    Slurm sends SIGTERM and requeues by itself; the run saves first if the partition's GraceTime allows it
#   lost node     Slurm requeues; what was done since the last save is done again, so set ckpt.interval
#   scancel       SIGTERM, then after KillWait SIGKILL; the run saves if it can, and is not requeued
#
# Change the lines below to what your cluster wants (partition, account, time).
#SBATCH --job-name=exact-trainer
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
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

# Within this time after SIGTERM a rank has saved and ended; torchrun waits a little longer for its ranks than they need.
GRACE_SECONDS=240
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$((GRACE_SECONDS + 20))

requeue=no
stop_and_requeue() {
  requeue=yes
  kill -TERM "$step" # srun passes it on to every node
}
trap stop_and_requeue USR1

srun --kill-on-bad-exit=1 scripts/launch/torchrun_multinode.sh "$@" --ckpt.grace-seconds "$GRACE_SECONDS" &
step=$!
code=0
wait "$step" || code=$?
if [ "$requeue" = yes ]; then # the signal ended the first wait
  code=0
  wait "$step" || code=$?
  if [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
