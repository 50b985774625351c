"""Data: raw files to Parquet datasets (``prepare``, ``table``, ``dataset``), and datasets to batches (``reader``).

``reader`` alone needs torch and is imported by itself, so that preparing data starts at once.
"""

from distembed.data.dataset.manifest import Manifest, create_manifest
from distembed.data.dataset.schema import SCHEMAS, CategoricalFeature, Label, Schema

__all__ = ["SCHEMAS", "CategoricalFeature", "Label", "Manifest", "Schema", "create_manifest"]
