"""FuxiCTR's click models as peers: trains one model on Criteo rows, and prints its figures as a line of JSON.

It runs in a separate environment with fuxictr==2.3.10, and takes the models from a checkout of FuxiCTR's repository,
whose wheel lacks them (``tools/bench_fuxictr.py``). Rows are encoded by FuxiCTR as in its Criteo benchmarks: integers
fall into buckets of their squared logarithm, each bucket with a vector, also for DLRM, which fails on columns of
numbers. The step is FuxiCTR's own, ``train_step`` over the batches of its ``NpzDataLoader``.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl
from fuxictr.datasets.criteo import CustomizedFeatureProcessor
from fuxictr.features import FeatureMap
from fuxictr.pytorch.dataloaders import RankDataLoader
from fuxictr.pytorch.torch_utils import seed_everything

INTEGERS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]
EMBEDDING_DIM = 16
SHARES = {"train": (0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1)}


def encode(tsv: str, folder: Path, min_count: int) -> FeatureMap:
    """Writes the splits as arrays, encoded by FuxiCTR on the training rows, and returns the columns."""
    columns = {"label": pl.Float64, **dict.fromkeys(INTEGERS, pl.Float64), **dict.fromkeys(CATEGORIES, pl.String)}
    rows = pl.read_csv(tsv, separator="\t", has_header=False, schema=columns)
    integers = {"name": INTEGERS, "active": True, "dtype": "float", "type": "categorical", "fill_na": 0}
    integers |= {"preprocess": "convert_to_bucket"}
    categories = {"name": CATEGORIES, "active": True, "dtype": "str", "type": "categorical", "fill_na": ""}
    label = {"name": "label", "dtype": "float"}
    encoder = CustomizedFeatureProcessor([integers, categories], label, "criteo", str(folder))
    ends = {name: [int(share * len(rows)) for share in shares] for name, shares in SHARES.items()}
    splits = {name: encoder.preprocess(rows[begin:end].lazy()) for name, (begin, end) in ends.items()}
    encoder.fit(splits["train"], min_categr_count=min_count)
    for name, split in splits.items():
        arrays = encoder.transform({column.name: column.to_numpy() for column in split.collect()})
        np.savez(folder / "criteo" / f"{name}.npz", **arrays)
    features = FeatureMap("criteo", str(folder / "criteo"))
    features.load(encoder.json_file, {"embedding_dim": EMBEDDING_DIM})
    return features


def main() -> None:
    """Encodes the rows, trains, and evaluates on validation and test rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tsv", help="raw Criteo rows in time order")
    parser.add_argument("--zoo", required=True, help="folder model_zoo of FuxiCTR's repository")
    parser.add_argument("--model", required=True, help="folder in the zoo and class, such as DCNv2/DCNv2")
    parser.add_argument("--settings", type=json.loads, default={}, help="arguments of the model, as JSON")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--min-count", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    file, _, name = options.model.rpartition("/")
    sys.path.insert(0, str(Path(options.zoo) / file))
    with tempfile.TemporaryDirectory() as folder:
        features = encode(options.tsv, Path(folder), options.min_count)
        seed_everything(options.seed)
        common = {
            "optimizer": "adam",
            "learning_rate": 1e-3,
            "loss": "binary_crossentropy",
            "metrics": ["AUC", "logloss"],
            "verbose": 0,
        }
        model = getattr(importlib.import_module("src"), name)(
            features, model_root=folder, embedding_dim=EMBEDDING_DIM, **common | options.settings
        )
        model._max_gradient_norm = 10.0  # the default of its fit()
        data = {f"{split}_data": f"{folder}/criteo/{split}.npz" for split in SHARES}
        train, valid, test = RankDataLoader(features, batch_size=options.batch_size, num_workers=1, **data)
        model.train()
        start = time.perf_counter()
        for batch in train:
            model.train_step(batch)
        seconds = time.perf_counter() - start
        figures = {"parameters": sum(weights.numel() for weights in model.parameters())}
        figures |= {"samples_per_second": train.num_samples / seconds, "valid": model.evaluate(valid)}
        print(json.dumps(figures | model.evaluate(test)))


if __name__ == "__main__":
    main()
