#!/usr/bin/env bash
# Makes .venv ready to run distembed, and ends at once when nothing has changed since the last time.
#
#   tools/setup.sh              what the product needs, and what starts jobs on this machine and on Slurm
#   tools/setup.sh kubernetes   and what starts them on Kubernetes
#   tools/setup.sh aws_batch    and what starts them on AWS Batch
#   tools/setup.sh launch       both of these
#   tools/setup.sh serve        and what `distembed serve` needs
#   tools/setup.sh ray spark    and what `distembed prepare --engine ray` and `--engine spark` need (Spark: Java too)
#   tools/setup.sh test         and what the tests need, `launch` and `serve` included
#   tools/setup.sh --trio 2.11  on another tested trio of torch, TorchRec and FBGEMM than the newest one, by its torch;
#                               they stand in distembed/reports/doctor/trio.py, with the Pythons that each is tested on
#
# DISTEMBED_PYTHON=/path/to/python3   the interpreter to build on (default: the first suitable one on PATH, or of pyenv)
# DISTEMBED_DEVICE=cpu|cuda           which members of the trio to take (default: cuda where nvidia-smi works)
# DISTEMBED_TRIO=2.11                 as --trio does, for scripts that run this one:  DISTEMBED_TRIO=2.11 tools/test.sh
#
# .venv holds one trio, one device and one Python at a time: asked for another it is made afresh, and a call that names
# no trio asks for the newest. Set DISTEMBED_TRIO for as long as another one is worked with.
#
# Packages come from wherever pip is configured to take them; nothing is built from source. The stamp is written last, so that
# an environment without one was interrupted and is made afresh: a killed pip leaves packages that only look installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv
readonly MARK=$VENV/.made-by-setup # ours, so that a .venv which someone else made is never deleted
readonly STAMP=$VENV/.ready        # three lines: what it stands on, what was installed, which extras
# Of its wheel the tests read MovieLens-100k, as data; what it demands, among it another NumPy, would run it.
readonly RECBOLE=recbole==1.2.1

say() { printf '==> %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}
hash_of() { cat "$@" | sha256sum | cut -c1-16; }

# Pythons that may serve, most wanted first. They are run, not only looked up: pyenv's shims exist for versions that do
# not start.
pythons() {
    if [[ -n ${DISTEMBED_PYTHON:-} ]]; then
        echo "$DISTEMBED_PYTHON"
        return
    fi
    printf '%s\n' python3 python3.{11..14}
    local root=${PYENV_ROOT:-${HOME:-}/.pyenv}
    printf '%s\n' "$root"/versions/*/bin/python3
}

# Any Python can answer, the one that is to be built on or another.
interpreter() {
    local candidate
    while read -r candidate; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done < <(echo $VENV/bin/python; pythons; DISTEMBED_PYTHON= pythons)
    fail_without_python " (3.11 or newer)"
}
fail_without_python() {
    fail "no Python that suits$1 was found on PATH, or among those of pyenv." \
        "On Debian and Ubuntu:  sudo apt-get install python3 python3-venv" \
        "or name one:           DISTEMBED_PYTHON=/path/to/python3 tools/setup.sh"
}
about_trio() { "$any_python" -I distembed/reports/doctor/trio.py "$@"; }

choose_device() {
    local device=${DISTEMBED_DEVICE:-}
    if [[ -z $device ]]; then
        if nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
    fi
    [[ $device == cpu || $device == cuda ]] || fail "DISTEMBED_DEVICE is '$device'; allowed are cpu and cuda."
    echo "$device"
}

find_python() {
    local candidate without_venv= allowed
    while read -r candidate; do
        "$candidate" -I distembed/reports/doctor/trio.py "$trio" suits 2>/dev/null || continue
        if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
            # Not the candidate itself: in an activated .venv it is the one that is about to be removed.
            "$candidate" -c 'import sys; print(sys._base_executable)'
            return
        fi
        without_venv=${without_venv:-$candidate}
    done < <(pythons)
    if [[ -n $without_venv ]]; then
        local package
        package=$("$without_venv" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        fail "$without_venv cannot make virtual environments (its venv or ensurepip module is missing)." \
            "On Debian and Ubuntu:  sudo apt-get install $package"
    fi
    allowed=$(about_trio "$trio" pythons)
    [[ -z ${DISTEMBED_PYTHON:-} ]] ||
        fail "DISTEMBED_PYTHON is '$DISTEMBED_PYTHON', which is no Python that the trio $trio is tested on: $allowed."
    fail_without_python " the trio $trio ($allowed)"
}

# Before anything is removed or downloaded: the CUDA members are gigabytes, and would not run.
require_driver() {
    local shortage
    [[ $device == cuda ]] || return 0
    shortage=$("$any_python" -I distembed/base/cuda_driver.py "$(about_trio "$trio" toolkit)" 2>&1) ||
        fail "$shortage." \
            "The CUDA members of the trio $trio would not run here. Install a newer driver, or take the members for processors:" \
            "    DISTEMBED_DEVICE=cpu tools/setup.sh"
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# What the environment stands on, beside the members of the trio, which are asked for in it. When either is another one
# the environment is made afresh; anything else is updated in place.
foundation() { echo "$device $1 $trio $PWD"; }
contents() { hash_of pyproject.toml tools/setup.sh distembed/reports/doctor/trio.py; }

read_stamp() {
    stamp_foundation= stamp_contents= stamp_extras=
    [[ ! -f $STAMP ]] || { read -r stamp_foundation; read -r stamp_contents; read -r stamp_extras; } <"$STAMP" || true
}
stands() {
    local version
    version=$(version_of $VENV/bin/python) || return 1
    [[ -z ${DISTEMBED_PYTHON:-} || $version == "$(version_of "$DISTEMBED_PYTHON")" ]] || return 1
    # The word between is the trio's, which what is installed tells better.
    [[ $stamp_foundation == "$device $version "*" $PWD" ]] || return 1
    "$VENV/bin/python" -I distembed/reports/doctor/trio.py "$trio" stands "$device"
}
has_extras() {
    local extra
    for extra in "${extras[@]}"; do [[ " $stamp_extras " == *" $extra "* ]] || return 1; done
}
end_if_ready() {
    read_stamp
    if stands && [[ $stamp_contents == "$(contents)" ]] && has_extras; then
        say "$VENV is ready (nothing has changed)"
        exit 0
    fi
}

pip_install() { "$VENV/bin/python" -m pip install --no-user --no-compile --no-warn-conflicts "${verbosity[@]}" "$@"; }

make_venv() {
    local python
    python=$(find_python)
    if [[ -L $VENV ]]; then
        fail "$VENV is a link to $(readlink $VENV), whose environment would be removed. Remove the link, then run this again."
    fi
    if [[ -e $VENV && ! -e $MARK && -n $(ls -A $VENV) ]]; then
        fail "$VENV exists and was not made by tools/setup.sh. Move it away, then run this again."
    fi
    if [[ -e $MARK ]]; then
        say "Removing the $VENV that was interrupted, or was made for another Python, device, trio or folder"
        # The mark goes last: killed here, the next run still knows the folder for its own.
        find $VENV/ -mindepth 1 -maxdepth 1 ! -name "${MARK##*/}" -exec rm -rf {} +
    fi
    say "Making $VENV with $python ($("$python" -V))"
    mkdir -p $VENV
    touch $MARK
    "$python" -m venv $VENV
}

install() {
    local requirements needs aws=()
    # torch first and pinned: several packages below would take the newest one.
    read -ra requirements < <(about_trio "$trio" "$device")
    read -ra needs < <(about_trio "$trio" needs)
    say "Installing ${requirements[0]} (the largest download)"
    pip_install "${requirements[0]}"
    say "Installing distembed${stamp_extras:+ [$stamp_extras]} and what it needs"
    # --no-build-isolation: the build backend is setuptools, which torch has brought.
    # Named here they are resolved first: left to itself, pip tries out releases of botocore until it gives up. What s3fs
    # stands on, aiobotocore, goes with few of them.
    [[ " $stamp_extras " != *" aws_batch "* ]] || aws+=("boto3==1.43.117")
    [[ " $stamp_extras " != *" test "* ]] || aws+=("moto==5.2.5" "aiobotocore==3.10.0" "s3fs==2026.9.0")
    pip_install --no-build-isolation "${requirements[0]}" "${needs[@]}" "${aws[@]}" --editable ".${stamp_extras:+[${stamp_extras// /,}]}"
    say "Installing ${requirements[*]:1} ($device)"
    # --no-deps: torchrec demands fbgemm-gpu, the CUDA build, on every machine, and TorchX an old urllib3.
    pip_install --no-deps "${requirements[@]:1}"
    if [[ " $stamp_extras " == *" test "* ]]; then
        say "Unpacking $RECBOLE for the data that it ships"
        pip_install --no-deps "$RECBOLE"
    fi
    # At once and on all cores: pip would compile on one, and without it each command's first user waits, and where
    # bytecode is not written each user of each. What is not for this Python does not compile, and is left.
    say "Compiling bytecode"
    "$VENV/bin/python" -W ignore -m compileall -qq -j 0 $VENV/lib/python*/site-packages distembed launch || true
    if [[ $device == cuda ]] && ! nvidia-smi -L >/dev/null 2>&1; then
        say "Not loading the CUDA members: FBGEMM's needs a library of the NVIDIA driver, which is not here"
        return
    fi
    say "Loading torch, FBGEMM and TorchRec once"
    "$VENV/bin/python" -W ignore -c 'import torch, fbgemm_gpu, torchrec' ||
        fail "the trio is installed and does not load; see:  $VENV/bin/python -m distembed.reports.doctor"
}

extras=()
while (($#)); do
    case $1 in
    --trio)
        (($# > 1)) || fail "--trio needs a name, such as --trio 2.11"
        DISTEMBED_TRIO=$2
        shift
        ;;
    --trio=*) DISTEMBED_TRIO=${1#*=} ;;
    *) extras+=("$1") ;;
    esac
    shift
done
for extra in "${extras[@]}"; do
    [[ " kubernetes aws_batch launch polish serve sweep ray spark test " == *" $extra "* ]] ||
        fail "unknown extra '$extra'; allowed are: kubernetes, aws_batch, launch, polish, serve, sweep, ray, spark, test"
    [[ $extra != launch && $extra != test ]] || extras+=(kubernetes aws_batch)
done
device=$(choose_device)
any_python=$(interpreter)
trio=$(about_trio "${DISTEMBED_TRIO:-default}" name 2>&1) || fail "${trio##*$'\n'}"
end_if_ready
require_driver

# One at a time. A pip that outlives a killed setup holds the lock as well, so that nothing is installed under its feet.
if command -v flock >/dev/null; then
    exec 9>.venv.lock
    flock -n 9 || { say "Another set-up is running here; waiting for it"; flock 9; }
    end_if_ready
fi

verbosity=(--quiet)
[[ ! -t 1 ]] || verbosity=() # pip's progress bars, for someone who watches
stands || make_venv
rm -f $STAMP
stamp_extras=$(printf '%s\n' $stamp_extras "${extras[@]}" | sort -u | xargs)
install
printf '%s\n' "$(foundation "$(version_of $VENV/bin/python)")" "$(contents)" "$stamp_extras" >$STAMP.new
mv $STAMP.new $STAMP
say "$VENV is ready:  $VENV/bin/distembed --help"
