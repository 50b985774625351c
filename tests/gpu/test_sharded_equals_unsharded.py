"""Every scheme x composition, sharded on the device, against the unsharded module on the CPU that torch trains."""

import pytest

from distembed.base.ranks import Ranks
from distembed.composition import COMPOSITIONS
from tests.gpu.models import require_equal_steps, tables

SHARDINGS = ("table_wise", "column_wise", "row_wise", "data_parallel")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sharding_type", SHARDINGS)
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_device_computes_what_the_unsharded_module_does(composition: str, sharding_type: str, ranks: Ranks) -> None:
    require_equal_steps(tables(composition), composition, sharding_type, ranks, rows=6)
