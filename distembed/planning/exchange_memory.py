"""What exchanging the vectors of one collection's tables takes of a rank's memory, moment by moment.

Vectors are composed in float32. Where lookups round them, they are rounded once, travel so and are widened by whoever
gets them; where codecs round them, these take float32 and give it back, with what travels beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from distembed.embedding.exchange import VectorExchange
from distembed.sharding.groups import LookupMemory

_FLOAT = 4


@dataclass(frozen=True)
class Exchange:
    """Tables of one collection and one sharding type on a rank; bytes of vectors are those of float32 unless told."""

    output: int  # bytes of all vectors that the lookups compose
    sent: int  # bytes of a copy of these that is sent
    received: int  # bytes of the vectors of this rank's rows
    arriving_ids: int  # bytes of the ids that arrive, with their lengths
    lookups: list[LookupMemory]
    is_sent: bool  # whether the vectors are for other ranks too
    numbers: VectorExchange = VectorExchange()  # in which numbers they are sent

    @property
    def is_rounded(self) -> bool:
        """Whether lookups round vectors, so that they are not float32 until they are widened."""
        return self.numbers.output_itemsize < _FLOAT

    def rounded(self, num_bytes: int) -> int:
        """Returns the bytes of vectors as lookups give them, before they are widened."""
        return num_bytes * self.numbers.output_itemsize // _FLOAT

    def travelling(self, num_bytes: int) -> int:
        """Returns the bytes of vectors as they travel."""
        return ceil(self.numbers.vector_bytes(num_bytes / _FLOAT))

    @property
    def output_bytes(self) -> int:
        """Bytes of this rank's vectors when they are put into one tensor: as received, and the tensor."""
        if self.numbers.comms.is_used:  # and as decoded
            return self.travelling(self.received) + 2 * self.received
        return self.rounded(self.received) + (self.received if self.is_rounded else self.rounded(self.received))

    @property
    def gradient_bytes(self) -> int:
        """Bytes that gradients of this rank's vectors take on their way back, beside themselves and what arrives."""
        if not self.is_sent:
            return 0
        if self.numbers.comms.is_used:  # put in the ranks' order, and encoded
            return self.received + ceil(self.numbers.gradient_bytes(self.received / _FLOAT))
        return 2 * self.rounded(self.received) if self.is_rounded else self.received


def fullest_lookup(exchanges: Sequence[Exchange]) -> int:
    """Returns the most bytes that lookups, one exchange's after the other's, have in memory with their outputs."""
    waiting, fullest, saved = 0, 0, 0
    for exchange in exchanges:
        saved += sum(lookup.saved_bytes for lookup in exchange.lookups)
        forward = max((lookup.forward_bytes for lookup in exchange.lookups), default=0)
        # outputs of several lookups are put into one tensor, and what is rounded into another
        copies = 2 if len(exchange.lookups) > 1 else 1
        rounded = exchange.rounded(exchange.output)
        encoded = exchange.travelling(exchange.output) if exchange.numbers.comms.is_used else 0
        travelling = exchange.travelling(exchange.sent) + exchange.travelling(exchange.received)
        fullest = max(
            fullest,
            waiting + saved + forward + copies * exchange.output,
            waiting + saved + (exchange.output + rounded if exchange.is_rounded else 0),
            waiting + saved + rounded + encoded + (travelling if exchange.is_sent else exchange.sent),
        )
        waiting += travelling if exchange.is_sent else exchange.output
    return fullest
