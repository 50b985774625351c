import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from distembed.checkpoints.metadata import parse_metadata


def test_the_path_that_torch_records_is_not_made(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "saved")
    data = (tmp_path / "saved" / ".metadata").read_bytes()
    assert b"PosixPath" in data
    found = parse_metadata(data)
    assert list(found.state_dict_metadata) == ["w"]
    assert found.storage_meta is not None and found.storage_meta.checkpoint_id is None


@pytest.mark.parametrize("argument", [7, None])
def test_a_path_of_something_else_is_refused(argument: Any) -> None:
    data = pickle.dumps(PurePosixPath("a")).replace(b"\x8c\x01a", pickle.dumps(argument, protocol=2)[2:-1])
    with pytest.raises(pickle.UnpicklingError, match="path that is none"):
        parse_metadata(data)
