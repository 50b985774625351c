"""Data: raw files to Parquet datasets, and Parquet datasets to batches.

Raw to dataset (no torch needed):

- ``criteo.py`` prepares Criteo rows; ``raw.py`` cuts files into blocks of whole lines, ``parse.py`` turns blocks into
  columns, ``vocabulary.py`` gives the ids, ``write.py`` writes the Parquet files, ``staging.py`` makes all of it
  appear at once.
- ``graph.py`` makes a knowledge graph over a table's ids: ``graph_input.py`` reads rows, ``graph_values.py`` and
  ``graph_ids.py`` give their values ids, ``graph_rows.py`` and ``graph_attributes.py`` make edges of them, and
  ``sorted_runs.py`` sorts these in bounded memory.
- ``synthesize.py`` makes a Criteo-format file with a planted signal.

Dataset to batches:

- ``schema.py`` says what the columns are, ``manifest.py`` what a dataset folder holds, ``columns.py``
  whether Parquet files fit.
- ``order.py`` decides which row comes when, ``decode.py`` reads row groups, ``prefetch.py`` runs ahead, and
  ``reader.py`` puts them together into the ``Batch`` of ``batch.py``.

What needs torch (``batch``, ``reader``) is imported from its module, so that preparing data starts at once.
"""

from distembed.data.dataset.manifest import Manifest, create_manifest
from distembed.data.dataset.schema import SCHEMAS, CategoricalFeature, Schema

__all__ = ["SCHEMAS", "CategoricalFeature", "Manifest", "Schema", "create_manifest"]
