#!/usr/bin/env bash
# A real Slurm of several nodes on one Debian or Ubuntu machine, to try and to test launching: no systemd, loopback only.
#
#   tests/launch/mini_slurm.sh install         Debian's packages of Slurm, munge and MariaDB; starts none of their daemons
#   tests/launch/mini_slurm.sh up              installs what is missing, starts the daemons, waits until every node is idle
#   eval "$(tests/launch/mini_slurm.sh env)"   lets sbatch, squeue and the like of this shell find it
#   tests/launch/mini_slurm.sh status          daemons, nodes and jobs
#   tests/launch/mini_slurm.sh kill-node mini2 a power failure: slurmd and the node's jobs end by SIGKILL
#   tests/launch/mini_slurm.sh start-node mini2 the node boots again
#   tests/launch/mini_slurm.sh down [--purge]  cancels the jobs and ends what `up` has started; --purge forgets its state
#
# MINI_SLURM_DIR=/tmp/mini-slurm   state, logs and sockets; refused where somebody else owns it
# MINI_SLURM_PORT=17000            first of 11 + MINI_SLURM_NODES ports; with another folder and port a second one can run
# MINI_SLURM_NODES=2               how many nodes, mini1 to miniN; all of them are this machine
# MINI_SLURM_CPUS=4                processors of a node, which the machine need not have
# MINI_SLURM_MEMORY=8192           megabytes of a node, which are not enforced
# MINI_SLURM_ACCOUNTING=1          1: slurmdbd with MariaDB, so that sacct works; 0: neither
# MINI_SLURM_REQUEUE_SECONDS=10    how long a requeued job waits, 5 or more; Slurm's own default is two minutes
# MINI_SLURM_DEAD_SECONDS=10       how long a node may be silent before it counts as dead
# MINI_SLURM_WHILE_PID=            takes everything down when the process with this number has ended
#
# There are two partitions: jobs of `urgent` take their nodes from those of `debug`, the default one, which have ten
# seconds to end. The daemons run as root and trust every user of this machine.
# Exit code 3: it cannot run on this machine, and it says why.
set -euo pipefail

# Not below $TMPDIR: sudo drops it, and `sudo mini_slurm.sh up` and `mini_slurm.sh env` are to mean the same.
readonly DIR=${MINI_SLURM_DIR:-/tmp/mini-slurm} PORT=${MINI_SLURM_PORT:-17000}
readonly NODES=${MINI_SLURM_NODES:-2} CPUS=${MINI_SLURM_CPUS:-4} MEMORY=${MINI_SLURM_MEMORY:-8192}
readonly ACCOUNTING=${MINI_SLURM_ACCOUNTING:-1} REQUEUE_SECONDS=${MINI_SLURM_REQUEUE_SECONDS:-10}
readonly DEAD_SECONDS=${MINI_SLURM_DEAD_SECONDS:-10} WHILE_PID=${MINI_SLURM_WHILE_PID:-}
readonly MUNGE_SOCKET=$DIR/run/munge.sock SQL_SOCKET=$DIR/run/mysql.sock
readonly LOCK=/run/mini-slurm.lock # apt and /etc/hosts belong to all that run here, and only root writes to them
readonly HOSTS_TAG="# mini-slurm $DIR"
export SLURM_CONF=$DIR/etc/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

say() { printf '==> %s\n' "$*" >&2; }
fail() {
    printf 'mini_slurm: %s\n' "$@" >&2
    exit 1
}
cannot() {
    printf 'mini_slurm: %s\n' "$@" >&2
    exit 3
}
check_settings() {
    local name
    for name in PORT NODES CPUS MEMORY REQUEUE_SECONDS DEAD_SECONDS; do
        [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "MINI_SLURM_$name is '${!name}'; allowed are whole numbers from 1."
    done
    ((REQUEUE_SECONDS >= 5)) || fail "MINI_SLURM_REQUEUE_SECONDS is $REQUEUE_SECONDS; Slurm takes 5 or more."
    [[ $ACCOUNTING == [01] ]] || fail "MINI_SLURM_ACCOUNTING is '$ACCOUNTING'; allowed are 0 and 1."
    # Slurm's files know no quotes, and a socket's path has at most 107 characters.
    [[ $DIR =~ ^/[A-Za-z0-9._/+-]+$ ]] || fail "MINI_SLURM_DIR is '$DIR'; it must be an absolute path of letters, digits and ._+-"
    ((${#MUNGE_SOCKET} <= 100)) || fail "MINI_SLURM_DIR is '$DIR', too long for the sockets in it; choose a shorter path."
}

# What lies in the folder is trusted: numbers of processes to kill, keys, configuration. /tmp is open to everyone.
check_owner() {
    [[ ! -L $DIR ]] || fail "MINI_SLURM_DIR, $DIR, is a symbolic link; name the folder itself, or remove the link."
    [[ -e $DIR ]] || return 0
    local owner
    owner=$(stat -c %u "$DIR")
    ((owner == EUID)) || { ((owner == 0)) && [[ $1 == env || $1 == status ]]; } ||
        fail "MINI_SLURM_DIR, $DIR, belongs to $(stat -c %U "$DIR") and not to $(id -un); choose another folder."
}

check_settings
check_owner "${1:-}"
readonly DBD_PORT=$((PORT + 1)) SQL_PORT=$((PORT + 2)) FIRST_NODE_PORT=$((PORT + 11))

node_names() { seq -f 'mini%.0f' "$NODES"; }

# ---------------------------------------------------------------------------------------------------------- packages

packages() {
    echo munge slurmctld slurmd slurm-client
    [[ $ACCOUNTING == 0 ]] || echo slurmdbd mariadb-server
}
installed() {
    local package
    for package in $(packages); do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || return 1
    done
}

# Debian's packages start what they bring unless this file says that they may not.
forbid_starting() {
    local policy=/usr/sbin/policy-rc.d
    [[ ! -e $policy ]] || return 0
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
    # shellcheck disable=SC2064 # $policy is to be read now
    trap "rm -f $policy" EXIT
}

apt_install() {
    local log=$1
    # shellcheck disable=SC2046 # several packages
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends $(packages) \
        >>"$log" 2>&1 </dev/null
}

install() {
    command -v dpkg-query >/dev/null || cannot "this is no Debian or Ubuntu: dpkg is missing." \
        "Install Slurm (slurmctld, slurmd, slurmdbd, its commands), munge and MariaDB by hand, or use a Debian container."
    ! installed || return 0
    command -v apt-get >/dev/null || cannot "apt-get is missing; install by hand: $(packages | xargs)"
    ((EUID == 0)) || cannot "installing packages needs root. Run:  sudo apt-get install --no-install-recommends $(packages | xargs)"
    say "Installing $(packages | xargs)"
    # In a subshell: its end removes the file that forbids starting, and lets the next one go on.
    (
        flock 9
        ! installed || exit 0
        log=$(mktemp)
        forbid_starting
        # The lists that are there may do; they are fetched only where they do not.
        apt_install "$log" || { apt-get update -qq >>"$log" 2>&1 && apt_install "$log"; } || {
            tail -n 15 "$log" >&2
            cannot "apt-get could not install $(packages | xargs); all that it said is in $log." \
                "Without a network, or where a mirror lacks them, install them by hand."
        }
        rm -f "$log"
    ) 9>>"$LOCK"
}

# ------------------------------------------------------------------------------------------------------ configuration

accounting_lines() {
    if [[ $ACCOUNTING == 0 ]]; then
        echo 'AccountingStorageType=accounting_storage/none'
        return
    fi
    # With auth/munge the "password" is the socket of munge; AuthInfo is not read for this link.
    cat <<END
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$DBD_PORT
AccountingStoragePass=$MUNGE_SOCKET
END
}

# cred_expire: a requeued job waits until its credentials have expired. linuxproc: cgroups may not be ours to write.
# DefMemPerCPU: a job that does not say what it needs would take all. InactiveLimit: a killed srun leaves an allocation.
# NoInAddrAny, NoCtldInAddrAny: daemons listen on the address of their name, 127.0.0.1, only.
write_slurm_conf() {
    local host
    host=$(hostname -s)
    cat >"$SLURM_CONF" <<END
ClusterName=mini
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$MUNGE_SOCKET,cred_expire=$REQUEUE_SECONDS
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=$((MEMORY / CPUS > 0 ? MEMORY / CPUS : 1))
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_continue,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=$DEAD_SECONDS
KillWait=5
InactiveLimit=60
MinJobAge=3600
JobRequeue=1
EnforcePartLimits=ALL
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.self
SlurmdPidFile=$DIR/run/%n.self
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/%n.log
$(accounting_lines)
NodeName=mini[1-$NODES] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$FIRST_NODE_PORT-$((FIRST_NODE_PORT + NODES - 1))] CPUs=$CPUS RealMemory=$MEMORY State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=10
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
END
}

write_slurmdbd_conf() {
    (umask 077 && cat >"$DIR/etc/slurmdbd.conf") <<END
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=$DBD_PORT
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$MUNGE_SOCKET
CommunicationParameters=NoInAddrAny
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$SQL_PORT
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
PidFile=$DIR/run/slurmdbd.self
LogFile=$DIR/log/slurmdbd.log
END
}

configure() {
    mkdir -p "$DIR"
    check_owner up # somebody may have been faster
    mkdir -p "$DIR"/{etc,run,log,state,spool,mysql,munge}
    # munged refuses folders that others may write; jobs of other users must reach its socket
    chmod 755 "$DIR" "$DIR/run"
    chmod 700 "$DIR/munge"
    if [[ ! -s $DIR/munge/key ]]; then
        (umask 377 && head -c 128 /dev/urandom >"$DIR/munge/key.new" && mv "$DIR/munge/key.new" "$DIR/munge/key")
    fi
    write_slurm_conf
    [[ $ACCOUNTING == 0 ]] || write_slurmdbd_conf
}

# Names that tasks may ask for, as that of the rendezvous. Each line is tagged with whose it is.
remove_names() {
    [[ -w /etc/hosts ]] || return 0
    (
        flock 9
        # Not `sed -i`: a container's /etc/hosts is a mount, which can be written and not replaced.
        rest=$(grep -vF -- "$HOSTS_TAG" /etc/hosts || true)
        [[ $rest == "$(cat /etc/hosts)" ]] || printf '%s\n' "$rest" >/etc/hosts
    ) 9>>"$LOCK"
}
add_names() {
    remove_names
    (
        flock 9
        for node in $(node_names); do echo "127.0.0.1 $node $HOSTS_TAG"; done >>/etc/hosts
    ) 9>>"$LOCK"
}

# ----------------------------------------------------------------------------------------------------------- daemons

# When a process was started, in ticks since boot: with its number the one name that is never given again.
started_at() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    stat=${stat##*) } # what stands before may hold spaces
    cut -d' ' -f20 <<<"$stat"
}
# Number of a daemon that we have started and that still runs.
pid_of() {
    local pid ticks
    { read -r pid ticks <"$DIR/run/$1.pid"; } 2>/dev/null || return 1
    [[ -n $ticks && $(started_at "$pid") == "$ticks" && $(cut -d' ' -f3 "/proc/$pid/stat") != Z ]] && echo "$pid"
}
start() {
    local name=$1
    shift
    pid_of "$name" >/dev/null && return
    # 9>&-: a daemon would hold the lock of whoever started it
    setsid "$@" >>"$DIR/log/$name.out" 2>&1 </dev/null 9>&- &
    echo "$! $(started_at $!)" >"$DIR/run/$name.pid"
}
wait_for() {
    local name=$1 seconds=$2 end=$((SECONDS + $2))
    shift 2
    until "$@" >/dev/null 2>&1; do
        if ((SECONDS >= end)); then
            tail -n 5 "$DIR"/log/* >&2
            fail "$name was not ready within $seconds seconds; the logs are in $DIR/log." \
                "Is a port from $PORT on taken? Choose others by MINI_SLURM_PORT."
        fi
        sleep 0.1
    done
}
stop() {
    local name=$1 pid
    if pid=$(pid_of "$name"); then
        kill "$pid" 2>/dev/null || true
        for _ in {1..100}; do
            pid_of "$name" >/dev/null || break
            sleep 0.1
        done
        ! pid_of "$name" >/dev/null || kill -KILL "$pid" 2>/dev/null || true
    fi
    rm -f "$DIR/run/$name.pid"
}

start_munge() {
    # --force: a killed one leaves its socket and lock
    start munged munged --foreground --force --key-file="$DIR/munge/key" --socket="$MUNGE_SOCKET" \
        --pid-file="$DIR/run/munged.self" --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed"
    wait_for munged 10 timeout 5 munge --no-input --socket="$MUNGE_SOCKET"
}

sql() { timeout 60 mariadb --no-defaults --socket="$SQL_SOCKET" --execute "$1"; }
start_database() {
    if [[ ! -e $DIR/mysql/.complete ]]; then
        rm -rf "$DIR/mysql" # what was interrupted half-way
        mkdir "$DIR/mysql"
        mariadb-install-db --no-defaults --user=root --datadir="$DIR/mysql" --auth-root-authentication-method=normal \
            --skip-test-db >"$DIR/log/mysql-install.out" 2>&1 || fail "no database could be made; see $DIR/log/mysql-install.out"
        touch "$DIR/mysql/.complete"
    fi
    start mariadbd mariadbd --no-defaults --user=root --datadir="$DIR/mysql" --socket="$SQL_SOCKET" --bind-address=127.0.0.1 \
        --port="$SQL_PORT" --pid-file="$DIR/run/mysql.self" --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900
    wait_for mariadbd 30 sql 'select 1'
    sql "create database if not exists slurm_acct; create user if not exists slurm@'127.0.0.1' identified by 'slurm';
         create user if not exists slurm@'localhost' identified by 'slurm';
         grant all on slurm_acct.* to slurm@'127.0.0.1'; grant all on slurm_acct.* to slurm@'localhost'"
}
start_accounting() {
    start_database
    start slurmdbd slurmdbd -D
    wait_for slurmdbd 30 timeout 5 sacctmgr --noheader show cluster
    sacctmgr --noheader show cluster format=cluster | grep -qw mini || sacctmgr --immediate add cluster mini >/dev/null
}

start_node() {
    mkdir -p "$DIR/spool/$1"
    # MINI_SLURM_NODE: by it kill_node knows what belongs to the node
    start "$1" env MINI_SLURM_NODE="$DIR/$1" slurmd -D -N "$1"
}
all_nodes_ready() { [[ $(timeout 5 sinfo --noheader --Node --states=idle,mixed,allocated --format=%N | sort -u | wc -l) == "$NODES" ]]; }

# ---------------------------------------------------------------------------------------------------------- commands

up() {
    ((EUID == 0)) || cannot "a Slurm that starts jobs needs root. Run:  sudo $0 up"
    install
    configure
    add_names
    start_munge
    [[ $ACCOUNTING == 0 ]] || start_accounting
    start slurmctld slurmctld -D
    wait_for slurmctld 20 timeout 5 scontrol ping
    for node in $(node_names); do start_node "$node"; done
    wait_for "every node" 30 all_nodes_ready
    [[ -z $WHILE_PID ]] || start watch bash "$0" watch "$WHILE_PID"
    say "Slurm is up.  eval \"\$($0 env)\""
}

# Processes of the steps of a node: each slurmstepd and everything below it.
step_processes() {
    local pid
    for pid in $(pgrep -x slurmstepd); do
        ! grep -qzxF -- "MINI_SLURM_NODE=$1" "/proc/$pid/environ" 2>/dev/null || tree_of "$pid"
    done
}
tree_of() {
    local child
    echo "$1"
    for child in $(pgrep -P "$1"); do tree_of "$child"; done
}
kill_steps() {
    local pids
    pids=$(step_processes "$1")
    # shellcheck disable=SC2086 # several numbers
    [[ -z $pids ]] || kill -KILL $pids 2>/dev/null || true
}
kill_node() {
    local pid
    if pid=$(pid_of "$1"); then kill -KILL "$pid"; fi
    rm -f "$DIR/run/$1.pid"
    kill_steps "$DIR/$1"
}

down() {
    [[ -z ${1:-} || $1 == --purge ]] || fail "down takes --purge and nothing else, not '$1'."
    if [[ -d $DIR/run ]]; then
        stop watch
        if pid_of slurmctld >/dev/null; then
            timeout 10 scancel --full --user="$(id -un)" 2>/dev/null || true
            for _ in {1..30}; do
                [[ -n $(timeout 5 squeue --noheader 2>/dev/null) ]] || break
                sleep 0.1
            done
        fi
        for file in "$DIR"/run/mini*.pid; do
            [[ ! -e $file ]] || { stop "$(basename "$file" .pid)" & }
        done
        wait
        for node in "$DIR"/spool/*; do kill_steps "$DIR/$(basename "$node")"; done
        for name in slurmctld slurmdbd mariadbd munged; do stop $name; done
    fi
    remove_names
    [[ ${1:-} != --purge ]] || rm -rf "$DIR"
    say "Slurm is down."
}

# Ends everything with the process that wanted it, however that ended.
watch() {
    local ticks
    ticks=$(started_at "$1") || true
    while [[ -n $ticks && $(started_at "$1") == "$ticks" ]]; do sleep 2; done
    rm -f "$DIR/run/watch.pid" # so that `down` does not stop who calls it
    down --purge
}

status() {
    local name
    for name in munged mariadbd slurmdbd slurmctld $(node_names); do
        printf '%-10s %s\n' "$name" "$(pid_of "$name" || echo -)"
    done
    pid_of slurmctld >/dev/null || fail "Slurm is not up.  Start it:  $0 up"
    sinfo --Node --long
    squeue
}

known_node() {
    node_names | grep -qxF -- "${1:-}" || fail "there is no node '${1:-}'; there are $(node_names | xargs)."
    pid_of slurmctld >/dev/null || fail "Slurm is not up.  Start it:  $0 up"
}

case ${1:-} in
install) install ;;
up) up ;;
down) down "${2:-}" ;;
status) status ;;
env) printf 'export SLURM_CONF=%q\n' "$SLURM_CONF" ;;
kill-node) known_node "${2:-}" && kill_node "$2" ;;
start-node) known_node "${2:-}" && start_node "$2" ;;
watch) watch "$2" ;;
*)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
    ;;
esac
