"""A small ``.metadata`` that would take for ever or much memory, or change classes, is refused; real ones are read."""

import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from distembed.checkpoints import save_checkpoint
from distembed.checkpoints.metadata import parse_metadata
from distembed.checkpoints.transfer import DamagedCheckpoint
from tests.checkpoints.test_damage import load, saved, without_checksums
from tests.layouts import LAYOUTS, OPTIMIZER_NAMES, build
from tests.ranks import run_on_ranks

# without a process group torch says that it takes this for one process, which it is
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ROOM_BYTES = 2**30
LEVELS = 60
MANY = 10_000
CLASSES = [*(getattr(torch_metadata, name) for name in torch_metadata.__all__), _StorageInfo]

# the instructions of a pickle, by what they leave
HOME = "torch.distributed.checkpoint.metadata"
EMPTY, KEEP = pickle.EMPTY_DICT, pickle.MEMOIZE


def number(value: int) -> bytes:
    data = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(data)]) + data


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


def kept(place: int) -> bytes:
    """What the instruction KEEP number ``place`` kept."""
    return pickle.LONG_BINGET + place.to_bytes(4, "little")


def known(name: str, home: str = HOME) -> bytes:
    return text(home) + text(name) + pickle.STACK_GLOBAL


def new(name: str, home: str = HOME) -> bytes:
    return known(name, home) + pickle.EMPTY_TUPLE + pickle.NEWOBJ


def filled(*items: bytes) -> bytes:
    return EMPTY + pickle.MARK + b"".join(items) + pickle.SETITEMS


def as_key(value: bytes) -> bytes:
    return EMPTY + value + pickle.NONE + pickle.SETITEM


def doubled(start: bytes, double: Callable[[bytes], bytes]) -> bytes:
    """Keeps values that hold the one before twice, level after level."""
    levels = (start, *(double(kept(level)) for level in range(LEVELS)))
    return filled(*(text(str(level)) + value + KEEP for level, value in enumerate(levels)))


LAST = kept(LEVELS)


def size(*numbers: int) -> bytes:
    argument = pickle.MARK + b"".join(map(number, numbers)) + pickle.TUPLE
    return known("Size", "torch") + argument + pickle.TUPLE1 + pickle.REDUCE


def built(name: str, home: str = HOME, /, **attributes: bytes) -> bytes:
    return new(name, home) + filled(*(text(key) + value for key, value in attributes.items())) + pickle.BUILD


def metadata(tensors: bytes, blocks: bytes = EMPTY) -> bytes:
    return built("Metadata", state_dict_metadata=tensors, storage_data=blocks)


def tensor(chunks: bytes) -> bytes:
    properties = (
        known("float32", "torch"),
        known("_get_layout", "torch.serialization") + text("torch.strided") + pickle.TUPLE1 + pickle.REDUCE,
        pickle.NEWFALSE,
        known("_MEM_FORMAT_ENCODING") + number(0) + pickle.TUPLE1 + pickle.REDUCE,
        pickle.NEWFALSE,
    )
    values = new("TensorProperties") + pickle.MARK + b"".join(properties) + pickle.TUPLE + pickle.BUILD
    return built("TensorStorageMetadata", properties=values, size=size(4), chunks=chunks)


def blocks_of_one_hash() -> bytes:
    """Blocks at places whose hashes are the same, as that of a tuple can be inverted (it is xxHash, without a key)."""
    prime_1, prime_2, prime_5, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64 - 1
    offsets: list[tuple[int, int]] = []
    first = 0
    while len(offsets) < MANY:
        first += 1
        state = (prime_5 + first * prime_2) & mask
        state = (state << 31 | state >> 33) * prime_1 & mask
        second = (12345 - state) * pow(prime_2, -1, 2**64) & mask
        if second < 2**61 - 1:
            offsets.append((first, second))
    assert len({hash(offset) for offset in offsets}) == 1
    keys = (built("MetadataIndex", fqn=text("x"), offset=size(*offset)) for offset in offsets)
    return metadata(EMPTY, filled(*(key + pickle.NONE for key in keys)))


def slots(target: bytes) -> bytes:
    """Sets an attribute to None by the second of the two states that a class with slots has."""
    return target + pickle.NONE + filled(text("__hash__") + pickle.NONE) + pickle.TUPLE2 + pickle.BUILD


# what -> its instructions, and what is said of it
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "tuple that is doubled": (
        lambda: doubled(pickle.EMPTY_TUPLE, lambda last: last * 2 + pickle.TUPLE2) + as_key(LAST),
        "it nests tuples",
    ),
    "tuple that is doubled by DUP": (
        lambda: as_key(b")" + (pickle.DUP + pickle.TUPLE2) * LEVELS),
        "it has the instruction DUP",
    ),
    "tuple in a tuple": (lambda: as_key(pickle.EMPTY_TUPLE + pickle.TUPLE1 * MANY), "it nests tuples"),
    "list in a list": (
        lambda: doubled(pickle.EMPTY_LIST, lambda last: b"](" + last * 2 + pickle.APPENDS),
        "a list holds what it cannot",
    ),
    "path that is doubled": (
        lambda: (
            doubled(EMPTY, lambda last: filled(text("a") + last, text("b") + last))
            + built("_StorageInfo", "torch.distributed.checkpoint.filesystem", relative_path=LAST)
        ),
        "a part of it holds what it cannot",
    ),
    "record in a record": (
        lambda: doubled(EMPTY, lambda last: built("ChunkStorageMetadata", offsets=last, sizes=last)),
        "a part of it holds what it cannot",
    ),
    "place of 8 GiB": (lambda: b")" + pickle.LONG_BINPUT + b"\x00\x00\x00\x20", "it has the instruction LONG_BINPUT"),
    "bytes to come": (lambda: pickle.BYTEARRAY8 + (2**40).to_bytes(8, "little"), "it has the instruction BYTEARRAY8"),
    "text to come": (lambda: pickle.BINUNICODE + b"\xff\xff\xff\x7f", "it ends too early"),
    "frame to come": (lambda: pickle.FRAME + (2**60).to_bytes(8, "little"), r".*"),
    "no instruction": (lambda: b"\xff", "it has the instruction 0xff"),
    "slots of a class": (lambda: slots(known("MetadataIndex")), "it nests tuples"),
    "slots": (lambda: slots(new("MetadataIndex")), "it nests tuples"),
    "state of a dtype": (lambda: known("float32", "torch") + EMPTY + pickle.BUILD, "it changes what is no new part"),
    "dict of a class": (lambda: known("Metadata") + filled(text("x") + b"N") + b"b", "it changes what is no new part"),
    "built again": (
        lambda: built("MetadataIndex", fqn=text("x")) + filled(text("fqn") + b"]") + pickle.BUILD,
        "it changes what is no new part",
    ),
    "called with keywords": (lambda: known("Metadata") + b")}" + pickle.NEWOBJ_EX, "it has the instruction NEWOBJ_EX"),
    "called otherwise": (lambda: known("Metadata") + pickle.NONE + b"\x85R", "it calls what no checkpoint has"),
    "made otherwise": (lambda: known("Size", "torch") + b")" + pickle.NEWOBJ, "it makes what no checkpoint has"),
    "key that is none": (lambda: as_key(pickle.NONE), "a dict has a key that it cannot"),
    "key without a name": (lambda: as_key(new("MetadataIndex")), "a dict has a key that it cannot"),
    "blocks of one hash": (blocks_of_one_hash, "it lists a block twice"),
    "size of many dimensions": (
        lambda: b"(" + pickle.NONE * MANY + b"t" + KEEP + b"(" + (kept(0) + b"\x85") * MANY + b"l",
        "it nests tuples",
    ),
    "attributes of many": (
        lambda: (
            filled(*(text(str(key)) + pickle.NONE for key in range(MANY)))
            + KEEP
            + (new("StorageMeta") + kept(0) + pickle.BUILD) * MANY
        ),
        "a part of it holds what it cannot",
    ),
    "the same blocks of many tensors": (
        lambda: (
            built("ChunkStorageMetadata", offsets=size(0), sizes=size(4))
            + KEEP
            + pickle.EMPTY_LIST
            + pickle.MARK
            + kept(0) * MANY
            + pickle.APPENDS
            + KEEP
            + tensor(kept(1))
            + KEEP
            + metadata(filled(*(text(str(key)) + kept(2) for key in range(MANY))))
        ),
        "it lists the same blocks for many tensors",
    ),
    "tensor that is none": (lambda: metadata(filled(text("x") + EMPTY)), "'x' is no tensor"),
}


@contextmanager
def little_room() -> Iterator[None]:
    """Lets this process have a little more memory than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an early version, whose ``.metadata`` anyone may change."""
    checkpoint = saved(tmp_path_factory.mktemp("early"))
    without_checksums(checkpoint)
    return checkpoint


@pytest.mark.timeout(20, method="thread")  # no signal ends a hash that takes for ever
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str, early: Path) -> None:
    make, message = BOMBS[name]
    bomb = pickle.PROTO + b"\x04" + make() + pickle.STOP
    assert len(bomb) < 2**22
    (early / ".metadata").write_bytes(bomb)
    before = [dict(vars(known_class)) for known_class in CLASSES]
    with little_room(), pytest.raises(DamagedCheckpoint, match=rf"\.metadata: {message}") as raised:
        load(early)
    assert "\n" not in str(raised.value)
    assert [dict(vars(known_class)) for known_class in CLASSES] == before


def save_two(rank: int, world_size: int, folder: Path) -> None:
    trained = build(next(iter(LAYOUTS)), OPTIMIZER_NAMES[0])
    trained.step(0)
    save_checkpoint(folder / "ours", trained.model, trained.optimizer, {"step": 1})
    save_by_torch(folder / "torch")


def save_by_torch(path: Path) -> None:
    """With all that torch's own planner writes: values that are no tensors, and where each was."""
    state = {"a": {"b": [torch.ones(3, 2), "text"], "c": torch.tensor(1.5, dtype=torch.float64)}, "n": 2**40}
    dcp.save(state, storage_writer=FsspecWriter(str(path)))


def require_equal(checkpoint: Path) -> Metadata:
    data = (checkpoint / ".metadata").read_bytes()
    parsed, expected = parse_metadata(data), pickle.loads(data)
    assert parsed == expected

    def attributes(value: Metadata) -> list[Any]:
        return [vars(info) for info in (value, *value.storage_data.values())]

    assert attributes(parsed) == attributes(expected)  # also those that torch's classes do not compare
    return parsed


def test_metadata_of_one_process_is_read(tmp_path: Path) -> None:
    require_equal(saved(tmp_path))
    save_by_torch(tmp_path / "torch")
    assert require_equal(tmp_path / "torch").planner_data["a.b.1"] == ("a", "b", 1)


@pytest.mark.distributed
def test_metadata_of_two_ranks_is_read(tmp_path: Path) -> None:
    run_on_ranks(2, save_two, tmp_path)
    parsed = require_equal(tmp_path / "ours")
    assert {info.relative_path for info in parsed.storage_data.values()} == {"__0_0.distcp", "__1_0.distcp"}
    require_equal(tmp_path / "torch")
