"""Makes a file of Criteo's format whose best possible logloss and AUC are known.

Of each feature's ids most follow Zipf's law (the r-th with probability about 1/r), and some are fresh: a window of ids
that moves with time, so that later rows hold ids that earlier ones do not, as in real logs. The label of a row is 1
with probability

    p = sigmoid(bias + sum_f w_f[id_f] + sum_(f,g) u_f[id_f] . u_g[id_g] + sum_k a_k z_k + b z_1 z_2 + drift(t))

with normal w and u for every id, z the standardised log(1 + integer), and t in [0, 1) the time. No model can do better
than p itself, whose logloss and AUC (in expectation over labels, *Bayes*) are written beside the file. Ids carry most
of the signal, so tables that make ids share rows lose some of it.

Trade-off: real rows have correlated features; here they are independent given the time, which makes the Bayes figures
exact and the signal harder to find.
"""

from __future__ import annotations

import gzip
import json
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from distembed.base.errors import UserError
from distembed.base.files import full_disk_explained, require_file, require_free_space, whole_file, write_text
from distembed.data.dataset.schema import CRITEO_DENSE, CRITEO_KAGGLE_CARDINALITIES

KAGGLE_ROWS = 45_840_617
CHUNK_ROWS = 32_768
_LABEL_RATE = 0.25
_PILOT_ROWS = 50_000

# Shares of missing values, and the mean and deviation of log(1 + integer), about as in the Kaggle file.
_DENSE_MISSING = (0.45, 0.0, 0.21, 0.22, 0.026, 0.22, 0.04, 0.0005, 0.04, 0.45, 0.04, 0.76, 0.22)
_DENSE_MEAN = (1.0, 3.0, 2.0, 2.0, 7.0, 4.0, 2.0, 2.0, 4.0, 0.5, 1.0, 0.5, 2.0)
_DENSE_DEVIATION = 1.3
_DENSE_LIMIT = 99_999
ID_MISSING = (
    *(0.0, 0.0, 0.034, 0.034, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.034, 0.0),
    *(0.0, 0.0, 0.034, 0.0, 0.0, 0.44, 0.44, 0.034, 0.76, 0.0, 0.034, 0.44, 0.44),
)

# Tables that shrink with the number of rows, and how: distinct ids grow more slowly than rows.
_FIXED_CARDINALITY = 100
_GROWTH = 0.7

_FRESH_SHARE = 0.1
_FRESH_IDS = 0.05
_FRESH_LEAST_CARDINALITY = 200
_FRESH_AGE = 0.05

_ID_DEVIATION = 0.22
_LATENT_SIZE = 2
_LATENT_DEVIATION = 0.5
_INTERACTIONS = ((0, 4), (1, 7), (5, 13), (8, 16), (17, 25), (9, 14))
_DENSE_WEIGHT = 0.14
_PRODUCT_WEIGHT = 0.15
_DRIFT = 0.15

_AUC_BINS = 1 << 16
_TENTHS = 10

# Less than rows take with any number of rows: 244 bytes of text; compressed 95 with 1,000 rows, and more with others.
_LEAST_ROW_BYTES, _LEAST_ROW_BYTES_GZIP = 235, 90


@dataclass(frozen=True)
class SyntheticSummary:
    """The file that was written, and the best logloss (in nats) and AUC: by the true probabilities.

    The last tenth of the rows is where a test split would be; its figures are None with fewer than ten rows.
    """

    path: str
    num_rows: int
    seed: int
    bytes: int
    label_rate: float  # share of the labels that are 1
    bayes_logloss: float | None  # expected logloss
    bayes_auc: float | None  # expected AUC
    last_tenth_bayes_logloss: float | None
    last_tenth_bayes_auc: float | None
    cardinalities: tuple[int, ...]  # number of ids that each categorical feature can have


def synthesize_criteo(
    output: str | os.PathLike[str],
    *,
    num_rows: int,
    seed: int,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> SyntheticSummary:
    """Writes a tab-separated file (gzip where its name ends in ``.gz``), and its summary as ``OUTPUT.json``.

    Args:
        output: File to make, which appears when it is complete.
        num_rows: Number of rows, 1 or more; tables grow with it up to the Kaggle file's sizes.
        seed: Seed of the rows, 0 or more; the same seed and number of rows give the same bytes.
        overwrite: Whether a file that is there is replaced.
        progress: Function that is called with the number of rows written so far.
    """
    if not 1 <= num_rows < 2**63:
        raise UserError(f"num_rows (--rows) is {num_rows}: it must be in 1 to {2**63 - 1}")
    if not 0 <= seed < 2**64:
        raise UserError(f"seed (--seed) is {seed}: it must be in 0 to {2**64 - 1}")
    path = Path(output)
    summary_path = path.with_name(path.name + ".json")
    for file in (path, summary_path):
        require_file("OUTPUT", file, overwrite)
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist; make it first")
    is_packed = path.suffix == ".gz"
    row_bytes = _LEAST_ROW_BYTES_GZIP if is_packed else _LEAST_ROW_BYTES
    remedy = (
        f"{num_rows:,} rows take {row_bytes} bytes each or more. Free space, name an output elsewhere, or ask for fewer"
    )
    require_free_space(path, num_rows * row_bytes, remedy)
    source, quality, positives = _RowDistribution(num_rows, seed), _BayesQuality(), 0
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    with (
        whole_file(path) as temporary,
        full_disk_explained(lambda _: f"{path} could not be written: its disk is full; {remedy}"),
    ):
        with (
            open(temporary, "wb") as raw,
            gzip.GzipFile("", "wb", 1, raw, mtime=0) if is_packed else nullcontext(raw) as packed,
        ):
            for start in range(0, num_rows, CHUNK_ROWS):
                rows = source.draw(start, min(start + CHUNK_ROWS, num_rows))
                integers = [pa.array(values, mask=values == -2) for values in (rows.labels, *rows.dense)]
                columns = [*integers, *(_id_texts(feature, ids) for feature, ids in enumerate(rows.ids))]
                table = pa.table(columns, [str(number) for number in range(len(columns))])
                csv.write_csv(table, packed, options)
                positives += int(rows.labels.sum())
                quality.add(rows.probabilities, rows.times)
                if progress is not None:
                    progress(start + len(rows.labels))
        logloss, auc = quality.over(slice(None))
        last_logloss, last_auc = quality.over(slice(-1, None))
        size, rate, sizes = os.path.getsize(temporary), positives / num_rows, tuple(source.cardinalities)
        summary = SyntheticSummary(
            str(path), num_rows, seed, size, rate, logloss, auc, last_logloss, last_auc, cardinalities=sizes
        )
        # before the file itself, so that no file lacks its summary
        write_text(summary_path, json.dumps({**asdict(summary), "path": path.name}, indent=1) + "\n")
    return summary


@dataclass(frozen=True)
class _DrawnRows:
    """The rows of one chunk; -1 is a missing id, and -2 a missing integer."""

    times: NDArray[np.float64]
    labels: NDArray[np.int64]
    dense: list[NDArray[np.int64]]
    ids: list[NDArray[np.int64]]
    probabilities: NDArray[np.float64]


class _RowDistribution:
    """The distribution that rows are drawn from, a function of the seed and the number of rows."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        growth = min(1.0, num_rows / KAGGLE_ROWS) ** _GROWTH
        self.cardinalities = [
            size if size <= _FIXED_CARDINALITY else max(_FIXED_CARDINALITY, int(size * growth))
            for size in CRITEO_KAGGLE_CARDINALITIES
        ]
        random = np.random.default_rng([seed, 0])

        def normal(shape: int | tuple[int, int], deviation: float) -> NDArray[np.float32]:
            return (random.standard_normal(shape) * deviation).astype(np.float32)

        self._id_weights = [normal(size, _ID_DEVIATION) for size in self.cardinalities]
        self._latents = {
            feature: normal((self.cardinalities[feature], _LATENT_SIZE), _LATENT_DEVIATION)
            for pair in _INTERACTIONS
            for feature in pair
        }
        self._dense_weights = random.standard_normal(len(CRITEO_DENSE)) * _DENSE_WEIGHT
        self._bias = 0.0
        times = np.linspace(0, 1, _PILOT_ROWS, endpoint=False)
        logits = self._logits(times, *self._features(np.random.default_rng([seed, 1]), times))
        low, high = -20.0, 20.0
        for _ in range(60):  # bisection to the bias whose mean probability is the label rate
            middle = (low + high) / 2
            is_low = np.mean(1 / (1 + np.exp(-(logits + middle)))) < _LABEL_RATE
            low, high = (middle, high) if is_low else (low, middle)
        self._bias = low

    def draw(self, start: int, stop: int) -> _DrawnRows:
        random = np.random.default_rng([self._seed, 2, start])
        times = np.arange(start, stop) / self._num_rows
        dense, ids = self._features(random, times)
        probabilities = 1 / (1 + np.exp(-self._logits(times, dense, ids)))
        labels = (random.random(stop - start) < probabilities).astype(np.int64)
        return _DrawnRows(times, labels, dense, ids, probabilities)

    def _features(
        self, random: np.random.Generator, times: NDArray[np.float64]
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        dense = []
        for column, (mean, missing) in enumerate(zip(_DENSE_MEAN, _DENSE_MISSING, strict=True)):
            drawn = np.exp(random.standard_normal(len(times)) * _DENSE_DEVIATION + mean) - 1
            dense.append(np.clip(drawn, -1 if column == 1 else 0, _DENSE_LIMIT).astype(np.int64))
            dense[-1][random.random(len(times)) < missing] = -2
        sizes = zip(self.cardinalities, ID_MISSING, strict=True)
        return dense, [_draw_ids(random, size, missing, times) for size, missing in sizes]

    def _logits(
        self, times: NDArray[np.float64], dense: list[NDArray[np.int64]], ids: list[NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        # The module's sum, term by term. A missing id, -1, reads the last id's weight and is then masked.
        logits = self._bias + _DRIFT * np.sin(2 * math.pi * times)
        for feature_ids, weights in zip(ids, self._id_weights, strict=True):
            logits += np.where(feature_ids >= 0, weights[feature_ids], 0)
        for first, second in _INTERACTIONS:
            product = (self._latents[first][ids[first]] * self._latents[second][ids[second]]).sum(1)
            logits += np.where((ids[first] >= 0) & (ids[second] >= 0), product, 0)
        standardised = [
            (np.log1p(np.maximum(values, 0)) - mean) / _DENSE_DEVIATION
            for values, mean in zip(dense, _DENSE_MEAN, strict=True)
        ]
        for values, weight in zip(standardised, self._dense_weights, strict=True):
            logits += weight * values
        return logits + _PRODUCT_WEIGHT * standardised[1] * standardised[6]


def _draw_ids(
    random: np.random.Generator, cardinality: int, missing: float, times: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Draws ids by Zipf's law, fresh ids for some rows, -1 for missing ones.

    Density 1/x on [1, n] has the distribution function log(x) / log(n), so x = n^u for uniform u in [0, 1).
    """
    uniform = random.random(len(times))
    has_fresh = cardinality >= _FRESH_LEAST_CARDINALITY
    lasting = int(cardinality * (1 - _FRESH_IDS)) if has_fresh else cardinality
    ids = np.exp(uniform * math.log(lasting + 1)).astype(np.int64) - 1
    if has_fresh:
        fresh = np.flatnonzero(random.random(len(times)) < _FRESH_SHARE)
        age_position = np.clip(times[fresh] - _FRESH_AGE * random.random(len(fresh)) ** 2, 0, 1)
        ids[fresh] = lasting + (age_position * (cardinality - lasting - 1)).astype(np.int64)
    if missing:
        ids[random.random(len(times)) < missing] = -1
    return np.minimum(ids, cardinality - 1)


class _BayesQuality:
    """Expected logloss and AUC of true probabilities, by tenths of the time, in constant memory (a histogram).

    A row of probability p counts as p of a positive and 1 - p of a negative row; its logloss is the entropy of p.
    """

    def __init__(self) -> None:
        self._rows, self._entropy = np.zeros(_TENTHS), np.zeros(_TENTHS)
        self._positive, self._negative = (np.zeros((_TENTHS, _AUC_BINS)) for _ in range(2))

    def add(self, probabilities: NDArray[np.float64], times: NDArray[np.float64]) -> None:
        tenths = (times * _TENTHS).astype(np.int64)
        p = np.clip(probabilities, 1e-12, 1 - 1e-12)
        self._rows += np.bincount(tenths, minlength=_TENTHS)
        self._entropy += np.bincount(tenths, -p * np.log(p) - (1 - p) * np.log1p(-p), _TENTHS)
        cell = tenths * _AUC_BINS + (p * _AUC_BINS).astype(np.int64)
        self._positive += np.bincount(cell, p, _TENTHS * _AUC_BINS).reshape(_TENTHS, _AUC_BINS)
        self._negative += np.bincount(cell, 1 - p, _TENTHS * _AUC_BINS).reshape(_TENTHS, _AUC_BINS)

    def over(self, tenths: slice) -> tuple[float, float] | tuple[None, None]:
        """Returns logloss and AUC over some tenths, None for both without rows; AUC counts ties in a bin as half."""
        rows = self._rows[tenths].sum()
        if not rows:
            return None, None
        positive, negative = self._positive[tenths].sum(0), self._negative[tenths].sum(0)
        below = np.cumsum(negative) - negative
        auc = (positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum())
        return float(self._entropy[tenths].sum() / rows), float(auc)


def _id_texts(feature: int, ids: NDArray[np.int64]) -> pa.Array:
    """Scrambles ids into texts of 8 hexadecimal digits, one to one in each feature; null for a missing id."""
    keys = (ids.astype(np.uint32) + np.uint32(feature * 0x01000193)) * np.uint32(2654435769)
    keys ^= keys >> np.uint32(15)
    keys *= np.uint32(0x2C1B3C6D)
    keys ^= keys >> np.uint32(12)
    digits = pa.py_buffer(keys.astype(">u4").tobytes().hex().encode())
    offsets = pa.py_buffer(np.arange(len(ids) + 1, dtype=np.int32) * 8)
    texts = pa.StringArray.from_buffers(len(ids), offsets, digits)
    return pc.if_else(ids >= 0, texts, None)
