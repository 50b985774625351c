"""Parquet datasets to shuffled batches."""

from distembed.data.reader.batch import Batch
from distembed.data.reader.decode import Decoding
from distembed.data.reader.order import BatchOrder, BatchShares
from distembed.data.reader.reader import BatchReader, read_share

__all__ = ["Batch", "BatchOrder", "BatchReader", "BatchShares", "Decoding", "read_share"]
