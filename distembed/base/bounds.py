"""The largest numbers that settings take: beyond them sizes overflow, and no machine could do what is asked."""

from typing import Annotated

from pydantic import Field

Count = Annotated[int, Field(gt=0, lt=2**31)]
"""A number of rows, steps or epochs."""
Interval = Annotated[int, Field(ge=0, lt=2**31)]
"""A number of steps between two of something; 0 where it has another meaning."""
Width = Annotated[int, Field(gt=0, le=2**20)]
"""How many numbers a vector has, or a layer gives."""
Widths = Annotated[list[Width], Field(min_length=1, max_length=1000)]
"""Those of neighbouring layers."""
MAX_TABLE_BYTES = 2**60
"""The bytes of a partition's weights; with four times as many for an optimizer's states they fit 64 bits."""
