"""The description of tables and batches for Triton's kernels: constants on the device, and the sizes of tiles.

Triton is imported by :func:`triton_kernels` alone. It compiles a kernel at its first launch, in some seconds, and keeps
it in its own cache on the disk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.kernels.layout import FLOAT_BYTES
from distembed.kernels.tables import Formula, Storage, TablePart, num_states

OPTIONS = {"enable_fp_fusion": True}
"""Options of Triton's compiler: products are added in one step; the default differs between versions of Triton."""
TILE_NUMBERS = 1024
"""How many numbers a tile of vectors has, about."""
LEAST_SLICE, MOST_SLICE = 128, 1024
"""Ids of a slice: 128 for the fewest rows; more than 1,024 ids do not fit into registers."""
_MOST_SLICED_ROWS = MOST_SLICE // 2
"""With fewer than two ids to a row, a slice has nearly as many sums as gradients."""
_SORT_TRAFFIC_BYTES, _PIECES = 60, 3 / 8
"""Bytes that an id moves while it is sorted, and the share of its vector that pieces of runs move."""
_DIVIDES, _TAKES_MODULUS = 1, 2
_KEY_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class TritonBatch:
    """The keys of a step's ids, and all rows."""

    keys: tuple[Tensor, ...]  # key of each id in each partition, -1 where its row is not on this rank
    weights: Tensor | None  # weights of the ids
    rows: tuple[Tensor, ...]  # all rows of each partition
    for_backward: tuple[Tensor, Tensor] | None  # owners and feature starts of ``write_keys``, None in evaluation

    @property
    def num_ids(self) -> int:
        """Number of ids of all features."""
        return len(self.keys[0])

    @property
    def owners(self) -> Tensor:
        """The int32 number of each id's vector or, where each id has its own, of its feature."""
        assert self.for_backward is not None
        return self.for_backward[0]

    @property
    def feature_starts(self) -> Tensor:
        """The place of each feature's first id, and the end of the last feature's ids, ``[features + 1]``."""
        assert self.for_backward is not None
        return self.for_backward[1]


class DeviceTables:
    """The tables of a fused lookup, as its kernels take them.

    Attributes:
        formula: The formula of all tables.
        num_features: Number of features of all tables.
        num_keys: Number of rows of all tables, in each partition.
        most_rows: Largest number of rows of a table, in each partition.
        slice_ids: Number of ids of a slice, in each partition; None where ids are sorted.
        rules: Whether rows follow by a division (1), a modulus (2), or both (3), in each partition.
        multiples: Each row of a partition begins at a multiple of so many numbers: a power of two, at most 16 bytes.
        state_multiples: Each row's states begin at a multiple of so many numbers.

    Arguments as :class:`distembed.kernels.operation.FusedLookup`.
    """

    def __init__(
        self,
        formula: Formula,
        feature_parts: Sequence[Sequence[TablePart]],
        features_per_table: Sequence[int],
        storages: Sequence[Storage],
    ) -> None:
        self.formula, self.num_features = formula, len(feature_parts)
        num_partitions = len(formula.columns)
        first_features = [0, *accumulate(features_per_table)][:-1]
        self.rules = tuple(_rule([parts[j] for parts in feature_parts]) for j in range(num_partitions))
        # keys number a partition's rows through all tables: first_keys[i][j] is the first of feature i's table
        num_keys = [0] * num_partitions
        table_firsts: list[int] = []  # the first feature of each feature's table
        first_keys: list[list[int]] = []
        for feature, parts in enumerate(feature_parts):
            if feature in first_features:
                first_keys.append(list(num_keys))
                num_keys = [number + part.num_rows for number, part in zip(num_keys, parts, strict=True)]
                table_firsts.append(feature)
            else:
                first_keys.append(first_keys[-1])
                table_firsts.append(table_firsts[-1])
        self.num_keys = tuple(num_keys)
        self.most_rows = tuple(max(parts[j].num_rows for parts in feature_parts) for j in range(num_partitions))
        self._fields = torch.tensor(
            [
                [
                    [*_part_fields(part, first_key, len(columns), storage.optimizer), first_feature]
                    for part, first_key, columns, storage in zip(parts, keys, formula.columns, storages, strict=True)
                ]
                for parts, keys, first_feature in zip(feature_parts, first_keys, table_firsts, strict=True)
            ],
            dtype=torch.int64,
        )
        row_starts, state_starts = self._fields[..., -3], self._fields[..., -2]
        column_counts = [len(columns) for columns in formula.columns]
        self.multiples = tuple(
            _multiple(columns, row_starts[:, j], 16 // storage.itemsize)
            for j, (columns, storage) in enumerate(zip(column_counts, storages, strict=True))
        )
        self.state_multiples = tuple(
            _multiple(num_states(storage.optimizer, columns), state_starts[:, j], 16 // FLOAT_BYTES)
            for j, (columns, storage) in enumerate(zip(column_counts, storages, strict=True))
        )
        self.slice_ids = tuple(map(ids_of_slice, self.most_rows, column_counts))
        self._on_device: Tensor | None = None

    def num_bags(self, num_ids: int, offsets: Tensor | None) -> int:
        """Returns the number of bags of all features; without offsets each has one id."""
        return num_ids if offsets is None else len(offsets) - 1

    def num_vectors(self, num_ids: int, offsets: Tensor | None) -> int:
        """Returns the number of composed vectors."""
        return self.num_bags(num_ids, offsets) if self.formula.pools else num_ids

    @property
    def num_partitions(self) -> int:
        """Number of partitions of each table."""
        return len(self.num_keys)

    def parts(self, device: torch.device) -> Tensor:
        """Returns the numbers of all parts on a device, to which they are copied once."""
        if self._on_device is None or self._on_device.device != device:
            self._on_device = self._fields.to(device)
        return self._on_device

    def key_type(self, j: int) -> torch.dtype:
        """Returns the type of a partition's keys."""
        return key_type(self.num_keys[j])

    def column_groups(self) -> tuple[int, ...]:
        """Returns five numbers for each group of partitions that share columns.

        First partition, last partition + 1, first column, number of columns, and this number rounded up to a power of
        two.
        """
        columns = self.formula.columns
        shared = all(column_range == columns[0] for column_range in columns)
        groups: list[int] = []
        for first_partition, end_partition in (
            [(0, len(columns))] if shared else [(j, j + 1) for j in range(len(columns))]
        ):
            group_columns = columns[first_partition]
            groups += [
                first_partition,
                end_partition,
                group_columns.start,
                len(group_columns),
                power_of_two(len(group_columns)),
            ]
        return tuple(groups)


def ids_of_slice(most_rows: int, num_columns: int) -> int | None:
    """Returns the number of ids whose gradients one program adds up, row by row; None where ids are sorted instead.

    A program writes a sum for each row of its table, which is read once. With eight or more ids to a row, these are
    few bytes beside the gradients. Ids are sorted where the sums of the longest slices move more bytes than a sort.
    """
    sums_bytes = 2 * most_rows * num_columns * FLOAT_BYTES
    sorted_bytes = MOST_SLICE * (_SORT_TRAFFIC_BYTES + _PIECES * num_columns * FLOAT_BYTES)
    if most_rows > _MOST_SLICED_ROWS or sums_bytes > sorted_bytes:
        return None
    return min(max(power_of_two(8 * most_rows), LEAST_SLICE), MOST_SLICE)


def num_slices(num_ids: int, num_features: int, slice_ids: int) -> int:
    """Returns the number of slices of all ids: a feature's first and last slice may have fewer ids than the others."""
    return num_ids // slice_ids + num_features


def key_type(num_keys: int) -> torch.dtype:
    """Returns the smallest integer type for keys 0 to ``num_keys - 1``: a radix sort takes a pass for each byte."""
    return next(dtype for dtype in _KEY_TYPES if num_keys - 1 <= torch.iinfo(dtype).max)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two of at least a number."""
    return 1 << (number - 1).bit_length()


def num_lanes(padded_columns: int, tile_numbers: int = TILE_NUMBERS) -> int:
    """Returns the number of vectors in a tile of about ``tile_numbers``, a power of two, as Triton wants it."""
    return max(1, tile_numbers // padded_columns)


def num_blocks(number: int, a_block: int) -> int:
    """Returns ``number / a_block``, rounded up."""
    return -(-number // a_block)


def _multiple(numbers_of_row: int, starts: Tensor, most: int) -> int:
    """Returns the largest power of two, at most ``most``, that divides the start of each row."""
    return math.gcd(most, numbers_of_row, *starts.tolist())


def _rule(parts: Sequence[TablePart]) -> int:
    """Returns the operations that any table needs in a partition; kernels are compiled with these alone."""
    divides = any(part.digit.divisor != 1 for part in parts)
    takes_modulus = any(part.digit.modulus is not None for part in parts)
    return _DIVIDES * divides + _TAKES_MODULUS * takes_modulus


def _part_fields(part: TablePart, first_key: int, num_columns: int, optimizer: str | None) -> list[int]:
    """Returns a part's fields but for the last, in the order of the constants in ``triton_kernels``.

    Local row r has key first_key + r and begins at weight_start + r * columns; key 0 would begin at r = -first_key.
    """
    modulus = part.digit.modulus if part.digit.modulus is not None else 2**63 - 1
    fields = [part.digit.divisor, modulus, part.first_row, part.num_rows, first_key]
    if optimizer is None:  # rows that every rank has are stacked in the order of their keys
        return [*fields, 0, 0]
    first_state = part.state_start - first_key * num_states(optimizer, num_columns)
    return [*fields, part.weight_start - first_key * num_columns, first_state]


class TritonKernels(NamedTuple):
    """The kernels, each called as ``kernel[number of programs,](...)``."""

    compose: Any
    write_keys: Any
    sum_runs: Any
    join_runs: Any
    update_rows: Any
    sum_slices: Any
    add_slices: Any


@cache
def triton_kernels() -> TritonKernels:
    """Imports Triton and returns the kernels; a :class:`UserError` where Triton is missing."""
    try:
        forward = import_module("distembed.kernels.triton_kernels")
        backward = import_module("distembed.kernels.triton_update")
        slices = import_module("distembed.kernels.triton_slices")
    except ImportError as error:
        raise UserError(
            f"the fused lookup on CUDA: triton cannot be imported ({error}); install a PyTorch that is built for CUDA, "
            "which brings it, or give tables kernel='fbgemm'."
        ) from None
    return TritonKernels(
        forward.compose,
        forward.write_keys,
        backward.sum_runs,
        backward.join_runs,
        backward.update_rows,
        slices.sum_slices,
        slices.add_slices,
    )


def launch(name: str, num_programs: int, *arguments: Any, **constants: Any) -> None:
    """Launches a kernel of :class:`TritonKernels`; Triton finds the compiled kernel at the first launch alone.

    Triton compares all arguments with its compiled kernels' arguments, which takes the host longer than the launch. A
    compiled kernel depends on the constants, and on the type, device and alignment of each tensor. It takes numbers of
    any value: all integers fit 32 bits, and Triton compiles for no value of theirs (``SIZES`` of ``triton_kernels``).
    """
    key = (name, *constants.values(), *map(_compiled_for, arguments))
    compiled = _compiled.get(key)
    if compiled is None:
        kernel = getattr(triton_kernels(), name)
        made = kernel[num_programs,](*arguments, **constants)
        if made is not None:  # an interpreter compiles nothing
            _compiled[key] = made, tuple(constants[each] for each in kernel.arg_names[len(arguments) :])
    else:
        made, ordered_constants = compiled
        made[num_programs, 1, 1](*arguments, *ordered_constants)


def forget_launches() -> None:
    """Has kernels be found by Triton again, as where its driver is another one."""
    _compiled.clear()


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _compiled_for(argument: Any) -> Any:
    """Returns the properties of an argument that decide which compiled kernel takes it."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.device, argument.data_ptr() % 16 == 0
    if isinstance(argument, tuple):
        return tuple(map(_compiled_for, argument))
    return None if argument is None else type(argument)
