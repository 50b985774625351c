"""The example of tools/example_masked_lm.py: a transformer that is not ours, with ids replaced by one line each."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from distembed.sse import take_counts

EXAMPLE = Path(__file__).parents[2] / "tools" / "example_masked_lm.py"


@cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_masked_lm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def few_windows() -> Any:
    corpus = example().read_corpus()
    return example().Corpus(corpus.num_words, corpus.train[:128], corpus.held_out[:16])


def test_held_out_paragraphs_are_not_trained_on() -> None:
    corpus = example().read_corpus()
    assert corpus.train.shape[1] == corpus.held_out.shape[1] == example().WINDOW
    assert 0.05 < len(corpus.held_out) / len(corpus.train) < 0.2
    trained = {tuple(window) for window in corpus.train.tolist()}
    assert not [window for window in corpus.held_out.tolist() if tuple(window) in trained]


def test_masks_and_unknown_words_are_never_asked_for() -> None:
    inputs, labels = example().mask(example().read_corpus().train, torch.Generator().manual_seed(0))
    asked = labels != example().IGNORED
    assert torch.equal(asked, inputs == example().MASK)
    assert not (labels[asked] < len(example().RESERVED)).any()


def test_words_and_labels_are_replaced_at_their_own_rates_and_masks_are_not() -> None:
    corpus = few_windows()
    trainee = example().Trainee(corpus, 0.5, 0.25, seed=0)
    inputs, labels = example().mask(corpus.train, torch.Generator().manual_seed(0))
    trainee.step(inputs, labels)
    replaced, seen = take_counts(trainee.model)["words"]
    can_be_replaced = int((inputs >= len(example().RESERVED)).sum())
    assert seen == inputs.numel() and replaced / can_be_replaced == pytest.approx(0.5, abs=0.03)
    replaced, _ = trainee.perturb_labels.take_counts()["labels"]
    assert replaced / int((labels != example().IGNORED).sum()) == pytest.approx(0.25, abs=0.08)


def test_evaluation_replaces_nothing() -> None:
    corpus = few_windows()
    never, always = (example().Trainee(corpus, p0, p0, seed=0) for p0 in (0.0, 1.0))
    assert never.held_out_loss(corpus.held_out) == always.held_out_loss(corpus.held_out)


def test_the_model_learns_with_and_without_replaced_ids() -> None:
    whole = few_windows()
    corpus = example().Corpus(whole.num_words, whole.train[:64], whole.held_out[:8])
    for p0 in (0.0, 0.1):
        losses = example().train(corpus, p0, p0, num_epochs=4, seed=0)
        assert losses[-1] < losses[0] - 0.5
