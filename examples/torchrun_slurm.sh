#!/bin/bash
# The embedded trainer with FSDP2 on several nodes of a Slurm job. Not run by us: adapt the modules, paths and sizes.
#SBATCH --job-name=agentropy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@900                   # 15 minutes before the end: time to save
set -euo pipefail

source /shared/venv/bin/activate            # the same environment on all nodes
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"   # srun of Slurm 22.05 and newer does not take it over by itself

# Rank 0 writes the run directory; all nodes read the checkpoints in it when the job goes on. Slurm's SIGTERM saves, and the
# same job again goes on.
out=/shared/runs/tao-rl-4b
if [ -e "$out/config.yaml" ]; then
  run=(--resume "$out")
else
  run=(--method tao-rl --model /shared/models/Qwen3-4B --dtype bfloat16
    --tasks /shared/data/dapo.jsonl --tools python --rollout.questions 128 --rollout.samples 8
    --rollout.max_new_tokens 4096 --rollout.max_context 8192 --steps 300 --out "$out")
fi

srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node 8 --shutdown-timeout 800 \
  --rdzv_backend c10d --rdzv_endpoint "$head:29500" --rdzv_id "$SLURM_JOB_ID" \
  -m -- agentropy train "${run[@]}"
