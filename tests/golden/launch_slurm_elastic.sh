sbatch --parsable --output=/shared/runs/first/launch/logs/slurm-%j.out <<'END_OF_SCRIPT'
#!/bin/bash
# Batch script of first-ID/train, written by distembed.
#SBATCH --job-name=first-ID/train
#SBATCH --nodes=2-4
#SBATCH --no-kill
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --mem=65536M
#SBATCH --partition=gpu
#SBATCH --time=1-0
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append

failures=/shared/runs/first/launch/logs/slurm-"$SLURM_JOB_ID".failures
cancelled=/shared/runs/first/launch/logs/slurm-"$SLURM_JOB_ID".cancelled
first_ended=/shared/runs/first/launch/logs/slurm-"$SLURM_JOB_ID".first-ended
max_retries=0
min_nodes=2
grace=120
step='' code='' leaving='' told='' warned_at='' timer=''

warn() { [[ $warned_at || ! $step ]] || { warned_at=$SECONDS; kill -USR1 "$step"; }; }
cancel_later() {
    [[ ! $timer ]] || return
    (sleep $((grace + 30)) >/dev/null 2>&1; insist scancel "$SLURM_JOB_ID") &
    timer=$!
}
# The time limit is near. srun hands the signal to every process of the step.
trap 'caught=yes; warn' USR1
# Cancelled by `distembed cancel`.
trap 'caught=yes leaving=yes; cancel_later; warn' USR2
# Preempted, or cancelled by others. Slurm has told the step itself.
trap 'caught=yes told=yes' TERM

say() { echo "$(date '+%F %T') the step ended with code $code: $*"; }
field() { [[ $record =~ (^|[[:space:]])$1=([^[:space:]]*) ]] && echo "${BASH_REMATCH[2]}"; }
is_interrupted() {
    [[ $code == 75 || $told || $(field PreemptTime) == [0-9]* ]] ||
        { [[ $warned_at ]] && ((grace == 0 || took < grace)); }
}
is_over() { [[ $(field JobState) && $(field JobState) != RUNNING ]]; }
# Both for five minutes: a controller that is busy or starts again does not answer.
ask() {
    local tries
    for ((tries = 0; tries < 30; tries++)); do
        record=$(scontrol show job "$SLURM_JOB_ID") && [[ $(field JobState) ]] && return
        record=''
        sleep 10
    done
}
insist() {
    local tries
    for ((tries = 0; tries < 30; tries++)); do
        "$@" && return
        record=$(scontrol show job "$SLURM_JOB_ID")
        ! is_over || return
        sleep 10
    done
    say "Slurm did not take: $*"
}
forget_cancelling() {
    [[ ! $timer ]] || kill "$timer" 2>/dev/null
    rm -f "$cancelled"
}
cancel_itself() {
    forget_cancelling
    insist scancel "$SLURM_JOB_ID"
    exit "${code:-1}"
}

echo "$(date '+%F %T') job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST"
# a job with this number long ago
[[ ${SLURM_RESTART_COUNT:-0} != 0 ]] || rm -f "$failures" "$first_ended"-*
export PYTHONUNBUFFERED=1 SLURM_UNBUFFEREDIO=1
export TORCHX_RANK0_HOST="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

# Runs once on every node.
IFS= read -r -d '' task <<'END_OF_TASK'
export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=2
export NCCL_SOCKET_IFNAME=eth0,eth1
export TORCHX_JOB_ID=slurm://torchx/"$SLURM_JOB_ID"
told=''
trap 'told=yes' TERM USR1
run() { (trap '' USR1; exec bash -c 'set -u
logs=/shared/runs/first/launch/logs/"'"$SLURM_JOB_ID"'"/node-"'"$SLURM_PROCID"'"
mkdir -p "$logs" || exit
rm -f "$logs/error.json"
export TORCHELASTIC_ERROR_FILE="$logs/error.json"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='"'"'[rank ${rank}]:'"'"'
host="${TORCHX_RANK0_HOST:-localhost}"
if test "'"$SLURM_PROCID"'" = 0; then is_host=1; else is_host=0; fi
exec python -m distembed.launch.nodes.run \
    --node "'"$SLURM_PROCID"'" --starts "$logs/../starts" --grace 120 --host "$host" --port 29500 --seconds 600 --elastic -- \
    --nnodes 2:4 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$host":29500 --rdzv-id "'"$SLURM_JOB_ID"'" \
    --rdzv-conf join_timeout=600,last_call_timeout=30,is_host="$is_host" \
    --max-restarts 3 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --tee 3 --log-dir "$logs" \
    -m distembed train /shared/config.yaml train.epochs=2 '"'"'data.path=/data/a b$c'"'"' train.device=cuda --run-dir /shared/runs/first --resume-or-start --plan /shared/plan.json
'); }
cancelled=/shared/runs/first/launch/logs/slurm-"$SLURM_JOB_ID".cancelled
first_ended=/shared/runs/first/launch/logs/slurm-"$SLURM_JOB_ID".first-ended-"${SLURM_RESTART_COUNT:-0}"
if [[ $SLURM_PROCID == 0 ]]; then
    run
    code=$?
    # without the meeting point the other nodes cannot continue
    : >"$first_ended" || scancel --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID"
    exit "$code"
fi
field() { [[ $record =~ (^|[[:space:]])$1=([^[:space:]]*) ]] && echo "${BASH_REMATCH[2]}"; }
first_is_lost() {
    local names
    record=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)
    [[ $(field JobState) == RUNNING ]] && names=$(scontrol show hostnames "$(field NodeList)") && [[ $names ]] || return
    [[ " ${names//$'\n'/ } " != *" $TORCHX_RANK0_HOST "* ]]
}
mind_first() {
    local tick
    while :; do
        # all nodes together ask about once a second
        for ((tick = 0; tick < SLURM_JOB_NUM_NODES + 10; tick += 2)); do
            [[ ! -e $first_ended && ! $told ]] || return
            sleep 2
        done
        if first_is_lost && [[ -e $cancelled ]]; then
            scancel "$SLURM_JOB_ID"
        elif first_is_lost; then
            echo "$(date '+%F %T') job $SLURM_JOB_ID has lost its first node, $TORCHX_RANK0_HOST; it is queued again"
            scontrol requeue "$SLURM_JOB_ID"
        fi
    done
}
mind_first &
minder=$!
run
code=$?
kill "$minder" 2>/dev/null
wait "$minder" 2>/dev/null
[[ $code == 0 ]] || mind_first
exit "$code"
END_OF_TASK

if [[ $leaving || -e $cancelled ]]; then
    echo "It was cancelled before it has started."
    cancel_itself
fi
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task=16 --export=ALL --open-mode=append --output=/shared/runs/first/launch/logs/slurm-%j-train-%t.out --kill-on-bad-exit=0 --wait=0 --no-kill bash -c "$task" &
step=$!
while caught=''; wait "$step"; code=$?; [[ $caught ]]; do :; done
rm -f "$first_ended"-*
took=$((SECONDS - ${warned_at:-$SECONDS}))
if [[ $code == 0 ]]; then
    say "done"
    forget_cancelling
    exit 0
fi
if [[ $leaving ]]; then
    say "cancelled"
    cancel_itself
fi
ask
if is_over; then
    say "Slurm has ended the job"
    exit "$code"
fi
if is_interrupted; then
    say "interrupted; it goes on after it was queued again"
elif [[ $(field NumNodes) == [0-9]* && $(field NumNodes) -lt min_nodes ]]; then
    say "$(field NumNodes) of the $min_nodes nodes that it needs are left; it goes on after it was queued again"
elif ((grace)) && [[ $code =~ ^(2|3)$ ]]; then
    say "failed; no retry: a restart does not mend the mistake"
    exit "$code"
else
    [[ ! $warned_at ]] || echo "$(date '+%F %T') warned, it did not end within grace_seconds, $grace: nothing was saved"
    if ! echo "$(date '+%F %T') $code" >>"$failures" || ! count=$(wc -l <"$failures"); then
        say "failed; no retry: failures cannot be counted in $failures"
        exit "$code"
    fi
    if ((count > max_retries)); then
        say "failed; retries: $max_retries, all used"
        exit "$code"
    fi
    say "failed; retry $count of $max_retries"
fi
[[ ! $leaving ]] || cancel_itself
insist scontrol requeue "$SLURM_JOB_ID"
exit "$code"
END_OF_SCRIPT
