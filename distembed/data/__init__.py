"""Data: raw files to Parquet datasets, and Parquet datasets to batches.

- ``prepare/`` makes a dataset of raw files; :mod:`distembed.graph.prepare` makes a knowledge graph over its ids.
- ``table/`` says what columns of any table become, for preparing as for scoring.
- ``dataset/`` says what a dataset is: ``schema.py`` what its columns are, ``manifest.py`` what its folder holds,
  ``creation.py`` makes a manifest for files from elsewhere, ``columns.py`` says whether Parquet files fit,
  ``pieces.py`` and ``row_groups.py`` hold what is read against its checksum, ``verification.py`` all of it, and
  ``config.py`` says where a config finds it.
- ``reader/`` reads it: ``order.py`` decides which row comes when, ``decode.py`` reads row groups, ``prefetch.py`` runs
  ahead in a thread, and ``reader.py`` makes the ``Batch`` of ``batch.py``.

Only ``reader/`` needs torch, and it is imported by itself, so that preparing data starts at once.
"""

from distembed.data.dataset.manifest import Manifest, create_manifest
from distembed.data.dataset.schema import SCHEMAS, CategoricalFeature, Schema

__all__ = ["SCHEMAS", "CategoricalFeature", "Manifest", "Schema", "create_manifest"]
