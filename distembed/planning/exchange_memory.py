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

    @property
    def rounded_output(self) -> int:
        """Bytes of the vectors that the lookups give."""
        return self.output * self.numbers.output_itemsize // _FLOAT

    @property
    def rounded_received(self) -> int:
        """Bytes of the vectors of this rank's rows before they are widened."""
        return self.received * self.numbers.output_itemsize // _FLOAT

    @property
    def travelling_bytes(self) -> int:
        """Bytes of the copies that are sent and of what is received, as they travel."""
        return self._travelling(self.sent) + self._travelling(self.received)

    @property
    def encoded_bytes(self) -> int:
        """Bytes that a codec makes of the output, before these are copied to be sent."""
        return self._travelling(self.output) if self.numbers.comms.is_used else 0

    @property
    def output_bytes(self) -> int:
        """Bytes of this rank's vectors when they are put into one tensor: as received, and the tensor."""
        if self.numbers.comms.is_used:  # and as decoded
            return self._travelling(self.received) + 2 * self.received
        return self.rounded_received + (self.received if self.is_rounded else self.rounded_received)

    @property
    def gradient_bytes(self) -> int:
        """Bytes that gradients of this rank's vectors take on their way back, beside themselves and what arrives."""
        if not self.is_sent:
            return 0
        if self.numbers.comms.is_used:  # put in the ranks' order, and encoded
            return self.received + ceil(self.numbers.gradient_bytes(self.received / _FLOAT))
        return 2 * self.rounded_received if self.is_rounded else self.received

    def _travelling(self, num_bytes: int) -> int:
        return ceil(self.numbers.vector_bytes(num_bytes / _FLOAT))


def fullest_lookup(exchanges: Sequence[Exchange]) -> int:
    """Returns the most bytes that lookups, one exchange's after the other's, have in memory with their outputs."""
    waiting, fullest, saved = 0, 0, 0
    for exchange in exchanges:
        saved += sum(lookup.saved_bytes for lookup in exchange.lookups)
        forward = max((lookup.forward_bytes for lookup in exchange.lookups), default=0)
        # outputs of several lookups are put into one tensor, and what is rounded into another
        copies = 2 if len(exchange.lookups) > 1 else 1
        rounding = exchange.output + exchange.rounded_output if exchange.is_rounded else 0
        received = exchange.travelling_bytes if exchange.is_sent else exchange.sent
        fullest = max(
            fullest,
            waiting + saved + forward + copies * exchange.output,
            waiting + saved + rounding,
            waiting + saved + exchange.rounded_output + exchange.encoded_bytes + received,
        )
        waiting += exchange.travelling_bytes if exchange.is_sent else exchange.output
    return fullest
