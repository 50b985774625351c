"""Memory of collectives on CPUs, given back before the step goes on, so that its peak is the same in every run.

A thread of gloo's runs a collective and says that it is done before it releases the tensors that it has sent and
received. Whoever waited for it goes on; where that thread then waits for a core, vectors of a whole batch stay in
memory for milliseconds more. Waiting until it has let go costs microseconds.
"""

import os
import time
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchrec.distributed.comm_ops import Request
from torchrec.distributed.dist_data import PooledEmbeddingsAwaitable, SequenceEmbeddingsAwaitable

_MOST_LOOKS = 1000
"""Looks at the tensors that a collective still holds, each with a chance for its thread to run; then a step goes on."""


def release_promptly(output_dists: Iterable[nn.Module]) -> None:
    """Has exchanges of vectors, and of their gradients, end no earlier than their memory is free again."""
    for output_dist in output_dists:
        for module in output_dist.modules():
            module.register_forward_hook(_take_over)


def _take_over(module: nn.Module, arguments: Any, awaitable: Any) -> None:
    """Takes over the request of an exchange that has just begun; inner dists' requests are taken over already."""
    if isinstance(awaitable, PooledEmbeddingsAwaitable | SequenceEmbeddingsAwaitable):
        request = awaitable._tensor_awaitable
        if type(request) is Request and request.dummy_tensor.device.type == "cpu":
            work = request.__dict__.pop("req")  # else it would be held twice
            # autograd knows the request already, and sets the work of the way back in it
            request.__class__ = _PromptRequest
            request.req = work


class _PromptRequest(Request[Any]):
    """TorchRec's request, whose work is not done until its tensors are the request's alone.

    The work has a name of its own: torch 2.11 does not compile a property that reads its own name in ``__dict__``.
    """

    @property
    def req(self) -> Any:
        """The work under way, or None."""
        return self._prompt_work

    @req.setter
    def req(self, work: Any) -> None:
        self._prompt_work = None if work is None else _PromptWork(work, self)


class _PromptWork:
    """A collective that is waited for until its request alone holds the received tensors."""

    def __init__(self, work: Any, request: Request[Any]) -> None:
        self._work, self._request = work, request

    def wait(self) -> None:
        """Waits for the collective and for its memory."""
        self._work.wait()
        os.sched_yield()  # the thread that ran it may let go first
        self._work = None
        received = [tensor for tensor in tree_leaves(self._request.tensor) if isinstance(tensor, Tensor)]
        for _ in range(_MOST_LOOKS):
            if all(tensor._use_count() == 1 for tensor in received):  # type: ignore[attr-defined]
                return
            time.sleep(0)
