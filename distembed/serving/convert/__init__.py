"""Tables between stock TorchRec models and compositional ones: fitted one way, written out the other.

``from_stock`` fills a compositional model from the weights of a stock one with full tables, ``to_stock`` returns the
weights of the stock one that a compositional one is; ``fit_table`` fits a single table. See README.md in this folder.
"""

from typing import TYPE_CHECKING

from distembed.base.lazy import imports_on_demand

if TYPE_CHECKING:
    from distembed.serving.convert.models import from_stock, to_stock
    from distembed.serving.convert.stock_checkpoint import StockCheckpoint
    from distembed.serving.convert.tables import FitError, FittedTable, fit_table, full_vectors

__all__ = ["FitError", "FittedTable", "StockCheckpoint", "fit_table", "from_stock", "full_vectors", "to_stock"]
__getattr__ = imports_on_demand(__name__)
