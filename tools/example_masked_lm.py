"""Stochastic shared embeddings in a plain transformer: one line for its inputs, and one for its labels.

::

    python tools/example_masked_lm.py                                     # less than two minutes
    python tools/example_masked_lm.py --seeds 5 --epochs 20 --p0 0 0.1

A small masked language model in plain PyTorch (Devlin et al., 2019) learns the words of Python's ``help()`` texts. Its
output is tied: the score of word i is ``h . u_i + b_i``, where u_i is the input embedding of i. SSE needs only the
lines marked "this line", for inputs (p_x in the paper) and for labels (p_y). The script prints the loss on held-out
paragraphs after the best and after the last epoch, and the cost of replacing as a share of a step.
"""

import argparse
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from distembed.sse import SSE, IdPerturbation, perturb_inputs

PADDING, MASK, UNKNOWN = RESERVED = (0, 1, 2)
IGNORED = -100
WINDOW, BATCH, MASKED_SHARE = 32, 32, 0.15
HELD_OUT_EVERY, HELD_OUT_DRAWS = 10, 4


@dataclass(frozen=True)
class Corpus:
    """Paragraphs one after another, cut into windows of one length.

    Attributes:
        num_words: Number of word ids, reserved ids included.
        train: Windows to train on.
        held_out: Windows of every tenth paragraph, without windows that are also in ``train``.
    """

    num_words: int
    train: Int64[Tensor, "windows words"]
    held_out: Int64[Tensor, "windows words"]


def read_corpus(least_count: int = 2) -> Corpus:
    """Returns the corpus; words that occur less often in the training paragraphs are unknown."""
    paragraphs = list(dict.fromkeys(text for topic in topics.values() for text in re.split(r"\n\s*\n", topic)))
    words = [re.findall(r"[a-z_]\w*|[.,:;()=]", paragraph.lower()) for paragraph in paragraphs]
    held_out = words[::HELD_OUT_EVERY]
    train = [each for place, each in enumerate(words) if place % HELD_OUT_EVERY]
    counts = Counter(word for paragraph in train for word in paragraph)
    known = [word for word, count in counts.most_common() if count >= least_count]
    ids = {word: number for number, word in enumerate(known, start=len(RESERVED))}
    windows, others = _windows(train, ids), _windows(held_out, ids)
    trained = set(map(tuple, windows.tolist()))  # a line of a table is a window of dots in both parts
    is_new = torch.tensor([tuple(window) not in trained for window in others.tolist()])
    return Corpus(len(known) + len(RESERVED), windows, others[is_new])


def _windows(paragraphs: Sequence[Sequence[str]], ids: dict[str, int]) -> Int64[Tensor, "windows words"]:
    """Returns the words' ids as windows, without the words after the last whole window."""
    flat = torch.tensor([ids.get(word, UNKNOWN) for paragraph in paragraphs for word in paragraph])
    return flat[: len(flat) // WINDOW * WINDOW].view(-1, WINDOW)


def mask(
    windows: Int64[Tensor, "windows words"], generator: torch.Generator
) -> tuple[Int64[Tensor, "windows words"], Int64[Tensor, "windows words"]]:
    """Returns windows with some words masked, and these words at their places, :data:`IGNORED` elsewhere."""
    is_masked = (torch.rand(windows.shape, generator=generator) < MASKED_SHARE) & (windows != UNKNOWN)
    return windows.masked_fill(is_masked, MASK), windows.masked_fill(~is_masked, IGNORED)


class MaskedLM(nn.Module):
    """A masked language model whose output is tied to its input, with an attention head for each 32 numbers."""

    def __init__(self, num_words: int, dim: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, dim, padding_idx=PADDING)
        self.places = nn.Parameter(torch.randn(WINDOW, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(
            dim, dim // 32, 4 * dim, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(dim), enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(num_words))
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(
        self, inputs: Int64[Tensor, "windows words"], labels: Int64[Tensor, "windows words"]
    ) -> Float[Tensor, ""]:
        """Returns the mean loss of the masked words."""
        queries = self.layers(self.words(inputs) + self.places)
        is_asked = labels != IGNORED
        return cross_entropy(linear(queries[is_asked], self.words.weight, self.bias), labels[is_asked])


class Trainee:
    """A model with its optimizer and its rules of replacing.

    Args:
        corpus: The training and held-out windows.
        p0_inputs: Probability of replacing an input word; masks are not replaced.
        p0_labels: Probability of replacing a label.
        seed: Seed of initial weights and replacements.
    """

    def __init__(self, corpus: Corpus, p0_inputs: float, p0_labels: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = MaskedLM(corpus.num_words)
        rules = [SSE(p0=p0, reserved=RESERVED, keep_reserved=True) for p0 in (p0_inputs, p0_labels)]
        perturb_inputs(self.model.words, rules[0], "words", seed=seed)  # this line
        self.perturb_labels = IdPerturbation(corpus.num_words, rules[1], "labels", seed=seed)  # this line
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01)

    def step(self, inputs: Int64[Tensor, "windows words"], labels: Int64[Tensor, "windows words"]) -> None:
        """Takes one step of training."""
        self.optimizer.zero_grad()
        self.model(
            inputs, self.perturb_labels(labels)
        ).backward()  # this line: labels instead of perturb_labels(labels)
        self.optimizer.step()

    @torch.no_grad()
    def held_out_loss(self, windows: Int64[Tensor, "windows words"]) -> float:
        """Returns the mean loss of the masked words over several draws of masks, which are equal at each call."""
        self.model.eval()
        generator = torch.Generator().manual_seed(0)
        losses = [self.model(*mask(windows, generator)).item() for _ in range(HELD_OUT_DRAWS)]
        self.model.train()
        return statistics.mean(losses)


def epochs(
    windows: Int64[Tensor, "windows words"], seed: int
) -> Iterator[list[tuple[Int64[Tensor, "windows words"], Int64[Tensor, "windows words"]]]]:
    """Yields the batches of each epoch, with a new order and new masks for each epoch."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(windows), generator=generator)
        yield [mask(windows[rows], generator) for rows in order.split(BATCH)]


def train(corpus: Corpus, p0_inputs: float, p0_labels: float, num_epochs: int, seed: int) -> list[float]:
    """Returns the held-out loss of a new model after each epoch."""
    trainee = Trainee(corpus, p0_inputs, p0_labels, seed)
    losses = []
    for batches, _ in zip(epochs(corpus.train, seed), range(num_epochs), strict=False):
        for inputs, labels in batches:
            trainee.step(inputs, labels)
        losses.append(trainee.held_out_loss(corpus.held_out))
    return losses


def step_cost(corpus: Corpus, p0: float, num_steps: int) -> float:
    """Returns the ratio, minus 1, of the times of a step with and without replaced inputs and labels.

    Two models take turns step by step on equal batches; the result is the median over steps.
    """
    trainees = [Trainee(corpus, rate, rate, seed=0) for rate in (0.0, p0)]
    batches = next(epochs(corpus.train, seed=0))
    seconds: list[list[float]] = [[], []]
    for number in range(num_steps):
        inputs, labels = batches[number % len(batches)]
        for place in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            trainees[place].step(inputs, labels)
            seconds[place].append(time.perf_counter() - started)
    ratios = [replacing / plain for plain, replacing in zip(*seconds, strict=True)]
    return statistics.median(ratios[num_steps // 10 :]) - 1


def main() -> None:
    """Trains models with and without replaced ids, and prints their held-out losses and the cost of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--p0", type=float, nargs="+", default=[0.0, 0.1], help="p0 of inputs and of labels")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--cost-steps", type=int, default=200, help="steps of the measurement of the cost")
    options = parser.parse_args()
    corpus = read_corpus()
    print(f"{corpus.num_words} words; {len(corpus.train)} windows to train on, {len(corpus.held_out)} held out")
    print("p0 of inputs, of labels: held-out loss of the best epoch, of the last; mean and deviation over seeds")
    for p0_inputs in options.p0:
        for p0_labels in options.p0:
            runs = [train(corpus, p0_inputs, p0_labels, options.epochs, seed) for seed in range(options.seeds)]
            best, last = [min(run) for run in runs], [run[-1] for run in runs]
            print(f"{p0_inputs}, {p0_labels}: {_mean_and_deviation(best)}, {_mean_and_deviation(last)}", flush=True)
    cost = step_cost(corpus, max(options.p0), options.cost_steps)
    print(f"replacing inputs and labels at {max(options.p0)}: {cost:+.1%} of a step")


def _mean_and_deviation(values: Sequence[float]) -> str:
    """Returns the mean and, of several values, the standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


if __name__ == "__main__":
    main()
