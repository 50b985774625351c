"""A trained run as a Python object, and raw rows scored by it.

- ``loaded_model.py`` loads a run and is the object: predictions, vectors, evaluations, what it is; ``page.py`` is what
  a notebook shows of it.
- ``whole_model.py`` builds a run's model unsharded, on one device of one process, and reads its weights.
- ``given_rows.py`` makes a table of rows of Python and JSON, and ``row_decoder.py`` decodes rows of tables: those of
  files, of :func:`~distembed.load` and of the server (:mod:`distembed.serving.server`) alike.
- ``recommender_rows.py`` decodes users and sequences of items.
- ``requests.py`` is what is asked of ``distembed predict --input``, ``raw_inputs.py`` streams files of raw rows, and
  ``raw_predictions.py`` scores them on all ranks, and writes the predictions.
"""
