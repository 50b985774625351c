"""Memory of an exchange is free when it has been waited for, however late the thread that ran it lets go."""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import Request
from torchrec.distributed.dist_data import PooledEmbeddingsAwaitable

from distembed.sharding.dists import release_promptly

CPU = torch.device("cpu")
SECONDS_LATE = 0.05


class LateWork:
    """A collective that is done before its thread lets go of the tensor that it has received."""

    def __init__(self, received: Tensor) -> None:
        self.held = [received.view(-1)]  # a view keeps its tensor

    def wait(self) -> None:
        threading.Timer(SECONDS_LATE, self.held.clear).start()


class Take(torch.autograd.Function):
    """What TorchRec's functions do around both ways: wait, and begin the way back with a work of its own."""

    works: list[LateWork] = []

    @staticmethod
    def forward(ctx: Any, group: None, request: Request[Tensor], dummy: Tensor) -> Tensor:
        ctx.request = request
        return Take.receive(request)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, Tensor]:
        begin(ctx.request)
        return None, None, Take.receive(ctx.request)[:1]

    @staticmethod
    def receive(request: Request[Tensor]) -> Tensor:
        assert request.req is not None and request.tensor is not None
        request.req.wait()
        assert not Take.works[-1].held
        received, request.req, request.tensor = request.tensor, None, None
        return received


def begin(request: Request[Tensor]) -> None:
    request.tensor = torch.ones(4)
    Take.works.append(LateWork(request.tensor))
    request.req = Take.works[-1]  # type: ignore[assignment]


class Exchange(nn.Module):
    def forward(self) -> PooledEmbeddingsAwaitable:
        request: Request[Tensor] = Request(None, CPU)  # type: ignore[arg-type]
        request.wait_function = Take
        request.dummy_tensor.requires_grad_()
        begin(request)
        return PooledEmbeddingsAwaitable(request)


def test_an_exchange_is_over_when_its_memory_is_free_on_both_ways() -> None:
    exchange = Exchange()
    release_promptly([exchange])
    vectors = exchange().wait()
    assert torch.equal(vectors, torch.ones(4))
    vectors.sum().backward()
    assert len(Take.works) == 2


def test_a_tensor_that_somebody_keeps_ends_the_wait_all_the_same() -> None:
    exchange = Exchange()
    release_promptly([exchange])
    awaitable = exchange()
    kept = Take.works[-1].held[0]
    Take.works[-1].wait = lambda: None  # type: ignore[method-assign]
    Take.works[-1].held = []
    assert torch.equal(awaitable.wait(), kept)
