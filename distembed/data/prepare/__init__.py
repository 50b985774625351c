"""Raw files to Parquet datasets."""
