"""The description of a step's lookup for the CPU kernels: blocks of 64-bit numbers, with a name for each place.

Kernels are compiled once for all groups of tables, so that all differences between groups are data. They take the
address of one block, the *job*, and find everything else from there. (Numba would count references to arrays in every
function that takes one, which takes longer than a short row.)
"""

# the job: addresses of arrays and blocks, and what holds for all tables
IDS = 0  # int64, feature after feature
OFFSETS = 1  # int64, where bags begin and the last one ends
WEIGHTS = 2  # float32, of the ids; 0 where they have none
FEATURES = 3
NUM_FEATURES = 4
PARTITIONS = 5
NUM_PARTITIONS = 6
PARTS = 7  # partitions within features
VECTORS = 8  # float32: the composed vectors, or their gradients
STRIDE = 9  # bytes from one bag's vector to that of the feature's next bag
WIDTH = 10  # columns of a composed vector
IS_PRODUCT = 11  # whether an id's vectors are multiplied; else each is added from its COLUMN_START on
JOB_FIELDS = 12

# a partition, the same for all features; addresses are those of this step
NUM_COLUMNS = 0  # of its vectors
COLUMN_START = 1  # first column of the composed vector that its vectors take part in
IS_HALF = 2  # whether rows are float16, else float32
ROW_BYTES = 3
STATE_ROW_BYTES = 4
WEIGHT_ADDRESS = 5
STATE_ADDRESS = 6  # of the optimizer's state
GRADIENT_ADDRESS = 7  # where gradients are added up; 0 where rows are updated instead
OPTIMIZER = 8
LEARNING_RATE = 9  # float64, as is the next
EPS = 10
ROUNDING_SEED = 11  # of this step's rounding of float16 rows at random; 0 to round to the nearest
PARTITION_FIELDS = 12

# a part, one partition of one feature's table: row = min((id // divisor) % modulus, last row) - first row,
# of the id or of its hash
DIVISOR = 0
DIVISOR_RECIPROCAL = 1  # ids below 2 ** 32 are multiplied by it in place of a division; 0 to divide
MODULUS = 2  # 0 for none
MODULUS_RECIPROCAL = 3
FIRST_ROW = 4  # the first row on this rank
NUM_ROWS = 5  # number of rows on this rank
WEIGHT_START = 6  # bytes from the partition's address to the first row
STATE_START = 7
GRADIENT_START = 8
LAST_HASH = 9  # the largest hash that is not drawn again; 0 where ids are not hashed
KEY_BEFORE = 10  # the keys of the hash
KEY_AFTER = 11
LAST_ROW = 12  # the row in place of larger ones, on all ranks; 2 ** 63 - 1 for none
FIRST_COLUMN = 13  # the first column on this rank
ROUNDING_KEY = 14  # a number of the table's partition, by which it is rounded unlike others
PART_FIELDS = 15

# a feature in this step
FIRST_BAG = 0  # place of its first bag in the offsets
NUM_BAGS = 1
VECTOR_START = 2  # bytes from the address of all vectors to the feature's first
FEATURE_FIELDS = 3

FLOAT_BYTES, ADDRESS_BYTES = 4, 8

BLOCK_IDS = 64
"""Number of ids that are mapped, and whose rows are prefetched, before the first of them is composed."""


def place_bits(num_rows: int, num_ids: int) -> int:
    """Returns the smallest b > 0 for which ``2 ** b`` places suffice: one a row, or two an id where that is fewer."""
    num_bits, needed = 1, min(num_rows, 2 * num_ids)
    while (1 << num_bits) < needed:
        num_bits += 1
    return num_bits


SGD, ADAGRAD, ROW_WISE_ADAGRAD = range(3)


# the job of dot products (``dots``): addresses and sizes of the rows' dense vectors, if there are any, and of features'
DENSE = 0  # float32 [rows, DIM]; 0 for none
FEATURE_VECTORS = 1  # float32 [rows, NUM_FEATURE_VECTORS, DIM]
NUM_FEATURE_VECTORS = 2
DIM = 3
OUTPUTS = 4  # [rows, OUTPUT_WIDTH], or their gradients
OUTPUT_WIDTH = 5  # a multiple of DOTS_ALIGNMENT
IS_BF16 = 6  # whether outputs are bf16, else float32
DENSE_GRADIENTS = 7  # as DENSE
VECTOR_GRADIENTS = 8  # as FEATURE_VECTORS
DOTS_FIELDS = 9

DOTS_ALIGNMENT = 16


def dots_scratch(num_vectors: int, dim: int, output_width: int) -> int:
    """Returns the float32 numbers that dot products of this many vectors, the dense one included, need as scratch."""
    height, padded_dim = (-(-count // DOTS_ALIGNMENT) * DOTS_ALIGNMENT for count in (num_vectors, dim))
    return 2 * height * padded_dim + height**2 + output_width + 3 * DOTS_ALIGNMENT
