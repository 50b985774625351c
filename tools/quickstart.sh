#!/usr/bin/env bash
# Installs distembed, prepares data, trains a DLRM with full, hashed and quotient-remainder tables (at 4 collisions),
# and compares the runs.
#
#   tools/quickstart.sh               on synthetic rows in Criteo's format
#   tools/quickstart.sh TSV...        on your Criteo rows: files (plain or .gz) in the order of time, or folders
#
# DISTEMBED_QUICKSTART_DIR=FOLDER   folder of all outputs (default: quickstart/ in this project)
# DISTEMBED_QUICKSTART_ROWS=N       number of synthetic rows (default: 500000)
# DISTEMBED_TRIO=2.11               another tested trio of torch, TorchRec and FBGEMM; see tools/setup.sh
#
# It prints each command before running it. A second call replaces the outputs of the first.
set -euo pipefail

inputs=()
for input in "$@"; do
    [[ -e $input ]] || { printf 'quickstart: %s: no such file or folder\n' "$input" >&2; exit 2; }
    inputs+=("$(realpath "$input")")
done
output=${DISTEMBED_QUICKSTART_DIR:+$(realpath -m "$DISTEMBED_QUICKSTART_DIR")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh
output=${output:-quickstart}

say() { printf '\n==> %s\n' "$*"; }
distembed() {
    printf '    $ .venv/bin/distembed'
    printf ' %q' "$@"
    printf '\n'
    .venv/bin/distembed "$@"
}

if ((${#inputs[@]})); then
    output+=/yours
    mkdir -p "$output"
else
    output+=/synthetic
    mkdir -p "$output"
    say "Synthesizing rows in Criteo's format: skewed ids, a planted signal, an order of time"
    inputs=("$output/raw.tsv")
    distembed synthesize "${inputs[0]}" --rows "${DISTEMBED_QUICKSTART_ROWS:-500000}" --seed 0 --overwrite
fi

say "Preparing a dataset: vocabularies from the first 80%, then 10% to validate and 10% to test, in the order of time"
distembed prepare criteo "${inputs[@]}" --output "$output/dataset" --split 0.8,0.1,0.1 --overwrite

runs=()
train() { # NAME OVERRIDE...
    local run=$output/runs/$1
    rm -rf "$run"
    distembed train configs/quickstart.yaml "data.path=$output/dataset" "${@:2}" --run-dir "$run"
    runs+=("$run")
}
say "Training with full tables: a row for every id"
train full embedding.default.partition=naive
say "Training with hashed tables: 4 ids share a row and cannot be told apart"
train hashed embedding.default.partition=remainder embedding.default.collisions=4
say "Training with quotient-remainder tables: as few rows, and every id keeps its own vector"
train quotient_remainder embedding.default.partition=quotient_remainder embedding.default.collisions=4

say "Comparing the runs"
distembed report "${runs[@]}" --output "$output/report.html"
say "Done. The report with all plots:  $(realpath "$output/report.html")"
