"""Makes a file of Criteo's format whose best possible logloss and AUC are known.

The true probability p of every row's label is known (``synthetic_rows.py``), and no model can do better than p itself,
whose logloss and AUC (in expectation over labels, *Bayes*) are written beside the file. Ids carry most of the signal,
so tables that make ids share rows lose some of it.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from distembed.data.prepare.inputs import real_path
from distembed.data.prepare.synthetic_rows import CHUNK_ROWS, RowSource, rows_text
from distembed.errors import UserError
from distembed.files import full_disk_explained, require_free_space, whole_file, write_text

# Less than rows take with any number of rows: 244 bytes of text; compressed 95 with 1,000 rows, and more with others.
_LEAST_ROW_BYTES, _LEAST_ROW_BYTES_GZIP = 235, 90

_AUC_BINS = 1 << 16
_TENTHS = 10


@dataclass(frozen=True)
class SyntheticSummary:
    """What was written, and what can be learnt from it at best.

    Attributes:
        path: Path of the file.
        num_rows: Number of rows.
        seed: Seed that the rows were drawn with.
        bytes: Size of the file.
        label_rate: Share of the labels that are 1.
        bayes_logloss: Expected logloss, in nats, of the true probabilities.
        bayes_auc: Expected AUC of the true probabilities.
        last_tenth_bayes_logloss: Expected logloss over the last tenth of the rows, where a test split would be; None
            with fewer than ten rows.
        last_tenth_bayes_auc: Expected AUC over the last tenth of the rows, likewise.
        cardinalities: Number of ids that each categorical feature can have.
    """

    path: str
    num_rows: int
    seed: int
    bytes: int
    label_rate: float
    bayes_logloss: float | None
    bayes_auc: float | None
    last_tenth_bayes_logloss: float | None
    last_tenth_bayes_auc: float | None
    cardinalities: tuple[int, ...]


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

    Raises:
        UserError: The number of rows or the seed is impossible, the file or its summary exists, or its folder does not.
        RunError: The file cannot be written, or its disk will not have room; nothing was left behind.
    """
    if not 1 <= num_rows < 2**63:
        raise UserError(f"num_rows (--rows) is {num_rows}: it must be in 1 to {2**63 - 1}")
    if not 0 <= seed < 2**64:
        raise UserError(f"seed (--seed) is {seed}: it must be in 0 to {2**64 - 1}")
    path = Path(output)
    _require_free_name(path, overwrite)
    row_bytes = _LEAST_ROW_BYTES_GZIP if path.suffix == ".gz" else _LEAST_ROW_BYTES
    remedy = (
        f"{num_rows:,} rows take {row_bytes} bytes each or more. Free space, name an output elsewhere, or ask for fewer"
    )
    require_free_space(path, num_rows * row_bytes, remedy)
    source = RowSource(num_rows, seed)
    quality = _BayesQuality()
    positives = 0
    with (
        whole_file(path) as part,
        full_disk_explained(lambda _: f"{path} could not be written: its disk is full; {remedy}"),
    ):
        with _open_output(path, part) as file:
            for start in range(0, num_rows, CHUNK_ROWS):
                rows = source.draw(start, min(start + CHUNK_ROWS, num_rows))
                file.write(rows_text(rows))
                positives += int(rows.labels.sum())
                quality.add(rows.probabilities, rows.times)
                if progress is not None:
                    progress(start + len(rows.labels))
        logloss, auc = quality.over(range(_TENTHS))
        last_logloss, last_auc = quality.over(range(_TENTHS - 1, _TENTHS))
        summary = SyntheticSummary(
            path=str(path),
            num_rows=num_rows,
            seed=seed,
            bytes=Path(part).stat().st_size,
            label_rate=positives / num_rows,
            bayes_logloss=logloss,
            bayes_auc=auc,
            last_tenth_bayes_logloss=last_logloss,
            last_tenth_bayes_auc=last_auc,
            cardinalities=tuple(source.cardinalities),
        )
        # before the file itself, so that no file lacks its summary
        text = json.dumps({**asdict(summary), "path": path.name}, indent=1) + "\n"
        write_text(_summary_path(path), text)
    return summary


def _summary_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _require_free_name(path: Path, overwrite: bool) -> None:
    """Makes sure that nothing is lost by writing the file and its summary.

    Raises:
        UserError: One of them is there and may not be replaced, is no file, or the folder does not exist.
    """
    real_path(path)
    if not path.parent.is_dir():
        raise UserError(f"the folder {path.parent} does not exist; make it first")
    for file in (path, _summary_path(path)):
        try:
            os.lstat(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{file} cannot be made: {error.strerror}; name another output") from error
        if not os.path.isfile(file):
            raise UserError(f"{file} is no file, so it is not replaced: name another output")
        if not overwrite:
            raise UserError(f"{file} exists already: name another output, remove it, or replace it with --overwrite")


class _BayesQuality:
    """Expected logloss and AUC of true probabilities, by tenths of the time, in memory that does not grow."""

    def __init__(self) -> None:
        self._rows = np.zeros(_TENTHS)
        self._entropy = np.zeros(_TENTHS)
        self._positive = np.zeros((_TENTHS, _AUC_BINS))
        self._negative = np.zeros((_TENTHS, _AUC_BINS))

    def add(self, probabilities: NDArray[np.float64], times: NDArray[np.float64]) -> None:
        """Counts these rows in."""
        tenths = (times * _TENTHS).astype(np.int64)
        p = np.clip(probabilities, 1e-12, 1 - 1e-12)
        self._rows += np.bincount(tenths, minlength=_TENTHS)
        self._entropy += np.bincount(tenths, -p * np.log(p) - (1 - p) * np.log1p(-p), _TENTHS)
        cell = tenths * _AUC_BINS + (p * _AUC_BINS).astype(np.int64)
        self._positive += np.bincount(cell, p, _TENTHS * _AUC_BINS).reshape(_TENTHS, _AUC_BINS)
        self._negative += np.bincount(cell, 1 - p, _TENTHS * _AUC_BINS).reshape(_TENTHS, _AUC_BINS)

    def over(self, tenths: range) -> tuple[float, float] | tuple[None, None]:
        """Returns logloss and AUC over these tenths, None for both without rows."""
        chosen = list(tenths)
        rows = self._rows[chosen].sum()
        if not rows:
            return None, None
        positive, negative = self._positive[chosen].sum(0), self._negative[chosen].sum(0)
        below = np.cumsum(negative) - negative
        auc = (positive * (below + negative / 2)).sum() / (positive.sum() * negative.sum())
        return float(self._entropy[chosen].sum() / rows), float(auc)


@contextmanager
def _open_output(path: Path, part: str) -> Iterator[BinaryIO]:
    """Opens the temporary file that becomes ``path``, compressed where its name says so."""
    with open(part, "wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", 1, raw, mtime=0) as packed:
                yield cast(BinaryIO, packed)
        else:
            yield raw
