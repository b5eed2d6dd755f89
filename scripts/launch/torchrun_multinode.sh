#!/usr/bin/env bash
# Several machines without a scheduler: start this on each of them with the same arguments.
#
#   NODES=2 HEAD=node-a:29500 scripts/launch/torchrun_multinode.sh @ configs/sft.toml --output-dir /mnt/runs/a
#
# NODES           how many machines take part                              (default 1)
# HEAD            host:port of one of them, reachable from all              (default localhost:29500)
# RANKS_PER_NODE  processes on each machine; "gpu" = one for each GPU       (default gpu)
# RESTARTS        how often the ranks are started again after one has failed or was told to stop   (default 0)
# JOB             a name that this job shares with no other at that address (default exact-trainer)
#
# SIGTERM to this command, or to any rank, makes the run save and end. torchrun then kills ranks that are not gone within
# 30 seconds; TORCH_ELASTIC_SHUTDOWN_TIMEOUT gives them more.
#
# The machines must see the same output directory: a checkpoint is one directory that all ranks write into.
# --resume.if-exists makes the line safe to start again after a failure: the run goes on from its newest checkpoint, or
# begins if there is none.
set -euo pipefail

if [ $# -eq 0 ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0"
  exit 2
fi

# Or ranks that are started again would look for the addresses of those before them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
  --nnodes "${NODES:-1}" \
  --nproc-per-node "${RANKS_PER_NODE:-gpu}" \
  --max-restarts "${RESTARTS:-0}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "${HEAD:-localhost:29500}" \
  --rdzv-id "${JOB:-exact-trainer}" \
  -m trainer sft "$@" --resume.if-exists
