#!/usr/bin/env bash
# Installs the tests' packages, checks format, lint, types and the layers of imports, and runs the tests.
#
#   tools/test.sh                            the quick tests: all but those marked thorough, slow or slurm
#   tools/test.sh --thorough                 those marked thorough too, as CI runs them
#   tools/test.sh tests/data -k reader -x    only pytest, with these arguments
#   tools/test.sh --changed [COMMIT]         the tests affected by the changes since main, or since COMMIT
#   tools/test.sh -m slow                    the slow tests
#   DISTEMBED_TRIO=2.11 tools/test.sh        another tested trio of torch, TorchRec and FBGEMM; see tools/setup.sh
#
# DISTEMBED_CRITEO_SAMPLE=FILE   real Criteo rows (TSV, plain or .gz); without the file, tests of real rows are skipped.
# DISTEMBED_MOVIELENS_MF=FOLDER  the MovieLens-1M files of SSE's authors.
# DISTEMBED_BEAUTY=FOLDER        the Amazon Beauty files.
# DISTEMBED_RECBOLE=FOLDER       ml-100k of RecBole's wheel, if tools/setup.sh has not installed the wheel.
#                                If a variable is unset, data in ../shared/data are used; an empty variable skips.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh test

# One thread a worker: the workers share the cores already.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Reads and writes bytecode next to the modules, where tools/setup.sh has compiled it: otherwise each process that a
# test starts would compile changed modules again.
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX
sample=../shared/data/criteo_kaggle_110k.tsv.gz
if [[ -z ${DISTEMBED_CRITEO_SAMPLE+set} && -f $sample ]]; then
    export DISTEMBED_CRITEO_SAMPLE=$PWD/$sample
fi
if [[ -d ../shared/data ]]; then
    export DISTEMBED_MOVIELENS_MF=${DISTEMBED_MOVIELENS_MF-$PWD/../shared/data}
    export DISTEMBED_BEAUTY=${DISTEMBED_BEAUTY-$PWD/../shared/data}
fi

# With arguments, tests marked thorough are among the chosen ones; a later -m takes the place of this one.
marked=()
(($# == 0)) || marked=(-m "not slow and not slurm")
[[ ${1-} != --thorough ]] || shift

if [[ ${1-} == --changed ]]; then
    mapfile -t touched < <(.venv/bin/python tools/changed_tests.py "${2:-main}")
    ((${#touched[@]})) || { echo "No test is touched."; exit 0; }
    set -- "${touched[@]}"
fi

failed=()
check() {
    printf '==> %s\n' "$*"
    ".venv/bin/$1" "${@:2}" || failed+=("$*")
}
if (($# == 0)); then
    check ruff format --check .
    check ruff check .
    # With the grammar of this Python, which the stubs of installed packages may need.
    check mypy --python-version "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    check lint-imports
    check python tools/english.py
fi
# worksteal: a worker without work takes over waiting tests, which take from milliseconds to a minute.
check python -m pytest -n 2 --dist worksteal "${marked[@]}" "$@"

if ((${#failed[@]})); then
    printf '==> FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
