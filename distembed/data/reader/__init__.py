"""Parquet datasets to shuffled batches."""
