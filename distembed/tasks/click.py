"""What a pipeline steps: a model with its loss, and the TorchRec pipeline around it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from distembed.data.reader.batch import Batch

StepOutput = tuple[Float[Tensor, ""], Float[Tensor, " batch"], Float[Tensor, " batch"]]
"""This rank's share of the mean loss times the number of ranks, its logits, its labels."""


class ClickTask(nn.Module):
    """Batch -> (loss, step output), with the networks in bf16 where asked.

    A rank's loss is the sum over its own rows times ``world_size / global_batch_size``: the gradients' mean over ranks
    is then that of the whole batch, also when ranks hold unequally many rows.
    """

    def __init__(self, model: nn.Module, world_size: int, device: torch.device, bf16: bool) -> None:
        super().__init__()
        self.model = model
        self._world_size = world_size
        self._device_type = device.type
        self._bf16 = bf16

    def forward(self, batch: Batch) -> tuple[Tensor, StepOutput]:
        """Runs the model on this rank's rows."""
        with torch.autocast(self._device_type, dtype=torch.bfloat16, enabled=self._bf16):
            logits = self.model(batch.dense_features, batch.sparse_features)
        logits = logits.float()
        total = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="sum")
        loss = total * (self._world_size / batch.global_batch_size)
        return loss, (loss.detach(), logits.detach(), batch.labels)
