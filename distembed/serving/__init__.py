"""A trained run as a Python object, and raw rows scored by it.

- ``loaded_model.py`` loads a run and is the object: predictions, vectors, evaluations, what it is; ``page.py`` is what
  a notebook shows of it.
- ``whole_model.py`` builds a run's model unsharded, on one device of one process, and reads its weights.
- ``given_rows.py`` makes a table of what Python holds rows in, and ``row_decoder.py`` batches of a table.
- ``recommender_rows.py`` decodes users and sequences of items.
- ``requests.py`` is what is asked of ``distembed predict --input``, ``raw_inputs.py`` streams files of raw rows, and
  ``raw_predictions.py`` scores them on all ranks, and writes the predictions.
"""
