"""The loss of clicks with smoothed labels, weights of classes and focus, against a sum over rows in plain Python."""

import math
from typing import Any

import pytest
import torch

from distembed.data.dataset.schema import LABELS
from distembed.data.reader.batch import Batch
from distembed.tasks import ClickConfig, ClickTask
from distembed.training.config import load_config


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"label_smoothing": 0.2},
        {"positive_weight": 3.0},
        {"focal_gamma": 2.0},
        {"label_smoothing": 0.1, "positive_weight": 0.5, "focal_gamma": 1.5},
    ],
)
def test_the_loss_equals_a_sum_over_rows(settings: dict[str, float]) -> None:
    logits, labels = [-2.0, 0.3, 5.0, -90.0, 60.0], [0.0, 1.0, 0.0, 1.0, 1.0]
    smoothing, gamma = settings.get("label_smoothing", 0.0), settings.get("focal_gamma", 0.0)
    expected = 0.0
    for logit, label in zip(logits, labels, strict=True):
        p = 1 / (1 + math.exp(-logit))
        target = label * (1 - smoothing) + smoothing / 2
        # log1p(exp(-|z|)) + max(z, 0) is -log(1 - p), exact where p is 1 in floating point
        softplus = math.log1p(math.exp(-abs(logit))) + max(logit, 0.0)
        own = target * (softplus - logit) + (1 - target) * softplus
        own *= (1 - (p if label else 1 - p)) ** gamma * (settings.get("positive_weight", 1.0) if label else 1.0)
        expected += own
    batch = Batch({LABELS: torch.tensor(labels)}, len(labels))
    outputs = torch.tensor(logits, requires_grad=True)
    loss, rows = ClickTask(ClickConfig(**settings)).step(outputs, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert gradient.isfinite().all()
    assert torch.equal(rows["labels"], batch[LABELS])


@pytest.mark.parametrize("override", ["label_smoothing=1.0", "positive_weight=0", "focal_gamma=-1"])
def test_settings_out_of_range_are_refused(override: str) -> None:
    with pytest.raises(Exception, match=f"task.{override.partition('=')[0]}"):
        load_config(None, [f"task.{override}"])


def test_the_settings_survive_a_dump(tmp_path: Any) -> None:
    config = load_config(None, ["task.label_smoothing=0.1", "train.dense_optimizer.clip_norm=2.0"])
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "c.yaml") == config
