"""The distribution of synthetic Criteo rows: ids, integers and labels, drawn in time order, and their text.

Of each feature's ids most follow Zipf's law (the r-th with probability about 1/r), and some are fresh: a window of ids
that moves with time, so that later rows hold ids that earlier ones do not, as in real logs. The label of a row is 1
with probability

    p = sigmoid(bias + sum_f w_f[id_f] + sum_(f,g) u_f[id_f] . u_g[id_g] + sum_k a_k z_k + b z_1 z_2 + drift(t))

with normal w and u for every id, z the standardised log(1 + integer), and t in [0, 1) the time.

Trade-off: real rows have correlated features; here they are independent given the time, which makes the Bayes figures
exact and the signal harder to find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

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
_NEGATIVE_INTEGER = -1
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

_TAB, _NEWLINE = 9, 10


@dataclass(frozen=True)
class Rows:
    """The rows of one chunk; a negative id, or an integer below ``_NEGATIVE_INTEGER``, is a missing value."""

    times: NDArray[np.float64]
    labels: NDArray[np.int64]
    dense: list[NDArray[np.int64]]
    ids: list[NDArray[np.int64]]
    probabilities: NDArray[np.float64]
    id_texts: list[NDArray[np.uint64]]


class RowSource:
    """The distribution that rows are drawn from, a function of the seed and the number of rows."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self._num_rows, self._seed = num_rows, seed
        growth = min(1.0, num_rows / KAGGLE_ROWS) ** _GROWTH
        self.cardinalities = [
            size if size <= _FIXED_CARDINALITY else max(_FIXED_CARDINALITY, int(size * growth))
            for size in CRITEO_KAGGLE_CARDINALITIES
        ]
        random = np.random.default_rng([seed, 0])
        self._id_weights = [
            (random.standard_normal(size) * _ID_DEVIATION).astype(np.float32) for size in self.cardinalities
        ]
        self._latents = {
            feature: (random.standard_normal((self.cardinalities[feature], _LATENT_SIZE)) * _LATENT_DEVIATION).astype(
                np.float32
            )
            for pair in _INTERACTIONS
            for feature in pair
        }
        self._dense_weights = random.standard_normal(len(CRITEO_DENSE)) * _DENSE_WEIGHT
        self._texts = [_hex_texts(_keys(feature, size)) for feature, size in enumerate(self.cardinalities)]
        self._bias = 0.0
        pilot = self._features(np.random.default_rng([seed, 1]), np.linspace(0, 1, _PILOT_ROWS, endpoint=False))
        self._bias = _bias_for(self._logits(*pilot))

    def draw(self, start: int, stop: int) -> Rows:
        """Draws the rows ``[start, stop)``."""
        random = np.random.default_rng([self._seed, 2, start])
        times, dense, ids = self._features(random, np.arange(start, stop) / self._num_rows)
        probabilities = 1 / (1 + np.exp(-self._logits(times, dense, ids)))
        labels = (random.random(stop - start) < probabilities).astype(np.int64)
        texts = [np.where(row >= 0, text[row], 0) for row, text in zip(ids, self._texts, strict=True)]
        return Rows(times, labels, dense, ids, probabilities, texts)

    def _features(
        self, random: np.random.Generator, times: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        dense = [_draw_integers(random, column, len(times)) for column in range(len(CRITEO_DENSE))]
        ids = [
            _draw_ids(random, size, missing, times)
            for size, missing in zip(self.cardinalities, ID_MISSING, strict=True)
        ]
        return times, dense, ids

    def _logits(
        self, times: NDArray[np.float64], dense: list[NDArray[np.int64]], ids: list[NDArray[np.int64]]
    ) -> NDArray[np.float64]:
        """Returns the logit of each row."""
        # a missing id, which is -1, reads the last id's weight and is then masked
        logits = self._bias + _DRIFT * np.sin(2 * math.pi * times)
        for row, weights in zip(ids, self._id_weights, strict=True):
            logits += np.where(row >= 0, weights[row], 0)
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


def _draw_integers(random: np.random.Generator, column: int, num_rows: int) -> NDArray[np.int64]:
    drawn = np.exp(random.standard_normal(num_rows) * _DENSE_DEVIATION + _DENSE_MEAN[column]) - 1
    values = np.clip(drawn, _NEGATIVE_INTEGER if column == 1 else 0, _DENSE_LIMIT).astype(np.int64)
    values[random.random(num_rows) < _DENSE_MISSING[column]] = _NEGATIVE_INTEGER - 1
    return values


def _draw_ids(
    random: np.random.Generator, cardinality: int, missing: float, times: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Draws ids by Zipf's law (inverted in its continuous form, n^u), fresh ids for some rows, -1 for missing ones."""
    uniform = random.random(len(times))
    has_fresh = cardinality >= _FRESH_LEAST_CARDINALITY
    lasting = int(cardinality * (1 - _FRESH_IDS)) if has_fresh else cardinality
    ids = np.exp(uniform * math.log(lasting + 1)).astype(np.int64) - 1
    if has_fresh:
        fresh = np.flatnonzero(random.random(len(times)) < _FRESH_SHARE)
        place = np.clip(times[fresh] - _FRESH_AGE * random.random(len(fresh)) ** 2, 0, 1)
        ids[fresh] = lasting + (place * (cardinality - lasting - 1)).astype(np.int64)
    if missing:
        ids[random.random(len(times)) < missing] = -1
    np.minimum(ids, cardinality - 1, out=ids)
    return ids


def _bias_for(logits: NDArray[np.float64]) -> float:
    """Returns the bias at which the mean probability is the wanted label rate, by bisection."""
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.mean(1 / (1 + np.exp(-(logits + middle))))) < _LABEL_RATE:
            low = middle
        else:
            high = middle
    return low


def _keys(feature: int, cardinality: int) -> NDArray[np.uint32]:
    """Returns distinct 32-bit keys for the ids, by a bijection of 32-bit numbers that is another for every feature."""
    keys = (np.arange(cardinality, dtype=np.uint32) + np.uint32(feature * 0x01000193)) * np.uint32(2654435769)
    keys ^= keys >> np.uint32(15)
    keys *= np.uint32(0x2C1B3C6D)
    return keys ^ (keys >> np.uint32(12))


def _hex_texts(keys: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Returns the 8 bytes of each key's text as one number."""
    nibbles = (keys[:, None] >> np.arange(28, -1, -4, dtype=np.uint32)) & np.uint32(15)
    texts: NDArray[np.uint64] = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles].view(np.uint64).reshape(-1)
    return texts


@cache
def _integer_texts() -> NDArray[np.uint64]:
    """Returns the texts of -2 (a missing value: empty), -1, 0, ..., each padded with zero bytes to 8."""
    texts = [b"", b"-1", *(str(value).encode() for value in range(_DENSE_LIMIT + 1))]
    return np.array(texts, "S8").view(np.uint64)


def rows_text(rows: Rows) -> bytes:
    """Returns the rows' text: all cells padded to 8 bytes with zeros, each with its separator, less the zeros."""
    offset = 1 - _NEGATIVE_INTEGER
    integer_texts = _integer_texts()
    cells = [integer_texts[values + offset] for values in (rows.labels, *rows.dense)]
    texts = np.stack([*cells, *rows.id_texts], axis=1)
    padded = np.empty((*texts.shape, 9), np.uint8)
    padded[:, :, :8] = texts.view(np.uint8).reshape(*texts.shape, 8)
    padded[:, :-1, 8] = _TAB
    padded[:, -1, 8] = _NEWLINE
    text: bytes = padded[padded != 0].tobytes()
    return text
