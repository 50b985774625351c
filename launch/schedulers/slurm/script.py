"""The batch script of a job on Slurm: one plain job whose nodes all run the same command.

TorchX makes a heterogeneous job with one component a node, which starts only when every component can, is requeued as a
whole and cannot lose a node. A plain job can be elastic: it takes as many nodes of a range as are free, and continues
when one of them dies.

The script decides about the end of a step::

    exit code 0                      the job has succeeded
    cancelled                        the script cancels its own job once the step has saved its state
    75, or not 0 after a warning     interrupted, can resume: back into the queue, however often that happens
    fewer nodes left than needed     back into the queue, however often that happens (elastic jobs)
    2 or 3, of a job that saves      a mistake of the user's, which a restart does not mend: the job has failed
    any other                        back into the queue, at most `max_retries` times; then the job has failed
    a node died                      Slurm itself requeues the job (elastic ones continue with the nodes left)
    the first node of an elastic     the tasks of the other nodes see that Slurm has taken it from the job, and requeue
    job died                         the job: script, step and meeting point were lost with it

A warning is SIGUSR1 some seconds before the time limit, or SIGTERM when another job takes the nodes. A step that runs
for `grace_seconds` after SIGUSR1 is killed, which counts as a failure: a job that saves too slowly would start over for
ever. Preemption never counts.

A job is cancelled with SIGUSR2 to its batch script; see :func:`distembed.launch.schedulers.slurm.submission.cancel`.
"""

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from distembed.base.errors import UserError
from distembed.launch.nodes.exit_codes import INTERRUPTED, MISTAKES

JOB_ID = "${app_id}"
"""The number of the job, as a macro of TorchX."""
REPLICA_ID = "${replica_id}"
"""The number of the node within the job."""
RANK0_VARIABLE = "TORCHX_RANK0_HOST"
"""Environment variable that holds the name of the job's first node."""
OWN_OPTIONS = tuple(
    "array chdir cpus-per-task error export export-file gpus-per-node help job-name mem mem-per-cpu mem-per-gpu "
    "no-kill no-requeue nodes ntasks ntasks-per-node open-mode output parsable quiet requeue signal test-only usage "
    "version wait wrap".split()
)
"""Options of sbatch that the job itself decides, or that the script would not work with."""
CANCEL_SECONDS = 30
"""Seconds after the grace period until Slurm cancels a job that was asked to end."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# --wait kills the step a minute after the end of its first task.
_FIXED_STEP = ["--kill-on-bad-exit=0", "--wait=60"]
# The remaining nodes decide for themselves whether they continue.
_ELASTIC_STEP = ["--kill-on-bad-exit=0", "--wait=0", "--no-kill"]


@dataclass(frozen=True)
class SlurmJob:
    """A job, as a batch script and the command that submits it.

    Args:
        program: The command of each node and its arguments, which may hold :data:`JOB_ID` and :data:`REPLICA_ID`.
        log_dir: Absolute path of the folder for logs, which every node must see.
        environment: Variables of the command, whose values may hold the macros too.
        min_nodes: Fewest nodes that the job starts and continues with.
        options: Options of sbatch by their names without dashes.
        directory: Working folder of the command; "" for the folder where sbatch is called.
        warning_seconds: Seconds before its time limit when the job is sent SIGUSR1; 0 for never.
        grace_seconds: Seconds that the command has to save its state; 0 where it has nothing to save.
        further: More options of sbatch, as :func:`further_options` returns them.
    """

    name: str
    role: str
    program: Sequence[str]
    log_dir: Path
    environment: Mapping[str, str]
    min_nodes: int
    max_nodes: int
    options: Mapping[str, str]
    directory: str = ""
    max_retries: int = 0
    warning_seconds: int = 0
    grace_seconds: int = 0
    further: Sequence[str] = ()

    def __post_init__(self) -> None:
        for field, name in (("application", self.name), ("role", self.role)):
            if not _NAME.fullmatch(name):
                raise UserError(f"the name of the {field} is {name!r}; allowed are letters, digits and . _ -")
        for variable in self.environment:
            if not _VARIABLE.fullmatch(variable):
                raise UserError(
                    f"the environment variable {variable!r} has a name that no shell can set; "
                    "allowed are letters, digits and _, with no digit first"
                )
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise UserError(
                f"the job asks for {self.min_nodes} to {self.max_nodes} nodes; ask for 1 or more, fewest first"
            )

    @property
    def full_name(self) -> str:
        """Slurm's name of the job."""
        return f"{self.name}/{self.role}"

    @property
    def elastic(self) -> bool:
        """Whether the job can run on fewer nodes than it asks for."""
        return self.min_nodes < self.max_nodes

    @property
    def command(self) -> list[str]:
        """The command that submits the script, which the command reads from its standard input."""
        command = ["sbatch", "--parsable", f"--output={log_pattern(self.log_dir)}"]
        # accounting keeps this line: so logs are found after the controller has forgotten the job
        return [*command, f"--chdir={self.directory}"] if self.directory else command

    def script(self) -> str:
        """Returns the batch script."""
        task = self._task()
        # the end of a here-document must be no line of the task
        mark = "END_OF_TASK"
        while mark in task:
            mark += "_"
        return BATCH_SCRIPT.substitute(
            job=self.full_name,
            options="\n".join(f"#SBATCH {option}" for option in self._options()),
            rank0_variable=RANK0_VARIABLE,
            log_dir=shlex.quote(str(self.log_dir)),
            max_retries=self.max_retries,
            min_nodes=self.min_nodes,
            grace=self.grace_seconds,
            cancel_seconds=CANCEL_SECONDS,
            record=RECORD.strip(),
            task=task,
            mark=mark,
            step_options=" ".join(self._step_options()),
            interrupted=INTERRUPTED,
            mistakes="|".join(map(str, MISTAKES)),
        )

    def __str__(self) -> str:
        return f"{shlex.join(self.command)} <<'END_OF_SCRIPT'\n{self.script()}END_OF_SCRIPT\n"

    def _options(self) -> list[str]:
        """Returns the options in the head of the script."""
        nodes = [f"--nodes={self.max_nodes}", "--ntasks-per-node=1"]
        if self.elastic:
            # with --ntasks-per-node Slurm would take the fewest nodes that hold the tasks, not the most
            nodes = [f"--nodes={self.min_nodes}-{self.max_nodes}", "--no-kill"]
        chosen = [f"--{option}={_quoted(value)}" for option, value in self.options.items()]
        # B: only to the script's shell, which hands it on
        signal = [f"--signal=B:USR1@{self.warning_seconds}"] if self.warning_seconds else []
        # append: a job that is started again continues its log
        from_request = [f"--job-name={self.full_name}", *nodes, *chosen, *signal, "--requeue", "--open-mode=append"]
        return [*from_request, *self.further]

    def _step_options(self) -> list[str]:
        """Returns the options of srun, which starts the task on every node."""
        nodes = '"$SLURM_JOB_NUM_NODES"'
        options = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        if "cpus-per-task" in self.options:
            # from Slurm 22.05 on a step does not inherit this from its job
            options.append(f"--cpus-per-task={self.options['cpus-per-task']}")
        # --export: the command needs the script's exports, which the user's SBATCH_EXPORT may hide
        output = shlex.quote(str(log_pattern(self.log_dir, self.role, "%t")))
        fate = _ELASTIC_STEP if self.elastic else _FIXED_STEP
        return [*options, "--export=ALL", "--open-mode=append", f"--output={output}", *fate]

    def _task(self) -> str:
        """Returns the shell script that every node runs."""
        template = ELASTIC_TASK if self.elastic else FIXED_TASK
        script = template.substitute(
            exports="\n".join(f"export {name}={_shell_text(value)}" for name, value in self.environment.items()),
            program=" ".join(_shell_text(word) for word in self.program),
            log_dir=shlex.quote(str(self.log_dir)),
            rank0_variable=RANK0_VARIABLE,
            record=RECORD.strip(),
        )
        return script.rstrip("\n")


def log_pattern(log_dir: Path, role: str = "", replica: str = "") -> Path:
    """Returns the path of the log of a job or of one replica, with ``%j`` for the job's number."""
    end = f"-{role}-{replica}" if role else ""
    return Path(str(log_dir).replace("%", "%%")) / f"slurm-%j{end}.out"


def further_options(text: str, named_options: Collection[str] = ()) -> list[str]:
    """Splits a text of sbatch options, like ``--exclusive --nodelist=n[1-4]``, quoted as for the shell.

    A UserError refuses words that are no option, :data:`OWN_OPTIONS`, and options in ``named_options``, which are given
    as ``-o NAME=VALUE``.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"sbatch is {text!r}: {error}") from None
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        if not word.startswith("--") or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            raise UserError(f"sbatch has {word!r}; each option is --NAME or --NAME=VALUE, such as --nodelist=n[1-4]")
        # sbatch takes the beginning of a name for the name
        if clashing := [option for option in named_options if option.startswith(name)]:
            raise UserError(f"sbatch has {word!r}; give -o {clashing[0]}=VALUE instead")
        if reserved := [option for option in OWN_OPTIONS if option.startswith(name)]:
            raise UserError(f"sbatch has {word!r}; --{reserved[0]} is decided by the job's request: leave it out")
    settings = (word.partition("=") for word in words)
    return [f"{option}={_quoted(value)}" if equals else option for option, equals, value in settings]


def time_limit_seconds(text: str) -> int | None:
    """Returns the seconds of sbatch's time limit: 90 is minutes, 1:30:00 hours, 2-12 days and hours; None: no limit."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    days, dash, clock = text.rpartition("-")
    fields = clock.split(":")
    if not all(re.fullmatch(r"[0-9]+", field) for field in [*fields, *([days] if dash else [])]) or len(fields) > 3:
        raise UserError(
            f"time is {text!r}; Slurm takes minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes and days-hours:minutes:seconds"
        )
    numbers = [int(field) for field in fields]
    if dash:
        units = [3600, 60, 1]
    else:
        units = [60, 1] if len(numbers) < 3 else [3600, 60, 1]
    return int(days or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units, strict=False))


def _quoted(value: str) -> str:
    """Returns a value for a line of options, which Slurm reads itself: a backslash escapes, within quotes too."""
    if "\n" in value:
        raise UserError(f"the option {value!r} has more than one line, which sbatch cannot read")
    return value if re.fullmatch(r"[\w@%+=:,./*-]+", value) else '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def _shell_text(text: str) -> str:
    """Returns a shell word for ``text``: quoted literally, with Slurm's variables in place of the two macros."""
    variables = {JOB_ID: '"$SLURM_JOB_ID"', REPLICA_ID: '"$SLURM_PROCID"'}
    words = re.split(f"({re.escape(JOB_ID)}|{re.escape(REPLICA_ID)})", text)
    # an empty part next to a macro is left out; an empty text is a word
    return "".join(variables.get(word) or shlex.quote(word) for word in words if word) or "''"


class _ShellTemplate(Template):
    """A shell script with ``@name`` in place of values."""

    delimiter = "@"  # the script is full of dollars


# Reads a field of the controller's record of the job, in the script and in the tasks of an elastic one.
RECORD = r"""
field() { [[ $record =~ (^|[[:space:]])$1=([^[:space:]]*) ]] && echo "${BASH_REMATCH[2]}"; }
"""

# Failures are counted in a file: SLURM_RESTART_COUNT also counts preemptions and dead nodes.
# Only a running job is requeued: a cancelled job would start again.
# A preempted job's shell may get no signal: hence PreemptTime.
# The step is warned once: a second signal would end a launcher that waits for its ranks.
BATCH_SCRIPT = _ShellTemplate("""\
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
""")

# A launcher that does not handle SIGUSR1 would die of it. Children inherit that a signal is ignored.
FIXED_TASK = _ShellTemplate("""\
trap '' USR1
@exports
exec @program
""")

# The shell stays to watch the first node: script, srun and meeting point are lost with it, and Slurm, which keeps the
# job alive, would leave the other nodes idle until the time limit. Launchers may fail at once or hang. Slurm is slow to
# notice a dead node: so after a failure the shell waits for Slurm, or for the end of the first node's task.
# Signals reach every process of the step: the shell only has to survive them.
ELASTIC_TASK = _ShellTemplate("""\
@exports
told=''
trap 'told=yes' TERM USR1
run() { (trap '' USR1; exec @program); }
cancelled=@log_dir/slurm-"$SLURM_JOB_ID".cancelled
first_ended=@log_dir/slurm-"$SLURM_JOB_ID".first-ended-"${SLURM_RESTART_COUNT:-0}"
if [[ $SLURM_PROCID == 0 ]]; then
    run
    code=$?
    # without the meeting point the other nodes cannot continue
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
