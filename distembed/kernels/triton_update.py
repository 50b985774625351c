"""The backward pass of the fused lookup on CUDA: gradients in, rows updated, once each and exactly.

The ids of all tables are sorted by their keys in one partition at a time, and the sorted ids are divided into *chunks*
of equally many; a lane walks a chunk::

    keys in order   | 3 3 3 7 | 7 7 7 7 | 7 9 9 9 | ...    four in a chunk
    run of 3          whole                                 its row is updated at once
    run of 7                t         h    h                the sums of its pieces wait in ``tails`` and ``heads``
    run of 9                                 whole

A second kernel adds the pieces of a run up, first to last. Runs are found from neighbouring keys, on the device, and no
number is added to by two lanes: results are the same to the bit from run to run.
"""

import triton
import triton.language as tl

from distembed.kernels.triton_kernels import (
    FIRST_KEY,
    NO_KEY,
    PART_FIELDS,
    SIZES,
    SLICES,
    STATE_START,
    WEIGHT_START,
    addresses,
    last_at_or_before,
    part_field,
    rows_of_keys,
)

# what is done with the gradient of a row
UPDATE_SGD = tl.constexpr(0)
UPDATE_ADAGRAD = tl.constexpr(1)
UPDATE_ROW_WISE_ADAGRAD = tl.constexpr(2)
WRITE_GRADIENT = tl.constexpr(3)  # where the row is
WRITE_AT_KEY = tl.constexpr(4)
WRITE_AT_PLACE = tl.constexpr(5)  # a place of the run among sorted ids

_NONE_BEFORE = tl.constexpr(-2)


@triton.jit
def _owners(order, owners, sorted_positions, are_ids, num_features, POOLS: tl.constexpr):
    """Returns, for places among the sorted ids: the ids' places in the batch, their features, and their vectors."""
    # a pooled id's owner is its vector, bag * num_features + feature; else it is the feature
    ids = tl.load(order + sorted_positions, mask=are_ids, other=0)
    id_owners = tl.load(owners + ids, mask=are_ids, other=0)
    if POOLS:
        features = (id_owners % num_features).to(tl.int64)
        vectors = id_owners.to(tl.int64)
    else:
        features = id_owners.to(tl.int64)
        vectors = ids
    return ids, features, vectors


@triton.jit
def _shaken(values, seed, starts, columns):
    """Rounds to float16 numbers at random, up or down, so that the mean of the rounded numbers is the value."""
    # float32 has 13 more bits of mantissa: a random number of 13 bits is added, and the lowest 13 bits are cut off.
    # Below 2 ** -14 float16 is subnormal, with steps of 2 ** -24: there multiples of the step are rounded alike.
    random_bits = (
        tl.randint(seed, (starts[:, None] + columns[None, :]).to(tl.uint32)).to(tl.int32, bitcast=True) & 0x1FFF
    )
    truncated = ((values.to(tl.int32, bitcast=True) + random_bits) & -0x2000).to(tl.float32, bitcast=True)
    multiples = tl.floor(values * 16777216.0 + random_bits.to(tl.float32) * 0.0001220703125)  # 2 ** 24 and 2 ** -13
    return tl.where(tl.abs(values) < 6.103515625e-05, multiples * 5.9604644775390625e-08, truncated)


@triton.jit
def finish(
    sums,
    are_whole,
    runs,
    update,
    J: tl.constexpr,
    NUM_PARTITIONS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    MULTIPLES: tl.constexpr,
    STATE_MULTIPLE: tl.constexpr,
    ACTION: tl.constexpr,
    ROUNDS_AT_RANDOM: tl.constexpr,
):
    """Updates rows by ``sums`` of their gradients, or writes the sums, in lanes that ``are_whole``.

    ``runs`` are the rows' keys, and the sorted positions and features of the ids at which they are finished; ``update``
    has the parts' fields, the target, the states, the learning rate, eps and the seed.
    """
    # the optimizers' equations are in kernels.update._update_row
    keys, sorted_positions, features = runs
    parts, target, states, learning_rate, eps, seed = update
    columns = tl.arange(0, PADDED)
    mask = are_whole[:, None] & (columns < NUM_COLUMNS)[None, :]
    if ACTION == WRITE_AT_KEY:
        tl.store(target + (keys * NUM_COLUMNS)[:, None] + columns[None, :], sums, mask=mask)
    elif ACTION == WRITE_AT_PLACE:
        tl.store(target + (sorted_positions * NUM_COLUMNS)[:, None] + columns[None, :], sums, mask=mask)
    else:
        starts = part_field(parts, features, J, WEIGHT_START, NUM_PARTITIONS)
        rows = addresses(target, starts, keys, NUM_COLUMNS, PADDED, MULTIPLES[J])
        if ACTION == WRITE_GRADIENT:
            tl.store(rows, sums.to(target.dtype.element_ty), mask=mask)
        else:
            values = tl.load(rows, mask=mask, other=0.0).to(tl.float32)
            if ACTION == UPDATE_SGD:
                change = sums * learning_rate
            elif ACTION == UPDATE_ADAGRAD:
                state_starts = part_field(parts, features, J, STATE_START, NUM_PARTITIONS)
                state_addresses = addresses(states, state_starts, keys, NUM_COLUMNS, PADDED, STATE_MULTIPLE)
                squares = tl.load(state_addresses, mask=mask, other=1.0) + sums * sums
                change = tl.div_rn(sums * learning_rate, tl.sqrt_rn(squares) + eps)
            else:
                state_addresses = states + part_field(parts, features, J, STATE_START, NUM_PARTITIONS) + keys
                square_sums = tl.sum(sums * sums, 1)
                mean = tl.div_rn(square_sums, tl.zeros_like(square_sums) + NUM_COLUMNS)
                squares = tl.load(state_addresses, mask=are_whole, other=1.0) + mean
                change = sums * tl.div_rn(tl.zeros_like(squares) + learning_rate, tl.sqrt_rn(squares) + eps)[:, None]
            # several threads may hold the same number of a tile, such as a row's state, and each loads it for itself:
            # none is overwritten before all have it
            tl.debug_barrier()
            if ACTION == UPDATE_ADAGRAD:
                tl.store(state_addresses, squares, mask=mask)
            if ACTION == UPDATE_ROW_WISE_ADAGRAD:
                tl.store(state_addresses, squares, mask=are_whole)
            values -= change
            if ROUNDS_AT_RANDOM:
                values = _shaken(values, seed, starts + keys * NUM_COLUMNS, columns)
            tl.store(rows, values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def contributions(
    ids,
    batch,
    J: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN_START: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    MULTIPLES: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
):
    """Returns each id's share of the gradient of its row in partition ``J``: weight * gradient * its other rows.

    ``ids`` are the ids' places in the batch, whether there is one, their features and the numbers of their vectors.
    """
    positions, are_ids, features, owners = ids
    keys, id_weights, gradients, parts, weights = batch
    num_partitions: tl.constexpr = len(weights)
    columns = tl.arange(0, PADDED)
    mask = are_ids[:, None] & (columns < NUM_COLUMNS)[None, :]
    sources = (owners * WIDTH + COLUMN_START)[:, None] + columns[None, :]
    vectors = tl.load(gradients + sources, mask=mask, other=0.0)
    if id_weights is not None:
        vectors *= tl.load(id_weights + positions, mask=are_ids, other=0.0)[:, None]
    if IS_PRODUCT:
        for k in tl.static_range(num_partitions):
            if k != J:
                other_keys = tl.load(keys[k] + positions, mask=are_ids, other=0).to(tl.int64)
                starts = part_field(parts, features, k, WEIGHT_START, num_partitions)
                vectors *= rows_of_keys(weights[k], starts, other_keys, are_ids, NUM_COLUMNS, PADDED, MULTIPLES[k])
    return vectors


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SLICES)
def sum_runs(
    sorted_keys,
    order,
    owners,
    keys,
    id_weights,
    gradients,
    parts,
    weights,
    target,
    heads,
    tails,
    num_ids,
    num_features,
    states,
    learning_rate,
    eps,
    seed,
    J: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMN_START: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    MULTIPLES: tl.constexpr,
    STATE_MULTIPLE: tl.constexpr,
    IS_PRODUCT: tl.constexpr,
    POOLS: tl.constexpr,
    ACTION: tl.constexpr,
    ROUNDS_AT_RANDOM: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Adds up the gradients of each row in partition ``J``, and finishes runs that lie within a chunk.

    A run that reaches into the next chunk leaves its first piece in ``tails``; each later piece is in ``heads``.
    """
    # `before` is the key before the chunk, `key` the current and `following` the next one. A run ends where the key
    # changes or the chunk does; `is_new` tells that it began in this chunk. Ids without a key (-1) sort first.
    num_partitions: tl.constexpr = len(weights)
    batch = (keys, id_weights, gradients, parts, weights)
    update = (parts, target, states, learning_rate, eps, seed)
    chunks = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    columns = tl.arange(0, PADDED)
    is_column = (columns < NUM_COLUMNS)[None, :]
    partial_sums = (chunks * NUM_COLUMNS)[:, None] + columns[None, :]
    firsts = chunks * CHUNK
    is_chunk = firsts < num_ids
    before = tl.load(sorted_keys + firsts - 1, mask=is_chunk & (chunks > 0), other=_NONE_BEFORE).to(tl.int64)
    key = tl.load(sorted_keys + firsts, mask=is_chunk, other=NO_KEY).to(tl.int64)
    sums = tl.zeros([LANES, PADDED], tl.float32)
    for step in range(0, CHUNK):
        sorted_positions = firsts + step
        following = tl.load(sorted_keys + sorted_positions + 1, mask=sorted_positions + 1 < num_ids, other=NO_KEY).to(
            tl.int64
        )
        are_ids = key >= 0
        positions, features, vectors = _owners(order, owners, sorted_positions, are_ids, num_features, POOLS)
        ids = (positions, are_ids, features, vectors)
        sums += contributions(ids, batch, J, WIDTH, COLUMN_START, NUM_COLUMNS, PADDED, MULTIPLES, IS_PRODUCT)
        ends = are_ids & ((step == CHUNK - 1) | (following != key))
        is_new = key != before
        tl.store(heads + partial_sums, sums, mask=(ends & (key == before))[:, None] & is_column)
        tl.store(tails + partial_sums, sums, mask=(ends & is_new & (following == key))[:, None] & is_column)
        are_whole, runs = ends & is_new & (following != key), (key, sorted_positions, features)
        finish(
            sums,
            are_whole,
            runs,
            update,
            J,
            num_partitions,
            NUM_COLUMNS,
            PADDED,
            MULTIPLES,
            STATE_MULTIPLE,
            ACTION,
            ROUNDS_AT_RANDOM,
        )
        sums = tl.where(ends[:, None], 0.0, sums)
        key = following


@triton.jit
def _joined(sorted_keys, chunks, num_ids, CHUNK: tl.constexpr):
    """Returns the last key of chunks, and whether its run begins there and continues in the next chunk."""
    lasts = chunks * CHUNK + CHUNK - 1
    keys = tl.load(sorted_keys + lasts, mask=lasts < num_ids, other=NO_KEY).to(tl.int64)
    following = tl.load(sorted_keys + lasts + 1, mask=lasts + 1 < num_ids, other=NO_KEY).to(tl.int64)
    has_before = (chunks > 0) & (lasts < num_ids)
    before = tl.load(sorted_keys + chunks * CHUNK - 1, mask=has_before, other=_NONE_BEFORE).to(tl.int64)
    return keys, (keys >= 0) & (keys == following) & (keys != before)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SLICES)
def join_runs(
    sorted_keys,
    order,
    owners,
    parts,
    target,
    heads,
    tails,
    num_ids,
    num_features,
    states,
    learning_rate,
    eps,
    seed,
    J: tl.constexpr,
    NUM_PARTITIONS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    MULTIPLES: tl.constexpr,
    STATE_MULTIPLE: tl.constexpr,
    POOLS: tl.constexpr,
    ACTION: tl.constexpr,
    ROUNDS_AT_RANDOM: tl.constexpr,
    CHUNK: tl.constexpr,
    JOINED_CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Finishes the runs that begin in this program's chunks and continue in later ones.

    A program has ``JOINED_CHUNKS`` chunks; one look at all of them shows that most have none. For a run, adds
    its tail and the heads of all following chunks that begin with its key, ``LANES`` chunks at a time.
    """
    first_chunk = tl.program_id(0).to(tl.int64) * JOINED_CHUNKS
    columns = tl.arange(0, PADDED)
    is_column = columns < NUM_COLUMNS
    zero = tl.zeros([1], tl.int64)
    last_keys, any_begin = _joined(sorted_keys, first_chunk + tl.arange(0, JOINED_CHUNKS), num_ids, CHUNK)
    num_chunks = tl.where(tl.max(any_begin.to(tl.int32), 0) != 0, JOINED_CHUNKS, 0)
    for chunk in range(first_chunk, first_chunk + num_chunks):
        key, begins = _joined(sorted_keys, chunk, num_ids, CHUNK)
        if begins:
            sums = tl.load(tails + chunk * NUM_COLUMNS + columns, mask=is_column, other=0.0)
            start = chunk + 1
            goes_on = 1
            while goes_on != 0:
                chunks = start + tl.arange(0, LANES)
                firsts = tl.load(sorted_keys + chunks * CHUNK, mask=chunks * CHUNK < num_ids, other=NO_KEY).to(tl.int64)
                are_same = firsts == key
                partial_sums = (chunks * NUM_COLUMNS)[:, None] + columns[None, :]
                sums += tl.sum(tl.load(heads + partial_sums, mask=are_same[:, None] & is_column[None, :], other=0.0), 0)
                start += LANES
                goes_on = tl.min(are_same.to(tl.int32), 0)
            last_position = zero + chunk * CHUNK + CHUNK - 1
            _, features, _ = _owners(order, owners, last_position, zero == 0, num_features, POOLS)
            runs, update = (zero + key, last_position, features), (parts, target, states, learning_rate, eps, seed)
            finish(
                sums[None, :],
                zero == 0,
                runs,
                update,
                J,
                NUM_PARTITIONS,
                NUM_COLUMNS,
                PADDED,
                MULTIPLES,
                STATE_MULTIPLE,
                ACTION,
                ROUNDS_AT_RANDOM,
            )


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=SLICES)
def update_rows(
    sorted_keys,
    order,
    owners,
    parts,
    sums,
    target,
    num_ids,
    num_keys,
    num_features,
    states,
    learning_rate,
    eps,
    seed,
    J: tl.constexpr,
    NUM_PARTITIONS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    MULTIPLES: tl.constexpr,
    STATE_MULTIPLE: tl.constexpr,
    POOLS: tl.constexpr,
    AT_KEY: tl.constexpr,
    ACTION: tl.constexpr,
    ROUNDS_AT_RANDOM: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    FEATURE_BITS: tl.constexpr,
):
    """Updates each row of the batch by its sum, which ``sum_runs`` or ``join_runs`` wrote at its key or its place.

    ``AT_KEY``: a lane is a key, and sums of rows that do not occur are zeros. They are left alone, as an update by zero
    leaves them where eps is not 0. Else a lane is a place among sorted ids. The place of a run is its last one in the
    chunk in which it begins, so that each run is found here exactly once.
    """
    lanes = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    columns = tl.arange(0, PADDED)
    is_column = (columns < NUM_COLUMNS)[None, :]
    sum_addresses = sums + (lanes * NUM_COLUMNS)[:, None] + columns[None, :]
    if AT_KEY:
        key = lanes
        gradients = tl.load(sum_addresses, mask=(lanes < num_keys)[:, None] & is_column, other=0.0)
        are_runs = tl.max((gradients != 0).to(tl.int32), 1) != 0
        # the last feature whose rows begin at or before the key is one of its table's
        first_keys = parts + J * PART_FIELDS + FIRST_KEY
        features = last_at_or_before(first_keys, NUM_PARTITIONS * PART_FIELDS, num_features, key, FEATURE_BITS)
    else:
        firsts = lanes // CHUNK * CHUNK
        key = tl.load(sorted_keys + lanes, mask=lanes < num_ids, other=NO_KEY).to(tl.int64)
        following = tl.load(sorted_keys + lanes + 1, mask=lanes + 1 < num_ids, other=NO_KEY).to(tl.int64)
        has_before = (firsts > 0) & (lanes < num_ids)
        before = tl.load(sorted_keys + firsts - 1, mask=has_before, other=_NONE_BEFORE).to(tl.int64)
        # the last place of a run within a chunk, or the last place of the chunk in which a longer run begins
        are_runs = (key >= 0) & (key != before) & ((key != following) | (lanes == firsts + CHUNK - 1))
        gradients = tl.load(sum_addresses, mask=are_runs[:, None] & is_column, other=0.0)
        places, features, vectors = _owners(order, owners, lanes, are_runs, num_features, POOLS)
    runs, update = (key, lanes, features), (parts, target, states, learning_rate, eps, seed)
    finish(
        gradients,
        are_runs,
        runs,
        update,
        J,
        NUM_PARTITIONS,
        NUM_COLUMNS,
        PADDED,
        MULTIPLES,
        STATE_MULTIPLE,
        ACTION,
        ROUNDS_AT_RANDOM,
    )
