#!/bin/bash
# A Ray cluster in a Slurm job, and one verl run with agentropy on it. Not run by us: adapt the modules, paths and sizes.
#SBATCH --job-name=agentropy-verl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail

source /shared/venv/bin/activate            # the same environment on all nodes, with agentropy[verl] and verl[vllm]
port=6379
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address | awk '{print $1}')

srun --nodes=1 --ntasks=1 -w "${nodes[0]}" \
  ray start --head --node-ip-address="$head" --port="$port" --num-cpus=64 --num-gpus=8 --block &
sleep 20
for node in "${nodes[@]:1}"; do
  srun --nodes=1 --ntasks=1 -w "$node" ray start --address="$head:$port" --num-cpus=64 --num-gpus=8 --block &
done
sleep 30

# The driver runs beside the head node; --out lies where all nodes see it.
srun --overlap --nodes=1 --ntasks=1 -w "${nodes[0]}" \
  agentropy launch verl --method tao-rl --model /shared/models/Qwen3-8B --tasks /shared/data/dapo.parquet \
  --tools python --questions 256 --minibatch 128 --samples 16 --response-tokens 8192 \
  --nodes "$SLURM_JOB_NUM_NODES" --gpus 8 --steps 300 --out /shared/runs/tao-rl-8b \
  "+ray_kwargs.ray_init.address=$head:$port" ray_kwargs.ray_init.num_cpus=null actor_rollout_ref.actor.strategy=fsdp2
