"""RecBole's BPR as a peer: trains an epoch for each line of its input, and prints the rows and seconds of the epoch.

It runs in a separate environment with recbole==1.2.1 (``tools/bench_bpr.py``).
"""

import argparse
import json
import os
import sys
import tempfile
import time

import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.utils import get_model, get_trainer, init_seed


def main() -> None:
    """Prepares the data as RecBole does by default, then trains epoch by epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="folder of a RecBole dataset, for example ml-100k")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {
        "use_gpu": False,
        "data_path": os.path.dirname(options.data),
        "load_col": {"inter": ["user_id", "item_id"]},
        "checkpoint_dir": tempfile.mkdtemp(),
        "show_progress": False,
        "state": "WARNING",
        "train_batch_size": options.batch_size,
        "embedding_size": options.dim,
        "epochs": 1,
    }
    config = Config(model="BPR", dataset=os.path.basename(options.data), config_dict=settings)
    init_seed(config["seed"], True)
    train, _, _ = data_preparation(config, create_dataset(config))
    model = get_model("BPR")(config, train.dataset)
    trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
    print("ready", flush=True)
    for epoch, _ in enumerate(sys.stdin):
        started, started_cpu = time.perf_counter(), time.process_time()
        trainer._train_epoch(train, epoch, show_progress=False)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        print(json.dumps([len(train.dataset), seconds, cpu_seconds]), flush=True)


if __name__ == "__main__":
    main()
