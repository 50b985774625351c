sbatch --parsable --output=/shared/runs/first/launch/logs/slurm-%j.out <<'END_OF_SCRIPT'
#!/bin/bash
# Batch script of first/train, written by distembed.
#SBATCH --job-name=first/train
#SBATCH --nodes=2-4
#SBATCH --no-kill
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --mem=65536M
#SBATCH --partition=gpu
#SBATCH --time=1-0
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

export PYTHONUNBUFFERED=1 SLURM_UNBUFFEREDIO=1
export TORCHX_RANK0_HOST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
failures=/shared/runs/first/launch/logs/slurm-"$SLURM_JOB_ID".failures
max_retries=0
[[ ${SLURM_RESTART_COUNT:-0} != 0 ]] || rm -f "$failures"
echo "$(date '+%F %T') job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST"

# Runs once on every node.
IFS= read -r -d '' task <<'END_OF_TASK'
trap '' USR1
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=2
export NCCL_SOCKET_IFNAME=eth0,eth1
export TORCHX_JOB_ID=slurm://torchx/"$SLURM_JOB_ID"
exec bash -c 'set -u
logs=/shared/runs/first/launch/logs/"'"$SLURM_JOB_ID"'"/node-"'"$SLURM_PROCID"'"
mkdir -p "$logs" || exit
rm -f "$logs/error.json"
export TORCHELASTIC_ERROR_FILE="$logs/error.json"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='"'"'[rank ${rank}]:'"'"'
host="${TORCHX_RANK0_HOST:-localhost}"
test "'"$SLURM_PROCID"'" = 0 || python -m launch.await_host "$host" 29500 --seconds 600 || exit
if test "'"$SLURM_PROCID"'" = 0; then is_host=1; else is_host=0; fi
exec python -m torch.distributed.run \
    --nnodes 2:4 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$host":29500 --rdzv-id "'"$SLURM_JOB_ID"'" \
    --rdzv-conf join_timeout=600,last_call_timeout=30,is_host="$is_host" \
    --max-restarts 3 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout 120 \
    --tee 3 --log-dir "$logs" \
    -m distembed train /shared/config.yaml train.epochs=2 '"'"'data.path=/data/a b$c'"'"' --run-dir /shared/runs/first --resume-or-start --plan /shared/plan.json
'
END_OF_TASK

step='' interrupted=''
# The time limit is near. srun hands the signal to every process of the step.
trap 'interrupted=yes caught=yes; kill -USR1 "$step"' USR1
# Preempted or cancelled. Slurm has told the step itself.
trap 'interrupted=yes caught=yes' TERM
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=16 --export=ALL --open-mode=append --output=/shared/runs/first/launch/logs/slurm-%j-train-%t.out --kill-on-bad-exit=0 --wait=0 --no-kill bash -c "$task" &
step=$!
while caught=''; wait "$step"; code=$?; [[ $caught ]]; do :; done

say() { echo "$(date '+%F %T') the step ended with code $code: $*"; }
field() { scontrol show job "$SLURM_JOB_ID" | grep -oE "$1=[^ ]+" | head -n 1 | cut -d= -f2; }
if [[ $code == 0 ]]; then
    say "done"
    exit 0
fi
if [[ $(field JobState) != RUNNING ]]; then
    say "Slurm has ended the job"
    exit "$code"
fi
if [[ $code == 75 || $interrupted || $(field PreemptTime) == [0-9]* ]]; then
    say "interrupted; it goes on after it was queued again"
else
    echo "$(date '+%F %T') $code" >>"$failures"
    count=$(wc -l <"$failures")
    if ((count > max_retries)); then
        say "failed; retries: $max_retries, all used"
        exit "$code"
    fi
    say "failed; retry $count of $max_retries"
fi
scontrol requeue "$SLURM_JOB_ID" || say "Slurm did not requeue the job"
exit "$code"
END_OF_SCRIPT
