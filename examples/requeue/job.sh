#!/bin/bash
#SBATCH --account=PROJECT --partition=PARTITION --time=01:00:00
#SBATCH --nodes=4 --ntasks-per-node=1 --gres=gpu:4 --cpus-per-task=48
#SBATCH --requeue --no-kill --open-mode=append
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
source .venv/bin/activate
job=$SLURM_JOB_ID
outcome=outcome.$job.${SLURM_RESTART_COUNT:-0}.json
srun --no-kill --kill-on-bad-exit=0 --wait=0 \
    python -m torchrun_hpc --nproc_per_node=gpu \
    --hpc-spares=1 --max-restarts=20 --hpc-outcome="$outcome" \
    examples/requeue/checkpoint_ddp.py --checkpoint "checkpoint.$job.pt"

# "running" here means that the launch was killed.
if grep --quiet -e '"outcome": "nodes failed"' -e '"outcome": "running"' "$outcome" &&
    [ "${SLURM_RESTART_COUNT:-0}" -lt 5 ]; then
    # All nodes lost in this run or an earlier one.
    bad=$(python -c 'import json, sys
print(*{node for file in sys.argv[1:] for node in json.load(open(file))["exclude"]},
      sep=",")' outcome."$job".*.json)
    trap "" TERM  # Slurm sends it to this script when the job is requeued
    scontrol requeuehold "$job"  # only a pending job can exclude nodes
    scontrol update JobId="$job" ExcNodeList="$bad"
    scontrol release "$job"
fi
grep --quiet '"outcome": "done"' "$outcome"
