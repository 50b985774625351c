"""CUDA without a card: tensors without data that say they are on a GPU, and raise where a GPU would be waited for.

Code runs as it would on a card, but for kernels: a tensor that is asked for on ``cuda`` is made on torch's meta device,
which knows shapes, dtypes and strides and computes nothing, and answers ``cuda`` when it is asked for its device. What
torch's ``FakeTensorMode`` does for a forward pass, this does for the backward pass too: autograd needs a device that is
there, which for a fake CUDA tensor means a torch built for CUDA.

Refused are, where they come from distembed, with the operation and the line:

- waits of the host for the device: ``.item()``, ``bool(tensor)``, ``.tolist()``, ``.cpu()``, ``nonzero``, masks,
  ``unique``, ``bincount``, ``repeat_interleave`` without ``output_size``;
- copies to the device within a step, of a list or of a tensor that is not pinned: constants are copied once;
- tensors of both devices in one operation.

What TorchRec has to wait for is in :mod:`tests.cuda.must_wait`.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from distembed.base import lazy

CUDA = torch.device("cuda", 0)
_META = torch.device("meta")
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent) + "/"
_DISPATCHED_IN_C = ("_local_scalar_dense", "nonzero", "unique", "bincount", "equal", "masked_select")
_READS_FEW_ROWS = ("index_select", "embedding", "_embedding_bag", "gather", "index", "take")
"""Operations that read of their first argument only what they return."""


class Refused(Exception):
    """An operation would make the host wait, copy to the device or mix devices."""


class PretendCuda(TorchFunctionMode):
    """Makes tensors that are asked for on ``cuda`` on the meta device, which then say that they are on ``cuda``."""

    def __init__(self, may_copy: Callable[[str], bool]) -> None:
        super().__init__()
        self._may_copy = may_copy

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _GETTERS:
            return _GETTERS[function](*args)
        if function is Tensor.backward or function is torch.autograd.backward:
            with self:  # without which backward functions would not see this mode
                return _backward(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if function is torch.device or "autocast" in name:
            return function(*args, **kwargs)
        if name == "record_stream":
            return None
        if name == "pin_memory":
            args[0].is_pinned_here = True
            return args[0]
        if function is torch.tensor or function is torch.as_tensor:
            _require_no_list(args, kwargs, self._may_copy)
        if function is Tensor.new_tensor and args[0].is_meta:
            _require_no_list(args[1:], {"device": CUDA}, self._may_copy)
        if kwargs.get("pin_memory") is True:
            kwargs = {**kwargs, "pin_memory": False}
        if function in (Tensor.tolist, Tensor.numpy, Tensor.__array__) and args[0].is_meta:
            raise Refused(f"{function.__name__} waits for the device; {_origin()}")
        args, kwargs = tuple(_on_meta(value) for value in args), {key: _on_meta(own) for key, own in kwargs.items()}
        made = function(*args, **kwargs)
        if function is torch.tensor and made.is_meta:
            made.made_of = args[0]
        return made


class Watch(TorchDispatchMode):
    """Refuses what a step must not do, and counts the operations that would be launched on the device.

    Attributes:
        launches: Number of operations by name, but for views and what makes memory without writing to it.
        moved_bytes: Bytes that these read and write.
    """

    def __init__(self, may_copy: Callable[[str], bool]) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.moved_bytes = 0
        self._may_copy = may_copy

    def reset(self) -> None:
        """Forgets what was counted."""
        self.launches.clear()
        self.moved_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.name().split("::")[-1].split(".")[0]
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in given if _is_on_device(tensor)]
        on_host = [tensor for tensor in given if not _is_on_device(tensor)]
        if on_device and name in _DISPATCHED_IN_C:
            raise Refused(f"{name} waits for the device; {_origin()}")
        if name in ("index", "index_put_", "index_put") and on_device and _has_mask(args[1]):
            raise Refused(f"{name} with a mask waits for the device; {_origin()}")
        if on_device and any(tensor.dim() > 0 or name in ("copy_", "_to_copy") for tensor in on_host):
            if name != "copy_" or not self._may_copy(origin_module()):
                raise Refused(f"{name} takes tensors of both devices; {_origin()}")
        if on_device and name.startswith("_fused_"):  # of an optimizer: CUDA has it, the meta device does not
            self.launches[name] += 1
            self.moved_bytes += 2 * sum(map(_num_bytes, on_device))
            return None
        try:
            made = function(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if on_device:
                raise Refused(f"{name}: {str(error).splitlines()[0]}; {_origin()}") from error
            raise
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        written = [tensor for tensor in results if _is_on_device(tensor)]
        is_pinned = all(getattr(tensor, "is_pinned_here", False) for tensor in on_host)
        if written and on_host and not on_device and not (is_pinned or self._may_copy(origin_module())):
            raise Refused(f"{name} copies to the device; {_origin()}")
        if written and not _only_describes(function, name):
            self.launches[name] += 1
            self.moved_bytes += _moved_bytes(name, on_device, written)
        return made


@contextmanager
def pretend_cuda(may_copy: Callable[[str], bool] = lambda origin: True) -> Iterator[Watch]:
    """Within the block tensors on ``cuda`` are pretended, and what they would make the host wait for is refused.

    Args:
        may_copy: Says whether a copy from the host to the device is allowed now, in the function that is named.

    Yields:
        The watch, which counts.
    """
    watch = Watch(may_copy)
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        _pretend_streams(patch)
        stack.enter_context(PretendCuda(may_copy))
        stack.enter_context(watch)
        yield watch


class PretendStream(torch.Stream):
    """A stream or an event, on which nothing waits."""

    def __new__(cls, *arguments: Any, **settings: Any) -> "PretendStream":
        return super().__new__(cls, stream_id=0, device_index=0, device_type=1)

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        pass

    def __enter__(self) -> "PretendStream":
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        """Waits on the device."""

    wait_event = record = wait = record_event = wait_stream

    def synchronize(self) -> None:
        """Would make the host wait."""
        raise Refused(f"a stream is synchronised; {_origin()}")


def _pretend_streams(patch: pytest.MonkeyPatch) -> None:
    """Has ``torch.cuda`` hand out streams that do nothing, and one device."""

    def synchronize(*arguments: Any) -> None:
        raise Refused(f"torch.cuda.synchronize waits for the device; {_origin()}")

    answers: dict[str, Any] = {
        "Stream": PretendStream,
        "Event": PretendStream,
        "stream": lambda stream: PretendStream(),
        "current_stream": PretendStream,
        "default_stream": PretendStream,
        "set_stream": lambda stream: None,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": synchronize,
        "get_device_properties": lambda device: SimpleNamespace(name="pretended", total_memory=2**36, major=9, minor=0),
        "get_device_name": lambda device=None: "pretended",
        "mem_get_info": lambda device=None: (2**36, 2**36),
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, answer)
    # weights are drawn by generators of the device
    stock = torch.Generator
    for module in (torch, lazy.torch):  # the latter keeps what it was once asked for
        patch.setattr(module, "Generator", lambda device="cpu": stock("cpu"))


def origin_module() -> str:
    """Returns the file and qualified name of the function outside of torch and this folder's kit that runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_TORCH) and not (file.startswith(_HERE) and Path(file).name in _KIT):
            return f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]
    return "nowhere"


_KIT = {"pretend.py", "must_wait.py", "stand_ins.py"}


def _origin() -> str:
    return f"in {origin_module()}"


def _backward(tensors: Any, gradient: Any = None, **settings: Any) -> None:
    """Does what ``backward`` does, with its defaults; torch's own way to the engine switches function modes off."""
    gradients = settings.get("grad_tensors", gradient)
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    gradients = (gradients,) if not isinstance(gradients, Sequence) else tuple(gradients)
    filled = tuple(
        torch.ones_like(tensor) if own is None else own for tensor, own in zip(tensors, gradients, strict=True)
    )
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tensors, filled, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _is_on_device(tensor: Tensor) -> bool:
    # within a dispatch mode no other mode is on: this is torch's own answer
    return tensor.device.type in ("meta", "cuda")


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices or ())


def _only_describes(function: Any, name: str) -> bool:
    """Returns whether an operation launches nothing: a view, or memory that is not written to."""
    if function.is_view or name.startswith(("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh", "alias")):
        return True
    return name in ("device", "view", "_reshape_alias", "set_", "resize_", "record_stream", "as_strided", "wait_tensor")


def _moved_bytes(name: str, given: list[Tensor], written: list[Tensor]) -> int:
    written_bytes = sum(map(_num_bytes, written))
    if name in _READS_FEW_ROWS:
        return 2 * written_bytes + sum(map(_num_bytes, given[1:]))
    return written_bytes + sum(map(_num_bytes, given))


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _require_no_list(args: tuple[Any, ...], kwargs: dict[str, Any], may_copy: Callable[[str], bool]) -> None:
    device = kwargs.get("device")
    data = args[0] if args else kwargs.get("data")
    if device is None or torch.device(device).type != "cuda" or may_copy(origin_module()) or isinstance(data, Tensor):
        return
    raise Refused(f"a list is copied to the device; {_origin()}")


def _on_meta(value: Any) -> Any:
    if isinstance(value, str):
        return _META if value == "cuda" or value.startswith("cuda:") else value
    if isinstance(value, torch.device):
        return _META if value.type == "cuda" else value
    return value


# within a function mode no other is on: these are torch's own answers
_GETTERS: dict[Any, Callable[..., Any]] = {
    Tensor.device.__get__: lambda tensor, *owner: CUDA if tensor.is_meta else tensor.device,
    Tensor.is_meta.__get__: lambda tensor, *owner: False,
    Tensor.is_cuda.__get__: lambda tensor, *owner: tensor.is_meta,
}
