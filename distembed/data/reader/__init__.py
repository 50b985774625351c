"""Parquet datasets to shuffled batches."""

from distembed.data.reader.batch import Batch
from distembed.data.reader.decode import Decoding
from distembed.data.reader.order import BatchOrder
from distembed.data.reader.reader import BatchReader
from distembed.data.reader.shares import BatchShares, read_share

__all__ = ["Batch", "BatchOrder", "BatchReader", "BatchShares", "Decoding", "read_share"]
