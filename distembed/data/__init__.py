"""Data: raw files to Parquet datasets, and Parquet datasets to batches.

A raw row becomes part of a batch in four steps, a package each::

    prepare/   raw files -> dataset: inputs are parsed, values get ids, rows are split and written
    table/     the meaning of a table's columns: a schema, and the parser and encoder that apply it
    dataset/   the folder between: schema, manifest, row groups with checksums, the cache of remote files
    reader/    dataset -> shuffled batches for each rank

``reader`` alone needs torch and is imported by itself, so that preparing data starts at once.
"""

from distembed.data.dataset.manifest import Manifest, create_manifest
from distembed.data.dataset.schema import SCHEMAS, CategoricalFeature, Schema

__all__ = ["SCHEMAS", "CategoricalFeature", "Manifest", "Schema", "create_manifest"]
