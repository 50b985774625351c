"""One feature whose ids are replaced."""

from dataclasses import dataclass

from distembed.sse.rule import SSE


@dataclass(frozen=True)
class IdStream:
    """The ids of one feature, which are replaced by random numbers of their own.

    Attributes:
        table: Name of the table that the feature is looked up in.
        feature: Name of the feature.
        num_embeddings: Number of ids, which lie in ``[0, num_embeddings)``.
        sse: Rule by which the ids are replaced.
        seed: Seed of the random numbers, which also depend on both names.

    Raises:
        UserError: The rule does not fit the table.
    """

    table: str
    feature: str
    num_embeddings: int
    sse: SSE
    seed: int

    def __post_init__(self) -> None:
        self.sse.require_valid_for(self.num_embeddings, f"table {self.table!r}: sse")

    @property
    def num_drawable(self) -> int:
        """Number of ids that may be drawn: all but the reserved ones."""
        return self.num_embeddings - len(self.sse.reserved)

    @property
    def num_first_reserved(self) -> int:
        """Number of reserved ids from 0 on, without a gap."""
        return sum(reserved == expected for expected, reserved in enumerate(self.sse.reserved))

    def rate(self, step: int) -> float:
        """Returns the probability that an id is replaced at this step: 0 where there is no other id to draw."""
        return self.sse.rate(step) if self.num_drawable > 1 else 0.0
