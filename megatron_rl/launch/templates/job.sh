#!/usr/bin/env bash
#SBATCH --job-name=@name --output=@folder/job-%j.log
#SBATCH --chdir=@directory
#SBATCH --nodes=@trainer_hosts @trainer_flags
#SBATCH hetjob
#SBATCH --nodes=@engine_hosts --no-kill @engine_flags
# Written by `megatron-rl launch slurm`: ranks in the first component, agents of engines in the second. The job outlives
# a host of engines.
set -euo pipefail
@{source}export @hosts_variable=@hosts
export first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)

srun --het-group=1 --kill-on-bad-exit=0 --cpu-bind=none --output=@folder/agent-%N.log \
    bash -c @agent &

code=0
srun --het-group=0 --kill-on-bad-exit=1 --cpu-bind=none \
    bash -c @ranks || code=$?

# Agents end their engines, and remove what these have left.
scancel --signal=TERM "$SLURM_JOB_ID+1" || true
wait
exit "$code"
