#!/usr/bin/env bash
# Installs what the tests need, checks format, lint, types and floors, and runs the tests.
#
#   tools/test.sh                            everything but the tests marked slow or slurm
#   tools/test.sh tests/data -k reader -x    only pytest, with these arguments
#   tools/test.sh --changed [COMMIT]         the tests that a change touches: everything since main, or since COMMIT
#   tools/test.sh -m slow                    the slow ones
#   DISTEMBED_TRIO=2.11 tools/test.sh        on the other tested trio of torch, TorchRec and FBGEMM; see tools/setup.sh
#
# DISTEMBED_CRITEO_SAMPLE=FILE   real Criteo rows (TSV, plain or .gz); tests that need them are skipped without it.
# DISTEMBED_MOVIELENS_MF=FOLDER  the MovieLens-1M files of SSE's authors; and so for DISTEMBED_BEAUTY, Amazon Beauty.
# DISTEMBED_RECBOLE=FOLDER       ml-100k of the wheel of RecBole, where the set-up does not have it.
#                                Unset, the data beside the checkout are taken where there are some; empty, none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh test

# One thread a worker: the workers share the cores already.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# The set-up's bytecode lies beside the modules, where no prefix leads away from it. Of modules that have changed since,
# bytecode is kept even where that is switched off: each process that a test starts would compile them anew.
unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX
sample=../shared/data/criteo_kaggle_110k.tsv.gz
if [[ -z ${DISTEMBED_CRITEO_SAMPLE+set} && -f $sample ]]; then
    export DISTEMBED_CRITEO_SAMPLE=$PWD/$sample
fi
if [[ -d ../shared/data ]]; then
    export DISTEMBED_MOVIELENS_MF=${DISTEMBED_MOVIELENS_MF-$PWD/../shared/data}
    export DISTEMBED_BEAUTY=${DISTEMBED_BEAUTY-$PWD/../shared/data}
fi

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
    # By the grammar of this Python, which the stubs of packages installed for it may be written in.
    check mypy --python-version "$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    check lint-imports
fi
# A worker without work takes over what waits for the other: tests take from milliseconds to a minute.
check python -m pytest -n 2 --dist worksteal "$@"

if ((${#failed[@]})); then
    printf '==> FAILED: %s\n' "${failed[@]}" >&2
    exit 1
fi
