"""An exported model on disk, and reading it, without the trainer and without TorchRec.

::

    model/
      manifest.json              the model, its inputs and outputs, tables, files with checksums (manifest.py)
      network.pt2                torch.export: ids and numbers of rows -> scores; with all tables, where they fit
      tables/shard-00000.pt2     where they do not: ids -> vectors of the features of one server, network.pt2 the rest
      compiled/network.pt2       the network as machine code for the processor that exported it, where it was asked for
      vocabularies/C1.jsonl      raw values in the order of their ids, a JSON text a line, the first one has id 2
      dataset/                   vocabularies and statistics that turn raw rows into ids and numbers (for distembed)
      serving_example.py         scores raw rows with torch alone, and checks itself by sample.json
      sample.json                rows with their ids, numbers and scores, to check an installation by

A program takes plain tensors, of a batch of B rows::

    values     int64 [ids]              ids of all features, feature after feature, of each row after row
    lengths    int64 [features, B]      number of ids of each feature of each row
    dense      float32 [B, numbers]     numbers as the dataset has them, where the model takes any
    sequences  float32 [numbers]        lists of numbers, one for each id of a list, column after column and row after
                                        row, where the model takes any

and returns the outputs that the manifest names, float32 [B], or for recommended items int64 and float32 [B, k].
"""
