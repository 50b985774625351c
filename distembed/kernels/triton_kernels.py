"""The forward pass of the fused lookup on CUDA, and functions that both passes use, in Triton.

A *key* numbers the rows of one partition through all tables of the group: row r of table t has the key
``rows of tables 0 to t-1 + r``. All tiles are ``[lanes, columns]``: a lane is a bag, or an id where each has its own
vector (sequences). Tuples have an entry for each partition.
"""

import triton
import triton.language as tl

# of a part, which is one partition of one feature's table; all numbers are int64
DIVISOR = tl.constexpr(0)
MODULUS = tl.constexpr(1)
FIRST_ROW = tl.constexpr(2)  # the first row on this rank
NUM_ROWS = tl.constexpr(3)  # number of rows on this rank
FIRST_KEY = tl.constexpr(4)  # key of FIRST_ROW
WEIGHT_START = tl.constexpr(5)  # a key's numbers begin at WEIGHT_START + key * columns; may be negative
STATE_START = tl.constexpr(6)
FIRST_FEATURE = tl.constexpr(7)  # of the features of the table
PART_FIELDS = tl.constexpr(8)

NO_KEY = tl.constexpr(-1)

SIZES = ["num_ids", "num_keys", "num_bags", "num_features", "most_rows", "seed"]
"""Arguments for whose values no kernel is compiled anew."""
SLICES = ["ids", "offsets", "id_weights"]
"""Arguments for whose alignment no kernel is compiled anew: they may be slices that begin anywhere."""


@triton.jit
def _divide(numbers, divisors):
    """Divides numbers that are not negative; 32-bit division is several times faster, where all of a tile fit it."""
    if tl.max(tl.maximum(numbers, divisors), 0) < 4294967296:
        quotients = (numbers.to(tl.uint32) // divisors.to(tl.uint32)).to(tl.int64)
    else:
        quotients = numbers // divisors
    return quotients


@triton.jit
def part_field(parts, features, j: tl.constexpr, field: tl.constexpr, NUM_PARTITIONS: tl.constexpr):
    """Returns a number of partition ``j`` of each lane's feature."""
    return tl.load(parts + (features * NUM_PARTITIONS + j) * PART_FIELDS + field)


@triton.jit
def _keys(ids, features, parts, j: tl.constexpr, RULE: tl.constexpr, NUM_PARTITIONS: tl.constexpr):
    """Returns the keys of ids in partition ``j``, NO_KEY where the row is not on this rank.

    ``RULE`` is 1 where rows need a division, 2 where they need a modulus, 3 where they need both.
    """
    rows = ids
    if RULE % 2 == 1:
        rows = _divide(rows, part_field(parts, features, j, DIVISOR, NUM_PARTITIONS))
    if RULE >= 2:
        modulus = part_field(parts, features, j, MODULUS, NUM_PARTITIONS)
        rows -= _divide(rows, modulus) * modulus
    rows -= part_field(parts, features, j, FIRST_ROW, NUM_PARTITIONS)
    are_here = (ids >= 0) & (rows >= 0) & (rows < part_field(parts, features, j, NUM_ROWS, NUM_PARTITIONS))
    return tl.where(are_here, rows + part_field(parts, features, j, FIRST_KEY, NUM_PARTITIONS), NO_KEY)


@triton.jit
def addresses(numbers, starts, keys, NUM_COLUMNS: tl.constexpr, PADDED: tl.constexpr, MULTIPLE: tl.constexpr):
    """Returns the addresses of the numbers of each lane's row; rows begin at multiples of ``MULTIPLE`` numbers.

    Triton reads and writes 128 bits at once only where it knows this.
    """
    row_starts = tl.multiple_of(starts + keys * NUM_COLUMNS, MULTIPLE)
    return numbers + (row_starts[:, None] + tl.arange(0, PADDED)[None, :])


@triton.jit
def rows_of_keys(
    weights, starts, keys, are_ids, NUM_COLUMNS: tl.constexpr, PADDED: tl.constexpr, MULTIPLE: tl.constexpr
):
    """Returns the rows of keys in float32, and zeros for lanes without an id or a key."""
    mask = (are_ids & (keys >= 0))[:, None] & (tl.arange(0, PADDED) < NUM_COLUMNS)[None, :]
    row_addresses = addresses(weights, starts, keys, NUM_COLUMNS, PADDED, MULTIPLE)
    return tl.load(row_addresses, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def last_at_or_before(starts, stride, count, numbers, BITS: tl.constexpr):
    """Returns the last i below ``count`` with ``starts[i * stride] <= number``, 0 if there is none, for each number.

    Starts ascend, and ``count`` is at most ``2 ** BITS``; a binary search.
    """
    found = tl.zeros_like(numbers)
    for bit in tl.static_range(BITS):
        tried = found + (1 << (BITS - 1 - bit))
        found_starts = tl.load(starts + tried * stride, mask=tried < count, other=0).to(tl.int64)
        found = tl.where((tried < count) & (found_starts <= numbers), tried, found)
    return found


@triton.jit
def _bags(
    offsets, num_ids, num_bags, num_features, POOLS: tl.constexpr, LANES: tl.constexpr, FEATURE_BITS: tl.constexpr
):
    """Returns each lane's feature, first id, last id + 1 and vector; -1 is the vector of a lane without work.

    A lane has a bag where ``POOLS``; bags come feature after feature, vectors bag after bag. Without offsets bag i has
    id i alone. Else a lane has an id, and the last feature that begins at or before the id is its feature.
    """
    lanes = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    if POOLS:
        is_bag = lanes < num_bags.to(tl.int64) * num_features
        if offsets is None:
            starts, ends = lanes, tl.where(is_bag, lanes + 1, lanes)
        else:
            starts = tl.load(offsets + lanes, mask=is_bag, other=0).to(tl.int64)
            ends = tl.load(offsets + lanes + 1, mask=is_bag, other=0).to(tl.int64)
        features = tl.where(is_bag, lanes // num_bags, 0)
        vectors = tl.where(is_bag, (lanes - features * num_bags) * num_features + features, -1)
    else:
        ids_end = tl.load(offsets + num_bags.to(tl.int64) * num_features).to(tl.int64)
        features = last_at_or_before(offsets, num_bags, num_features, lanes, FEATURE_BITS)
        starts, ends = lanes, tl.where(lanes < ids_end, lanes + 1, lanes)
        vectors = tl.where(lanes < num_ids, lanes, -1)
    return features, starts, ends, vectors


@triton.jit
def _composed(
    positions,
    are_ids,
    features,
    tables,
    FIRST: tl.constexpr,
    STOP: tl.constexpr,
    MULTIPLES: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Returns the product or the sum of the rows of ids at ``positions`` in partitions ``FIRST`` to ``STOP - 1``."""
    keys, parts, weights = tables
    num_partitions: tl.constexpr = len(weights)
    vectors = tl.zeros([positions.shape[0], PADDED], tl.float32)
    for j in tl.static_range(FIRST, STOP):
        starts = part_field(parts, features, j, WEIGHT_START, num_partitions)
        row_keys = tl.load(keys[j] + positions, mask=are_ids, other=NO_KEY).to(tl.int64)
        rows = rows_of_keys(weights[j], starts, row_keys, are_ids, NUM_COLUMNS, PADDED, MULTIPLES[j])
        if j == FIRST:
            vectors = rows
        elif IS_PRODUCT:
            vectors *= rows
        else:
            vectors += rows
    return vectors


@triton.jit
def _pool(
    batch,
    bags,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    MULTIPLES: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
):
    """Writes the output columns that the partitions of ``GROUP`` share: the lane's ids composed and summed."""
    tables, id_weights, outputs = batch
    features, starts, ends, vectors = bags
    FIRST: tl.constexpr = GROUPS[5 * GROUP]
    STOP: tl.constexpr = GROUPS[5 * GROUP + 1]
    COLUMN_START: tl.constexpr = GROUPS[5 * GROUP + 2]
    NUM_COLUMNS: tl.constexpr = GROUPS[5 * GROUP + 3]
    PADDED: tl.constexpr = GROUPS[5 * GROUP + 4]
    # all lanes of a tile take as many steps as its longest bag; a lane without a further id adds zeros
    sums = tl.zeros([starts.shape[0], PADDED], tl.float32)
    for step in range(0, tl.max(ends - starts, 0)):
        positions = starts + step
        are_ids = positions < ends
        composed = _composed(
            positions, are_ids, features, tables, FIRST, STOP, MULTIPLES, IS_PRODUCT, NUM_COLUMNS, PADDED
        )
        if id_weights is not None:
            composed *= tl.load(id_weights + positions, mask=are_ids, other=0.0)[:, None]
        sums += composed
    columns = tl.arange(0, PADDED)
    targets = (vectors * WIDTH + COLUMN_START)[:, None] + columns[None, :]
    tl.store(outputs + targets, sums, mask=(vectors >= 0)[:, None] & (columns < NUM_COLUMNS)[None, :])


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SLICES)
def compose(
    keys,
    offsets,
    id_weights,
    parts,
    weights,
    outputs,
    num_ids,
    num_bags,
    num_features,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    MULTIPLES: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
    POOLS: tl.constexpr,
    LANES: tl.constexpr,
    FEATURE_BITS: tl.constexpr,
):
    """Writes the composed, pooled vectors of ids, whose keys ``write_keys`` has written.

    ``GROUPS`` has five numbers for each group of partitions that share columns: first partition, last partition + 1,
    first column, number of columns, and this number rounded up to a power of two. Rows of partition j begin at
    multiples of ``MULTIPLES[j]`` numbers.
    """
    bags = _bags(offsets, num_ids, num_bags, num_features, POOLS, LANES, FEATURE_BITS)
    batch = ((keys, parts, weights), id_weights, outputs)
    for i in tl.static_range(NUM_GROUPS):
        _pool(batch, bags, i, WIDTH, GROUPS, MULTIPLES, IS_PRODUCT)


@triton.jit
def _feature_starts(features, offsets, num_bags, num_features):
    """Returns the place of each feature's first id; of ``num_features``, the end of the last bag."""
    if offsets is None:
        starts = features.to(tl.int64) * num_bags
    else:
        bags = features.to(tl.int64) * num_bags
        starts = tl.load(offsets + bags, mask=features <= num_features, other=0).to(tl.int64)
    return starts


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SLICES)
def write_keys(
    ids,
    offsets,
    parts,
    keys,
    owners,
    feature_starts,
    num_ids,
    num_bags,
    num_features,
    RULES: tl.constexpr,
    POOLS: tl.constexpr,
    LANES: tl.constexpr,
    FEATURE_BITS: tl.constexpr,
):
    """Writes each id's key in every partition.

    For a backward pass also writes each id's *owner*, which is its bag's vector, or the feature of a sequence's id, and
    the place where each feature's ids begin and the last one's end. Else ``owners`` and ``feature_starts`` are None.
    """
    num_partitions: tl.constexpr = len(keys)
    features, starts, ends, vectors = _bags(offsets, num_ids, num_bags, num_features, POOLS, LANES, FEATURE_BITS)
    for step in range(0, tl.max(ends - starts, 0)):
        positions = starts + step
        are_ids = positions < ends
        bag_ids = tl.load(ids + positions, mask=are_ids, other=0)
        if owners is not None:
            if POOLS:
                lane_owners = vectors
            else:
                lane_owners = features
            tl.store(owners + positions, lane_owners.to(tl.int32), mask=are_ids)
        for j in tl.static_range(num_partitions):
            row_keys = _keys(bag_ids, features, parts, j, RULES[j], num_partitions)
            tl.store(keys[j] + positions, row_keys.to(keys[j].dtype.element_ty), mask=are_ids)
    # ids after the end of the last bag are in no bag: they get NO_KEY
    ids_end = _feature_starts(num_features, offsets, num_bags, num_features)
    for start in range(ids_end + tl.program_id(0) * LANES, num_ids, tl.num_programs(0) * LANES):
        positions = start + tl.arange(0, LANES)
        for j in tl.static_range(num_partitions):
            no_keys = tl.full([LANES], NO_KEY, keys[j].dtype.element_ty)
            tl.store(keys[j] + positions, no_keys, mask=positions < num_ids)
    if feature_starts is not None:
        if tl.program_id(0) == 0:
            for first in range(0, num_features + 1, LANES):
                numbers = first + tl.arange(0, LANES)
                own_starts = _feature_starts(numbers, offsets, num_bags, num_features)
                tl.store(feature_starts + numbers, own_starts, mask=numbers <= num_features)
