#!/usr/bin/env bash
#SBATCH --job-name=vllm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
# The bundle lies where all nodes see it: vllm-livepatch generate --out "$HOME/livepatch"
set -euo pipefail
bundle=${BUNDLE:-$HOME/livepatch}

# Without containers: srun hands these on to every task.
export PYTHONPATH="$bundle${PYTHONPATH:+:$PYTHONPATH}"
export LIVEPATCH=${LIVEPATCH:-strict}  # LIVEPATCH=off sbatch ... turns everything off
# A node's reports: vllm-livepatch status --state-dir DIR, on that node.
export LIVEPATCH_STATE_DIR=${LIVEPATCH_STATE_DIR:-${TMPDIR:-/tmp}/livepatch-$SLURM_JOB_ID}
python=(python3)
container=()

# With pyxis and enroot (IMAGE=@IMAGE@ sbatch ...): variables of the image win over exported ones unless
# --container-env names them.
if [[ -n ${IMAGE:-} ]]; then
    export PYTHONPATH=/livepatch  # append what the image itself has, after a colon
    container=(--container-image="$IMAGE" --container-mounts="$bundle:/livepatch:ro"
        --container-env=PYTHONPATH,LIVEPATCH,LIVEPATCH_STATE_DIR --no-container-entrypoint)
    bundle=/livepatch
fi

# Every node is asked before anything is served; the job ends where one would not be patched.
# Python takes a file that was emptied for a program that succeeds: hence `test -s`.
if [[ $LIVEPATCH != off ]]; then
    srun "${container[@]}" test -s "$bundle/__main__.py"
    srun "${container[@]}" "${python[@]}" "$bundle" doctor
fi
srun "${container[@]}" vllm serve @MODEL@
