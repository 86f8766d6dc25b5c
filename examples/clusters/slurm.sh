#!/bin/bash
# Trains on two nodes with eight processes each: sbatch examples/clusters/slurm.sh train.py
#SBATCH --job-name=penstock
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # head would end scontrol with SIGPIPE
port=$((20000 + SLURM_JOB_ID % 20000)) # another one for each job on a shared node

# The interface between the nodes, where there are several. NCCL and gloo choose each for themselves.
export NCCL_SOCKET_IFNAME=${NETWORK_INTERFACE:-}
export GLOO_SOCKET_IFNAME=${NETWORK_INTERFACE:-}
[ -n "${NETWORK_INTERFACE:-}" ] || unset NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME

# One launcher per node. --kill-on-bad-exit ends the other nodes when the launcher of one fails.
srun --kill-on-bad-exit=1 bash -c '
  exec torchrun --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --nproc-per-node 8 \
    --master-addr "$0" --master-port "$1" "${@:2}"
' "$first" "$port" "$@"
