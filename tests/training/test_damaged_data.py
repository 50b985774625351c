"""Runs on datasets that are damaged, or were made before there were checksums, and what they say."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from distembed.data.dataset.manifest import CHECKSUMS_NAME, PIECE
from tests.data.test_damage import flip_a_bit
from tests.small_runs import command, config_values, distembed, write_dataset

DAMAGED = r"part-0.parquet, row group {} is damaged: its checksum differs from the recorded one"


@pytest.fixture
def own(tmp_path: Path) -> tuple[Path, Path]:
    """A config and its dataset, to damage."""
    dataset = write_dataset(tmp_path / "dataset")
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    return tmp_path / "own.yaml", dataset


@pytest.mark.distributed
def test_damaged_row_groups_end_every_rank_with_their_name(own: tuple[Path, Path], tmp_path: Path) -> None:
    config, dataset = own
    train = dataset / "train" / "part-0.parquet"
    # the splits' files are in order there, and the training split's has 8 row groups
    for end in np.cumsum(np.fromfile(dataset / CHECKSUMS_NAME, PIECE)["bytes"])[:8].tolist():
        flip_a_bit(train, end - 100)
    ended = distembed("train", config, "--run-dir", tmp_path / "run", ranks=2, code=2)
    assert "error: " in ended.stderr and "row group" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_a_row_group_that_is_damaged_for_one_rank_ends_both(own: tuple[Path, Path], tmp_path: Path) -> None:
    """The other rank waits in a collective, and the launcher ends it."""
    config, dataset = own
    flip_a_bit(dataset / "train" / "part-0.parquet", 1000)
    arguments = ("train", config, "--run-dir", tmp_path / "run")
    ended = subprocess.run(command(*arguments, ranks=2), capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1  # the launcher's own
    assert DAMAGED.format(0) in ended.stderr and "fetch the file again from where a whole copy is" in ended.stderr
