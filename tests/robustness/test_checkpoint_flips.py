"""A checkpoint in which any one bit is another is refused by the name of the file, or gives the numbers it gave."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizerWrapper

from distembed.base.errors import DamagedCheckpoint, UserError
from distembed.base.ranks import Collectives
from distembed.checkpoints import save_checkpoint
from distembed.checkpoints.checkpoint import restore_run
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.distributed

PROGRESS = {"step": 7, "samples": 448, "seconds": 1.5, "reader": {"epoch": 0, "batch": 7}}


class Trained:
    """A model of tables and a network, with an optimizer that has made a step."""

    def __init__(self) -> None:
        table = CompositionalEmbeddingBagConfig("t", 100, 8, ["f"], QuotientRemainder(100, collisions=4))
        self.model = nn.ModuleDict(
            {"tables": CompositionalEmbeddingBagCollection([table]), "network": nn.Linear(8, 3)},
        )
        self.optimizer = KeyedOptimizerWrapper(dict(self.model.named_parameters()), lambda p: torch.optim.Adam(p))
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def numbers(self) -> list[Tensor]:
        """Weights, optimizer state and random state, as copies."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value.clone() for value in (*self.model.state_dict().values(), *states, torch.get_rng_state())]

    def load(self, checkpoint: Path) -> tuple[dict[str, Any], list[Tensor]]:
        return restore_run(str(checkpoint), self.model, self.optimizer, Collectives()).values, self.numbers()

    def spoil(self) -> None:
        """Makes every number another one, so that what is not read does not pass for what is."""
        with torch.no_grad():
            for parameter, state in self.optimizer.state.items():
                parameter.fill_(-1)
                for name, value in state.items():
                    if name != "step":
                        value.fill_(-1)


def save(rank: int, world_size: int, checkpoint: Path) -> None:
    torch.manual_seed(3)
    trained = Trained()
    save_checkpoint(checkpoint, trained.model, trained.optimizer, PROGRESS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("flips") / "step-00000007"
    run_on_ranks(2, save, path)
    return path


def require_detected_or_without_effect(checkpoint: Path, flips: int, seed: int) -> None:
    files = sorted(path for path in checkpoint.iterdir() if path.is_file())
    assert {"index.json", "progress.json", "rank-0.blocks", "rank-1.blocks"} <= {path.name for path in files}
    trained, draw = Trained(), random.Random(seed)
    progress, numbers = trained.load(checkpoint)
    assert progress == PROGRESS
    for _ in range(flips):
        file = draw.choice(files)
        whole = file.read_bytes()
        position, bit = draw.randrange(len(whole)), draw.randrange(8)
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :])
        trained.spoil()
        try:
            loaded = trained.load(checkpoint)
        except UserError as error:
            assert file.name in str(error), f"bit {bit} of byte {position} of {file.name}: {error}"
        else:
            where = f"bit {bit} of byte {position} of {file.name} is another, and it is not noticed"
            assert loaded[0] == progress, where
            assert all(torch.equal(one, two) for one, two in zip(loaded[1], numbers, strict=True)), where
        finally:
            file.write_bytes(whole)
    assert all(torch.equal(one, two) for one, two in zip(trained.load(checkpoint)[1], numbers, strict=True))


def test_a_bit_that_is_another_is_noticed(checkpoint: Path) -> None:
    require_detected_or_without_effect(checkpoint, 24, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_of_many_bits_that_is_another_is_noticed(checkpoint: Path, request: pytest.FixtureRequest) -> None:
    require_detected_or_without_effect(checkpoint, request.config.getoption("--flips"), seed=1)


def test_a_file_that_ends_too_soon_is_noticed(checkpoint: Path) -> None:
    """Files are cut, emptied and removed one at a time."""
    trained = Trained()
    for file in sorted(path for path in checkpoint.iterdir() if path.is_file()):
        whole = file.read_bytes()
        for length in (0, 1, len(whole) // 2, len(whole) - 1, None):
            if length is None:
                file.unlink()
            else:
                file.write_bytes(whole[:length])
            try:
                with pytest.raises(DamagedCheckpoint, match=file.name.replace(".", r"\.")):
                    trained.load(checkpoint)
            finally:
                file.write_bytes(whole)
    assert trained.load(checkpoint)[0] == PROGRESS
