#!/usr/bin/env bash
# Creates two hosts on one Linux machine, with a network of limited speed between them.
#
#   tools/two_hosts.sh up                     creates the hosts, unless they are up already
#   tools/two_hosts.sh limit 1gbit            limits the rate of each host, in tc's units; `limit none` removes it
#   tools/two_hosts.sh exec 1 COMMAND ...     runs a command on the first host, in this folder and with this environment
#   tools/two_hosts.sh down                   kills the hosts' processes and removes everything that `up` has created
#
# TWO_HOSTS_NAME=twohost       the hosts' names are twohost1 and twohost2; at most 14 characters
# TWO_HOSTS_SUBNET=10.78.0     the hosts' addresses are 10.78.0.1 and .2; this machine is .254 and reaches both
#
# A host is a network namespace with its own eth0, loopback, /etc/hosts and name; files, users and processes are this
# machine's. Each eth0 is a veth on a bridge of this machine, called TWO_HOSTS_NAME. A second pair needs another name
# and subnet. The script neither uses nor removes anything that it has not created.
# Exit code 3: it cannot run on this machine; the message gives the reason.
set -euo pipefail

readonly NAME=${TWO_HOSTS_NAME:-twohost} SUBNET=${TWO_HOSTS_SUBNET:-10.78.0}
readonly HOSTS=(1 2)
readonly FILES=/etc/netns           # `ip netns exec` mounts a host's files in this folder over /etc
readonly MARK='# two_hosts.sh made' # first words of its /etc/hosts: a host without them is not ours
export PATH=$PATH:/usr/sbin:/sbin

say() { printf '==> %s\n' "$*" >&2; }
fail() {
    printf 'two_hosts: %s\n' "$@" >&2
    exit 1
}
cannot() {
    printf 'two_hosts: %s\n' "$@" >&2
    exit 3
}
usage() {
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0"
    exit 2
}

check_settings() {
    [[ $NAME =~ ^[a-z][a-z0-9-]{0,13}$ ]] ||
        fail "TWO_HOSTS_NAME is '$NAME'; allowed are up to 14 lower-case letters, digits and hyphens, a letter first."
    [[ $SUBNET =~ ^[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}$ ]] ||
        fail "TWO_HOSTS_SUBNET is '$SUBNET'; it must be three numbers, such as 10.78.0"
}
check_machine() {
    local command
    [[ $(uname -s) == Linux ]] || cannot "network namespaces are Linux's; this is $(uname -s)."
    for command in ip tc unshare; do
        command -v $command >/dev/null ||
            cannot "$command is missing. On Debian and Ubuntu:  apt-get install iproute2 util-linux"
    done
    ((EUID == 0)) || cannot "network namespaces need root. Run:  sudo $0 ${1:-}"
}

has_namespace() { [[ -e /run/netns/$1 ]]; }
has_link() { ip link show dev "$1" >/dev/null 2>&1; }
is_ours() { grep -qs "^$MARK" "$FILES/$1/hosts"; }
is_up() {
    local i host
    for i in "${HOSTS[@]}"; do
        host=$NAME$i
        has_namespace "$host" && is_ours "$host" || return 1
        [[ -n $(ip -n "$host" link show dev lo up) ]] || return 1 # make_host brings lo up last
    done
}
require_up() { is_up || fail "the hosts $NAME* are not up.  Start them:  $0 up"; }

refuse_what_is_not_ours() {
    local i host
    for i in "${HOSTS[@]}"; do
        host=$NAME$i
        is_ours "$host" && continue
        ! has_namespace "$host" || fail "a namespace $host exists already; choose another TWO_HOSTS_NAME."
        [[ ! -e $FILES/$host ]] || fail "$FILES/$host exists already; choose another TWO_HOSTS_NAME."
        ! has_link "$host" || fail "an interface $host exists already; choose another TWO_HOSTS_NAME."
    done
    is_ours "${NAME}1" || ! has_link "$NAME" || fail "an interface $NAME exists already; choose another TWO_HOSTS_NAME."
}
refuse_taken_subnet() {
    local routes
    routes=$(ip -4 route show root "$SUBNET.0/24") || fail "TWO_HOSTS_SUBNET is '$SUBNET', which is no subnet."
    [[ -z $routes ]] ||
        fail "this machine has routes within $SUBNET.0/24 already; choose another TWO_HOSTS_SUBNET." "$routes"
}

write_hosts_file() {
    local i
    mkdir -p "$FILES/$1"
    {
        echo "$MARK $NAME on $SUBNET"
        echo "127.0.0.1 localhost"
        for i in "${HOSTS[@]}"; do echo "$SUBNET.$i $NAME$i"; done
    } >"$FILES/$1/hosts"
}
make_host() {
    local host=$NAME$1
    ip netns add "$host" || cannot "no network namespace can be made: the kernel or a container forbids it."
    ip link add "$host" type veth peer name eth0 netns "$host" || cannot "no veth can be made: the kernel lacks it."
    ip link set "$host" master "$NAME" up
    ip -n "$host" addr add "$SUBNET.$1/24" dev eth0
    ip -n "$host" link set eth0 up
    ip -n "$host" link set lo up
}
make() {
    local i
    for i in "${HOSTS[@]}"; do write_hosts_file "$NAME$i"; done # first: this file marks everything else as ours
    ip link add "$NAME" type bridge || cannot "no bridge can be made: the kernel lacks it, or a container forbids it."
    ip addr add "$SUBNET.254/24" dev "$NAME"
    ip link set "$NAME" up
    for i in "${HOSTS[@]}"; do make_host "$i"; done
}

up() {
    if is_up; then
        grep -qxF "$MARK $NAME on $SUBNET" "$FILES/${NAME}1/hosts" ||
            fail "the hosts $NAME* are up already, on another subnet. Take them down first:  $0 down"
    else
        refuse_what_is_not_ours
        remove # parts of an interrupted `up`, or files left after a reboot
        refuse_taken_subnet
        trap remove EXIT
        make
        trap - EXIT
    fi
    say "${NAME}1 is $SUBNET.1, ${NAME}2 is $SUBNET.2.  $0 exec 1 COMMAND ..."
}

limit() {
    local i rate=${1:-}
    [[ -n $rate ]] || fail "limit takes a rate, such as 1gbit or 100mbit, or none."
    require_up
    for i in "${HOSTS[@]}"; do
        if [[ $rate == none ]]; then
            # tc fails if there is no limit.
            tc -n "$NAME$i" qdisc del dev eth0 root 2>/dev/null || true
        else
            # The burst must hold the bytes sent between two clock ticks.
            tc -n "$NAME$i" qdisc replace dev eth0 root tbf rate "$rate" burst 256kb latency 400ms ||
                fail "tc takes no rate '$rate'; rates are numbers with a unit, such as 1gbit or 100mbit."
        fi
    done
}

run() {
    local i=${1:-}
    [[ " ${HOSTS[*]} " == *" $i "* && $# -ge 2 ]] || fail "exec takes the number of a host (${HOSTS[*]}) and a command."
    shift
    require_up
    # shellcheck disable=SC2016 # the inner shell expands the variables
    exec ip netns exec "$NAME$i" unshare --uts \
        bash -c 'echo "$0" >/proc/sys/kernel/hostname && exec "$@"' "$NAME$i" "$@"
}

end_processes() {
    local pids
    pids=$(ip netns pids "$1" 2>/dev/null) || true
    # shellcheck disable=SC2086 # several process ids
    [[ -z $pids ]] || kill -KILL $pids 2>/dev/null || true
}
remove() {
    local i host
    # The mark of a host is removed last, so that an interrupted `down` can be repeated.
    ! is_ours "${NAME}1" || ! has_link "$NAME" || ip link del "$NAME"
    for i in "${HOSTS[@]}"; do
        host=$NAME$i
        is_ours "$host" || continue
        if has_namespace "$host"; then end_processes "$host"; fi
        # Removed by hand, because a deleted namespace frees its devices only some time later.
        ! has_link "$host" || ip link del "$host"
        ! has_namespace "$host" || ip netns del "$host"
        rm "$FILES/$host/hosts"
        rmdir "$FILES/$host"
    done
    rmdir "$FILES" 2>/dev/null || true # it may hold the files of other hosts
}
down() {
    remove
    say "The hosts $NAME* are down."
}

[[ ${1:-} =~ ^(up|limit|exec|down)$ ]] || usage
check_settings
check_machine "$1"
case $1 in
up) up ;;
limit) limit "${2:-}" ;;
exec) run "${@:2}" ;;
down) down ;;
esac
