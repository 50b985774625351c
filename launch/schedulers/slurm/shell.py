"""The shell of a job on Slurm: its batch script, and the task that runs on every node.

What the script decides, and why, stands in :mod:`launch.schedulers.slurm.script`, which fills it in.
"""

from string import Template


class ShellTemplate(Template):
    """A shell script with ``@name`` for what is filled in."""

    delimiter = "@"  # the script is full of dollars


# What the controller knows of the job, in the script and in the tasks of an elastic one.
RECORD = r"""
field() { [[ $record =~ (^|[[:space:]])$1=([^[:space:]]*) ]] && echo "${BASH_REMATCH[2]}"; }
"""

# The number of failures is kept in a file: SLURM_RESTART_COUNT also counts preemptions and dead nodes.
# Requeued is only a job that runs: one that is being cancelled would come back from the dead.
# A preempted job's shell may hear nothing of it, hence PreemptTime.
# Warned is the step once: a second signal would end a launcher that gives its ranks time.
BATCH_SCRIPT = ShellTemplate("""\
#!/bin/bash
# Batch script of @job, written by distembed.
@options

failures=@log_dir/slurm-"$SLURM_JOB_ID".failures
cancelled=@log_dir/slurm-"$SLURM_JOB_ID".cancelled
first_ended=@log_dir/slurm-"$SLURM_JOB_ID".first-ended
max_retries=@max_retries
min_nodes=@min_nodes
grace=@grace
step='' code='' leaving='' told='' warned_at='' timer=''

warn() { [[ $warned_at || ! $step ]] || { warned_at=$SECONDS; kill -USR1 "$step"; }; }
cancel_later() {
    [[ ! $timer ]] || return
    (sleep $((grace + @cancel_seconds)) >/dev/null 2>&1; insist scancel "$SLURM_JOB_ID") &
    timer=$!
}
# The time limit is near. srun hands the signal to every process of the step.
trap 'caught=yes; warn' USR1
# Cancelled by `distembed cancel`.
trap 'caught=yes leaving=yes; cancel_later; warn' USR2
# Preempted, or cancelled by others. Slurm has told the step itself.
trap 'caught=yes told=yes' TERM

say() { echo "$(date '+%F %T') the step ended with code $code: $*"; }
@record
is_interrupted() {
    [[ $code == @interrupted || $told || $(field PreemptTime) == [0-9]* ]] ||
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
        "$@@" && return
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
export @rank0_variable="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

# Runs once on every node.
IFS= read -r -d '' task <<'@mark'
@task
@mark

if [[ $leaving || -e $cancelled ]]; then
    echo "It was cancelled before it has started."
    cancel_itself
fi
srun @step_options bash -c "$task" &
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
elif ((grace)) && [[ $code =~ ^(@mistakes)$ ]]; then
    say "failed; no retry: starting again does not mend what is wrong"
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
""")

# A launcher that does not know SIGUSR1 would die of it. That a signal is ignored is handed on to its children,
# until one of them says what it does about it.
FIXED_TASK = ShellTemplate("""\
trap '' USR1
@exports
exec @program
""")

# The shell stays to see whether the first node is still there: script, srun and meeting point are lost with it, and
# Slurm, which keeps the job alive, would leave the others idle until the time limit. Launchers may fail at once or
# hang. Slurm takes its time to notice a dead node; so they wait for that after a failure, or for the end of the first.
# Signals reach every process of the step: the shell has only to survive them.
ELASTIC_TASK = ShellTemplate("""\
@exports
told=''
trap 'told=yes' TERM USR1
run() { (trap '' USR1; exec @program); }
cancelled=@log_dir/slurm-"$SLURM_JOB_ID".cancelled
first_ended=@log_dir/slurm-"$SLURM_JOB_ID".first-ended-"${SLURM_RESTART_COUNT:-0}"
if [[ $SLURM_PROCID == 0 ]]; then
    run
    code=$?
    # without the meeting point the others cannot go on
    : >"$first_ended" || scancel --signal=KILL "$SLURM_JOB_ID.$SLURM_STEP_ID"
    exit "$code"
fi
@record
first_is_lost() {
    local names
    record=$(scontrol show job "$SLURM_JOB_ID" 2>/dev/null)
    [[ $(field JobState) == RUNNING ]] && names=$(scontrol show hostnames "$(field NodeList)") && [[ $names ]] || return
    [[ " ${names//$'\\n'/ } " != *" $@rank0_variable "* ]]
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
            echo "$(date '+%F %T') job $SLURM_JOB_ID has lost its first node, $@rank0_variable; it is queued again"
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
""")
