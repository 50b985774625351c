"""One operation for a compositional lookup: composed forward, exactly updated backward.

Forward it reads the rows of every id and writes the composed, pooled vector once. Backward it adds gradients up, row by
row of each partition, and updates each row that occurs once. FBGEMM's tables keep weights and states, and give their
addresses.

``operation``  what PyTorch sees: a call, its gradient, and the division of work among threads
``tables``     what it is told of tables
``threads``    shares of work in threads
``layout``     the blocks of numbers by which kernels are told of tables and ids
``loading``    whether kernels can be had, and their compilation
``compose``    the forward pass on a CPU
``update``     the backward pass on a CPU
``gradients``  from gradients of composed vectors to those of rows
``slots``      the distinct rows of a batch
``rows``       what both passes have in common
``simd``       vectors of numbers for numba

On CUDA the same is done by Triton, for the same tables and with the same results:

``triton_lookup``    what PyTorch sees
``triton_tables``    what kernels are told of tables and ids, and the sizes of tiles
``triton_backward``  the order of the backward pass, and its memory
``triton_loading``   the one place that imports Triton
``triton_kernels``   the forward pass, and the keys by which the backward pass sorts
``triton_update``    the backward pass
"""
