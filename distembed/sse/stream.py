"""The ids of one feature, as far as they are replaced."""

from dataclasses import dataclass

from distembed.sse.rule import SSE


@dataclass(frozen=True)
class IdStream:
    """The ids of one feature, with random numbers of their own.

    Attributes:
        table: that the feature is looked up in.
        feature: its name.
        num_embeddings: ids lie in ``[0, num_embeddings)``.
        sse: how they are replaced.
        seed: of the random numbers, with both names.
    """

    table: str
    feature: str
    num_embeddings: int
    sse: SSE
    seed: int

    def __post_init__(self) -> None:
        self.sse.require_fit(self.num_embeddings, f"table {self.table!r}: sse")

    @property
    def num_drawable(self) -> int:
        """Ids that may be drawn: all but the reserved ones."""
        return self.num_embeddings - len(self.sse.reserved)

    @property
    def num_first_reserved(self) -> int:
        """How many of the first ids are reserved, without a gap."""
        return sum(reserved == expected for expected, reserved in enumerate(self.sse.reserved))

    def rate(self, step: int) -> float:
        """Probability that an id is drawn anew at this step: 0 where there is no other id to draw."""
        return self.sse.rate(step) if self.num_drawable > 1 else 0.0
