"""One operation for a compositional lookup: composed forward, exactly updated backward.

Forward it reads the rows of every id and writes the composed, pooled vector once. Backward it adds gradients up, row by
row of each partition, and updates each row that occurs once. FBGEMM's tables keep weights and states, and give their
addresses. ``operation`` runs on a CPU, by kernels that numba compiles; ``triton_lookup`` runs on CUDA, for the same
tables and with the same results. ``dots`` multiplies pairs of the vectors that DLRM looks up, on a CPU.
"""
