"""Tables for inference with fewer bits: rows of int8 or int4 with a scale and an offset each, and half precision.

- ``rows.py`` quantises a weight row by row, and reads rows of it, in torch's own operations alone.
"""
