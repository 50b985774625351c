"""A trained run as a Python object, raw rows scored by it, and its exports, server, conversions and quantised tables.

``loaded_model.py`` is the object of :func:`distembed.load`; ``rows`` decodes raw rows for it, for
``distembed predict --input`` (``requests.py``, ``raw_predictions.py``) and for the server alike.
"""
