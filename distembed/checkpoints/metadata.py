"""Reading ``.metadata`` of a checkpoint, which torch writes as a pickle, without executing anything.

Whoever hands over a pickle hands over code, if it is loaded as it comes. Here only the classes that
``torch.distributed.checkpoint`` puts there are known, all of which only hold values; anything else that a file names is
refused before it is looked up. Nor can a small file take long or much memory: only the instructions that torch's own
files have are followed, and nothing is nested or shared such that what it says is more than its bytes. That takes
Python's own unpickler in Python, about three times as long as the one in C. What comes out is then held against what
torch's classes promise, since a pickle may give any attribute any value.
"""

import io
import pickle
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

_KNOWN: dict[tuple[str, str], Any] = {
    (home.__name__, name): getattr(home, name)
    for home, names in (
        (
            metadata,
            (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            ),
        ),
        (filesystem, ("_StorageInfo",)),
        (torch, ("Size",)),
        (torch.serialization, ("_get_layout",)),
    )
    for name in names
}
_KNOWN |= {
    ("torch", str(value).removeprefix("torch.")): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def _ignored_path(*_parts: str) -> None:
    """Takes the place of a class of paths: where a checkpoint was written does not matter where it is read."""


_KNOWN |= {
    (module, name): _ignored_path
    for module in ("pathlib", "pathlib._local")  # the latter since Python 3.13
    for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}

_PLAIN: frozenset[type] = frozenset({type(None), bool, int, str, torch.dtype, torch.layout, _MEM_FORMAT_ENCODING})
_FLAT = _PLAIN | {torch.Size}
# class -> the types of what its attributes hold: no two of them can hold each other
_ATTRIBUTES: dict[type, frozenset[type]] = {
    BytesStorageMetadata: _FLAT,
    ChunkStorageMetadata: _FLAT,
    MetadataIndex: _FLAT,
    _StorageInfo: _FLAT,
    StorageMeta: _PLAIN | {list},
    TensorProperties: _PLAIN,
    TensorStorageMetadata: _FLAT | {TensorProperties, list},
    Metadata: _PLAIN | {dict, StorageMeta},
}
_LISTED = _PLAIN | {ChunkStorageMetadata}
# what is called -> the type of its only argument
_CALLED: dict[Any, type] = {torch.Size: tuple, torch.serialization._get_layout: str, _MEM_FORMAT_ENCODING: int}
_MAX_DIMS = 64  # as many as torch computes with
_MAX_ATTRIBUTES = 16
_STR, _INT = frozenset({str}), frozenset({int})


class _Instructions(dict[int, Any]):
    """Functions by the code of the instruction that they follow; any other is refused."""

    def __missing__(self, code: int) -> Any:
        import pickletools  # only for its names, and few files need them

        name = next((known.name for known in pickletools.opcodes if known.code == chr(code)), hex(code))
        raise pickle.UnpicklingError(f"it has the instruction {name}, which no checkpoint has")


class _MetadataUnpickler(pickle._Unpickler):
    """Knows the classes of ``torch.distributed.checkpoint`` and the instructions that make them, and no other.

    The methods named ``load_`` are what :class:`pickle._Unpickler` has under that name, but look at what is given.
    """

    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.read = io.BytesIO(data).read
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.append = self.stack.append
        self._hashes: set[int] = set()

    def load(self) -> Any:
        read, follow = self.read, self.dispatch
        while (code := read(1)) != pickle.STOP:
            _require(code != b"", "it ends too early")
            follow[code[0]](self)
        return self.stack.pop()

    def load_frame(self) -> None:
        self.read(8)  # how much to read at once, but all of it is read

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _KNOWN[module_name, global_name]
        except KeyError:
            name = f"{module_name}.{global_name}"[:100]
            raise pickle.UnpicklingError(
                f"it names {name}, which no checkpoint has: loading it would run code"
            ) from None

    def load_newobj(self) -> None:
        arguments, made = self.stack.pop(), self.stack.pop()
        _require(isinstance(made, type) and made in _ATTRIBUTES and arguments == (), "it makes what no checkpoint has")
        self.append(made.__new__(made))

    def load_reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if called is _ignored_path:
            _require(type(arguments) is tuple and _are(arguments, _STR), "it has a path that is none")
            self.append(None)
            return
        _require(
            type(arguments) is tuple and len(arguments) == 1 and type(arguments[0]) is _CALLED.get(called),
            "it calls what no checkpoint has",
        )
        self.append(called(*arguments))

    def load_build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        allowed = _ATTRIBUTES.get(type(record))
        _require(allowed is not None and not vars(record), "it changes what is no new part of a checkpoint")
        if type(record) is TensorProperties:
            _require(type(state) is tuple and len(state) == 5, "a tensor has not the properties that torch writes")
            record.__setstate__(state)
            return
        _require(
            type(state) is dict
            and len(state) <= _MAX_ATTRIBUTES
            and _are(state, _STR)
            and _are(state.values(), allowed or _PLAIN),
            "a part of it holds what it cannot",
        )
        vars(record).update(state)

    def load_tuple(self) -> None:
        self._append_tuple(tuple(self.pop_mark()))

    def load_tuple1(self) -> None:
        (item,) = items = (self.stack.pop(),)
        if type(item) is tuple:  # the argument of torch.Size
            _require(len(item) <= _MAX_DIMS and _are(item, _INT), "it nests tuples as no checkpoint does")
            self.append(items)
        else:
            self._append_tuple(items)

    def load_tuple2(self) -> None:
        second, first = self.stack.pop(), self.stack.pop()
        self._append_tuple((first, second))

    def load_tuple3(self) -> None:
        third, second, first = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self._append_tuple((first, second, third))

    def _append_tuple(self, items: tuple[Any, ...]) -> None:
        _require(_are(items, _PLAIN), "it nests tuples as no checkpoint does")
        self.append(items)

    def load_append(self) -> None:
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        _require(type(self.stack[-1]) is list and _are(items, _LISTED), "a list holds what it cannot")
        self.stack[-1].extend(items)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def load_setitems(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        keys = items[::2]
        _require(type(self.stack[-1]) is dict and len(items) % 2 == 0, "it sets items of what is no dict")
        if not _are(keys, _STR):
            for key in keys:
                self._require_key(key)
        self.stack[-1].update(zip(keys, items[1::2], strict=True))

    def _require_key(self, key: Any) -> None:
        if type(key) is str:
            return
        _require(
            type(key) is MetadataIndex
            and type(vars(key).get("fqn")) is str
            and type(vars(key).get("offset")) in (type(None), torch.Size),
            "a dict has a key that it cannot",
        )
        # that of an offset is no secret, so that many keys could be made to have the same
        hashed = hash(key)
        _require(hashed not in self._hashes, "it lists a block twice")
        self._hashes.add(hashed)

    dispatch: ClassVar[dict[int, Any]] = _Instructions(
        {
            **{
                code[0]: pickle._Unpickler.dispatch[code[0]]
                for code in (
                    pickle.PROTO,
                    pickle.MARK,
                    pickle.NONE,
                    pickle.NEWTRUE,
                    pickle.NEWFALSE,
                    pickle.BININT,
                    pickle.BININT1,
                    pickle.BININT2,
                    pickle.LONG1,
                    pickle.SHORT_BINUNICODE,
                    pickle.BINUNICODE,
                    pickle.EMPTY_TUPLE,
                    pickle.EMPTY_LIST,
                    pickle.EMPTY_DICT,
                    pickle.MEMOIZE,
                    pickle.BINGET,
                    pickle.LONG_BINGET,
                    pickle.STACK_GLOBAL,
                )
            },
            pickle.FRAME[0]: load_frame,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.REDUCE[0]: load_reduce,
            pickle.BUILD[0]: load_build,
            pickle.TUPLE[0]: load_tuple,
            pickle.TUPLE1[0]: load_tuple1,
            pickle.TUPLE2[0]: load_tuple2,
            pickle.TUPLE3[0]: load_tuple3,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
        }
    )


def parse_metadata(data: bytes) -> Metadata:
    """Returns what the bytes of a ``.metadata`` file say.

    Raises:
        Exception: They are damaged, name a class that has no place there, or describe what no checkpoint can be.
    """
    found = _MetadataUnpickler(data).load()
    _require(type(found) is Metadata, "it holds no metadata")
    _require(type(found.state_dict_metadata) is dict and type(found.storage_data) is dict, "it lists no tensors")
    room = len(data) // 16  # one takes more
    for name, entry in found.state_dict_metadata.items():
        _require(type(name) is str, "it lists a tensor without a name")
        if type(entry) is TensorStorageMetadata:
            room -= len(entry.chunks) if type(entry.chunks) is list else 0
            _require(room >= 0, "it lists the same blocks for many tensors")
            _require_tensor(name, entry)
        else:
            _require(type(entry) is BytesStorageMetadata, f"{name!r} is no tensor")
    for index, info in found.storage_data.items():
        _require(type(index) is MetadataIndex and type(info) is _StorageInfo, "it lists what is no part of a file")
        path, offset, length = info.relative_path, info.offset, info.length
        _require(
            type(path) is str and "/" not in path and "\\" not in path and path.endswith(".distcp"),
            f"it reads from {path!r}",
        )
        _require(
            type(offset) is int and type(length) is int and offset >= 0 <= length,
            f"it reads {length!r} bytes at {offset!r}",
        )
        _require(not getattr(info, "transform_descriptors", None), "its files are transformed")
    return found


def _require_tensor(name: object, entry: TensorStorageMetadata) -> None:
    sizes = [entry.size, *(size for chunk in entry.chunks if _is_chunk(chunk) for size in (chunk.offsets, chunk.sizes))]
    _require(
        type(name) is str
        and type(entry.properties) is TensorProperties
        and isinstance(entry.properties.dtype, torch.dtype)
        and len(sizes) == 1 + 2 * len(entry.chunks)
        and all(
            type(size) is torch.Size and len(size) == len(entry.size) and min(size, default=0) >= 0 for size in sizes
        ),
        f"{name!r} is no tensor",
    )


def _is_chunk(value: object) -> bool:
    return type(value) is ChunkStorageMetadata


def _are(items: Iterable[Any], types: frozenset[type]) -> bool:
    return types.issuperset(map(type, items))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(what)
