"""Checkpoints in torch's own format, of earlier versions of distembed: they are read, and nothing is executed."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from distembed.base.errors import DamagedCheckpoint, UserError
from distembed.checkpoints.saved import verify_checkpoint
from distembed.checkpoints.torch_format import parse_torch_index
from tests.canary import Canary
from tests.checkpoints.test_checkpoint import check_load, save_trained
from tests.checkpoints.test_damage import load, saved
from tests.layouts import build
from tests.ranks import run_on_ranks
from tests.robustness.checkpoint_numbers import change_metadata, to_earlier_format, write_metadata

# torch says that it takes one process for one process
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = saved(tmp_path)
    to_earlier_format(path)
    return path


def test_it_is_read_and_verified(checkpoint: Path) -> None:
    assert {path.name for path in checkpoint.iterdir()} == {".metadata", "__0_0.distcp", "progress.json"}
    assert all((parameter == 1).all() for parameter in load(checkpoint).parameters())
    found = verify_checkpoint(str(checkpoint))
    assert found.problems == [] and found.num_files == 3
    whole = bytearray((checkpoint / "__0_0.distcp").read_bytes())
    whole[len(whole) // 2] ^= 1
    (checkpoint / "__0_0.distcp").write_bytes(whole)
    assert len(verify_checkpoint(str(checkpoint)).problems) == 1
    (checkpoint / ".metadata").write_bytes((checkpoint / ".metadata").read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata does not have the checksum"):
        load(checkpoint)


def save_row_wise(rank: int, world_size: int, folder: Path) -> None:
    save_trained(folder / "it", build("row_wise", "row_wise_adagrad"))


def load_column_wise(rank: int, world_size: int, folder: Path) -> None:
    check_load(folder / "it", build("column_wise", "row_wise_adagrad"))


@pytest.mark.distributed
def test_other_layouts_read_it(tmp_path: Path) -> None:
    run_on_ranks(1, save_row_wise, tmp_path)
    to_earlier_format(tmp_path / "it")
    run_on_ranks(2, load_column_wise, tmp_path)


@pytest.mark.parametrize("place", ["alone", "planner_data", "beside a tensor", "as a dtype"])
def test_metadata_executes_nothing(place: str, checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    def harm(found: Any) -> Any:
        if place == "alone":
            return Canary(canary)
        entry = found.state_dict_metadata["model.weight"]
        if place == "planner_data":  # the rest stays as it was
            found.planner_data = Canary(canary)
        elif place == "beside a tensor":
            entry.harm = Canary(canary)
        else:
            entry.properties.dtype = Canary(canary)
        return found

    change_metadata(checkpoint, harm)
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata: it names pathlib\S*Path\.touch, which no checkpoint has"):
        load(checkpoint)
    assert not canary.exists()
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert canary.exists()  # it was harmful


def test_a_block_executes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    canary, block = tmp_path / "canary", io.BytesIO()
    torch.save(Canary(canary), block)
    (checkpoint / "__0_0.distcp").write_bytes(block.getvalue())

    def place(found: Metadata) -> Metadata:
        for info in found.storage_data.values():
            info.offset, info.length = 0, len(block.getvalue())
        return found

    change_metadata(checkpoint, place)
    change_metadata(checkpoint, place)  # with the checksums of the new places
    with pytest.raises(DamagedCheckpoint, match="a block holds something else than a tensor"):
        load(checkpoint)
    assert not canary.exists()


def info_of(found: Metadata) -> dict[str, Any]:
    return vars(next(iter(found.storage_data.values())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: found.state_dict_metadata.update(x=found.state_dict_metadata.pop("model.weight")),
            "KeyError|'x'",
        ),
        # torch would unpickle it as it comes
        (lambda found: found.state_dict_metadata.update({"model.weight": BytesStorageMetadata()}), "weight: absent in"),
        (lambda found: info_of(found).update(relative_path="../x.distcp"), "reads from"),
        (lambda found: info_of(found).update(relative_path=7), "reads from 7"),
        (lambda found: info_of(found).update(length=-1), "reads -1 bytes"),
        (lambda found: info_of(found).pop("checksum"), "no checksums of some blocks"),
        (lambda found: info_of(found).update(transform_descriptors=["zip"]), "are transformed"),
        (lambda found: vars(found).update(storage_data=None), "damaged"),
        (lambda found: vars(found.state_dict_metadata["model.bias"]).update(size=5), "damaged"),
        (lambda found: vars(found.state_dict_metadata["model.bias"]).update(size=torch.Size([2])), "outside of its"),
        (lambda found: vars(found.state_dict_metadata["model.bias"]).update(chunks=[3]), "damaged"),
        (lambda found: vars(found.state_dict_metadata["model.bias"].properties).update(dtype=None), "without a type"),
    ],
)
def test_metadata_that_no_checkpoint_has_is_refused(
    change: Callable[[Metadata], object], message: str, checkpoint: Path
) -> None:
    def changed(found: Metadata) -> Metadata:
        change(found)
        return found

    change_metadata(checkpoint, changed)
    with pytest.raises(UserError, match=message):
        load(checkpoint)


def pickled(*parts: bytes) -> bytes:
    return pickle.PROTO + b"\x04" + b"".join(parts) + pickle.STOP


def known(name: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (metadata.__name__, name)) + b"\x93"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        pickle.dumps(None),
        pickled(pickle.BYTEARRAY8 + (2**40).to_bytes(8, "little")),
        pickled(pickle.BINUNICODE + b"\xff\xff\xff\x7f"),
        pickled(known("Metadata"), pickle.EMPTY_DICT, pickle.BUILD),  # would change the class
        pickled(known("Metadata"), b")}", pickle.NEWOBJ_EX),
        pickled(known("_MEM_FORMAT_ENCODING"), b"N\x85R"),
    ],
)
def test_other_pickles_are_refused_and_change_no_class(data: bytes, checkpoint: Path) -> None:
    classes = [*(getattr(metadata, name) for name in metadata.__all__), filesystem._StorageInfo]
    before = [dict(vars(known_class)) for known_class in classes]
    write_metadata(checkpoint, data)
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata: ") as raised:
        load(checkpoint)
    assert "\n" not in str(raised.value)
    assert [dict(vars(known_class)) for known_class in classes] == before


def test_one_list_of_blocks_cannot_serve_many_tensors(checkpoint: Path) -> None:
    def repeat(found: Metadata) -> Metadata:
        entry = found.state_dict_metadata["model.bias"]
        found.state_dict_metadata.update({str(number): entry for number in range(100)})
        return found

    change_metadata(checkpoint, repeat)
    with pytest.raises(DamagedCheckpoint, match=r"\.metadata: "):
        load(checkpoint)


def test_plain_values_and_paths_of_torchs_own_files_are_left_out(tmp_path: Path) -> None:
    state = {"a": {"b": [torch.ones(3, 2), "text"], "c": torch.tensor(1.5, dtype=torch.float64)}, "n": 2**40}
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    data = (tmp_path / "saved" / ".metadata").read_bytes()
    assert b"PosixPath" in data
    found = parse_torch_index(data)
    assert {name: (tensor.size, tensor.dtype) for name, tensor in found.items()} == {
        "a.b.0": ((3, 2), torch.float32),
        "a.c": ((), torch.float64),
    }
    assert all(block.checksum is None and block.is_archive for tensor in found.values() for block in tensor.blocks)
