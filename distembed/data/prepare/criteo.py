"""Criteo's click logs, as published, to a Parquet dataset that the reader reads.

They have a parser of their own (``criteo_rows.py``, ``parse_rows.py``), which is faster than that of any table; all
else is as for rows of any kind (``pipeline.py``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.base import Base
from distembed.data.prepare.criteo_rows import CriteoSource
from distembed.data.prepare.inputs import require_outside
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.options import PrepareOptions
from distembed.data.prepare.pipeline import prepare_rows
from distembed.data.prepare.progress import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.source_files import list_sources
from distembed.data.prepare.split import SplitRule
from distembed.errors import UserError
from distembed.names import one_of

MAX_COUNT = 2**63 - 1
MAX_HASH_SIZE = 2**62
"""Sums of two ids, as partitions of tables make them, then stay within 64 bits."""


@dataclass(frozen=True)
class CriteoOptions:
    """What a dataset's bytes depend on besides the input; the manifest records it.

    Attributes:
        min_count: Values seen fewer times in the training rows share the out-of-vocabulary id; 1 or more.
        hash_size: Size of the tables that ids are hashed into, 2 to 2^62; None builds a vocabulary instead.
        hash_seed: Seed of the hash, below 2^64.
        split: How rows are divided (:mod:`~distembed.data.prepare.split`): by shares, ``days``, ``none`` or, with
            ``vocabulary``, ``validation`` or ``test``; Criteo's rows have no column that says more.
        max_rejected: Largest share of malformed rows that is no error; they are listed in ``rejected.tsv``.
        missing: What becomes of missing integers: ``zero``, so that they are as zeros, or ``keep``: they are null.
        vocabulary: A dataset, by folder or URL, or a run, whose ids are applied; other values are out of vocabulary.
        grow: Whether values that ``vocabulary`` lacks, and that are seen ``min_count`` times, get ids behind its own.

    Raises:
        UserError: An option is out of its range.
    """

    min_count: int = 2
    hash_size: int | None = None
    hash_seed: int = 0
    split: str = "0.8,0.1,0.1"
    max_rejected: float = 0.01
    missing: str = "zero"
    vocabulary: str | os.PathLike[str] | None = None
    grow: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_count <= MAX_COUNT:
            raise UserError(
                f"min_count (--min-count) is {self.min_count}: it must be in 1 to {MAX_COUNT}; 1 keeps every value"
            )
        if self.hash_size is not None and not 2 <= self.hash_size <= MAX_HASH_SIZE:
            raise UserError(
                f"hash_size (--hash-size) is {self.hash_size}: it must be in 2 to {MAX_HASH_SIZE}, since id 0 is for "
                "missing values and ids have 64 bits; give the number of rows that each table shall have"
            )
        if not 0 <= self.hash_seed < 2**64:
            raise UserError(f"hash_seed (--hash-seed) is {self.hash_seed}: it must be in 0 to {2**64 - 1}")
        self.prepare_options()
        one_of("missing (--missing)", self.missing, ("zero", "keep"))
        if SplitRule.parse(self.split).kind in ("time", "column"):
            raise UserError(
                f"split (--split) is {self.split!r}, and Criteo's rows have neither a time nor such a column: give "
                "shares such as '0.8,0.1,0.1', 'days' or 'none'"
            )

    def prepare_options(self) -> PrepareOptions:
        """Returns the options that rows of any kind have, which are checked.

        Raises:
            UserError: One is out of its range.
        """
        recorded = {"source": "criteo", **self.to_json()}
        return PrepareOptions(self.split, self.max_rejected, self.vocabulary, self.grow, recorded)

    def to_json(self) -> dict[str, Any]:
        """Returns the options that matter for this kind of ids, in the manifest's order."""
        ids = {"min_count": self.min_count} if self.hash_size is None else {}
        unused = {"min_count"} if self.hash_size is not None else {"hash_size", "hash_seed"}
        # so that the manifests of datasets with zeros are what they were before there was a choice
        unused |= {"missing"} if self.missing == "zero" else set()
        unused |= {"vocabulary", "grow"}  # what they lead to is recorded by the pipeline
        return ids | {name: value for name, value in asdict(self).items() if name not in unused}


def prepare_criteo(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    options: CriteoOptions | None = None,
    limits: ResourceLimits | None = None,
    *,
    overwrite: bool = False,
    progress: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Manifest:
    """Prepares Criteo rows.

    Args:
        inputs: Files, folders or pipes, plain or gzip, in time order; a folder is its files in natural order, and
            ``-`` is standard input.
        output: Dataset folder to make, or the URL of one.
        options: What the dataset's bytes depend on; a vocabulary and shares 0.8, 0.1, 0.1 unless given.
        limits: Memory and threads to use; 2 GiB and every processor unless given.
        overwrite: Whether a dataset at ``output`` is replaced.
        progress: Function that is called now and then, in the caller's thread.
        note: Function that is told in a sentence what should be known of the input: a header that was left out, files
            of a folder that were not read, rows that are all alike. What the manifest tells is said by
            :func:`~distembed.data.prepare.notes.dataset_warnings`.

    Returns:
        The manifest that was written.

    Raises:
        UserError: The input cannot be read, or is not one of Criteo rows. Nothing was written.
        RunError: The disk is full, or will not have room. Nothing was left behind.
    """
    options = options or CriteoOptions()
    sources = list_sources(inputs, note)
    require_outside(sources, Path(output))
    if options.vocabulary is not None:
        _require_same_values(options, Base.load(options.vocabulary, options.grow))
    source = CriteoSource(sources, options)
    return prepare_rows(
        source, output, options.prepare_options(), limits, overwrite=overwrite, progress=progress, note=note
    )


def _require_same_values(options: CriteoOptions, base: Base) -> None:
    """Makes sure that the options make the same values of rows as the dataset has whose ids are applied.

    Raises:
        UserError: They make others.
    """
    from distembed.data.prepare.same_values import require_same_values  # schemas take 60 ms to load
    from distembed.data.table.schema_files import schema_of_preparation

    require_same_values(schema_of_preparation(options.prepare_options().recorded), base)
