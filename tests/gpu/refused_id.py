"""Looks up an id that lies outside of its table, in a process that this ends: ``python -m tests.gpu.refused_id cuda``.

A card finds it in a kernel, after which its context is of no use. On a processor the check of a card is run.
"""

import sys

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.embedding.ids import IdMapper, _assert_inside

NUM_EMBEDDINGS = 50


def main(device: torch.device, bad_id: int) -> None:
    table = CompositionalEmbeddingBagConfig("t", NUM_EMBEDDINGS, 8, ["f"])
    mapper = IdMapper([table])
    for value in (NUM_EMBEDDINGS - 1, bad_id):
        batch = KeyedJaggedTensor(["f"], torch.tensor([0, value]), lengths=torch.tensor([1, 1])).to(device)
        batch.length_per_key()
        if device.type == "cuda":
            mapper(batch)
            torch.cuda.synchronize()
        else:
            _assert_inside(batch, mapper._find_layout(batch).device_bounds)
        print(f"{value} was accepted", flush=True)


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), int(sys.argv[2]))
