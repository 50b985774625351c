"""What optimizers keep of each weight, by the names of torch's states."""

from collections.abc import Mapping

_ADAM = {"exp_avg": False, "exp_avg_sq": False}
_PARTIAL_ROW_WISE = {"exp_avg": False, "exp_avg_sq": True}
IS_ROW_WISE: Mapping[str, Mapping[str, bool]] = {
    "sgd": {},
    "adagrad": {"sum": False},
    "row_wise_adagrad": {"sum": True},
    "adam": _ADAM,
    "adamw": _ADAM,
    "amsgrad": {**_ADAM, "max_exp_avg_sq": False},
    "partial_row_wise_adam": _PARTIAL_ROW_WISE,
    "lamb": _ADAM,
    "partial_row_wise_lamb": _PARTIAL_ROW_WISE,
}
"""By kind of optimizer, its states in FBGEMM's order, and whether each has one number a row."""
