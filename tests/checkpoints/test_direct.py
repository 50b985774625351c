"""Weights that are read straight into a module are those that ``torch.distributed.checkpoint`` reads, or refused."""

import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from torch import nn

from distembed.base.errors import DamagedCheckpoint, UserError
from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.checkpoints.direct import load_weights_alone
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import MAX_BLOCK_BYTES
from tests.data.test_damage import flip_a_bit


class Weights(nn.Module):
    """Weights of several types, sizes and layouts: none, one number, part of a block, several blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows = MAX_BLOCK_BYTES // (4 * 64)
        for name, size, dtype in (
            ("several_blocks", (2 * rows + 77, 64), torch.float32),
            ("halves", (999, 65), torch.bfloat16),
            ("small", (3, 5), torch.float32),
            ("one", (), torch.float32),
            ("none", (0, 4), torch.float32),
        ):
            self.register_parameter(name, nn.Parameter(torch.randn(size, generator=generator).to(dtype)))
        self.register_buffer("counts", torch.randint(2**40, (20_000,), generator=generator))
        transposed = torch.randn(300, 200, generator=generator).T
        self.register_buffer("transposed", transposed)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("direct") / "weights"
    save_checkpoint(path, Weights(1), progress={"step": 7})
    return path


@pytest.mark.parametrize("place", ["local", "url", "memory"])
def test_all_weights_are_read_to_the_bit(saved: Path, place: str) -> None:
    path = str(saved) if place == "local" else f"file://{saved}"
    if place == "memory":
        path = "memory://direct/weights"
        fsspec.filesystem("memory").put(str(saved), "/direct/weights", recursive=True)
    one, other = Weights(2), Weights(3)
    assert load_weights_alone(path, one) == {"step": 7}
    load_checkpoint(saved, other)
    expected = Weights(1).state_dict()
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]) and torch.equal(weight, expected[name]), name


def test_every_damaged_byte_is_noticed(saved: Path, tmp_path: Path) -> None:
    file = saved / "__0_0.distcp"
    blocks = SavedCheckpoint.read(str(saved)).metadata.storage_data
    own = [info for index, info in blocks.items() if index.fqn.startswith("model.")]
    assert len(own) == 3 + 5  # of the empty weight there is none
    places = [info.offset + place for info in own for place in (70, info.length // 2, info.length - 1)]
    for number, place in enumerate(places):
        damaged = tmp_path / str(number)
        shutil.copytree(saved, damaged)
        flip_a_bit(damaged / file.name, place)
        with pytest.raises(DamagedCheckpoint, match="does not have the checksum that it was written with"):
            load_weights_alone(str(damaged), Weights(2))
        shutil.rmtree(damaged)
    shutil.copytree(saved, tmp_path / "cut")
    (tmp_path / "cut" / file.name).write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DamagedCheckpoint, match="ends after"):
        load_weights_alone(str(tmp_path / "cut"), Weights(2))


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_read(saved: Path) -> None:
    other = Weights(2)
    other.small = nn.Parameter(torch.zeros(4, 5))
    before = other.halves.clone()
    with pytest.raises(UserError, match=r"small: \(3, 5\) float32 in the checkpoint, \(4, 5\) float32 in the model"):
        load_weights_alone(str(saved), other)
    assert torch.equal(other.halves, before)
