#!/usr/bin/env bash
# Runs on this machine's NVIDIA card all that only a card can say: the tests marked `gpu`, then every bench with its
# peers. Takes at most 9 minutes beside the installation, writes one file of JSON a part and a table in Markdown, and
# goes on where it was when it is called again.
#
#   tools/gpu.sh                     into runs/gpu; ends with the table, which is runs/gpu/table.md too
#   tools/gpu.sh --fresh             forgets what there is of earlier calls
#   tools/gpu.sh --only tests step   some parts alone: tests embedding fused step launches sse memory checkpoint
#   tools/gpu.sh --results DIR --minutes 4
#   tools/gpu.sh --dry               all of it on the processor with tiny sizes, into runs/gpu_dry: every line runs but
#                                    the kernels; takes some minutes
#
# Exit status: 0 everything is done, 1 some part failed or had no time left (call again), 2 there is no usable card.
#
# DISTEMBED_PYTHON_READY=python3   an interpreter that has all packages already; nothing is installed then, and no
#                                  network is needed. It needs what pyproject.toml lists as dependencies, one of the
#                                  trios of distembed/reports/doctor/trio.py, and for the tests pytest and hypothesis. They may
#                                  as well be on PYTHONPATH; distembed itself is taken from this checkout.
# DISTEMBED_TRIO, DISTEMBED_PYTHON where it is unset, as for tools/setup.sh, which installs into .venv.
# CUDA_VISIBLE_DEVICES=1           which card, where there are several; the first one is measured, and tests of several
#                                  cards take all that they see.
#
# For instance with the older trio, on a machine without network whose packages are in a folder:
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
    echo "gpu: DISTEMBED_PYTHON_READY is '$python', which is no program" >&2
    exit 2
}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -W ignore tools/gpu_bench.py "$@"
