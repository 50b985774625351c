"""Raw rows that keep arriving, as batches: files of a folder or an object store, and messages of a Kafka topic.

::

    source.py     the interface of a source: pieces that are complete, each read as often as needed
    folder.py     files in a folder, or at a URL
    kafka.py      offsets of a topic's partitions
    journal.py    the order in which a run reads pieces, kept in the run's folder
    rows.py       pieces -> rows, by the dataset's schema and vocabularies -> steps
    reader.py     steps -> each rank's batches; the position in checkpoints
"""
