#!/usr/bin/env bash
# Runs the tests marked `gpu` and every bench with its peers on this machine's NVIDIA GPU. It takes at most 9 minutes
# besides the installation, and writes a JSON file for each part and a table in Markdown. A second call resumes where
# the first one stopped.
#
#   tools/gpu.sh                     writes to runs/gpu, and prints the table, runs/gpu/table.md
#   tools/gpu.sh --fresh             deletes the results of earlier calls
#   tools/gpu.sh --only tests step   runs some parts: tests embedding fused step launches sse memory checkpoint
#   tools/gpu.sh --results DIR --minutes 4
#   tools/gpu.sh --dry               runs all parts on the processor with tiny sizes, into runs/gpu_dry: every line runs
#                                    except the kernels; takes some minutes
#
# Exit status: 0 all parts are done, 1 a part failed or had no time left (call again), 2 there is no usable GPU.
#
# DISTEMBED_PYTHON_READY=python3   an interpreter that has all packages: nothing is installed, and no network is needed.
#                                  It needs the dependencies of pyproject.toml, a trio of
#                                  distembed/reports/doctor/trio.py, and for the tests pytest and hypothesis. PYTHONPATH
#                                  may add packages; distembed itself is imported from this checkout.
# DISTEMBED_TRIO, DISTEMBED_PYTHON otherwise, options of tools/setup.sh, which installs into .venv.
# CUDA_VISIBLE_DEVICES=1           the GPUs to use; the first is measured, and tests of several GPUs use all of them.
#
# For example with the older trio, on a machine without network whose packages are in a folder:
#
#   PYTHONPATH=/path/to/packages DISTEMBED_PYTHON_READY=python3.12 tools/gpu.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${DISTEMBED_PYTHON_READY:-}
if [[ -z $python ]]; then
    tools/setup.sh test
    python=.venv/bin/python
fi
command -v "$python" >/dev/null || {
    echo "gpu: DISTEMBED_PYTHON_READY is '$python', which is not a program" >&2
    exit 2
}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -W ignore tools/gpu_bench.py "$@"
