"""Vectors of 4, 8 and 16 float32 for numba, which has none: loaded from an address, computed with, stored.

Numba's own loops over a row's columns are turned into vector instructions only where their number is known when they
are compiled, and a kernel for each dimension, composition and optimizer would take minutes to compile. With vectors one
kernel serves them all::

    zeros = zeros_8()  # which also says how many lanes there are
    for column in range(0, num_columns, 8):
        store(target + 4 * column, load_floats(first + 4 * column, zeros) * load_floats(second + 4 * column, zeros))

Addresses are integers, and nothing is checked: whoever calls a kernel has looked at shapes before.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, overload, register_model

_intrinsic: Any = intrinsic  # as Any: kernels call an intrinsic without its first argument, which mypy would miss

_FLOAT, _HALF, _LONG, _INT, _SHORT = ir.FloatType(), ir.HalfType(), ir.IntType(64), ir.IntType(32), ir.IntType(16)


class Floats(types.Type):
    """The type of a vector."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"Floats({lanes})")

    @property
    def llvm(self) -> ir.Type:
        """The type that LLVM has for it."""
        return ir.VectorType(_FLOAT, self.lanes)


@register_model(Floats)
class _FloatsModel(PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Floats) -> None:
        super().__init__(dmm, fe_type, fe_type.llvm)  # type: ignore[no-untyped-call]


def _pointer(builder: Any, address: Any, element: ir.Type) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _call(builder: Any, name: str, returned: ir.Type, arguments: Sequence[Any]) -> Any:
    """Calls one of LLVM's own functions."""
    kind = ir.FunctionType(returned, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def _typed(signature: Any, build: Callable[..., Any]) -> Any:
    """Returns an intrinsic's signature and code generator for numba; ``build(builder, *arguments)`` emits LLVM code."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        built = build(builder, *arguments)
        return context.get_dummy_value() if signature.return_type == types.void else built

    return signature, generate


@_intrinsic
def load_floats(typing_context: Any, address: Any, like: Any) -> Any:
    """Loads a vector of float32 from an address, with as many lanes as the vector ``like``."""
    return _typed(
        like(types.int64, like), lambda builder, start, _: builder.load(_pointer(builder, start, like.llvm), align=4)
    )


@_intrinsic
def load_half(typing_context: Any, address: Any, like: Any) -> Any:
    """Loads float16 numbers from an address, as a float32 vector with as many lanes as ``like``."""

    def build(builder: Any, start: Any, _: Any) -> Any:
        halves = builder.load(_pointer(builder, start, ir.VectorType(_HALF, like.lanes)), align=2)
        return builder.fpext(halves, like.llvm)

    return _typed(like(types.int64, like), build)


@_intrinsic
def store(typing_context: Any, address: Any, vector: Any) -> Any:
    """Writes a vector as float32 at an address."""
    return _typed(
        types.void(types.int64, vector),
        lambda builder, start, value: builder.store(value, _pointer(builder, start, vector.llvm), align=4),
    )


@_intrinsic
def store_half(typing_context: Any, address: Any, vector: Any) -> Any:
    """Writes a vector as float16 at an address, rounded to the nearest."""
    halves = ir.VectorType(_HALF, vector.lanes)
    return _typed(
        types.void(types.int64, vector),
        lambda builder, start, value: builder.store(
            builder.fptrunc(value, halves), _pointer(builder, start, halves), align=2
        ),
    )


@_intrinsic
def load_bf16(typing_context: Any, address: Any, like: Any) -> Any:
    """Loads bf16 numbers, the upper halves of float32, as a float32 vector with as many lanes as ``like``."""
    shorts, integers = (ir.VectorType(kind, like.lanes) for kind in (_SHORT, _INT))

    def build(builder: Any, start: Any, _: Any) -> Any:
        halves = builder.load(_pointer(builder, start, shorts), align=2)
        shift = ir.Constant(integers, [16] * like.lanes)
        return builder.bitcast(builder.shl(builder.zext(halves, integers), shift), like.llvm)

    return _typed(like(types.int64, like), build)


@_intrinsic
def store_bf16(typing_context: Any, address: Any, vector: Any) -> Any:
    """Writes a vector as bf16 at an address, rounded to the nearest; of two as near, to the even one."""
    shorts, integers = (ir.VectorType(kind, vector.lanes) for kind in (_SHORT, _INT))

    def build(builder: Any, start: Any, value: Any) -> Any:
        def all_lanes(number: int) -> Any:
            return ir.Constant(integers, [number] * vector.lanes)

        bits = builder.bitcast(value, integers)
        is_odd = builder.and_(builder.lshr(bits, all_lanes(16)), all_lanes(1))
        rounded = builder.add(builder.add(bits, is_odd), all_lanes(0x7FFF))
        # rounding might carry a NaN's bits into the exponent
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), all_lanes(0x7FC00000), rounded)
        halves = builder.trunc(builder.lshr(rounded, all_lanes(16)), shorts)
        return builder.store(halves, _pointer(builder, start, shorts), align=2)

    return _typed(types.void(types.int64, vector), build)


@_intrinsic
def transpose(typing_context: Any, source: Any, source_stride: Any, target: Any, target_stride: Any, like: Any) -> Any:
    """Writes a square block of float32, with the lanes of ``like`` as rows and columns, transposed to ``target``.

    Strides are bytes from row to row.
    """
    lanes = range(like.lanes)

    def build(builder: Any, source: Any, source_stride: Any, target: Any, target_stride: Any, _: Any) -> Any:
        def place(start: Any, stride: Any, row: int) -> Any:
            return _pointer(builder, builder.add(start, builder.mul(stride, _LONG(row))), like.llvm)

        rows = [builder.load(place(source, source_stride, row), align=4) for row in lanes]
        # each turn exchanges two blocks of half the size:   a b   a c
        #                                                    c d   b d
        half = like.lanes // 2
        while half:
            upper = ir.Constant(
                ir.VectorType(_INT, like.lanes), [i if not i & half else like.lanes + i - half for i in lanes]
            )
            lower = ir.Constant(
                ir.VectorType(_INT, like.lanes), [i + half if not i & half else like.lanes + i for i in lanes]
            )
            for row in (row for row in lanes if not row & half):
                first, second = rows[row], rows[row + half]
                rows[row] = builder.shuffle_vector(first, second, upper)
                rows[row + half] = builder.shuffle_vector(first, second, lower)
            half //= 2
        for row in lanes:
            builder.store(rows[row], place(target, target_stride, row), align=4)

    return _typed(types.void(types.int64, types.int64, types.int64, types.int64, like), build)


@_intrinsic
def round_half_at_random(typing_context: Any, vector: Any, random: Any, column: Any) -> Any:
    """Rounds to float16 numbers at random, up or down, so that the mean of the rounded numbers is the value.

    The random bits are MurmurHash3's finalizer of the lane's column and the 64 bits ``random``. They are equal for
    equal arguments, for any number of lanes.
    """
    # float32 has 13 more bits of mantissa than float16: a random number of 13 bits is added to the magnitude, and the
    # lowest 13 bits are cut off. Below 2 ** -14 float16 has steps of 2 ** -24, as it has from 2 ** -14 to 2 ** -13:
    # there 2 ** -14 is added before, and taken away after.
    #   1.5 steps + [0, 1) steps = [1.5, 2.5) steps, cut off to 1 or 2 with equal odds
    integers = ir.VectorType(_INT, vector.lanes)

    def build(builder: Any, value: Any, random: Any, column: Any) -> Any:
        def all_lanes(number: int) -> Any:
            return ir.Constant(integers, [number] * vector.lanes)

        def each(number: Any) -> Any:
            return _in_all_lanes(builder, builder.trunc(number, _INT), integers)

        def fold(number: Any, shift: int) -> Any:
            return builder.xor(number, builder.lshr(number, all_lanes(shift)))

        lane_columns = builder.add(each(column), ir.Constant(integers, list(range(vector.lanes))))
        hashed = builder.xor(builder.mul(lane_columns, all_lanes(0x9E3779B1)), each(random))
        hashed = builder.mul(fold(hashed, 16), all_lanes(0x85EBCA6B))
        hashed = fold(builder.add(hashed, each(builder.lshr(random, _LONG(32)))), 13)
        hashed = fold(builder.mul(hashed, all_lanes(0xC2B2AE35)), 16)
        random_bits = builder.lshr(hashed, all_lanes(19))

        bits = builder.bitcast(value, integers)
        magnitude = builder.bitcast(builder.and_(bits, all_lanes(0x7FFFFFFF)), vector.llvm)
        least_normal, zeros = (ir.Constant(vector.llvm, [number] * vector.lanes) for number in (2.0**-14, 0.0))
        added = builder.select(builder.fcmp_ordered("<", magnitude, least_normal), least_normal, zeros)
        raised = builder.bitcast(builder.fadd(magnitude, added), integers)
        cut = builder.and_(builder.add(raised, random_bits), all_lanes(0xFFFFE000))
        rounded = builder.bitcast(builder.fsub(builder.bitcast(cut, vector.llvm), added), integers)
        signed = builder.bitcast(builder.or_(rounded, builder.and_(bits, all_lanes(0x80000000))), vector.llvm)
        return builder.select(builder.fcmp_unordered("uno", value, value), value, signed)

    return _typed(vector(vector, types.int64, types.int64), build)


def _in_all_lanes(builder: Any, number: Any, kind: ir.VectorType) -> Any:
    """Returns a vector of a kind whose lanes are all ``number``."""
    undefined = ir.Constant(kind, ir.Undefined)
    single_lane = builder.insert_element(undefined, number, _INT(0))
    return builder.shuffle_vector(
        single_lane, undefined, ir.Constant(ir.VectorType(_INT, kind.count), [0] * kind.count)
    )


@_intrinsic
def splat(typing_context: Any, value: Any, like: Any) -> Any:
    """Returns a vector with as many lanes as ``like``, each of them ``value``."""
    return _typed(like(types.float32, like), lambda builder, number, _: _in_all_lanes(builder, number, like.llvm))


def _make_zeros(kind: Floats) -> Any:
    def zeros(typing_context: Any) -> Any:
        return _typed(kind(), lambda builder: ir.Constant(kind.llvm, [0.0] * kind.lanes))

    return _intrinsic(zeros)


zeros_4, zeros_8, zeros_16 = (_make_zeros(Floats(lanes)) for lanes in (4, 8, 16))


@_intrinsic
def lanes_of(typing_context: Any, vector: Any) -> Any:
    """Returns how many numbers a vector has."""
    return _typed(types.int64(vector), lambda builder, _: _LONG(vector.lanes))


@_intrinsic
def multiply_add(typing_context: Any, first: Any, second: Any, third: Any) -> Any:
    """Returns ``first * second + third``, rounded once."""
    name = f"llvm.fma.v{first.lanes}f32"
    return _typed(first(first, second, third), lambda builder, *operands: _call(builder, name, first.llvm, operands))


@_intrinsic
def square_root(typing_context: Any, vector: Any) -> Any:
    """Returns the square root of each number."""
    name = f"llvm.sqrt.v{vector.lanes}f32"
    return _typed(vector(vector), lambda builder, *operands: _call(builder, name, vector.llvm, operands))


@_intrinsic
def sum_lanes(typing_context: Any, vector: Any) -> Any:
    """Returns the sum of a vector's numbers: adds its upper half to its lower half until one number is left."""

    def build(builder: Any, summed: Any) -> Any:
        lanes = vector.lanes
        while lanes > 1:
            lanes //= 2
            upper_half = ir.Constant(ir.VectorType(_INT, lanes), list(range(lanes, 2 * lanes)))
            lower_half = ir.Constant(ir.VectorType(_INT, lanes), list(range(lanes)))
            summed = builder.fadd(
                builder.shuffle_vector(summed, summed, lower_half), builder.shuffle_vector(summed, summed, upper_half)
            )
        return builder.extract_element(summed, _INT(0))

    return _typed(types.float32(vector), build)


def _define(function: Callable[..., Any], instruction: str) -> None:
    """Makes numba compile a Python operator, for two vectors of one length, to an LLVM instruction of this name."""

    def compute(typing_context: Any, first: Any, second: Any) -> Any:
        return _typed(first(first, second), lambda builder, *intrinsic: getattr(builder, instruction)(*intrinsic))

    intrinsic = _intrinsic(compute)

    @overload(function)
    def overloaded(first, second):  # type: ignore[no-untyped-def]  # numba compares it with what it returns
        if isinstance(first, Floats) and first == second:
            return lambda first, second: intrinsic(first, second)
        return None


for _operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define(_operator, _instruction)


@_intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for the line of the cache that has an address, without waiting for it."""

    def build(builder: Any, start: Any) -> None:
        pointer = _pointer(builder, start, ir.IntType(8))
        # to be read, to be kept in all caches, and data
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, _INT(0), _INT(3), _INT(1)])

    return _typed(types.void(types.int64), build)


@_intrinsic
def high_product(typing_context: Any, first: Any, second: Any) -> Any:
    """Returns the upper 64 bits of the product of two unsigned numbers of 64 bits."""

    def build(builder: Any, *operands: Any) -> Any:
        wide = ir.IntType(128)
        factors = [builder.zext(factor, wide) for factor in operands]
        return builder.trunc(builder.lshr(builder.mul(*factors), wide(64)), _LONG)

    return _typed(types.uint64(types.uint64, types.uint64), build)


def _make_read(kind: Any, numba_type: Any) -> Any:
    def read(typing_context: Any, address: Any) -> Any:
        return _typed(numba_type(types.int64), lambda builder, start: builder.load(_pointer(builder, start, kind)))

    return _intrinsic(read)


read_float, read_double, read_int, read_long = (
    _make_read(_FLOAT, types.float32),
    _make_read(ir.DoubleType(), types.float64),
    _make_read(_INT, types.int32),
    _make_read(_LONG, types.int64),
)


@_intrinsic
def write(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes a number, of its own type, at an address."""
    return _typed(
        types.void(types.int64, value),
        lambda builder, start, number: builder.store(number, _pointer(builder, start, number.type)),
    )
