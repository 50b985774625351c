"""What the ranks of a test are forked with: loading it takes each of them seconds.

Nothing of it starts a thread of Python's, and of the package nothing is done but imported, and its kernels compiled.
torch loads its compiler with the first optimizer.
"""

import gc
import importlib

from distembed.kernels.loading import reason_not_compiled

MODULES = [
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.utils.tensorboard",
    "torchrec",
    "hypothesis",
    "pytest",
    "distembed.commands.cli",
    "distembed.training.run",
]

for name in MODULES:
    importlib.import_module(name)
for lanes in (16, 8, 4):
    reason_not_compiled(lanes)
gc.collect()
gc.freeze()  # else every rank goes through all of it, again and again
