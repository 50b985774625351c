"""``distembed plan --fit``: the least compression with which a model fits.

The rule: rows go where they are looked up most. Of a table with m remainder rows the m most frequent ids have one each
(``distembed prepare`` gives out ids by falling frequency); the others share these rows, and are told apart by the few
rows of the quotient alone. So the expected loss is taken to grow with the number of training rows whose id is beyond
the first m, summed over the tables. For a given number of rows in all that sum is least if rows are given out by
falling count, since the count of a table's m-th id falls with m: every table has the ids that were seen more often than
some count, whatever their table. So tables of few or of frequent ids stay whole. Without counts, ids are taken to be as
frequent as Zipf's law has them in every table: then all have the same number of rows, or all that they need.

The number of rows in all is the largest with which the plan fits, found by halving.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.config import Config
from distembed.data.manifest import Manifest
from distembed.data.vocabulary import FIRST_ID
from distembed.embedding.settings import TableConfig
from distembed.errors import RunError, UserError
from distembed.fit import find_fit
from distembed.planning.cluster import Cluster

_PRECISION = 0.002
"""Share of the rows in all to which their number is found."""

Counts = Mapping[str, NDArray[np.int64]]


def fit_config(config: Config, cluster: Cluster) -> Config:
    """The config with each table compressed as far as the cluster asks for; the same one where it fits as it is.

    Compressed tables are hashed where the default is, else quotient-remainder ones. Tables that have settings of their
    own keep these.

    Raises:
        RunError: where even the most compressed model does not fit.
    """
    if find_fit(config, cluster).fits:
        return config
    sizes = {feature.name: feature.num_embeddings for feature in config.data.load_schema().categorical}
    counts = _counts(config)

    def give_out(total: int) -> Config:
        return _with_rows(config, sizes, rows_by_count(counts, total) if counts else rows_alike(sizes, total))

    low, high = len(sizes), sum(sizes.values())
    if not find_fit(give_out(low), cluster).fits:
        raise RunError(
            "no compression of the tables makes the model fit: with remainders and quotients of equally many rows it "
            "still does not. Use more or larger devices, or a smaller embedding_dim."
        )
    while high - low > max(1, _PRECISION * low):
        middle = (low + high) // 2
        fits = find_fit(give_out(middle), cluster).fits
        low, high = (middle, high) if fits else (low, middle)
    return give_out(low)


def rows_by_count(counts: Counts, total: int) -> dict[str, int]:
    """Rows of each table, ``total`` of them in all, by falling count; of ids of one count each table has its share.

    Args:
        counts: how often each id of a table was seen, falling.
        total: rows to give out.
    """
    falling = np.sort(np.concatenate(list(counts.values())))[::-1]
    total = min(total, len(falling))
    last = falling[total - 1]
    above = {name: int(np.searchsorted(-own, -last, side="left")) for name, own in counts.items()}
    equal = {name: int(np.searchsorted(-own, -last, side="right")) - above[name] for name, own in counts.items()}
    share = (total - sum(above.values())) / sum(equal.values())
    return {name: above[name] + int(share * equal[name]) for name in counts}


def rows_alike(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Rows of each table, at most ``total`` in all: one number for all tables, or as many as a table has ids."""
    left, rows = total, 0
    for i, size in enumerate(sorted(sizes.values())):
        rows = left // (len(sizes) - i)
        if rows < size:
            break
        left -= size
    else:
        return dict(sizes)
    return {name: min(size, rows) for name, size in sizes.items()}


def _counts(config: Config) -> Counts:
    """How often each id was seen in training, those of no single value first; empty without vocabularies."""
    if config.data.path is None:
        return {}
    counts = {}
    for name, vocabulary in Manifest.load(config.data.path).vocabularies.items():
        file = Path(config.data.path) / vocabulary.file
        try:
            own = pq.read_table(file, columns=["count"])["count"].to_numpy()
        except OSError as error:
            raise UserError(f"the vocabulary {file} cannot be read: {error}; prepare the dataset again.") from error
        counts[name] = np.concatenate([np.full(FIRST_ID, own.max(initial=1)), own])
    return counts


def _with_rows(config: Config, sizes: Mapping[str, int], rows: Mapping[str, int]) -> Config:
    default = config.embedding.default
    scheme = "remainder" if default.partition == "remainder" else "quotient_remainder"
    tables: dict[str, TableConfig] = {}
    for name, size in sizes.items():
        if name in config.embedding.tables:
            tables[name] = config.embedding.tables[name]
        elif rows[name] < size:
            # with fewer rows than the root of the ids the quotient would have more rows than are saved
            buckets = max(math.isqrt(size - 1) + 1, rows[name])
            tables[name] = dataclasses.replace(default, partition=scheme, num_buckets=buckets, collisions=None)
        else:
            tables[name] = dataclasses.replace(default, partition="naive")
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, tables=tables))
